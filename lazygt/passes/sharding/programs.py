"""Programs of all ranks: all passes, with sharding in their midst."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lazygt.graph.cost import family
from lazygt.graph.mesh import FSDPUnit, Mesh, Sharding, VirtualMesh
from lazygt.graph.node import Graph, verify
from lazygt.graph.placement import ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, Shard, Unspecified
from lazygt.machine import Machine, default_machine
from lazygt.passes import AFTER_SHARDING, BEFORE_SHARDING, priced, run_passes
from lazygt.passes.base import Placed, placed, rebuild, renumbered, written_through
from lazygt.passes.classes import by_class, classes, classified
from lazygt.passes.collectives.bucket import CAP, Caps
from lazygt.passes.collectives.overlap import overlapped
from lazygt.passes.cse import DeadCode, key_of, may_merge
from lazygt.passes.pipeline import pipeline_axis, shard_stages
from lazygt.passes.sharding.annotations import stored_shardings
from lazygt.passes.sharding.axis import AxisStep, PartitionedProgram, R, shard
from lazygt.passes.sharding.marks import place_node, turns
from lazygt.passes.sharding.regather import reshard_after_forward
from lazygt.passes.updates import updated_with
from lazygt.passes.virtual_ranks.merge import merged

# -- gradients in blocks, as the parameters or optimizer states that they update are ---------------
# Their first readers, such as a clipping by their norm, are given blocks too, and no rank ever
# has them whole once they are reduced.
#
# To add up the gradients of several microbatches before they are reduced sends the fewest bytes,
# but keeps them whole until the last microbatch. That is done with small gradients, or with as
# much as a requested cap allows. Where there is more, the gradients of each backward are reduced,
# and blocks are added up.

_SUMS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})
#: Bytes of a gradient that is added up first in any case: a launch takes longer than it does.
SMALL = 16 << 10


def gradients_in_blocks(
    graph: Graph, mesh: Mesh, kept: Mapping[int, Sharding], backward: Collection[int], cap: int
) -> Graph:
    """Return the graph with gradients placed as the values that they update.

    Args:
        kept: the sharding that each value is stored with.
        backward: numbers of the recorded ops of a backward pass.
        cap: bytes of gradients that may stay whole over several microbatches, where a unit does not
            say so.
    """
    stored = {value: sharding for value, sharding in kept.items() if sharding.unit is not None}
    if not backward:
        return graph
    turn_of = turns(graph, backward)
    state = _only_updated(graph, kept, turn_of)
    if not stored and not state:
        return graph
    gradients = _Gradients(graph, mesh, turn_of, updated_with(graph, stored | state))
    return gradients.placed(cap)


def _only_updated(
    graph: Graph, kept: Mapping[int, Sharding], turn_of: Sequence[int]
) -> dict[int, Sharding]:
    """Return the inputs in blocks that no forward or backward reads: an optimizer's state."""
    last = max(turn_of, default=0)
    state = {
        value: sharding for value, sharding in kept.items()
        if value < len(graph.inputs) and sharding.pinned and sharding.unit is None
        and any(isinstance(placement, Shard) for placement in sharding.placements)
    }  # fmt: skip
    for node, turn in zip(graph.nodes, turn_of, strict=True):
        if turn % 2 or turn < last:
            for value in node.refs():
                state.pop(value, None)
    return state


class _Sum(NamedTuple):
    """Addition of a gradient to that of earlier microbatches.

    Attributes:
        nbytes: of either.
        first: whether the other is that of a single microbatch.
        home: of the parameter.
    """

    nbytes: int
    first: bool
    home: Sharding


