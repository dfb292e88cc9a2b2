"""Node and Graph: pure operations on numbered values.

A graph numbers its values: the inputs first, then the results of each node in order. A node may
name an op that torch runs in place; its *meaning* is still pure: it computes on copies, and the
new version of every tensor it writes is one more result. The executor decides which copies are
really made (see ``graph.alias``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazygt.errors import GraphError
from lazygt.graph.meta import TensorMeta, typed_key


class Numbered:
    """Stand-in for an argument, by number; immutable."""

    # not a dataclass: msgspec would encode its fields without calling our extension hook
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.index == self.index

    def __hash__(self) -> int:
        return hash(self.index)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(index={self.index})"


class Ref(Numbered):
    """A value of the graph, by number."""

    __slots__ = ()


_REFS: list[Ref] = []


def ref(index: int) -> Ref:
    """Return the cached ``Ref(index)``: passes renumber every argument of every node."""
    while index >= len(_REFS):
        _REFS.append(Ref(len(_REFS)))
    return _REFS[index]


class Param(Numbered):
    """A Python number that is known only at run time, by its position in the run message."""

    __slots__ = ()


#: An argument: Ref, Param, None, bool, int, float, complex, str, torch.dtype,
#: torch.layout, torch.memory_format, DEVICE, or a tuple of these.
Arg = Any


class _Device:
    """Placeholder of the worker's own device in arguments."""

    def __repr__(self) -> str:
        return "DEVICE"


DEVICE = _Device()

#: A node with several members inside: ``Node.body``.
FUSED = "lazygt.fused"


@dataclass(frozen=True, slots=True)
class Node:
    """One op applied to values.

    Attributes:
        op: overload name, for example ``aten.add.Tensor``.
        args, kwargs: arguments with Ref and Param in place of tensors and run-time numbers.
        fresh: metas of the tensors that the op returns anew, in order. None for an undefined
            tensor, and for an op with ``dynamic`` set: its results are known only afterwards.
        writes: numbers of the values it writes; each write is one more result of the node, after
            the fresh ones.
        written: metas of the new versions, one a write.
        dynamic: shapes (or whether there is a tensor at all) depend on values.
        body: the members of a fused node (op FUSED), as a graph of their own. ``args`` are the
            values of the body's inputs, then the numbers of its params; the body's outputs are
            the node's results. ``writes`` are the values that a member writes in place.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    fresh: tuple[TensorMeta | None, ...] = ()
    writes: tuple[int, ...] = ()
    written: tuple[TensorMeta, ...] = ()
    dynamic: bool = False
    body: Graph | None = None
    _refs: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)
    #: see ``graph.sizes.sizes_in``
    _sizes: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[Any, ...]:
        return (self.op, typed_key(self.args), typed_key(self.kwargs), self.fresh, self.writes,
                self.written, self.dynamic, self.body)  # fmt: skip

    @property
    def results(self) -> tuple[TensorMeta | None, ...]:
        """Metas of every value that the node defines."""
        return self.fresh + self.written

    def resized(
        self,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        fresh: tuple[TensorMeta | None, ...],
        written: tuple[TensorMeta, ...],
    ) -> Node:
        """Return the same op on the same values in other sizes; the refs of ``args`` are equal."""
        node = Node(self.op, args, kwargs, fresh, self.writes, written)
        _set_refs(node, self._refs)
        if args is self.args and kwargs is self.kwargs:
            _set_sizes(node, self._sizes)
        return node

    def refs(self) -> tuple[int, ...]:
        """Return the numbers of the values the node reads, in argument order, with repeats."""
        numbers = self._refs
        if numbers is None:
            refs: list[int] = []
            _add_refs(self.args, refs)
            for _, arg in self.kwargs:
                _add_refs((arg,), refs)
            numbers = tuple(refs)
            object.__setattr__(self, "_refs", numbers)  # a cache, not part of the node's value
        return numbers


(_set_op, _set_args, _set_kwargs, _set_fresh, _set_writes, _set_written, _set_dynamic, _set_body,
 _set_refs, _set_sizes) = (vars(Node)[name].__set__ for name in Node.__slots__)  # fmt: skip


def _init(
    self: Node,
    op: str,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...] = (),
    fresh: tuple[TensorMeta | None, ...] = (),
    writes: tuple[int, ...] = (),
    written: tuple[TensorMeta, ...] = (),
    dynamic: bool = False,
    body: Graph | None = None,
) -> None:
    """Set the fields as a frozen dataclass does, in half the time: passes build many nodes."""
    _set_op(self, op)
    _set_args(self, args)
    _set_kwargs(self, kwargs)
    _set_fresh(self, fresh)
    _set_writes(self, writes)
    _set_written(self, written)
    _set_dynamic(self, dynamic)
    _set_body(self, body)
    _set_refs(self, None)
    _set_sizes(self, None)


Node.__init__ = _init  # type: ignore[method-assign]


#: Python memory of an op, as measured: in a plan of the client, with the steps that it was recorded
#: in, and in one of a worker, with its decoded and prepared forms.
_BYTES_AN_OP = 1250


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs, nodes and outputs of one trace between two sync points.

    Two side tables, which take no part in equality: ``lines`` names the user's ``file:line`` of
    each node; ``origins`` the recorded op that each node comes from, by number, once passes have
    moved nodes about (empty: they stand as recorded).
    """

    inputs: tuple[TensorMeta, ...]
    params: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    lines: tuple[str, ...] = field(default=(), compare=False)
    origins: tuple[int, ...] = field(default=(), compare=False)

    @property
    def values(self) -> tuple[TensorMeta | None, ...]:
        """The meta of every value, by number."""
        metas: list[TensorMeta | None] = list(self.inputs)
        for node in self.nodes:
            metas += node.fresh
            metas += node.written
        return tuple(metas)

    def numbered(self) -> Iterator[tuple[Node, range]]:
        """Yield each node with the numbers of its results."""
        start = len(self.inputs)
        for node in self.nodes:
            stop = start + len(node.fresh) + len(node.written)
            yield node, range(start, stop)
            start = stop

    def __str__(self) -> str:
        return print_graph(self)

    @property
    def nbytes(self) -> int:
        """Approximate memory of a plan of the graph, in the client and in each worker."""
        ops = sum(1 if node.body is None else len(node.body.nodes) for node in self.nodes)
        return _BYTES_AN_OP * (ops + 1)

    def line(self, number: int) -> str:
        """Return the user's line of node ``number``, or ``"?"``."""
        return self.lines[number] if number < len(self.lines) else "?"

    def origin(self, number: int) -> int:
        """Return the number of the recorded op that node ``number`` comes from."""
        return self.origins[number] if self.origins else number


