"""Collectives of a rank's graph: their payloads, their reasons, and their flat buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lazygt.graph.mesh import Mesh
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    LAUNCH,
    LAUNCH_,
    POINT_TO_POINT,
    RECV,
    REDUCE_SCATTER,
    SEND,
    WAIT,
    block_size,
)

#: Bytes that a rank sends in a ring of N, per byte of payload and (N - 1) / N.
_RING = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "take_rows": 1,
    "put_rows": 1,
}  # fmt: skip

_EXCHANGES = COLLECTIVES | POINT_TO_POINT
_LAUNCHES = frozenset({LAUNCH, LAUNCH_})
_INDEXED = frozenset({"take_rows", "put_rows"})
#: Purpose of each collective for the op that needs it.
_PURPOSE = {
    "all_reduce": "adds up what each rank made with",
    "all_gather": "puts together the blocks made by",
    "reduce_scatter": "adds up, and cuts into blocks, what each rank made with",
    "all_to_all": "cuts along another dim the blocks made by",
    "send_recv": "gives other ranks the rows that they lack of the blocks made by",
    "take_rows": "takes from each rank the rows that an index names of the blocks made by",
    "put_rows": "sends rows to the ranks that an index names, into the blocks made by",
}


@dataclass(frozen=True, slots=True)
class Communication:
    """Collective of a rank's graph; a bucket of several values is one."""

    #: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, or ``send_recv`` for rows
    #: that go from rank to rank, and for either half of a transfer between stages
    kind: str
    #: ``sum``, ``max``, ``min`` or ``prod``; None for one that reduces nothing
    reduce_op: str | None
    #: payload of the rank: the operand of an all-reduce, the gathered result of an all-gather, the
    #: unreduced operand of a reduce-scatter, the local operand of an all-to-all, the rows that this
    #: rank sends. Rows that are sent by an index are an all-to-all, too: all of a rank's rows
    #: count, with their places, as if none were its own.
    nbytes: int
    mesh_dim: str  # the axis of the mesh along which ranks meet
    source: str  # the user's ``file:line``
    why: str  # text with the op that produced the moved value, and the op that reads it
    ranks: int = 1  # the number that meet; 1 where the mesh is not known

    @property
    def ring_bytes(self) -> int:
        """Bytes that a rank sends if the ranks pass them on in a ring."""
        return round(ring_bytes(self.kind, self.nbytes, self.ranks))


def collective_name(kind: str, reduce_op: str | None) -> str:
    """Return a collective's kind, with the reduction if there is one: ``all_reduce sum``."""
    return f"{kind} {reduce_op}" if reduce_op else kind


def ring_bytes(kind: str, nbytes: int, ranks: int) -> float:
    """Return the bytes that each of ``ranks`` sends in a ring for this payload.

    Messages from one rank to single others (``send_recv``) are sent as they are.
    """
    return _RING[kind] * nbytes * (ranks - 1) / ranks if kind in _RING else float(nbytes)


def ring_limit(kind: str, nbytes: int) -> int:
    """Return the limit of ``ring_bytes`` for many ranks, where (N - 1) / N is 1."""
    return _RING.get(kind, 1) * nbytes


# -- choice of transport on one host ---------------------------------------------------------------

#: Bytes that a rank sends to all others together, up to which sockets are as fast as shared memory.
SOCKET_BYTES = 1 << 20
#: Bytes more than a ring needs that are still sent at once, rather than in a second exchange.
EXTRA_BYTES = 256 << 10


def socket_bytes(kind: str, nbytes: int, ranks: int) -> float:
    """Return the bytes that a rank sends through sockets for a collective of this payload.

    In an all-reduce each rank sends its full value to all others, in one exchange; the other
    collectives send as much as in a ring.
    """
    return float((ranks - 1) * nbytes) if kind == "all_reduce" else ring_bytes(kind, nbytes, ranks)


