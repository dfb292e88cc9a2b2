"""Programs of all ranks: the full sequence of passes, with sharding in the middle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lazygt.graph.cost import family
from lazygt.graph.mesh import FSDPUnit, Mesh, Sharding, VirtualMesh
from lazygt.graph.node import Graph, verify
from lazygt.graph.placement import ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER
from lazygt.machine import Machine, default_machine
from lazygt.passes import AFTER_SHARDING, BEFORE_SHARDING, priced, run_passes
from lazygt.passes.base import (
    NodeRow,
    by_class,
    classes,
    classified,
    rebuild,
    renumbered,
    rows_of,
    written_through,
    written_values,
)
from lazygt.passes.bucket import CAP, Caps
from lazygt.passes.cse import DeadCode, key_of, may_merge
from lazygt.passes.overlap import overlapped
from lazygt.passes.pipeline import pipeline_axis, shard_stages
from lazygt.passes.sharding.axis import AxisStep, PartitionedProgram, R, shard
from lazygt.passes.sharding.gradients import gradients_in_blocks
from lazygt.passes.sharding.marks import PLACE, pass_numbers, place_node
from lazygt.passes.sharding.propagate.placement_sources import (
    COPIES,
    gathers_operand,
    is_elementwise,
    moves_elements,
    stored_shardings,
)
from lazygt.passes.virtual_rank_merge import merged

# -- FSDP's ``reshard_after_forward``: weights are gathered again for every pass -------------------
# A step is a sequence of passes: forward, backward, the forward of the next microbatch. From the
# second pass on, nodes that need a gathered stored value, or a view or cast of one, read the
# pass's own copy (a ``lazygt.place``) instead, which is gathered at its first reader.


def reshard_after_forward(
    graph: Graph, shardings: Mapping[int, Sharding], backward: Collection[int]
) -> Graph:
    """Return the graph with the weights of ``reshard_after_forward`` units gathered in each pass.

    Args:
        shardings: the sharding of each stored value.
        backward: numbers of the recorded ops of a backward pass.
    """
    stored = {
        value: sharding for value, sharding in shardings.items()
        if sharding.unit is not None and sharding.unit.reshard_after_forward
    }  # fmt: skip
    return _Regather(graph, stored, backward).run() if stored and backward else graph


class _Regather:
    """Rewrite of a graph in one walk over its nodes.

    Args:
        stored: value -> its sharding.
        backward: numbers of the recorded ops of a backward pass.
    """

    def __init__(
        self, graph: Graph, stored: Mapping[int, Sharding], backward: Collection[int]
    ) -> None:
        self._graph, self._metas, self._backward = graph, graph.values, backward
        self._stored = dict(stored)
        #: view or cast of a stored value -> its node
        self._views: dict[int, NodeRow] = {}
        #: stored value -> casts and copies of it, or of its views
        self._casts: dict[int, list[int]] = {}
        #: stored value or view -> its copy in the current pass; None: in the first pass
        self._copies: dict[int, int] | None = None
        self._rows: list[NodeRow] = []
        self._count = len(self._metas)

    def run(self) -> Graph:
        """Return the rewritten graph. The first pass keeps its operands, later ones get copies."""
        last = 0
        for row, pass_number in zip(
            rows_of(self._graph), pass_numbers(self._graph, self._backward), strict=True
        ):
            if pass_number != last:
                last, self._copies = pass_number, {}
            self._record(row)
            self._rows.append(row if self._copies is None else self._on_copies(row, self._copies))
        return rebuild(self._graph, self._rows) if self._copies is not None else self._graph

    def _record(self, row: NodeRow) -> None:
        """Record which values are stored, and which are views or casts of stored values."""
        node = row.node
        for value in written_values(node):
            self._separate_casts(value)
        if any(value in self._stored or value in self._views for value in node.refs()):
            if moves_elements(node) or self._is_placed_cast(row):
                self._views.update(dict.fromkeys(row.results, row))
                if node.op in COPIES or node.op == PLACE:
                    self._casts.setdefault(self._root(row.results[0]), []).append(row.results[0])
            elif is_elementwise(node, self._metas):
                shardings = {
                    self._stored.get(value) for value in node.refs() if self._is_large(value)
                }
                sharding = shardings.pop() if len(shardings) == 1 else None
                if sharding is not None:
                    self._stored[row.results[0]] = sharding

    def _is_placed_cast(self, row: NodeRow) -> bool:
        """Return whether a node places a cast of a stored value; such a cast is not stored."""
        if row.node.op != PLACE or row.results[0] not in self._stored:
            return False
        view = self._views.get(row.node.args[0].index)
        if view is None or view.node.op not in COPIES:
            return False
        del self._stored[row.results[0]]
        return True

    def _separate_casts(self, value: int) -> None:
        """Make the casts of a written value stored values of their own."""
        for cast in self._casts.pop(value, ()):
            (source,) = self._views.pop(cast).node.refs()
            if source in self._stored:
                self._stored[cast] = self._stored[source]

    def _root(self, value: int) -> int:
        """Return the stored value of which a value is a view or cast."""
        while value in self._views:
            (value,) = self._views[value].node.refs()
        return value

    def _is_large(self, value: int) -> bool:
        meta = self._metas[value]
        return meta is None or meta.numel > 1

    def _on_copies(self, row: NodeRow, copies: dict[int, int]) -> NodeRow:
        """Return a node with gathered operands replaced by the pass's own copies."""
        copied = {
            value: self._copy(value, row.source, copies)
            for value in row.node.refs()
            if value in self._views
            or (value in self._stored and gathers_operand(row.node, value, self._metas))
        }
        if not copied:
            return row
        copies.update({value: value for value in row.results if value in self._views})
        node = renumbered(row.node, {value: value for value in row.node.refs()} | copied)
        return row._replace(node=node)

    def _copy(self, value: int, source: int, copies: dict[int, int]) -> int:
        """Return the pass's copy of a value; add it if there is none.

        Args:
            source: the node that reads the copy.
            copies: value -> its copy in the pass.
        """
        if value not in copies:
            view = self._views.get(value)
            if view is None:
                meta = self._metas[value]
                assert meta is not None
                node, results = place_node(value, meta, self._stored[value]), [value]
            else:
                (base,) = view.node.refs()
                node = renumbered(view.node, {base: self._copy(base, source, copies)})
                results = list(view.results)
            for result in results:
                copies[result] = self._count
                self._count += 1
            self._rows.append(NodeRow(node, [copies[result] for result in results], source))
        return copies[value]


