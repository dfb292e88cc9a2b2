"""Programs of all ranks: the full sequence of passes, with sharding in the middle."""

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
from lazygt.passes.base import (
    Placed,
    by_class,
    classes,
    classified,
    placed,
    rebuild,
    renumbered,
    written_through,
    written_values,
)
from lazygt.passes.bucket import CAP, Caps
from lazygt.passes.cse import DeadCode, key_of, may_merge
from lazygt.passes.overlap import overlapped
from lazygt.passes.pipeline import pipeline_axis, shard_stages
from lazygt.passes.sharding.axis import AxisStep, PartitionedProgram, R, shard
from lazygt.passes.sharding.marks import PLACE, place_node, turns
from lazygt.passes.sharding.propagate.placement_sources import (
    COPIES,
    gathers_operand,
    is_elementwise,
    moves_elements,
    stored_shardings,
)
from lazygt.passes.updates import updated_with
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
        self._views: dict[int, Placed] = {}
        #: stored value -> casts and copies of it, or of its views
        self._casts: dict[int, list[int]] = {}
        #: stored value or view -> its copy in the current pass; None: in the first pass
        self._copies: dict[int, int] | None = None
        self._rows: list[Placed] = []
        self._count = len(self._metas)

    def run(self) -> Graph:
        last = 0
        for row, turn in zip(placed(self._graph), turns(self._graph, self._backward), strict=True):
            if turn != last:
                last, self._copies = turn, {}
            self._record(row)
            self._rows.append(row if self._copies is None else self._on_copies(row, self._copies))
        return rebuild(self._graph, self._rows) if self._copies is not None else self._graph

    def _record(self, row: Placed) -> None:
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

    def _is_placed_cast(self, row: Placed) -> bool:
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

    def _on_copies(self, row: Placed, copies: dict[int, int]) -> Placed:
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
            self._rows.append(Placed(node, [copies[result] for result in results], source))
        return copies[value]


# -- sharded gradients -----------------------------------------------------------------------------
# Gradients get the placements of the parameters or optimizer states that they update. Their first
# readers, such as clipping by norm, read shards too, so no rank has an unsharded gradient after the
# reduction.
#
# Accumulating the gradients of several microbatches before the reduction sends the fewest bytes,
# but keeps unsharded gradients alive until the last microbatch. So only small gradients, or as many
# as a requested cap allows, are accumulated unsharded. Beyond that the gradients of each backward
# are reduced, and shards are accumulated.

_SUMS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})
#: Most bytes of a gradient that is always accumulated unsharded: a launch takes longer.
SMALL = 16 << 10


def gradients_in_blocks(
    graph: Graph, mesh: Mesh, shardings: Mapping[int, Sharding], backward: Collection[int], cap: int
) -> Graph:
    """Return the graph with gradients placed like the parameters or states that they update.

    Args:
        shardings: the sharding of each stored value.
        backward: numbers of the recorded ops of a backward pass.
        cap: most bytes of gradients that may stay unsharded over several microbatches; the cap of
            a wrap unit takes precedence.
    """
    stored = {value: sharding for value, sharding in shardings.items() if sharding.unit is not None}
    if not backward:
        return graph
    pass_of = turns(graph, backward)
    optimizer_state = _sharded_optimizer_state(graph, shardings, pass_of)
    if not stored and not optimizer_state:
        return graph
    gradients = _Gradients(graph, mesh, pass_of, updated_with(graph, stored | optimizer_state))
    return gradients.placed(cap)


def _sharded_optimizer_state(
    graph: Graph, shardings: Mapping[int, Sharding], pass_of: Sequence[int]
) -> dict[int, Sharding]:
    """Return the sharded inputs that no forward or backward reads: an optimizer's state."""
    last = max(pass_of, default=0)
    state = {
        value: sharding for value, sharding in shardings.items()
        if value < len(graph.inputs) and sharding.fixed and sharding.unit is None
        and any(isinstance(placement, Shard) for placement in sharding.placements)
    }  # fmt: skip
    for node, pass_number in zip(graph.nodes, pass_of, strict=True):
        if pass_number % 2 or pass_number < last:
            for value in node.refs():
                state.pop(value, None)
    return state