def _add_refs(args: tuple[Arg, ...], refs: list[int]) -> None:
    """Add the numbers of the values inside arguments."""
    for arg in args:
        if type(arg) is Ref:
            refs.append(arg.index)
        elif type(arg) is tuple:
            _add_refs(arg, refs)


def params_in(arg: Arg) -> list[int]:
    """Return the numbers of the Params inside an argument, in order, with repeats."""
    if type(arg) is Param:
        return [arg.index]
    if type(arg) is tuple:
        return [index for item in arg for index in params_in(item)]
    return []


def map_arg(arg: Arg, leaf: Any) -> Arg:
    """Return ``arg`` with ``leaf`` applied to everything that is not a tuple."""
    if type(arg) is tuple:
        return tuple(map_arg(item, leaf) for item in arg)
    return leaf(arg)


# -- canonical text --------------------------------------------------------------------------------


def print_graph(
    graph: Graph, name: str = "graph", notes: Sequence[str] = (), placements: Sequence[str] = ()
) -> str:
    """Return the canonical text of a graph.

    Args:
        notes: a remark after each node's line.
        placements: text after each value's meta, in braces.
    """
    lines = [f"{name} {{"]
    for number, meta in enumerate(graph.inputs):
        lines.append(f"  %{number}: {_meta_text(meta, number, placements)} = input")
    for number, kind in enumerate(graph.params):
        lines.append(f"  ${number}: {kind} = param")
    for number, (node, results) in enumerate(graph.numbered()):
        remark = graph.line(number) if graph.lines else ""
        if number < len(notes) and notes[number]:
            remark = f"{remark}  [{notes[number]}]" if remark else f"[{notes[number]}]"
        text = print_node(node, results, placements)
        if node.body is not None:
            text = print_graph(node.body, name=text).replace("\n", "\n  ")
        lines.append(f"  {text}" + (f"  # {remark}" if remark else ""))
    lines.append(("  return " + ", ".join(f"%{value}" for value in graph.outputs)).rstrip())
    lines.append("}")
    return "\n".join(lines)