def goes_by_sockets(kind: str, nbytes: int, ranks: int) -> bool:
    """Return whether ranks exchange the values through sockets; else through shared memory.

    In shared memory each rank reduces its share, and the shares are gathered, which is no more than
    in a ring. All ranks must make the same choice.
    """
    sent = socket_bytes(kind, nbytes, ranks)
    extra = sent - ring_bytes(kind, nbytes, ranks)
    return sent <= SOCKET_BYTES and extra <= EXTRA_BYTES


def communications(graph: Graph, mesh: Mesh | None = None) -> tuple[Communication, ...]:
    """Return the collectives of one rank's graph, in the order of their launches.

    Args:
        mesh: gives the number of ranks that meet.
    """
    return tuple(communications_by_node(graph, mesh).values())


def communications_by_node(graph: Graph, mesh: Mesh | None = None) -> dict[int, Communication]:
    """Return the collectives by the number of the node that launches each."""
    if all(node.op not in _EXCHANGES for node in graph.nodes):
        return {}
    values = graph.values
    producers = _producers(graph)
    users = _users(graph)
    return {
        number: Communication(
            _kind(node),
            _reduce_op(node),
            _payload(node, values),
            node.args[-1],
            graph.line(number),
            _reason(node, producers, next((users.get(value) for value in results), None)),
            1 if mesh is None else mesh.size(node.args[-1]),
        )
        for number, (node, results) in enumerate(graph.numbered())
        if node.op in _EXCHANGES
    }


def _kind(node: Node) -> str:
    """Return the kind of a collective as ``Communication`` has it."""
    if node.op in POINT_TO_POINT:
        return "send_recv"
    return "all_to_all" if _purpose(node) in _INDEXED else _purpose(node)


def _purpose(node: Node) -> str:
    """Return the collective's name without ``lazygt.``; of a launch, its kind."""
    return str(node.args[0]) if node.op in _LAUNCHES else node.op.removeprefix("lazygt.")


def _reduce_op(node: Node) -> str | None:
    """Return the collective's reduction, or None."""
    if node.op in _LAUNCHES:
        return None if node.args[3] is None else str(node.args[3])
    if node.op == ALL_REDUCE:
        return str(node.args[1])
    return str(node.args[2]) if node.op == REDUCE_SCATTER else None


def _payload(node: Node, values: Sequence[TensorMeta | None]) -> int:
    """Return the payload in bytes, as ``Communication`` counts it."""
    if _purpose(node) in _INDEXED:
        return rows_payload([values[value] for value in node.refs()])
    if node.op in _LAUNCHES:
        return sum(_packed_bytes(node, position, values) for position in range(len(node.args[1])))
    receives = node.op in (ALL_GATHER, RECV)
    meta = node.fresh[0] if receives else values[node.args[0].index]
    return 0 if meta is None else meta.nbytes


def rows_payload(operands: Sequence[TensorMeta | None]) -> int:
    """Return a rank's bytes in an exchange of rows by index, from its operands.

    Each row that the index names counts with its index.
    """
    value, index, *_ = operands
    if value is None or index is None:
        return 0
    row_bytes = math.prod(value.shape[1:]) * value.dtype.itemsize
    return index.numel * (row_bytes + index.dtype.itemsize)


def _packed_bytes(node: Node, position: int, values: Sequence[TensorMeta | None]) -> int:
    """Return the payload of one of the values that one launch sends together."""
    kind, operands, moves, _, _ = node.args
    meta = values[operands[position].index]
    if meta is None or kind != "all_gather":
        return 0 if meta is None else meta.nbytes
    dim, size = moves[position]
    shape: tuple[int, ...] = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
    nbytes: int = math.prod(shape) * meta.dtype.itemsize
    return nbytes


def _producers(graph: Graph) -> list[str]:
    """Return the op that computes each value."""
    producers = ["an input"] * len(graph.inputs)
    for node in graph.nodes:
        producers += [node.op] * len(node.results)
    return producers