class _Gradients:
    def __init__(
        self, graph: Graph, mesh: Mesh, turn_of: Sequence[int], homes: Mapping[int, Sharding]
    ) -> None:
        self._graph, self._mesh, self._turns, self._homes = graph, mesh, turn_of, homes
        self._metas = graph.values
        #: the turn in which each value was made
        self._born = [0] * len(graph.inputs)
        for node, turn in zip(graph.nodes, turn_of, strict=True):
            self._born += [turn] * len(node.results)
        self._count = len(self._born)
        #: gradient -> the same in blocks
        self._blocks: dict[int, int] = {}

    def placed(self, cap: int) -> Graph:
        """Return the graph with the placements; see ``gradients_in_blocks``."""
        sums, final = self._sums(), self._final()
        sums = sums if self._whole(sums) > self._cap(sums, cap) else {}
        rows: list[Placed] = []
        for row in placed(self._graph):
            refs = row.node.refs()
            moved = {value: self._blocks[value] for value in refs if value in self._blocks}
            addition = sums.get(row.source)
            if addition is not None and addition.nbytes > SMALL:
                moved |= self._place(refs[not addition.first :], row.source, rows)
            same = {value: value for value in refs}
            rows.append(row._replace(node=renumbered(row.node, same | moved)) if moved else row)
            self._blocks |= self._place(
                [value for value in row.results if value in final], row.source, rows
            )
        if self._count == len(self._born):
            return self._graph
        outputs = tuple([self._blocks.get(value, value) for value in self._graph.outputs])
        return rebuild(replace(self._graph, outputs=outputs), rows)

    def _final(self) -> set[int]:
        """Return the gradients that a node outside of any backward reads."""
        return {
            value
            for node, turn in zip(self._graph.nodes, self._turns, strict=True)
            if not turn % 2
            for value in node.refs()
            if value in self._homes and self._born[value] % 2
        }

    def _place(self, values: Sequence[int], source: int, rows: list[Placed]) -> dict[int, int]:
        """Place values; return the number of each after its placement."""
        moved = {}
        for value in dict.fromkeys(values):
            meta = self._metas[value]
            assert meta is not None
            node = place_node(value, meta, Sharding(self._placements(self._homes[value])))
            rows.append(Placed(node, [self._count], source))
            moved[value] = self._count
            self._count += 1
        return moved

    def _placements(self, home: Sharding) -> tuple[Shard | Unspecified, ...]:
        """Return the home's blocks on its axes, and ``Unspecified()`` on all others."""
        axes = self._mesh.names if home.unit is None else (home.unit.axis,)
        return tuple([
            placement if axis in axes and isinstance(placement, Shard) else Unspecified()
            for axis, placement in zip(self._mesh.names, home.placements, strict=True)
        ])  # fmt: skip

    # -- several microbatches ------------------------------------------------------------

    def _sums(self) -> dict[int, _Sum]:
        """Return, by number, the nodes that add up gradients of parameters not kept whole."""
        metas = self._metas
        sums: dict[int, _Sum] = {}
        summed: set[int] = set()
        for number, ((node, results), turn) in enumerate(
            zip(self._graph.numbered(), self._turns, strict=True)
        ):
            if node.op not in _SUMS or not turn % 2 or len(refs := node.refs()) != 2:
                continue
            home, meta = self._homes.get(results[0]), metas[results[0]]
            if home is None or home.unit is None:
                continue
            alike = meta is not None and metas[refs[0]] == metas[refs[1]] == meta
            if alike and 0 < self._born[refs[0]] < turn == self._born[refs[1]]:
                assert meta is not None
                sums[number] = _Sum(meta.nbytes, refs[0] not in summed, home)
                summed.add(results[0])
        return sums

    def _whole(self, sums: Mapping[int, _Sum]) -> int:
        """Return the bytes of gradients that would be whole at a time."""
        return sum(one.nbytes for one in sums.values() if one.first)

    def _cap(self, sums: Mapping[int, _Sum], cap: int) -> int:
        units = [one.home.unit for one in sums.values()]
        return max((unit.cap_bytes for unit in units if unit and unit.cap_bytes is not None),
                   default=cap)  # fmt: skip


# -- twins across ranks: no value is reduced twice -------------------------------------------------
# cse leaves a large twin that is computed again where the first one has died: to compute it again
# takes less than to keep it. Not so once ranks have to meet for it. So nodes are numbered by
# their computation (value numbering), and a second reduction of the same value is replaced by the
# first one's result, which lives until then. Nodes that only the second one needed are dropped.
#
# Recomputation stays: a value that a backward pass computes again of a matmul is not kept for it.
# Ranks decide together, since a program may have twins on one of them that it has not on others.

_REDUCTIONS = frozenset({ALL_REDUCE, REDUCE_SCATTER})
#: (a collective, the earlier one that gives the same), counted from the first of the program.
Twin = tuple[int, int]


def reduced_once(graphs: Sequence[Graph], backward: Collection[int] = ()) -> list[Graph]:
    """Return the ranks' programs, with every value reduced once.

    Args:
        backward: numbers of the recorded ops of a backward pass.
    """
    agreed = set.intersection(*(_twins(graph, backward) for graph in classes(graphs)))
    return by_class(lambda graph: _merged(graph, agreed), graphs) if agreed else list(graphs)


def _twins(graph: Graph, backward: Collection[int]) -> set[Twin]:
    """Return the reductions of a rank that are twins of earlier ones."""
    written = written_through(graph)
    same: dict[int, int] = {}
    first: dict[Any, tuple[int, int, Sequence[int]]] = {}
    twins: set[Twin] = set()
    products = _products(graph)
    count = 0
    for row in placed(graph):
        node, results = row.node, row.results
        is_reduction, at = node.op in _REDUCTIONS, count
        count += node.op in COLLECTIVES
        if not (is_reduction or may_merge(row, written)) or not written.isdisjoint(results):
            continue
        key = key_of(node, same)
        where, source, earlier = first.setdefault(key, (at, row.source, results))
        if earlier is results:
            continue
        again = graph.origin(row.source) in backward and graph.origin(source) not in backward
        if is_reduction and again and node.args[0].index in products:
            continue
        same.update(zip(results, earlier, strict=True))
        if is_reduction:
            twins.add((at, where))
    return twins


def _products(graph: Graph) -> set[int]:
    """Return the results of matmuls, and values that are made of one such value alone."""
    products: set[int] = set()
    for node, results in graph.numbered():
        refs = node.refs()
        if family(node) == "matmul" or (len(refs) == 1 and refs[0] in products):
            products.update(results)
    return products


def _merged(graph: Graph, twins: Collection[Twin]) -> Graph:
    """Return the graph without these reductions."""
    earlier = dict(twins)
    kept: list[Placed] = []
    same: dict[int, int] = {}
    results: list[Sequence[int]] = []
    for row in placed(graph):
        at = len(results)
        if row.node.op in COLLECTIVES:
            results.append(row.results)
            if at in earlier:
                same.update(zip(row.results, results[earlier[at]], strict=True))
                continue
        kept.append(row)
    return DeadCode().run(rebuild(graph, kept, same))


# -- programs of all ranks: all passes, with sharding in their midst -------------------------------

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
