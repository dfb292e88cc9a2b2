"""Symbolic graphs: symbols in place of a graph's sizes, and substitution of sizes for symbols.

Programs run in other sizes more often than they change (a smaller last batch, a longer sequence). A
*symbolic* graph has a `Size` in place of every number of 2 or more that is a size in an argument,
and in its metas the number of that symbol plus 2; 0, 1 and negative numbers are not replaced.
Symbols are numbered by appearance, and equal sizes have the same one. So a graph has one symbolic
graph and one list of sizes, and these two restore it. In other sizes several symbols may have one
value.

A symbolic meta is not for shape inference: its sizes do not fit each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from lazygt.graph.alias import WRITE_BACK, op_facts
from lazygt.graph.meta import TensorMeta, intern
from lazygt.graph.node import Arg, Graph, Node, Numbered

Sizes = tuple[int, ...]
Args = tuple[Arg, ...]
Kwargs = tuple[tuple[str, Arg], ...]

#: The smallest number that has a symbol.
MIN_SYMBOLIC_SIZE = 2


class Size(Numbered):
    """Symbol of a size, by number, in an argument of a symbolic graph."""

    __slots__ = ()


@lru_cache(maxsize=4096)
def size_positions(op: str) -> frozenset[int | str]:
    """Return an op's positions and keywords at which an int is a size, not data (a number)."""
    if op == WRITE_BACK:
        return frozenset({2})
    facts = None if op.startswith("lazygt.") else op_facts(Node(op, ()))
    if facts is None:
        return frozenset()
    positions = {position for position, is_data in enumerate(facts.hoist) if not is_data}
    return frozenset(
        positions | {name for name, is_data in facts.hoist_named.items() if not is_data}
    )


def sizes_in(node: Node) -> tuple[int, ...]:
    """Return the sizes in a node's arguments, each once."""
    numbers = node._sizes
    if numbers is None:
        positions = size_positions(node.op)
        arguments = [arg for position, arg in enumerate(node.args) if position in positions]
        arguments += [arg for name, arg in node.kwargs if name in positions]
        numbers = tuple(dict.fromkeys(size for arg in arguments for size in _numbers(arg)))
        object.__setattr__(node, "_sizes", numbers)  # a cache, not part of the node's value
    return numbers


def _numbers(arg: Arg) -> Iterator[int]:
    """Yield the sizes in an argument."""
    if type(arg) is tuple:
        for item in arg:
            yield from _numbers(item)
    elif type(arg) is int and arg >= MIN_SYMBOLIC_SIZE:
        yield arg


class SymbolicGraph:
    """Graph with symbols in place of its sizes.

    Args:
        graph: the symbolic graph.
        first: the first sizes, and the graph in them; unchanged nodes are reused from it.

    Attributes:
        count: number of symbols.
    """

    def __init__(self, graph: Graph, first: tuple[Sizes, Graph] | None = None) -> None:
        self.graph, self._first = graph, first
        symbols = _SymbolsIn()
        for meta in graph.inputs:
            symbols.meta(meta)
        self._node_symbols = [symbols.node(node) for node in graph.nodes]
        #: for each node whether symbols are in more than the metas of its results
        self._own_symbols = [
            node.body is not None or node.dynamic or bool(symbols.arguments(node))
            for node in graph.nodes
        ]
        self._numbers = symbols.numbers
        self.count = len(symbols.numbers)

    @staticmethod
    def of(graph: Graph) -> tuple[SymbolicGraph, Sizes]:
        """Return the symbolic graph of a graph, and its sizes."""
        symbols = _ToSymbols()
        symbolic = symbols.graph(graph)
        sizes = tuple(symbols.numbers)
        return SymbolicGraph(symbolic, (sizes, graph)), sizes

    def in_sizes(self, sizes: Sizes) -> Graph:
        """Substitute sizes for the symbols; nodes without a changed size are the first graph's."""
        if self._first is None:
            self._first = sizes, _FromSymbols(sizes).graph(self.graph)
        first_sizes, first = self._first
        changed = {number for number in range(self.count) if sizes[number] != first_sizes[number]}
        if not changed:
            return first
        rewriting = _FromSymbols(sizes)
        nodes = [
            first_node if symbols.isdisjoint(changed) else rewriting.resized(node, first_node, own)
            for node, first_node, symbols, own in zip(
                self.graph.nodes, first.nodes, self._node_symbols, self._own_symbols, strict=True
            )
        ]
        inputs = tuple([rewriting.meta(meta) for meta in self.graph.inputs])
        return replace(first, inputs=inputs, nodes=tuple(nodes))

    def check(self) -> None:
        """Check that the symbols are numbered without gaps.

        Raises:
            ValueError: they are not.
        """
        if self._numbers != set(range(self.count)):
            raise ValueError("the symbols are not numbered from 0 without gaps")