def _users(graph: Graph) -> dict[int, str]:
    """Return the op that reads each value first.

    The value that a launch gives is read by its wait alone: it gets the op that first reads a
    result of the wait.
    """
    users: dict[int, str] = {}
    for node in graph.nodes:
        for value in node.refs():
            users.setdefault(value, node.op)
    for node, results in graph.numbered():
        if node.op == WAIT:
            user = next((users[value] for value in results if value in users), None)
            users.pop(node.args[0].index)
            if user is not None:
                users[node.args[0].index] = user
    return users


def _reason(node: Node, producers: Sequence[str], user: str | None) -> str:
    """Return the text of ``Communication.why``.

    Args:
        producers: the op that computes each value.
        user: the op that reads the collective's result; None: it is an output.
    """
    if node.op == RECV:
        return f"receives from rank {node.args[0]} of the axis, for {user or 'the result'}"
    operands = node.args[1] if node.op in _LAUNCHES else node.args[:1]
    producer = producers[operands[0].index]
    if node.op == SEND:
        return f"sends to rank {node.args[1]} of the axis what it made with {producer}"
    others_text = f" and {len(operands) - 1} more" if len(operands) > 1 else ""
    others_text = "" if _purpose(node) in _INDEXED else others_text
    return f"{_PURPOSE[_purpose(node)]} {producer}{others_text}, for {user or 'the result'}"


# -- layout of flat buffers ------------------------------------------------------------------------
#
# A bucket of several values is sent as one flat buffer, in which every value has a slot. A slot has
# the same length on every rank of the axis, although blocks may differ: its length is that of the
# largest block, the first. Slots begin at multiples of ``ALIGN`` bytes, the alignment of vectorized
# kernels.

#: Alignment of slots, in bytes.
ALIGN = 64


class Slots(NamedTuple):
    """Slots of a flat buffer, in elements: starts, lengths of the values, and the total."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    total: int


def slots(
    kind: str,
    shapes: Sequence[Sequence[int]],
    moves: Sequence[Sequence[int]],
    axis_size: int,
    itemsize: int,
) -> Slots:
    """Return the slots of one rank's values.

    Args:
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        shapes: shapes of the operands.
        moves: for each value ``(dim, size)`` of an all-gather, ``(dim,)`` of a reduce-scatter, as
            a launch has them (see ``graph.placement``); not read for an all-reduce.
        axis_size: number of ranks on the axis.
        itemsize: bytes of an element.
    """
    if kind == "all_reduce":
        lengths = tuple([math.prod(shape) for shape in shapes])
    else:
        lengths = tuple([
            _largest_block(shape, move, axis_size)
            for shape, move in zip(shapes, moves, strict=True)
        ])  # fmt: skip
    if len(lengths) == 1:
        return Slots((0,), lengths, lengths[0])
    alignment = max(ALIGN // itemsize, 1)
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += -(-length // alignment) * alignment
    return Slots(tuple(starts), lengths, total)


def buffer_length(kind: str, axis_size: int, total: int, count: int = 1) -> int:
    """Return the elements of the buffer that a launch receives into.

    Args:
        total: elements of all slots of a rank.
        count: number of values. Several scattered values are packed, and this rank's block of the
            result overwrites its own block.
    """
    packed = kind == "reduce_scatter" and count > 1
    return axis_size * total if kind == "all_gather" or packed else total


def _largest_block(shape: Sequence[int], move: Sequence[int], axis_size: int) -> int:
    """Return the number of elements of the largest block of a sharded value, the first one.

    Args:
        shape: shape of the operand: of this rank's block for an all-gather, else of the full value.
        move: ``(dim, size)``: the sharded dim and its global size; ``(dim,)``: the operand is full.
        axis_size: number of ranks that share the dim.
    """
    dim, *size = move
    rest = math.prod([length for position, length in enumerate(shape) if position != dim])
    return rest * block_size(size[0] if size else shape[dim], axis_size, 0)
