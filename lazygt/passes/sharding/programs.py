"""Programs of all ranks: all passes, with sharding in their midst."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lazygt.graph.mesh import FSDPUnit, Mesh, Sharding, VirtualMesh
from lazygt.graph.node import Graph
from lazygt.graph.verify import verify
from lazygt.machine import Machine, default_machine
from lazygt.passes import AFTER_SHARDING, BEFORE_SHARDING, priced, run_passes
from lazygt.passes.classes import by_class, classified
from lazygt.passes.collectives.bucket import CAP, Caps
from lazygt.passes.collectives.overlap import overlapped
from lazygt.passes.pipeline import pipeline_axis, shard_stages
from lazygt.passes.sharding.annotations import stored_shardings
from lazygt.passes.sharding.axis import AxisStep, PartitionedProgram, R, shard
from lazygt.passes.sharding.fsdp import reshard_after_forward
from lazygt.passes.sharding.gradients import gradients_in_blocks
from lazygt.passes.sharding.twins import reduced_once
from lazygt.passes.virtual_ranks.merge import merged

Stages = list[tuple[str, Graph]]

#: Bytes of gradients up to which those of several microbatches are added up whole, if no cap was
#: asked for: to reduce each would save no memory to speak of.
WORTH_KEEPING = 1 << 20


def programs(
    graph: Graph,
    mesh: Mesh,
    inputs: Sequence[Sharding | None],
    machine: Machine | None = None,
    check: bool = False,
    stages: Stages | None = None,
    decided: list[AxisStep] | None = None,
    workers: VirtualMesh | None = None,
    bucket_bytes: int | None = None,
    backward: Collection[int] = (),
) -> PartitionedProgram:
    """Return the graph of every rank, as the passes leave it; equal ones are one object.

    Args:
        graph: as recorded.
        inputs: the sharding of each input; None: whole on every rank.
        machine: its costs decide placements and the fusion of ops; None: ``cpu-generic``.
        check: verify after every pass.
        stages: gets (name of the pass, rank 0's graph after it) for each.
        decided: gets the decisions on each axis, outermost first.
        workers: the workers that stand for the ranks of ``mesh``, which are virtual ones then; the
            graphs are the workers', with reductions in the order of the ranks. None: each rank is a
            worker.
        bucket_bytes: so much travels in one collective, if that was asked for; a wrap unit may have
            a limit of its own.
        backward: numbers of the recorded ops of a backward pass; see ``fsdp``.

    Raises:
        GraphError: a graph breaks its own rules; with ``check``, naming the pass.
        ValueError: it has pipeline stages where it can't; see ``pipeline``.
    """
    whole = Sharding((R,) * len(mesh.names))
    tidy = run_passes(graph, BEFORE_SHARDING, check, stages)
    machine = machine or default_machine("cpu")
    shardings = [given or whole for given in inputs]
    tidy = reshard_after_forward(tidy, stored_shardings(tidy, mesh, shardings), backward)
    cap = WORTH_KEEPING if bucket_bytes is None else bucket_bytes
    tidy = gradients_in_blocks(tidy, mesh, stored_shardings(tidy, mesh, shardings), backward, cap)
    axis = pipeline_axis(tidy, mesh, shardings, workers)
    if axis is None:
        program = shard(tidy, mesh, shardings, machine, decided)
    else:
        program = shard_stages(tidy, mesh, axis, shardings, machine, decided)
    if workers is None:
        program = replace(program, graphs=tuple(reduced_once(program.graphs, backward)))
    if stages is not None:
        stages.append(("shard", program.graphs[0]))
    if workers is not None:
        given = [sharding.placements for sharding in shardings]
        kept = [output.placements for output in program.outputs]
        program = replace(program, graphs=merged(program.graphs, given, kept, workers))
        if stages is not None:
            stages.append(("merge", program.graphs[0]))
    places = (workers or VirtualMesh(mesh, mesh)).slots(shardings)
    units = {
        number: stored.unit
        for stored, numbers in zip(shardings, places, strict=True)
        if stored.unit is not None
        for number in numbers
    }
    caps = _caps(bucket_bytes, machine, units)
    graphs = classified(program.graphs)
    apart = overlapped(graphs, mesh if workers is None else workers.workers, caps, backward)
    if stages is not None:
        stages.append(("overlap", apart[0]))

    passes = priced(AFTER_SHARDING, machine)

    def finished(graph: Graph) -> Graph:
        whole = run_passes(graph, passes, check, stages if graph is apart[0] else None)
        verify(whole)
        return whole

    return replace(program, graphs=tuple(by_class(finished, apart)))


def _caps(asked: int | None, machine: Machine, units: Mapping[int, FSDPUnit]) -> Caps:
    """Return the bytes at which a bucket is closed: as asked for, else as is fastest."""
    if asked is not None:
        return Caps(asked, asked, units)
    return Caps(CAP, min(CAP, int(machine.collectives.packed)), units)
