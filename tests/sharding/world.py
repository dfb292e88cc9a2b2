"""All ranks of a mesh in one process: whole programs on more ranks than there are cores.

Ranks run until they come to a collective; it happens when all ranks of its line are there, with
the same op and arguments. What is sent to one rank lies there until it is received. When no line
is complete and nothing is there to receive, the ranks would wait for ever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from typing import Any

import torch

from lazygt.graph.fusion import expand_fused
from lazygt.graph.mesh import Mesh, Sharding, has_any, owners, region
from lazygt.graph.node import Graph
from lazygt.graph.placement import (
    COLLECTIVE_OPS,
    COLLECTIVES,
    EXCHANGES_OF_ROWS,
    LAUNCH,
    LAUNCH_,
    RECV,
    SEND,
    SHARD,
    WAIT,
    Replicate,
    Shard,
)
from lazygt.passes.sharding.programs import programs
from tests.passes.sharding.rules.lockstep import AXIS, alone, exchange, run_node

Tensor = torch.Tensor
#: op, arguments that are equal on all ranks, the value (of a launch: values)
CollectiveInfo = tuple[str, tuple[Any, ...], Any]


def run_whole(graph: Graph, inputs: Sequence[Tensor], params: Sequence[Any]) -> list[Tensor]:
    """The outputs of the program on one device."""
    values: list[Any] = list(inputs)
    for node in graph.nodes:
        values.extend(run_node(node, values, params))
    return [values[number] for number in graph.outputs]


def run_sharded(
    graph: Graph,
    mesh: Mesh,
    stored: Sequence[Sharding],
    inputs: Sequence[Tensor],
    params: Sequence[Any],
) -> list[Tensor]:
    """The outputs of the program on a mesh, put together from the ranks' blocks."""
    made = programs(graph, mesh, stored, check=True)
    ranks = []
    for rank, local in enumerate(made.graphs):
        blocks = [
            whole.new_empty(0)
            if not has_any(mesh, each.placements, rank)
            else whole[region(mesh, each.placements, whole.shape, rank)].contiguous()
            if any(isinstance(label, Shard) for label in each.placements)
            else whole.clone(memory_format=torch.preserve_format)
            for whole, each in zip(inputs, stored, strict=True)
        ]
        ranks.append(_rank(expand_fused(local), blocks, params, mesh, rank))
    outputs = _lockstep(ranks, mesh)
    values = graph.values
    return [
        _joined(mesh, each, values[number].shape, [local[position] for local in outputs])  # type: ignore[union-attr]
        for position, (number, each) in enumerate(zip(graph.outputs, made.outputs, strict=True))
    ]


def _rank(
    graph: Graph, inputs: list[Tensor], params: Sequence[Any], mesh: Mesh, rank: int
) -> Generator[CollectiveInfo, Tensor, list[Tensor]]:
    values: list[Any] = list(inputs)
    for node in graph.nodes:
        if node.op in (LAUNCH, LAUNCH_):
            kind, operands, *rest = node.args
            values.append((yield LAUNCH, (kind, *rest), [values[each.index] for each in operands]))
        elif node.op == WAIT:
            made = values[node.args[0].index]
            assert [tuple(one.shape) for one in made] == [meta.shape for meta in node.results]  # type: ignore[union-attr]
            values.extend(made)
        elif node.op in EXCHANGES_OF_ROWS:
            given = [values[value] for value in node.refs()]
            values.append((yield node.op, node.args[len(given) :], given))
        elif node.op in COLLECTIVES:
            values.append((yield node.op, node.args[1:], values[node.args[0].index]))
        elif node.op == SEND:
            yield node.op, node.args[1:], values[node.args[0].index].clone()
        elif node.op == RECV:
            values.append((yield node.op, node.args, torch.empty(0)))
        elif node.op in COLLECTIVE_OPS:
            value, axis = values[node.args[0].index], node.args[-1]
            args = node.args[1:] if node.op == SHARD else ()
            values.append(alone(node.op, args, value, mesh.index(rank, axis), mesh.size(axis)))
        else:
            values.extend(run_node(node, values, params))
    return [values[number] for number in graph.outputs]


