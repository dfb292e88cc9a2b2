"""Gradients in blocks, as the parameters or optimizer states that they update are.

Their first readers, such as a clipping by their norm, are given blocks too, and no rank ever has
them whole once they are reduced.

To add up the gradients of several microbatches before they are reduced sends the fewest bytes, but
keeps them whole until the last microbatch. That is done with small gradients, or with as much as a
requested cap allows. Where there is more, the gradients of each backward are reduced, and blocks
are added up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph
from lazygt.graph.placement import Shard, Unspecified
from lazygt.passes.base import Placed, placed, rebuild, renumbered
from lazygt.passes.sharding.marks import place_node
from lazygt.passes.sharding.turns import turns
from lazygt.passes.updates import updated_with

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