def print_node(node: Node, results: range, placements: Sequence[str] = ()) -> str:
    """Return the text of one node: its results with their metas, the op, the arguments."""
    result_texts = [
        f"%{number}: {_meta_text(meta, number, placements)}"
        for number, meta in zip(results, node.results, strict=True)
    ]
    args = [_arg_text(arg) for arg in node.args] + [
        f"{key}={_arg_text(arg)}" for key, arg in node.kwargs
    ]
    text = f"{', '.join(result_texts) or '_'} = {node.op}({', '.join(args)})"
    if node.writes:
        text += " writes " + ", ".join(f"%{value}" for value in node.writes)
    return text + (" dynamic" if node.dynamic else "")


def _meta_text(meta: TensorMeta | None, number: int, placements: Sequence[str]) -> str:
    """Return a value's meta as text, with its placement if there is one."""
    text = "none" if meta is None else str(meta)
    return (
        f"{text} {placements[number]}" if number < len(placements) and placements[number] else text
    )


def _arg_text(arg: Arg) -> str:
    """Return an argument as text."""
    if type(arg) is Ref:
        return f"%{arg.index}"
    if type(arg) is Param:
        return f"${arg.index}"
    if arg is DEVICE:
        return "device"
    if type(arg) is tuple:
        return "[" + ", ".join(_arg_text(item) for item in arg) + "]"
    if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)):
        return str(arg)
    has_no_literal = isinstance(arg, complex) or (isinstance(arg, float) and not math.isfinite(arg))
    return _number_text(arg) if has_no_literal else repr(arg)


def _number_text(number: float | complex) -> str:
    """Return a number that has no literal (inf, NaN, complex) as text that parses back exactly."""
    kind, text = type(number), str(number)
    if typed_key(kind(text)) != typed_key(number):
        components = (number.real, number.imag) if kind is complex else (number,)
        text = "0x" + struct.pack(f">{len(components)}d", *components).hex()
    return f"{kind.__name__}({text!r})"


# -- verification ----------------------------------------------------------------------------------


def verify(graph: Graph) -> None:
    """Check that values are defined before use, once, and that parameters exist.

    Raises:
        GraphError: naming the node and the rule.
    """
    for number, (node, results) in enumerate(graph.numbered()):
        for ref in node.refs():
            if not 0 <= ref < results.start:
                raise _violation(number, node, f"reads %{ref}, which is not defined before it")
        for ref in node.writes:
            if not 0 <= ref < results.start:
                raise _violation(number, node, f"writes %{ref}, which is not defined before it")
        if not node.dynamic and len(node.writes) != len(node.written):
            raise _violation(number, node, "has a write without a new version, or the reverse")
        for param in params_in(node.args) + params_in(tuple(arg for _, arg in node.kwargs)):
            if not 0 <= param < len(graph.params):
                raise _violation(number, node, f"uses ${param} of {len(graph.params)} parameters")
        if node.dynamic and number != len(graph.nodes) - 1:
            raise _violation(number, node, "has data-dependent results but is not the last node")
        if node.op == FUSED or node.body is not None:
            _verify_body(number, node)
    total = len(graph.values)
    for value in graph.outputs:
        if not 0 <= value < total:
            raise GraphError(f"output %{value} is not a value of the graph")


def _verify_body(number: int, node: Node) -> None:
    """Check that a fused node's arguments and results match its members."""
    if node.op != FUSED or node.body is None:
        raise _violation(
            number, node, "is fused without members, or has members without being fused"
        )
    refs = list(node.refs())
    if node.args != (*map(Ref, refs), *map(Param, params_in(node.args))) or node.kwargs:
        raise _violation(number, node, "has an argument that is neither value nor parameter")
    if len(refs) != len(node.body.inputs) or len(params_in(node.args)) != len(node.body.params):
        raise _violation(number, node, "has other operands than the inputs of its members")
    if len(node.body.outputs) != len(node.results):
        raise _violation(number, node, "has other results than the outputs of its members")
    if any(target not in refs for target in node.writes):
        raise _violation(number, node, "writes a value that is not an operand")
    verify(node.body)


def _violation(number: int, node: Node, rule: str) -> GraphError:
    """Return the error for a node that breaks a rule."""
    return GraphError(f"node {number} ({node.op}) {rule}")