def _lockstep(
    ranks: Sequence[Generator[CollectiveInfo, Tensor, list[Tensor]]], mesh: Mesh
) -> list[list[Tensor]]:
    waiting: dict[int, CollectiveInfo] = {}
    done: dict[int, list[Tensor]] = {}
    sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def advance(rank: int, received: Any) -> None:
        try:
            op, args, value = ranks[rank].send(received)
            while op == SEND:
                sent[rank, _peer(mesh, rank, *args)].append(value)
                op, args, value = next(ranks[rank])
            waiting[rank] = op, args, value
        except StopIteration as end:
            done[rank] = end.value

    for rank in range(len(ranks)):
        advance(rank, None)
    while waiting:
        arrived = _arrived(waiting, sent, mesh)
        if arrived is not None:
            rank, value = arrived
            _, (_, shape, dtype, _, _), _ = waiting.pop(rank)
            assert (tuple(value.shape), value.dtype) == (shape, dtype)
            advance(rank, value)
            continue
        line = _complete(waiting, mesh)
        met = [waiting.pop(rank) for rank in line]
        assert len({meeting[:2] for meeting in met}) == 1, f"ranks {line} meet in {met}"
        op, args, _ = met[0]
        exchanged = _exchange_all if op == LAUNCH else exchange
        given = [values for _, _, values in met]
        for rank, value in zip(line, exchanged(op, (*args[:-1], AXIS), given), strict=True):
            advance(rank, value)
    return [done[rank] for rank in range(len(ranks))]


def _peer(mesh: Mesh, rank: int, place: int, axis: str) -> int:
    """The rank at a place of a rank's own line."""
    return next(line for line in mesh.axis_groups(axis) if rank in line)[place]


def _arrived(
    waiting: dict[int, CollectiveInfo], sent: dict[tuple[int, int], deque[Tensor]], mesh: Mesh
) -> tuple[int, Tensor] | None:
    """A rank that waits for what is there, and that."""
    for rank, (op, args, _) in waiting.items():
        if op == RECV:
            there = sent[_peer(mesh, rank, args[0], args[-1]), rank]
            if there:
                return rank, there.popleft()
    return None


def _exchange_all(
    op: str, args: tuple[Any, ...], given: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """What each rank gets from a bucket, value by value."""
    kind, moves, reduce_op, axis = args
    if f"lazygt.{kind}" in EXCHANGES_OF_ROWS:
        found = exchange(f"lazygt.{kind}", (*moves[0], axis), list(given))
        return [[one] for one in found]
    last = () if reduce_op is None else (reduce_op,)
    made = [
        exchange(f"lazygt.{kind}", (*move, *last, axis), list(values))
        for move, values in zip(
            moves or [()] * len(given[0]), zip(*given, strict=True), strict=True
        )
    ]
    return [list(of_rank) for of_rank in zip(*made, strict=True)]


def _complete(waiting: dict[int, CollectiveInfo], mesh: Mesh) -> tuple[int, ...]:
    """A line all of whose ranks wait for each other."""
    meeting = {rank: met for rank, met in waiting.items() if met[0] in COLLECTIVES}
    for rank, (_, args, _) in meeting.items():
        line = next(line for line in mesh.axis_groups(args[-1]) if rank in line)
        if all(other in meeting and meeting[other][1][-1] == args[-1] for other in line):
            return line
    raise AssertionError(f"ranks wait for ever: {[(r, m[:2]) for r, m in waiting.items()]}")


def _joined(mesh: Mesh, each: Sharding, shape: tuple[int, ...], blocks: list[Tensor]) -> Tensor:
    """The whole value; ranks with the same block must have the same bits."""
    whole = torch.full(shape, 0).to(blocks[0].dtype)
    for rank, where in owners(mesh, each.placements, shape).items():
        whole[where] = blocks[rank]
    for rank, block in enumerate(blocks):
        if not has_any(mesh, each.placements, rank):
            assert block.numel() == 0, f"rank {rank} has what only another should have"
            continue
        found = whole[region(mesh, each.placements, shape, rank)]
        assert torch.equal(block, found) or bool(block.isnan().any()), f"rank {rank} differs"
    return whole


def whole(mesh: Mesh) -> Sharding:
    """A value that every rank has."""
    return Sharding((Replicate(),) * len(mesh.names))