class _Sum(NamedTuple):
    """Addition of a gradient to the sum over earlier microbatches."""

    nbytes: int  # of each operand
    first: bool  # whether the sum is that of a single microbatch
    home: Sharding  # the sharding of the parameter


class _Gradients:
    """Placement of gradients in one walk over the graph.

    Args:
        pass_of: the pass number of each node; odd in a backward.
        shardings: gradient -> the sharding of the parameter or state that it updates.
    """

    def __init__(
        self, graph: Graph, mesh: Mesh, pass_of: Sequence[int], shardings: Mapping[int, Sharding]
    ) -> None:
        self._graph, self._mesh, self._pass_of, self._shardings = graph, mesh, pass_of, shardings
        self._metas = graph.values
        #: for each value the pass in which it was produced
        self._producing_pass = [0] * len(graph.inputs)
        for node, pass_number in zip(graph.nodes, pass_of, strict=True):
            self._producing_pass += [pass_number] * len(node.results)
        self._count = len(self._producing_pass)
        #: gradient -> its sharded copy
        self._sharded: dict[int, int] = {}

    def placed(self, cap: int) -> Graph:
        """Return the graph with the placements; see ``gradients_in_blocks``."""
        sums, read_outside = self._sums(), self._gradients_read_outside()
        sums = sums if self._unsharded_bytes(sums) > self._cap(sums, cap) else {}
        rows: list[Placed] = []
        for row in placed(self._graph):
            refs = row.node.refs()
            replacements = {value: self._sharded[value] for value in refs if value in self._sharded}
            accumulation = sums.get(row.source)
            if accumulation is not None and accumulation.nbytes > SMALL:
                replacements |= self._place(refs[not accumulation.first :], row.source, rows)
            same = {value: value for value in refs}
            rows.append(
                row._replace(node=renumbered(row.node, same | replacements))
                if replacements
                else row
            )
            self._sharded |= self._place(
                [value for value in row.results if value in read_outside], row.source, rows
            )
        if self._count == len(self._producing_pass):
            return self._graph
        outputs = tuple([self._sharded.get(value, value) for value in self._graph.outputs])
        return rebuild(replace(self._graph, outputs=outputs), rows)

    def _gradients_read_outside(self) -> set[int]:
        """Return the gradients that a node outside of all backward passes reads."""
        return {
            value
            for node, pass_number in zip(self._graph.nodes, self._pass_of, strict=True)
            if not pass_number % 2
            for value in node.refs()
            if value in self._shardings and self._producing_pass[value] % 2
        }

    def _place(self, values: Sequence[int], source: int, rows: list[Placed]) -> dict[int, int]:
        """Add ``place`` marks to ``rows``; return value -> its placed copy."""
        placed_copies = {}
        for value in dict.fromkeys(values):
            meta = self._metas[value]
            assert meta is not None
            node = place_node(value, meta, Sharding(self._placements(self._shardings[value])))
            rows.append(Placed(node, [self._count], source))
            placed_copies[value] = self._count
            self._count += 1
        return placed_copies

    def _placements(self, sharding: Sharding) -> tuple[Shard | Unspecified, ...]:
        """Return the shards of ``sharding`` on its axes, and ``Unspecified()`` on all others."""
        axes = self._mesh.names if sharding.unit is None else (sharding.unit.axis,)
        return tuple([
            placement if axis in axes and isinstance(placement, Shard) else Unspecified()
            for axis, placement in zip(self._mesh.names, sharding.placements, strict=True)
        ])  # fmt: skip

    # -- several microbatches ------------------------------------------------------------

    def _sums(self) -> dict[int, _Sum]:
        """Return, by number, the nodes that accumulate gradients of sharded parameters."""
        metas = self._metas
        sums: dict[int, _Sum] = {}
        summed: set[int] = set()
        for number, ((node, results), pass_number) in enumerate(
            zip(self._graph.numbered(), self._pass_of, strict=True)
        ):
            if node.op not in _SUMS or not pass_number % 2 or len(refs := node.refs()) != 2:
                continue
            sharding, meta = self._shardings.get(results[0]), metas[results[0]]
            if sharding is None or sharding.unit is None:
                continue
            have_same_meta = meta is not None and metas[refs[0]] == metas[refs[1]] == meta
            if (
                have_same_meta
                and 0 < self._producing_pass[refs[0]] < pass_number == self._producing_pass[refs[1]]
            ):
                assert meta is not None
                sums[number] = _Sum(meta.nbytes, refs[0] not in summed, sharding)
                summed.add(results[0])
        return sums

    def _unsharded_bytes(self, sums: Mapping[int, _Sum]) -> int:
        """Return the bytes of gradients that would be unsharded at the same time."""
        return sum(addition.nbytes for addition in sums.values() if addition.first)

    def _cap(self, sums: Mapping[int, _Sum], cap: int) -> int:
        units = [addition.home.unit for addition in sums.values()]
        return max((unit.cap_bytes for unit in units if unit and unit.cap_bytes is not None),
                   default=cap)  # fmt: skip


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
    for row in placed(graph):
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
            continue
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
    retained: list[Placed] = []
    replaced: dict[int, int] = {}
    results: list[Sequence[int]] = []
    for row in placed(graph):
        position = len(results)
        if row.node.op in COLLECTIVES:
            results.append(row.results)
            if position in earlier:
                replaced.update(zip(row.results, results[earlier[position]], strict=True))
                continue
        retained.append(row)
    return DeadCode().run(rebuild(graph, retained, replaced))


