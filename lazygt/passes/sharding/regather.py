"""FSDP's ``reshard_after_forward``: weights are gathered again for every pass.

A step is a sequence of passes: forward, backward, the forward of the next microbatch. From the
second pass on, nodes that need a gathered stored value, or a view or cast of one, read the pass's
own copy (a ``lazygt.place``) instead, which is gathered at its first reader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lazygt.graph.mesh import Sharding
from lazygt.graph.node import Graph
from lazygt.passes.base import Placed, placed, rebuild, renumbered
from lazygt.passes.sharding.annotations import (
    COPIES,
    gathers_operand,
    is_elementwise,
    moves_elements,
)
from lazygt.passes.sharding.marks import PLACE, place_node, turns
from lazygt.passes.updates import written


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
        for value in written(node):
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
