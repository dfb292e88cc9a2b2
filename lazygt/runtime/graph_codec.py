"""Wire format of graphs, without their source lines, and names of plans. Versioned."""

from __future__ import annotations

import hashlib
from keyword import iskeyword
from typing import Any

import msgspec

from lazygt.errors import ProtocolError
from lazygt.graph.flags import Flags, check_flags
from lazygt.graph.meta import TORCH_NAMES, TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref
from lazygt.graph.sizes import Size
from lazygt.runtime.wire import Buffer, Count, Message, pack, tuples, unpack

#: Version of the format, which client and worker compare when they connect.
VERSION = 6


def encode_graph(graph: Graph, flags: Flags = ()) -> bytes:
    """Encode a graph without its source lines.

    Args:
        flags: torch's flags that it runs under.
    """
    return pack((VERSION, *_graph_fields(graph), *([flags] if flags else ())))


def _graph_fields(graph: Graph) -> tuple[Any, ...]:
    """Return a graph as the tuple that is encoded; bodies of fused nodes are such tuples, too."""
    nodes = [
        (n.op, n.args, n.kwargs, n.fresh, n.writes, n.written, n.dynamic,
         None if n.body is None else _graph_fields(n.body))
        for n in graph.nodes
    ]  # fmt: skip
    return graph.inputs, graph.params, nodes, graph.outputs


def decode_graph(data: Buffer) -> Graph:
    """Return the graph that ``encode_graph`` encoded; see ``decode_program``."""
    return decode_program(data)[0]


def decode_program(data: Buffer, symbolic: bool = False) -> tuple[Graph, Flags]:
    """Return the graph that ``encode_graph`` encoded, and the flags that it runs under.

    Args:
        symbolic: it may have symbols for sizes (``graph.sizes``).

    Raises:
        ProtocolError: for another version or anything that is not a graph.
    """
    try:
        version: Any = unpack(data, _Versioned).version
    except ProtocolError as error:
        raise ProtocolError("not a graph: it has no version") from error
    if version != VERSION:
        raise ProtocolError(f"a plan of wire version {version}, expected {VERSION}")
    takes = _SYMBOLIC if symbolic else _ARGUMENTS
    try:
        program: _ProgramFields = unpack(data, _ProgramFields)
        flags = tuple([(name, tuples(value)) for name, value in program.flags])
        check_flags(flags)
        return _graph_from(program, takes), flags
    except (ProtocolError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a graph: {error}") from error


class _Versioned(msgspec.Struct, array_like=True):
    """The beginning of a program."""

    version: Any


class _NodeFields(Message):
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    fresh: tuple[TensorMeta | None, ...]
    writes: tuple[Count, ...]
    written: tuple[TensorMeta, ...]
    dynamic: bool
    body: _GraphFields | None


class _GraphFields(Message):
    inputs: tuple[TensorMeta, ...]
    params: tuple[str, ...]
    nodes: tuple[_NodeFields, ...]
    outputs: tuple[Count, ...]


class _ProgramFields(Message):
    version: int
    inputs: tuple[TensorMeta, ...]
    params: tuple[str, ...]
    nodes: tuple[_NodeFields, ...]
    outputs: tuple[Count, ...]
    flags: tuple[tuple[str, Any], ...] = ()


def _graph_from(fields: _GraphFields | _ProgramFields, takes: Kinds) -> Graph:
    """Build a graph of its decoded fields.

    Args:
        takes: types that arguments of its nodes may have.
    """
    nodes = tuple([_node_from(node, takes) for node in fields.nodes])
    return Graph(fields.inputs, fields.params, nodes, fields.outputs)


def _node_from(fields: _NodeFields, takes: Kinds) -> Node:
    """Return the node of decoded fields, with its arguments checked."""
    op, args, kwargs, fresh, writes, written, dynamic, body = msgspec.structs.astuple(fields)
    if kwargs:
        for name, _ in kwargs:
            if not name.isidentifier() or iskeyword(name):
                raise ValueError(f"{name!r} is no name of an argument of {op}")
        kwargs = tuple([(name, _argument(op, arg, takes)) for name, arg in kwargs])
    args = tuple([arg if type(arg) in takes else _argument(op, arg, takes) for arg in args])
    inner = None if body is None else _graph_from(body, takes)
    return Node(op, args, kwargs, fresh, writes, written, dynamic, inner)


def _argument(op: str, arg: Any, takes: Kinds) -> Arg:
    """Return a checked argument, with tuples in place of lists."""
    kind = type(arg)
    if kind in takes:
        return arg
    if kind is not list:
        raise ValueError(f"{op} takes no {kind.__name__}")
    return tuple([item if type(item) in takes else _argument(op, item, takes) for item in arg])


Kinds = frozenset[type]
#: Types of an argument, or of an item in it.
_ARGUMENTS: Kinds = frozenset({
    Ref, Param, bool, int, float, str, complex, type(None), TensorMeta, *TORCH_NAMES, type(DEVICE),
})  # fmt: skip
_SYMBOLIC = _ARGUMENTS | {Size}


def template_name(data: Buffer) -> bytes:
    """Return the 16 bytes that name an encoded graph."""
    return hashlib.sha256(data).digest()[:16]


def plan_name(template: bytes, sizes: tuple[int, ...], salt: bytes = b"") -> bytes:
    """Return the 16 bytes that name a plan.

    Args:
        template: the name of its template.
        salt: for a plan with different graphs on its ranks: distinguishes it from other plans that
            have the same graph on this rank.
    """
    return hashlib.sha256(template + pack(sizes) + salt).digest()[:16]