# -- programs of all ranks -------------------------------------------------------------------------

Stages = list[tuple[str, Graph]]

#: Most bytes of gradients that are accumulated unsharded over microbatches if no cap is requested:
#: sharding them would save little memory.
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
        backward: numbers of the recorded ops of a backward pass; see ``fsdp``.

    Raises:
        GraphError: a graph is invalid; with ``check`` the error names the pass.
        ValueError: pipeline stages are not possible; see ``pipeline``.
    """
    replicated = Sharding((R,) * len(mesh.names))
    prepared = run_passes(graph, BEFORE_SHARDING, check, stages)
    machine = machine or default_machine("cpu")
    shardings = [sharding or replicated for sharding in inputs]
    prepared = reshard_after_forward(
        prepared, stored_shardings(prepared, mesh, shardings), backward
    )
    cap = WORTH_KEEPING if bucket_bytes is None else bucket_bytes
    prepared = gradients_in_blocks(
        prepared, mesh, stored_shardings(prepared, mesh, shardings), backward, cap
    )
    axis = pipeline_axis(prepared, mesh, shardings, workers)
    if axis is None:
        program = shard(prepared, mesh, shardings, machine, decided)
    else:
        program = shard_stages(prepared, mesh, axis, shardings, machine, decided)
    if workers is None:
        program = replace(program, graphs=tuple(reduced_once(program.graphs, backward)))
    if stages is not None:
        stages.append(("shard", program.graphs[0]))
    if workers is not None:
        input_placements = [sharding.placements for sharding in shardings]
        output_placements = [output.placements for output in program.outputs]
        program = replace(
            program, graphs=merged(program.graphs, input_placements, output_placements, workers)
        )
        if stages is not None:
            stages.append(("merge", program.graphs[0]))
    slots_of_inputs = (workers or VirtualMesh(mesh, mesh)).slots(shardings)
    units = {
        number: stored.unit
        for stored, numbers in zip(shardings, slots_of_inputs, strict=True)
        if stored.unit is not None
        for number in numbers
    }
    caps = _bucket_caps(bucket_bytes, machine, units)
    graphs = classified(program.graphs)
    overlapped_graphs = overlapped(
        graphs, mesh if workers is None else workers.workers, caps, backward
    )
    if stages is not None:
        stages.append(("overlap", overlapped_graphs[0]))

    passes = priced(AFTER_SHARDING, machine)

    def finished(graph: Graph) -> Graph:
        optimised = run_passes(
            graph, passes, check, stages if graph is overlapped_graphs[0] else None
        )
        verify(optimised)
        return optimised

    return replace(program, graphs=tuple(by_class(finished, overlapped_graphs)))


def _bucket_caps(requested: int | None, machine: Machine, units: Mapping[int, FSDPUnit]) -> Caps:
    """Return the size limits of buckets: as requested, else the fastest on the machine."""
    if requested is not None:
        return Caps(requested, requested, units)
    return Caps(CAP, min(CAP, int(machine.collectives.packed)), units)
