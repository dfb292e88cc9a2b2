"""Sharded gradients: they get the placements of the parameters or states that they update.

Their first readers, such as clipping by norm, read shards too, so no rank has an unsharded gradient
after the reduction.

Accumulating the gradients of several microbatches before the reduction sends the fewest bytes, but
keeps unsharded gradients alive until the last microbatch. So only small gradients, or as many as a
requested cap allows, are accumulated unsharded. Beyond that the gradients of each backward are
reduced, and shards are accumulated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import Shard, Unspecified
from lazygt.passes.base import (
    NodeRow,
    dependencies,
    rebuild,
    renumbered,
    rows_of,
    written_values,
)
from lazygt.passes.sharding.marks import pass_numbers, place_node

# -- gradient to parameter -------------------------------------------------------------------------

T = TypeVar("T")


def updated_with(graph: Graph, known: Mapping[int, T]) -> dict[int, T]:
    """Return for each value the ``known`` entry of the input that is updated with the value.

    The backward dataflow search follows ops on values of one shape, as in an optimizer's moments.
    In a horizontal op the tensors at one index of the lists belong together.

    Args:
        known: input -> its entry, for example its sharding.
    """
    memory, metas = dependencies(graph).memory, graph.values
    entry_of: dict[int, T] = {}
    for node, results in reversed(list(graph.numbered())):
        targets = written_values(node)
        for refs, outputs in _tensor_slices(node, results):
            inputs = [known[memory[v]] for v in refs if v in targets and memory[v] in known]
            later = [entry_of[value] for value in outputs if value in entry_of]
            entry = next(iter([*inputs, *later]), None)
            if entry is None:
                continue
            shapes = {meta.shape for value in outputs if (meta := metas[value]) is not None}
            for value in refs:
                meta = metas[value]
                if meta is not None and meta.shape in shapes:
                    entry_of.setdefault(value, entry)
    return entry_of


def _tensor_slices(node: Node, results: range) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return (operands, results) of a node; for a horizontal op one pair for each tensor."""
    lists = [arg for arg in node.args if type(arg) is tuple and arg and type(arg[0]) is Ref]
    if not lists:
        return [(node.refs(), results)]
    versions = dict(zip(node.writes, results[len(node.fresh) :], strict=True))
    slices: list[tuple[Sequence[int], Sequence[int]]] = []
    for index in range(len(lists[0])):
        refs = [arg[index].index for arg in lists if index < len(arg)]
        written = [versions[value] for value in refs if value in versions]
        slices.append((refs, written or results[index : index + 1]))
    return slices


# -- placement of gradients ------------------------------------------------------------------------

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
    pass_of = pass_numbers(graph, backward)
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
        # backward passes have odd numbers, and what follows the last one is the optimizer
        if pass_number % 2 or pass_number < last:
            for value in node.refs():
                state.pop(value, None)
    return state


class _Sum(NamedTuple):
    """Addition of a gradient to the sum over earlier microbatches."""

    nbytes: int  # of each operand
    first: bool  # whether the sum so far is the gradient of a single microbatch
    sharding: Sharding  # of the parameter


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
        rows: list[NodeRow] = []
        for row in rows_of(self._graph):
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

    def _place(self, values: Sequence[int], source: int, rows: list[NodeRow]) -> dict[int, int]:
        """Add ``place`` marks to ``rows``; return value -> its placed copy."""
        placed_copies = {}
        for value in dict.fromkeys(values):
            meta = self._metas[value]
            assert meta is not None
            node = place_node(value, meta, Sharding(self._placements(self._shardings[value])))
            rows.append(NodeRow(node, [self._count], source))
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
        """Return the largest cap of the gradients' wrap units; ``cap`` if none has one."""
        units = [addition.sharding.unit for addition in sums.values()]
        return max((unit.cap_bytes for unit in units if unit and unit.cap_bytes is not None),
                   default=cap)  # fmt: skip
