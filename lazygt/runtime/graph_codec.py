"""Wire format of graphs, without their source lines, and names of plans. Versioned."""

from __future__ import annotations

import hashlib
from keyword import iskeyword
from typing import Any

import msgspec

from lazygt.errors import ProtocolError
from lazygt.graph.flags import Flags, check_flags
from lazygt.graph.meta import TORCH_NAMES, TensorMeta
from lazygt.graph.node import DEVICE, Graph, Node, Param, Ref
from lazygt.graph.sizes import Size
from lazygt.runtime.wire import Buffer, Count, Message, pack, unpack

#: Both sides compare it in their hello.
VERSION = 6


def encode_graph(graph: Graph, flags: Flags = ()) -> bytes:
    """Encode a graph without its source lines.

    Args:
        flags: torch's flags that it runs under.
    """
    return pack((VERSION, *_graph_fields(graph), *([flags] if flags else ())))


def _graph_fields(graph: Graph) -> tuple[Any, ...]:
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
    value = unpack(data)
    if not isinstance(value, tuple) or not value:
        raise ProtocolError("not a graph: it has no version")
    version, *fields = value
    if version != VERSION:
        raise ProtocolError(f"a plan of wire version {version}, expected {VERSION}")
    takes = _SYMBOLIC if symbolic else _ARGUMENTS
    try:
        program = msgspec.convert(fields, _ProgramFields)
        check_flags(program.flags)
        return _graph_from(program, takes), program.flags
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a graph: {error}") from error


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


class _ProgramFields(_GraphFields):
    flags: tuple[tuple[str, Any], ...] = ()


def _graph_from(fields: _GraphFields, takes: tuple[type, ...]) -> Graph:
    nodes = tuple([_node_from(node, takes) for node in fields.nodes])
    return Graph(fields.inputs, fields.params, nodes, fields.outputs)


def _node_from(fields: _NodeFields, takes: tuple[type, ...]) -> Node:
    op, args, kwargs, fresh, writes, written, dynamic, body = msgspec.structs.astuple(fields)
    for name, arg in kwargs:
        if not name.isidentifier() or iskeyword(name):
            raise ValueError(f"{name!r} is no name of an argument of {op}")
        _check_argument(op, arg, takes)
    _check_argument(op, args, takes)
    inner = None if body is None else _graph_from(body, takes)
    return Node(op, args, kwargs, fresh, writes, written, dynamic, inner)


def _check_argument(op: str, arg: Any, takes: tuple[type, ...]) -> None:
    if type(arg) is tuple:
        for item in arg:
            _check_argument(op, item, takes)
    elif not isinstance(arg, takes) and arg is not DEVICE:
        raise ValueError(f"{op} takes no {type(arg).__name__}")


#: Types of an argument, or of an item in it.
_ARGUMENTS = (Ref, Param, int, float, str, complex, type(None), TensorMeta, *TORCH_NAMES)
_SYMBOLIC = (*_ARGUMENTS, Size)


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
