"""The workers of a session, invariant or not, in one process: their programs in lockstep, each with
a generator of its own."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from lazygt.graph.fusion import expand_fused
from lazygt.graph.mesh import Mesh, Sharding, VirtualMesh, region, regions_by_worker
from lazygt.graph.node import Graph
from lazygt.graph.placement import Shard
from lazygt.passes.sharding.axis import PartitionedProgram
from lazygt.passes.sharding.programs import programs
from tests.sharding import world

Tensor = torch.Tensor
SEED = 11


def worker_graphs(
    graph: Graph,
    stored: Sequence[Sharding],
    workers: str,
    invariant: int | Mapping[str, int] | None,
) -> tuple[Graph, ...]:
    """The program of each worker."""
    return _programs(graph, stored, VirtualMesh.of(Mesh.parse(workers), invariant)).graphs


def run_merged(
    graph: Graph,
    stored: Sequence[Sharding],
    inputs: Sequence[Tensor],
    params: Sequence[Any],
    workers: str,
    invariant: int | Mapping[str, int] | None,
) -> list[Tensor]:
    """The outputs of the program on so many workers, put together from their blocks."""
    mesh = VirtualMesh.of(Mesh.parse(workers), invariant)
    made = _programs(graph, stored, mesh)
    running = []
    for worker, local in enumerate(made.graphs):
        blocks = [
            _block(mesh, each, whole, rank)
            for whole, each in zip(inputs, stored, strict=True)
            for rank in mesh.holders(worker, each.placements)
        ]
        running.append(
            _alone(world._rank(expand_fused(local), blocks, params, mesh.workers, worker))
        )
    found = world._lockstep(running, mesh.workers)
    values, slots = graph.values, mesh.slots(made.outputs)
    return [
        _joined(mesh, each, values[number], [[local[s] for s in slot] for local in found])
        for number, each, slot in zip(graph.outputs, made.outputs, slots, strict=True)
    ]


def _programs(graph: Graph, stored: Sequence[Sharding], mesh: VirtualMesh) -> PartitionedProgram:
    workers = None if mesh.workers is mesh.ranks else mesh
    return programs(graph, mesh.ranks, stored, check=True, workers=workers)


def _block(mesh: VirtualMesh, each: Sharding, whole: Tensor, rank: int) -> Tensor:
    """What a virtual rank has: a block is row-major, a whole value lies as it does."""
    if not any(isinstance(label, Shard) for label in each.placements):
        return whole.clone(memory_format=torch.preserve_format)
    where = region(mesh.ranks, each.placements, whole.shape, rank)
    return whole[where].clone(memory_format=torch.contiguous_format)


def _alone(rank: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """A rank that draws from a generator of its own, with the seed of all."""
    state, received = torch.Generator().manual_seed(SEED).get_state(), None
    while True:
        theirs = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        try:
            met = rank.send(received)
        except StopIteration as end:
            return end.value
        finally:
            state = torch.default_generator.get_state()
            torch.default_generator.set_state(theirs)
        received = yield met


def _joined(
    mesh: VirtualMesh, each: Sharding, meta: Any, blocks: Sequence[Sequence[Tensor]]
) -> Tensor:
    """The whole value; a worker that is not asked for its blocks must have the same bits."""
    whole = torch.full(meta.shape, 0).to(meta.dtype)
    for worker, regions in regions_by_worker(mesh, each.placements, meta.shape).items():
        for where, block in zip(regions, blocks[worker], strict=True):
            whole[where] = block
    for worker, held in enumerate(blocks):
        ranks = mesh.holders(worker, each.placements)
        for rank, block in zip(ranks, held, strict=True):
            found = whole[region(mesh.ranks, each.placements, meta.shape, rank)]
            assert torch.equal(block, found) or bool(block.isnan().any()), f"{worker} differs"
    return whole