def check_sizes(symbolic: SymbolicGraph, sizes: Sizes) -> None:
    """Check that sizes can be substituted for a graph's symbols.

    Raises:
        ValueError: another number of sizes, or a size that needs no symbol.
    """
    if len(sizes) != symbolic.count:
        raise ValueError(f"{symbolic.count} sizes are wanted, but {len(sizes)} were passed")
    if min(sizes, default=MIN_SYMBOLIC_SIZE) < MIN_SYMBOLIC_SIZE:
        raise ValueError(f"a size of less than {MIN_SYMBOLIC_SIZE} has no symbol")


class _Rewriting:
    """Visitor that rewrites every size in a graph, node or meta."""

    def __init__(self) -> None:
        self._metas: dict[int, TensorMeta] = {}

    def graph(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        inputs = tuple([self.meta(meta) for meta in graph.inputs])
        return replace(graph, inputs=inputs, nodes=tuple([self.node(node) for node in graph.nodes]))

    def node(self, node: Node) -> Node:
        """Return the rewritten node, with the members of a fused node."""
        args, kwargs = self.arguments(node)
        fresh = [None if meta is None else self.meta(meta) for meta in node.fresh]
        written = [self.meta(meta) for meta in node.written]
        body = None if node.body is None else self.graph(node.body)
        return Node(node.op, args, kwargs, tuple(fresh), node.writes, tuple(written), node.dynamic,
                    body)  # fmt: skip

    def meta(self, meta: TensorMeta) -> TensorMeta:
        """Return the rewritten meta; the result for one object is cached."""
        written = self._metas.get(id(meta))
        if written is None:
            shape = tuple([self.number(size) for size in meta.shape])
            stride = tuple([self.number(step) for step in meta.stride])
            offset = self.number(meta.offset)
            written = intern(shape, stride, meta.dtype, offset, meta.conj, meta.neg)
            self._metas[id(meta)] = written
        return written

    def number(self, number: int) -> int:
        """Return the replacement of a size, stride or offset in a meta."""
        raise NotImplementedError

    def arguments(self, node: Node) -> tuple[Args, Kwargs]:
        """Return the node's rewritten arguments."""
        raise NotImplementedError


class _ToSymbols(_Rewriting):
    """Rewriting of a graph's sizes to symbols.

    Attributes:
        numbers: size -> its symbol, in the order of appearance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, int] = {}

    def number(self, number: int) -> int:
        if number < MIN_SYMBOLIC_SIZE:
            return number
        return self.numbers.setdefault(number, len(self.numbers)) + MIN_SYMBOLIC_SIZE

    def arguments(self, node: Node) -> tuple[Args, Kwargs]:
        if node.op == WRITE_BACK:
            base, value, chain = node.args
            return (base, value, tuple([self._view(*step) for step in chain])), ()
        return self._call(node.op, node.args, node.kwargs)

    def _view(self, op: str, position: int, args: Args, kwargs: Kwargs, which: int) -> Arg:
        """Rewrite one view op of a write_back's chain."""
        args, kwargs = self._call(op, args, kwargs)
        return op, position, args, kwargs, which

    def _call(self, op: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Rewrite the sizes in an op's arguments."""
        positions = size_positions(op)
        called = [
            self._arg(arg) if position in positions else arg for position, arg in enumerate(args)
        ]
        named = [(name, self._arg(arg) if name in positions else arg) for name, arg in kwargs]
        return tuple(called), tuple(named)

    def _arg(self, arg: Arg) -> Arg:
        """Return an argument with symbols for its sizes."""
        kind = type(arg)
        if kind is tuple:
            return tuple([self._arg(item) for item in arg])
        if kind is int and arg >= MIN_SYMBOLIC_SIZE:
            return Size(self.numbers.setdefault(arg, len(self.numbers)))
        return arg


class _FromSymbols(_Rewriting):
    """Rewriting of a symbolic graph's symbols to sizes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self._sizes = sizes

    def resized(self, node: Node, first: Node, own_symbols: bool) -> Node:
        """Return the rewritten node.

        Args:
            first: the node in the first sizes.
            own_symbols: symbols are in more than the metas of its results.
        """
        if own_symbols:
            return self.node(node)
        fresh = tuple([None if meta is None else self.meta(meta) for meta in node.fresh])
        written = tuple([self.meta(meta) for meta in node.written])
        return first.resized(first.args, first.kwargs, fresh, written)

    def number(self, number: int) -> int:
        return number if number < MIN_SYMBOLIC_SIZE else self._sizes[number - MIN_SYMBOLIC_SIZE]

    def arguments(self, node: Node) -> tuple[Args, Kwargs]:
        args = tuple([self._arg(arg) for arg in node.args])
        return args, tuple([(name, self._arg(arg)) for name, arg in node.kwargs])

    def _arg(self, arg: Arg) -> Arg:
        """Return an argument with sizes for its symbols."""
        kind = type(arg)
        if kind is Size:
            return self._sizes[arg.index]
        return tuple([self._arg(item) for item in arg]) if kind is tuple else arg


class Resize(_Rewriting):
    """Rewriting of metas from old sizes to new ones.

    Args:
        sizes: old size -> new size.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()
        self._sizes = sizes

    def number(self, number: int) -> int:
        return number if number < MIN_SYMBOLIC_SIZE else self._sizes[number]


class _SymbolsIn:
    """Visitor that collects the symbols in nodes and metas."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._metas: dict[int, frozenset[int]] = {}

    def node(self, node: Node) -> frozenset[int]:
        """Return the symbols of a node and of its members."""
        symbols = self.arguments(node)
        for meta in node.results:
            if meta is not None:
                symbols |= self.meta(meta)
        if node.body is not None:
            for meta in node.body.inputs:
                symbols |= self.meta(meta)
            symbols.update(*[self.node(member) for member in node.body.nodes])
        self.numbers |= symbols
        return frozenset(symbols)

    def arguments(self, node: Node) -> set[int]:
        """Return the symbols of a node's arguments."""
        symbols: set[int] = set()
        for arg in (node.args, *[arg for _, arg in node.kwargs]):
            self._arg(arg, symbols)
        return symbols

    def meta(self, meta: TensorMeta) -> frozenset[int]:
        """Return the symbols of a meta."""
        symbols = self._metas.get(id(meta))
        if symbols is None:
            numbers = (*meta.shape, *meta.stride, meta.offset)
            symbols = frozenset(
                [number - MIN_SYMBOLIC_SIZE for number in numbers if number >= MIN_SYMBOLIC_SIZE]
            )
            self._metas[id(meta)] = symbols
            self.numbers |= symbols
        return symbols

    def _arg(self, arg: Arg, symbols: set[int]) -> None:
        """Add the symbols of an argument to ``symbols``."""
        if type(arg) is Size:
            symbols.add(arg.index)
        elif type(arg) is tuple:
            for item in arg:
                self._arg(item, symbols)
