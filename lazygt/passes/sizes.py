"""A graph's sizes: the graph read with symbols for them, and written anew with others.

What a reading says of sizes is all that passes may ask of them, so that they decide the same on
graphs that read the same:

- which are equal, and which are 0, 1 or negative: those stand for themselves
- of a tensor: whether it is row-major, whether it fills its memory
- which of two tensors has more elements, or more bytes
- whether a tensor has at most so many bytes: ``_LIMITS``
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from lazygt.graph.alias import WRITE_BACK, op_facts
from lazygt.graph.exact import exact
from lazygt.graph.meta import TensorMeta, intern
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.passes.cse import _SMALL as CHEAP_TO_KEEP
from lazygt.passes.foreach import SMALL

#: Bytes of one tensor up to which a pass decides one way, and above another.
_LIMITS = (CHEAP_TO_KEEP, SMALL)


class Skeleton(NamedTuple):
    """A graph read with symbols for its sizes.

    Attributes:
        key: everything but the sizes; graphs with equal keys get the same from every pass.
        sizes: what the symbols stand for, in the order in which they appear; each another number.
    """

    key: tuple[Any, ...]
    sizes: tuple[int, ...]


def skeleton(graph: Graph) -> Skeleton:
    """The reading of a recorded graph; linear in its size."""
    reader = _Reader()
    reader.read(graph)
    return Skeleton(tuple(reader.key), tuple(reader.symbols))


class _Reader:
    """Writes a graph down as one flat list, in which what was written says how to read on."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.symbols: dict[int, int] = {}
        #: id of a meta -> its number among all metas
        self.metas: dict[int, int] = {}
        self.numels: list[int] = []
        self.nbytes: list[int] = []

    def read(self, graph: Graph) -> None:
        """Add a graph to the key."""
        self.key += (graph.params, graph.outputs, graph.lines, len(graph.inputs))
        for meta in graph.inputs:
            self._meta(meta)
        for node in graph.nodes:
            self.node(node)
        self.key += _ranks(self.numels) + _ranks(self.nbytes)

    def node(self, node: Node) -> None:
        """One node, its members too."""
        sized = _sized(node.op)
        self.key += (node.op, len(node.args), len(node.kwargs), len(node.fresh), node.writes,
                     len(node.written), node.dynamic)  # fmt: skip
        for place, arg in enumerate(node.args):
            self._arg(arg, place in sized)
        for name, arg in node.kwargs:
            self.key.append(name)
            self._arg(arg, name in sized)
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
        if size > 1:
            self.key += ("size", self.symbols.setdefault(size, len(self.symbols)))
        else:
            self.key.append(size)

    def _meta(self, meta: TensorMeta | None) -> None:
        if meta is None:
            self.key.append(None)
            return
        number = self.metas.setdefault(id(meta), len(self.metas))
        self.key.append(number)
        if number < len(self.numels):
            return
        traits, numel, nbytes = _traits(meta)
        self.numels.append(numel)
        self.nbytes.append(nbytes)
        self.key.append(traits)
        for size in (*meta.shape, *meta.stride, meta.offset):
            self._size(size)


@lru_cache(maxsize=4096)
def _sized(op: str) -> frozenset[int | str]:
    """The positions and keywords in which a whole number is a size, and not data."""
    if op == WRITE_BACK:
        return frozenset({2})
    facts = None if op.startswith("lazygt.") else op_facts(Node(op, ()))
    if facts is None:
        return frozenset()
    places = {place for place, data in enumerate(facts.hoist) if not data}
    return frozenset(places | {name for name, data in facts.hoist_named.items() if not data})


@lru_cache(maxsize=16384)
def _traits(meta: TensorMeta) -> tuple[tuple[Any, ...], int, int]:
    """What passes ask of one tensor besides its sizes; its elements; its bytes."""
    numel, nbytes = meta.numel, meta.nbytes
    limits = [nbytes <= limit for limit in _LIMITS]
    traits = (meta.dtype, len(meta.shape), meta.conj, meta.neg, meta.plain, meta.is_contiguous(),
              meta.extent == numel, *limits)  # fmt: skip
    return traits, numel, nbytes


def _ranks(numbers: list[int]) -> list[int]:
    """Each number by its place among all; 0 stands for itself."""
    places = {number: place for place, number in enumerate(sorted({0, *numbers}))}
    return [places[number] for number in numbers]


def sizes_in(node: Node) -> frozenset[int]:
    """The sizes above 1 that stand in a node, or in its members."""
    reader = _Reader()
    reader.node(node)
    return frozenset(reader.symbols)


# -- other sizes -----------------------------------------------------------------------------------


class Resize:
    """Puts other sizes in the place of those that a graph has.

    Attributes:
        changed: the old sizes that have a new one.
    """

    def __init__(self, have: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        self._sizes = dict(zip(have, wanted, strict=True))
        self.changed = {old for old, new in self._sizes.items() if old != new}
        self._metas: dict[int, TensorMeta] = {}

    def node(self, node: Node) -> Node:
        """The node in the new sizes, its members too."""
        sized = _sized(node.op)
        args = [self._arg(arg) if place in sized else arg for place, arg in enumerate(node.args)]
        kwargs = [(name, self._arg(arg) if name in sized else arg) for name, arg in node.kwargs]
        fresh = [None if meta is None else self.meta(meta) for meta in node.fresh]
        written = [self.meta(meta) for meta in node.written]
        body = None if node.body is None else self._body(node.body)
        return Node(node.op, tuple(args), tuple(kwargs), tuple(fresh), node.writes, tuple(written),
                    node.dynamic, body)  # fmt: skip

    def meta(self, meta: TensorMeta) -> TensorMeta:
        """The meta in the new sizes; the very object where they are the old ones."""
        found = self._metas.get(id(meta))
        if found is None:
            shape, stride = self._arg(meta.shape), self._arg(meta.stride)
            found = meta
            if shape != meta.shape or stride != meta.stride or meta.offset in self.changed:
                offset = self._arg(meta.offset)
                found = intern(shape, stride, meta.dtype, offset, meta.conj, meta.neg)
            self._metas[id(meta)] = found
        return found

    def _body(self, body: Graph) -> Graph:
        nodes = tuple([self.node(node) for node in body.nodes])
        return replace(body, inputs=tuple([self.meta(meta) for meta in body.inputs]), nodes=nodes)

    def _arg(self, arg: Arg) -> Arg:
        kind = type(arg)
        if kind is tuple:
            return tuple([self._arg(item) for item in arg])
        return self._sizes[arg] if kind is int and arg > 1 else arg
