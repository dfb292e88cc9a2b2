"""Graphs as they travel, without their source lines. Versioned."""

from __future__ import annotations

import hashlib
from collections import deque
from keyword import iskeyword
from typing import Any

import msgspec

from lazygt.errors import ProtocolError
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Graph, Node, Param, Ref
from lazygt.runtime.wire import TORCH_NAMES, Buffer, Count, Part, pack, unpack

#: Both sides compare it in their hello.
VERSION = 4

#: The graph encoded last: a new plan is encoded to be named, and again to be sent.
_latest: deque[tuple[Graph, bytes]] = deque(maxlen=1)


def encode_graph(graph: Graph) -> bytes:
    """A graph without its source lines."""
    for known, encoded in tuple(_latest):
        if known is graph:
            return encoded
    data = pack((VERSION, *_graph_fields(graph)))
    _latest.append((graph, data))
    return data


def _graph_fields(graph: Graph) -> tuple[Any, ...]:
    nodes = [
        (n.op, n.args, n.kwargs, n.fresh, n.writes, n.written, n.dynamic,
         None if n.body is None else _graph_fields(n.body))
        for n in graph.nodes
    ]  # fmt: skip
    return graph.inputs, graph.params, nodes, graph.outputs


def decode_graph(data: Buffer) -> Graph:
    """The graph that ``encode_graph`` encoded.

    Raises:
        ProtocolError: for another version or anything that is not a graph.
    """
    value = unpack(data)
    if not isinstance(value, tuple) or not value:
        raise ProtocolError("not a graph: it has no version")
    version, *fields = value
    if version != VERSION:
        raise ProtocolError(f"a plan of wire version {version}, expected {VERSION}")
    try:
        return _graph_from(msgspec.convert(fields, _GraphFields))
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a graph: {error}") from error


class _NodeFields(Part):
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    fresh: tuple[TensorMeta | None, ...]
    writes: tuple[Count, ...]
    written: tuple[TensorMeta, ...]
    dynamic: bool
    body: _GraphFields | None


class _GraphFields(Part):
    inputs: tuple[TensorMeta, ...]
    params: tuple[str, ...]
    nodes: tuple[_NodeFields, ...]
    outputs: tuple[Count, ...]


def _graph_from(fields: _GraphFields) -> Graph:
    nodes = tuple([_node_from(node) for node in fields.nodes])
    return Graph(fields.inputs, fields.params, nodes, fields.outputs)


def _node_from(fields: _NodeFields) -> Node:
    op, args, kwargs, fresh, writes, written, dynamic, body = msgspec.structs.astuple(fields)
    for name, arg in kwargs:
        if not name.isidentifier() or iskeyword(name):
            raise ValueError(f"{name!r} is no name of an argument of {op}")
        _check_argument(op, arg)
    _check_argument(op, args)
    inner = None if body is None else _graph_from(body)
    return Node(op, args, kwargs, fresh, writes, written, dynamic, inner)


def _check_argument(op: str, arg: Any) -> None:
    if type(arg) is tuple:
        for item in arg:
            _check_argument(op, item)
    elif not isinstance(arg, _ARGUMENTS) and arg is not DEVICE:
        raise ValueError(f"{op} takes no {type(arg).__name__}")


#: What an argument may be, or have in it.
_ARGUMENTS = (Ref, Param, int, float, str, complex, type(None), TensorMeta, *TORCH_NAMES)


def plan_name(data: Buffer, salt: bytes = b"") -> bytes:
    """16 bytes that name an encoded graph.

    Args:
        salt: of a plan whose ranks have different graphs: tells it from others in which this
            rank has the same.
    """
    digest = hashlib.sha256(data)
    digest.update(salt)
    return digest.digest()[:16]