# -- redundant collectives: no value is reduced twice ----------------------------------------------
# cse leaves a large value that is computed again after the first one has died: recomputation is
# cheaper than memory. That does not hold for collectives. So global value numbering finds a second
# reduction of the same value, which is replaced by the first one's result, which lives until then.
# Nodes that only the second reduction needed are removed.
#
# Activation checkpointing stays: the reduction of a matmul that a backward pass computes again is
# not replaced. Only collectives that are redundant on all ranks are removed.

_REDUCTIONS = frozenset({ALL_REDUCE, REDUCE_SCATTER})
#: (redundant collective, equal earlier one), as positions among the program's collectives.
RedundantPair = tuple[int, int]


def reduced_once(graphs: Sequence[Graph], backward: Collection[int] = ()) -> list[Graph]:
    """Return the ranks' programs without redundant reductions.

    Args:
        backward: numbers of the recorded ops of a backward pass.
    """
    redundant = set.intersection(
        *(_redundant_reductions(graph, backward) for graph in classes(graphs))
    )
    return (
        by_class(lambda graph: _without_redundant(graph, redundant), graphs)
        if redundant
        else list(graphs)
    )


def _redundant_reductions(graph: Graph, backward: Collection[int]) -> set[RedundantPair]:
    """Return a rank's reductions that equal earlier ones (global value numbering)."""
    written = written_through(graph)
    replaced: dict[int, int] = {}
    first_of: dict[Any, tuple[int, int, Sequence[int]]] = {}
    redundant: set[RedundantPair] = set()
    products = _products(graph)
    count = 0
    for row in rows_of(graph):
        node, results = row.node, row.results
        is_reduction, position = node.op in _REDUCTIONS, count
        count += node.op in COLLECTIVES
        if not (is_reduction or may_merge(row, written)) or not written.isdisjoint(results):
            continue
        key = key_of(node, replaced)
        earlier_position, source, earlier = first_of.setdefault(
            key, (position, row.source, results)
        )
        if earlier is results:
            continue
        is_recomputation = (
            graph.origin(row.source) in backward and graph.origin(source) not in backward
        )
        if is_reduction and is_recomputation and node.args[0].index in products:
            continue  # activation checkpointing, see above
        replaced.update(zip(results, earlier, strict=True))
        if is_reduction:
            redundant.add((position, earlier_position))
    return redundant


def _products(graph: Graph) -> set[int]:
    """Return the results of matmuls, and values computed from one such value only."""
    products: set[int] = set()
    for node, results in graph.numbered():
        refs = node.refs()
        if family(node) == "matmul" or (len(refs) == 1 and refs[0] in products):
            products.update(results)
    return products


def _without_redundant(graph: Graph, redundant: Collection[RedundantPair]) -> Graph:
    """Return the graph without the redundant collectives and the nodes that only they needed."""
    earlier = dict(redundant)
    retained: list[NodeRow] = []
    replaced: dict[int, int] = {}
    results: list[Sequence[int]] = []
    for row in rows_of(graph):
        position = len(results)
        if row.node.op in COLLECTIVES:
            results.append(row.results)
            if position in earlier:
                replaced.update(zip(row.results, results[earlier[position]], strict=True))
                continue
        retained.append(row)
    return DeadCode().run(rebuild(graph, retained, replaced))


