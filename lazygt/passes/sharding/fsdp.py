"""Stored values are gathered again for the backward, so that nobody keeps them whole till then.

Backward ops take whole weights, or views of them, that the forward has used. They get a copy of
the stored value (a ``lazygt.place``) of their own, and views of that; it is gathered where the
first of them stands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lazygt.graph.mesh import Sharding
from lazygt.graph.node import Graph, Node
from lazygt.passes.base import Placed, placed, rebuild, renumbered
from lazygt.passes.sharding.annotations import is_elementwise, moves_elements, takes_whole
from lazygt.passes.sharding.marks import place_node


def reshard_after_forward(
    graph: Graph, kept: Mapping[int, Sharding], backward: Collection[int]
) -> Graph:
    """The graph in which units with ``reshard_after_forward`` are gathered for each direction.

    Args:
        kept: how values are stored.
        backward: which recorded ops, by number, are of a backward pass.
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
        #: views of stored values that the forward made -> their nodes
        self._views: dict[int, Placed] = {}
        self._copies: dict[int, int] = {}
        self._rows: list[Placed] = []
        self._count = len(self._metas)

    def run(self) -> Graph:
        for row in placed(self._graph):
            late = self._graph.origin(row.source) in self._backward
            if late:
                self._rows.append(row._replace(node=self._late(row)))
            else:
                self._early(row)
                self._rows.append(row)
        return rebuild(self._graph, self._rows) if self._copies else self._graph

    def _early(self, row: Placed) -> None:
        """Note which values of the forward are stored or views of stored ones."""
        node = row.node
        if any(value in self._stored or value in self._views for value in node.refs()):
            if moves_elements(node) and not is_elementwise(node, self._metas):
                self._views.update(dict.fromkeys(row.results, row))
            elif is_elementwise(node, self._metas):
                homes = {self._stored.get(value) for value in node.refs() if self._is_large(value)}
                home = homes.pop() if len(homes) == 1 else None
                if home is not None:
                    self._stored[row.results[0]] = home

    def _is_large(self, value: int) -> bool:
        meta = self._metas[value]
        return meta is None or meta.numel > 1

    def _late(self, row: Placed) -> Node:
        """A backward node on copies of what it takes whole."""
        moved = {
            value: self._copy(value, row.source)
            for value in row.node.refs()
            if value in self._views
            or (value in self._stored and takes_whole(row.node, value, self._metas))
        }
        if not moved:
            return row.node
        return renumbered(row.node, {value: value for value in row.node.refs()} | moved)

    def _copy(self, value: int, source: int) -> int:
        if value not in self._copies:
            view = self._views.get(value)
            if view is None:
                meta = self._metas[value]
                assert meta is not None
                node, results = place_node(value, meta, self._stored[value]), [value]
            else:
                (below,) = view.node.refs()
                node = renumbered(view.node, {below: self._copy(below, source)})
                results = list(view.results)
            for result in results:
                self._copies[result] = self._count
                self._count += 1
            self._rows.append(Placed(node, [self._copies[result] for result in results], source))
        return self._copies[value]
