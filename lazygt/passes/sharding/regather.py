"""FSDP: stored values are gathered again for every pass, so none stays whole between.

A step is one pass after another: forward, backward, the forward of the next microbatch. Nodes of a
later pass than the first that take a stored value, or a view or a cast of it, whole get a copy (a
``lazygt.place``) that all of that pass share, and views and casts of that; it is gathered where the
first of them stands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lazygt.graph.mesh import Sharding
from lazygt.graph.node import Graph
from lazygt.passes.base import Placed, placed, rebuild, renumbered
from lazygt.passes.sharding.annotations import (
    COPIES,
    is_elementwise,
    moves_elements,
    takes_whole,
)
from lazygt.passes.sharding.marks import PLACE, place_node, turns
from lazygt.passes.updates import written


def reshard_after_forward(
    graph: Graph, kept: Mapping[int, Sharding], backward: Collection[int]
) -> Graph:
    """Return the graph with units of ``reshard_after_forward`` gathered for each pass.

    Args:
        kept: the sharding that each value is stored with.
        backward: numbers of the recorded ops of a backward pass.
    """
    stored = {
        value: sharding for value, sharding in kept.items()
        if sharding.unit is not None and sharding.unit.reshard_after_forward
    }  # fmt: skip
    return _Regather(graph, stored, backward).run() if stored and backward else graph


class _Regather:
    def __init__(
        self, graph: Graph, stored: Mapping[int, Sharding], backward: Collection[int]
    ) -> None:
        self._graph, self._metas, self._backward = graph, graph.values, backward
        self._stored = dict(stored)
        #: views of stored values, and casts -> their nodes
        self._views: dict[int, Placed] = {}
        #: stored value -> casts and copies of it, or of its views
        self._casts: dict[int, list[int]] = {}
        #: stored value or view -> its copy in the current pass; None: this is the first pass
        self._here: dict[int, int] | None = None
        self._rows: list[Placed] = []
        self._count = len(self._metas)

    def run(self) -> Graph:
        last = 0
        for row, turn in zip(placed(self._graph), turns(self._graph, self._backward), strict=True):
            if turn != last:
                last, self._here = turn, {}
            self._learn(row)
            self._rows.append(row if self._here is None else self._moved(row, self._here))
        return rebuild(self._graph, self._rows) if self._here is not None else self._graph

    def _learn(self, row: Placed) -> None:
        """Note which values are stored or views of stored ones."""
        node = row.node
        for value in written(node):
            self._part(value)
        if any(value in self._stored or value in self._views for value in node.refs()):
            if moves_elements(node) or self._is_placed_cast(row):
                self._views.update(dict.fromkeys(row.results, row))
                if node.op in COPIES or node.op == PLACE:
                    self._casts.setdefault(self._root(row.results[0]), []).append(row.results[0])
            elif is_elementwise(node, self._metas):
                homes = {self._stored.get(value) for value in node.refs() if self._is_large(value)}
                home = homes.pop() if len(homes) == 1 else None
                if home is not None:
                    self._stored[row.results[0]] = home

    def _is_placed_cast(self, row: Placed) -> bool:
        """Return whether a node stores a cast as its source is stored."""
        if row.node.op != PLACE or row.results[0] not in self._stored:
            return False
        view = self._views.get(row.node.args[0].index)
        if view is None or view.node.op not in COPIES:
            return False
        del self._stored[row.results[0]]
        return True

    def _part(self, value: int) -> None:
        """Make casts of a value stored values of their own, once it is written."""
        for cast in self._casts.pop(value, ()):
            (below,) = self._views.pop(cast).node.refs()
            if below in self._stored:
                self._stored[cast] = self._stored[below]

    def _root(self, value: int) -> int:
        """Return the stored value behind a view or a cast."""
        while value in self._views:
            (value,) = self._views[value].node.refs()
        return value

    def _is_large(self, value: int) -> bool:
        meta = self._metas[value]
        return meta is None or meta.numel > 1

    def _moved(self, row: Placed, here: dict[int, int]) -> Placed:
        """Return a node on the pass's own copies of the operands that it takes whole."""
        moved = {
            value: self._copy(value, row.source, here)
            for value in row.node.refs()
            if value in self._views
            or (value in self._stored and takes_whole(row.node, value, self._metas))
        }
        if not moved:
            return row
        here.update({value: value for value in row.results if value in self._views})
        node = renumbered(row.node, {value: value for value in row.node.refs()} | moved)
        return row._replace(node=node)

    def _copy(self, value: int, source: int, here: dict[int, int]) -> int:
        if value not in here:
            view = self._views.get(value)
            if view is None:
                meta = self._metas[value]
                assert meta is not None
                node, results = place_node(value, meta, self._stored[value]), [value]
            else:
                (below,) = view.node.refs()
                node = renumbered(view.node, {below: self._copy(below, source, here)})
                results = list(view.results)
            for result in results:
                here[result] = self._count
                self._count += 1
            self._rows.append(Placed(node, [here[result] for result in results], source))
        return here[value]
