"""All ranks of a mesh in one process: whole programs on more ranks than there are cores.

Ranks run until they come to a collective; it happens when all ranks of its line are there, with
the same op and arguments. When no line is complete, the ranks would wait for ever.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from lazygt.graph.inline import inline
from lazygt.graph.label import COLLECTIVE_OPS, MEETINGS, SHARD, Replicated, Sharded
from lazygt.graph.mesh import Mesh, Stored
from lazygt.graph.node import Graph
from lazygt.passes.sharding.programs import programs
from lazygt.runtime.blocks import owners, region
from tests.passes.rules.lockstep import AXIS, alone, exchange, run_node

Tensor = torch.Tensor
Meeting = tuple[str, tuple[Any, ...], Tensor]


def run_whole(graph: Graph, inputs: Sequence[Tensor], params: Sequence[Any]) -> list[Tensor]:
    """The outputs of the program on one device."""
    values: list[Any] = list(inputs)
    for node in graph.nodes:
        values.extend(run_node(node, values, params))
    return [values[number] for number in graph.outputs]


def run_sharded(
    graph: Graph,
    mesh: Mesh,
    stored: Sequence[Stored],
    inputs: Sequence[Tensor],
    params: Sequence[Any],
) -> list[Tensor]:
    """The outputs of the program on a mesh, put together from the ranks' blocks."""
    made = programs(graph, mesh, stored, check=True)
    ranks = []
    for rank, local in enumerate(made.graphs):
        blocks = [
            whole[region(mesh, each.labels, whole.shape, rank)].contiguous()
            if any(isinstance(label, Sharded) for label in each.labels)
            else whole.clone(memory_format=torch.preserve_format)
            for whole, each in zip(inputs, stored, strict=True)
        ]
        ranks.append(_rank(inline(local), blocks, params, mesh, rank))
    outputs = _lockstep(ranks, mesh)
    values = graph.values
    return [
        _joined(mesh, each, values[number].shape, [local[position] for local in outputs])  # type: ignore[union-attr]
        for position, (number, each) in enumerate(zip(graph.outputs, made.outputs, strict=True))
    ]


def _rank(
    graph: Graph, inputs: list[Tensor], params: Sequence[Any], mesh: Mesh, rank: int
) -> Generator[Meeting, Tensor, list[Tensor]]:
    values: list[Any] = list(inputs)
    for node in graph.nodes:
        if node.op in MEETINGS:
            values.append((yield node.op, node.args[1:], values[node.args[0].index]))
        elif node.op in COLLECTIVE_OPS:
            value, axis = values[node.args[0].index], node.args[-1]
            args = node.args[1:] if node.op == SHARD else ()
            values.append(alone(node.op, args, value, mesh.index(rank, axis), mesh.size(axis)))
        else:
            values.extend(run_node(node, values, params))
    return [values[number] for number in graph.outputs]


def _lockstep(
    ranks: Sequence[Generator[Meeting, Tensor, list[Tensor]]], mesh: Mesh
) -> list[list[Tensor]]:
    waiting: dict[int, Meeting] = {}
    done: dict[int, list[Tensor]] = {}

    def advance(rank: int, received: Any) -> None:
        try:
            waiting[rank] = ranks[rank].send(received)
        except StopIteration as end:
            done[rank] = end.value

    for rank in range(len(ranks)):
        advance(rank, None)
    while waiting:
        line = _complete(waiting, mesh)
        met = [waiting.pop(rank) for rank in line]
        assert len({meeting[:2] for meeting in met}) == 1, f"ranks {line} meet in {met}"
        op, args, _ = met[0]
        for rank, value in zip(
            line, exchange(op, (*args[:-1], AXIS), [v for _, _, v in met]), strict=True
        ):
            advance(rank, value)
    return [done[rank] for rank in range(len(ranks))]


def _complete(waiting: dict[int, Meeting], mesh: Mesh) -> tuple[int, ...]:
    """A line all of whose ranks wait for each other."""
    for rank, (_, args, _) in waiting.items():
        line = next(line for line in mesh.lines(args[-1]) if rank in line)
        if all(other in waiting and waiting[other][1][-1] == args[-1] for other in line):
            return line
    raise AssertionError(f"ranks wait for ever: {[(r, m[:2]) for r, m in waiting.items()]}")


def _joined(mesh: Mesh, each: Stored, shape: tuple[int, ...], blocks: list[Tensor]) -> Tensor:
    """The whole value; ranks with the same block must have the same bits."""
    whole = torch.full(shape, 0).to(blocks[0].dtype)
    for rank, where in owners(mesh, each.labels, shape).items():
        whole[where] = blocks[rank]
    for rank, block in enumerate(blocks):
        found = whole[region(mesh, each.labels, shape, rank)]
        assert torch.equal(block, found) or bool(block.isnan().any()), f"rank {rank} differs"
    return whole


def whole(mesh: Mesh) -> Stored:
    """A value that every rank has."""
    return Stored((Replicated(),) * len(mesh.names))