# -- programs of all ranks -------------------------------------------------------------------------

#: (name of a pass, the graph after it).
Stages = list[tuple[str, Graph]]

#: Most bytes of gradients that are accumulated unsharded over microbatches if no cap is requested:
#: sharding them would save little memory.
UNSHARDED_GRADIENTS = 1 << 20


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
    """Run all passes; return the optimised graph of every rank. Equal graphs are one object.

    Args:
        graph: as recorded.
        inputs: the sharding of each input; None: replicated.
        machine: cost model of placements and of fusion; None: ``cpu-generic``.
        check: verify after every pass.
        stages: list to which (name of the pass, rank 0's graph after it) is appended.
        decided: list to which the decisions on each axis are appended, outermost first.
        workers: the workers of the ranks of ``mesh``, which are virtual then; the result has the
            graphs of the workers, with reductions in the order of the ranks. None: each rank is a
            worker.
        bucket_bytes: requested bytes of a bucket of collectives; the cap of a wrap unit takes
            precedence.
        backward: numbers of the recorded ops of a backward pass; see
            `reshard_after_forward` and `gradients_in_blocks`.

    Raises:
        GraphError: a graph is invalid; with ``check`` the error names the pass.
        ValueError: pipeline stages are not possible; see ``pipeline``.
    """
    machine, stages = machine or default_machine("cpu"), [] if stages is None else stages
    shardings = [sharding or Sharding((R,) * len(mesh.names)) for sharding in inputs]
    prepared = run_passes(graph, BEFORE_SHARDING, check, stages)
    prepared = _prepared(prepared, mesh, shardings, bucket_bytes, backward)
    axis = pipeline_axis(prepared, mesh, shardings, workers)
    if axis is None:
        program = shard(prepared, mesh, shardings, machine, decided)
    else:
        program = shard_stages(prepared, mesh, axis, shardings, machine, decided)
    graphs: Sequence[Graph] = program.graphs
    if workers is None:
        graphs = reduced_once(graphs, backward)
    stages.append(("shard", graphs[0]))
    if workers is not None:
        stored = [sharding.placements for sharding in shardings]
        graphs = merged(graphs, stored, [out.placements for out in program.outputs], workers)
        stages.append(("merge", graphs[0]))
    caps = _bucket_caps(bucket_bytes, machine, _units(mesh, shardings, workers))
    axes = mesh if workers is None else workers.workers
    graphs = overlapped(classified(graphs), axes, caps, backward)
    stages.append(("overlap", graphs[0]))
    return replace(program, graphs=tuple(_optimised(graphs, machine, check, stages)))


def _prepared(
    graph: Graph,
    mesh: Mesh,
    shardings: Sequence[Sharding],
    bucket_bytes: int | None,
    backward: Collection[int],
) -> Graph:
    """Return the graph with weights gathered in each pass, and gradients placed."""
    graph = reshard_after_forward(graph, stored_shardings(graph, mesh, shardings), backward)
    cap = UNSHARDED_GRADIENTS if bucket_bytes is None else bucket_bytes
    stored = stored_shardings(graph, mesh, shardings)
    return gradients_in_blocks(graph, mesh, stored, backward, cap)


def _optimised(
    graphs: Sequence[Graph], machine: Machine, check: bool, stages: Stages
) -> list[Graph]:
    """Return the ranks' graphs after the last passes; the first graph's are added to ``stages``."""
    passes = priced(AFTER_SHARDING, machine)

    def optimised(graph: Graph) -> Graph:
        result = run_passes(graph, passes, check, stages if graph is graphs[0] else None)
        verify(result)
        return result

    return by_class(optimised, graphs)


def _units(
    mesh: Mesh, shardings: Sequence[Sharding], workers: VirtualMesh | None
) -> dict[int, FSDPUnit]:
    """Return the wrap unit of each stored input of a worker's program, by number of the input."""
    slots_of_inputs = (workers or VirtualMesh(mesh, mesh)).slots(shardings)
    return {
        number: sharding.unit
        for sharding, numbers in zip(shardings, slots_of_inputs, strict=True)
        if sharding.unit is not None
        for number in numbers
    }


def _bucket_caps(requested: int | None, machine: Machine, units: Mapping[int, FSDPUnit]) -> Caps:
    """Return the size limits of buckets: as requested, else the fastest on the machine."""
    if requested is not None:
        return Caps(requested, requested, units)
    return Caps(CAP, min(CAP, int(machine.collectives.packed)), units)
