"""Skeletons: graphs read with symbols for their sizes.

Graphs that read the same are one program in several sizes. 0, 1 and negative numbers stand for
themselves, and equal sizes have the same symbol.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lazygt.graph.exact import exact
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.graph.sizes import LEAST, Sizes, sized


class Skeleton(NamedTuple):
    """A graph read with symbols for its sizes.

    Attributes:
        key: everything but the sizes.
        sizes: the numbers of the symbols, in order of appearance; all different.
    """

    key: tuple[Any, ...]
    sizes: Sizes


def skeleton(graph: Graph) -> Skeleton:
    """Return the skeleton of a recorded graph; linear in its size."""
    reader = _Reader()
    reader.read(graph)
    return Skeleton(tuple(reader.key), tuple(reader.symbols))


class _Reader:
    """Serialization of a graph to one flat, self-delimiting list."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.symbols: dict[int, int] = {}
        #: id of a meta -> its number among all metas
        self.metas: dict[int, int] = {}

    def read(self, graph: Graph) -> None:
        """Add a graph to the key."""
        self.key += (graph.params, graph.outputs, graph.lines, len(graph.inputs))
        for meta in graph.inputs:
            self._meta(meta)
        for node in graph.nodes:
            self._node(node)

    def _node(self, node: Node) -> None:
        """Add one node, with its members, to the key."""
        places = sized(node.op)
        self.key += (node.op, len(node.args), len(node.kwargs), len(node.fresh), node.writes,
                     len(node.written), node.dynamic)  # fmt: skip
        for place, arg in enumerate(node.args):
            self._arg(arg, place in places)
        for name, arg in node.kwargs:
            self.key.append(name)
            self._arg(arg, name in places)
        for meta in node.results:
            self._meta(meta)
        if node.body is not None:
            self.read(node.body)

    def _arg(self, arg: Arg, sized: bool) -> None:
        kind = type(arg)
        if kind is Ref or kind is Param:
            self.key += (kind, arg.index)
        elif kind is tuple:
            self.key += (kind, len(arg))
            for item in arg:
                self._arg(item, sized)
        elif kind is int and sized:
            self._size(arg)
        else:
            self.key += exact(arg)

    def _size(self, size: int) -> None:
        if size >= LEAST:
            self.key += ("size", self.symbols.setdefault(size, len(self.symbols)))
        else:
            self.key.append(size)

    def _meta(self, meta: TensorMeta | None) -> None:
        if meta is None:
            self.key.append(None)
            return
        known = len(self.metas)
        number = self.metas.setdefault(id(meta), known)
        self.key.append(number)
        if number < known:
            return
        self.key += (meta.dtype, len(meta.shape), meta.conj, meta.neg)
        for size in (*meta.shape, *meta.stride, meta.offset):
            self._size(size)
