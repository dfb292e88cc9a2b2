"""The wire: messages as msgpack headers and raw buffers. Versioned; no pickle.

A message is a list of frames: a header, then the buffers that it speaks of, in order. Ops are
named by their overload and looked up by the reader; whatever does not follow the schema raises
ProtocolError, and its sender is dropped by the channel.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgpack
import torch

from lazygt.errors import ProtocolError
from lazygt.graph.meta import TensorMeta, contiguous_stride, dtype_of, intern, short_dtype
from lazygt.graph.node import DEVICE, Graph, Node, Param, Ref

#: Both sides compare it in their hello.
VERSION = 3

PLAN, RUN, DONE, NEED, SWAP, SWAPPED = 1, 2, 3, 4, 5, 6
WRITE, WROTE = 7, 8
LEFT, RENEW = 9, 10

_REF, _PARAM, _TORCH, _DEVICE, _COMPLEX, _META = 1, 2, 3, 4, 5, 6
_TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)

Buffer = bytes | memoryview


# -- values ------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """``value`` as msgpack, with lazygt's own types as extensions."""
    packed: bytes = msgpack.packb(value, default=_to_ext)
    return packed


def unpack(data: Buffer) -> Any:
    """The value that ``pack`` packed; arrays come back as tuples.

    Raises:
        ProtocolError: for anything that is not well formed.
    """
    try:
        return msgpack.unpackb(data, ext_hook=_from_ext, use_list=False, strict_map_key=False)
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises many types for bad bytes
        raise ProtocolError(f"not a message: {type(error).__name__}: {error}") from error


def _to_ext(value: Any) -> Any:
    kind = type(value)
    if kind is Ref or kind is Param:
        return _numbered_ext(_REF if kind is Ref else _PARAM, value.index)
    if kind is complex:  # 0.0 and -0.0 are equal, and would share a place in the cache
        return msgpack.ExtType(_COMPLEX, msgpack.packb((value.real, value.imag)))
    try:
        return _cached_ext(value)
    except TypeError as error:
        raise TypeError(f"{type(value).__name__} can't travel: {value!r}") from error


@lru_cache(maxsize=16384)
def _numbered_ext(code: int, index: int) -> Any:
    return msgpack.ExtType(code, msgpack.packb(index))


@lru_cache(maxsize=16384)
def _cached_ext(value: Any) -> Any:
    if isinstance(value, _TORCH_NAMES):
        return msgpack.ExtType(_TORCH, str(value).encode())
    if value is DEVICE:
        return msgpack.ExtType(_DEVICE, b"")
    if isinstance(value, TensorMeta):
        return msgpack.ExtType(_META, msgpack.packb(_meta_fields(value)))
    raise TypeError("it has no extension type")


@lru_cache(maxsize=16384)
def _from_ext(code: int, data: bytes) -> Any:
    if code == _REF:
        return Ref(_integer(data))
    if code == _PARAM:
        return Param(_integer(data))
    if code == _TORCH:
        return _torch_name(data.decode())
    if code == _DEVICE:
        return DEVICE
    if code == _COMPLEX:
        return complex(*msgpack.unpackb(data))
    if code == _META:
        return _meta_from(msgpack.unpackb(data, use_list=False))
    raise ProtocolError(f"unknown extension type {code}")


def _integer(data: bytes) -> int:
    value = msgpack.unpackb(data)
    if not isinstance(value, int):
        raise ProtocolError(f"expected a number, got {value!r}")
    return value


def _torch_name(text: str) -> Any:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not text.startswith("torch.") or not isinstance(found, _TORCH_NAMES):
        raise ProtocolError(f"{text!r} names no dtype, layout or memory format")
    return found


def _meta_fields(meta: TensorMeta) -> tuple[Any, ...]:
    usual = meta.plain or meta.stride == contiguous_stride(meta.shape)
    stride = None if usual else meta.stride
    flags = ((meta.conj and 1) or 0) | ((meta.neg and 2) or 0)
    return short_dtype(meta.dtype), meta.shape, stride, meta.offset, flags


def _meta_from(fields: Any) -> TensorMeta:
    try:
        dtype, shape, stride, offset, flags = fields
        if any(not isinstance(n, int) or n < 0 for n in (*shape, *(stride or ()), offset, flags)):
            raise ValueError("sizes, strides and offset are whole numbers >= 0")
        if stride is not None and len(stride) != len(shape):
            raise ValueError("as many strides as sizes")
        steps = contiguous_stride(shape) if stride is None else stride
        return intern(shape, steps, dtype_of(dtype), offset, bool(flags & 1), bool(flags & 2))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a tensor meta: {fields!r}: {error}") from error


# -- graphs ------------------------------------------------------------------------------


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
    try:
        version, *fields = value
        if version != VERSION:
            raise ProtocolError(f"a plan of wire version {version}, expected {VERSION}")
        return _graph_from(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a graph: {error}") from error


def _graph_from(fields: Any) -> Graph:
    inputs, params, nodes, outputs = fields
    return Graph(inputs, params, tuple(_node_from(node) for node in nodes), outputs)


def _node_from(fields: Any) -> Node:
    op, args, kwargs, fresh, writes, written, dynamic, body = fields
    if not (isinstance(op, str) and isinstance(args, tuple) and isinstance(kwargs, tuple)):
        raise ValueError("a node is (op, args, kwargs, fresh, writes, written, dynamic, body)")
    if any(m is not None and not isinstance(m, TensorMeta) for m in (*fresh, *written)):
        raise ValueError(f"the results of {op} are not metas")
    if any(not isinstance(index, int) for index in writes) or not isinstance(dynamic, bool):
        raise ValueError(f"the writes of {op} are not value numbers")
    inner = None if body is None else _graph_from(body)
    return Node(op, args, kwargs, fresh, writes, written, dynamic, inner)


# -- messages ----------------------------------------------------------------------------


@dataclass(slots=True)
class Put:
    """A tensor sent to the workers: in the arena at ``offset``, or as the next buffer."""

    id: int
    meta: TensorMeta
    offset: int | None = None


@dataclass(slots=True)
class Run:
    """Run a plan (or nothing), after receiving ``puts``; then answer ``fetches``.

    Attributes:
        seq: number of the run, from 1.
        digest: which plan; None runs nothing.
        base: id of the plan's first output; the others follow.
        inputs, frees: updates of predicted id lists (see ``Prediction``).
        params: run-time numbers; None: the same as in the last run of this plan.
        releases: arena offsets that the client has done with.
        fetches: ids whose values are wanted.
        timed: run it node by node, and say how long each took (``Done.timings``).
    """

    seq: int
    digest: bytes | None = None
    base: int = 0
    inputs: Any = None
    frees: Any = None
    params: tuple[Any, ...] | None = None
    puts: list[Put] = field(default_factory=list)
    releases: tuple[int, ...] = ()
    fetches: tuple[int, ...] = ()
    timed: bool = False


#: The kind of failure of a collective: another rank's failure, most likely, is the cause.
COLLECTIVE_ERROR = "CollectiveError"
#: The kind of a failure when ranks were about to meet in different collectives.
MISMATCH = "CollectiveMismatch"


@dataclass(slots=True)
class Failure:
    """Why a value could not be computed: node number, exception, message."""

    node: int
    kind: str
    detail: str
    seq: int = 0


@dataclass(slots=True)
class Fetched:
    """A fetched value: its meta, and where it is (arena offset, or the next buffer)."""

    meta: TensorMeta
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """When a worker did what, in nanoseconds of its host's monotonic clock.

    Attributes:
        begin, end: from the run message taken to its answer ready.
        steps: (step, count, begin, end) of each node that ran: it did ``count`` of
            ``plan.steps`` in one, from ``step`` on.
    """

    begin: int
    end: int
    steps: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(slots=True)
class Done:
    """The answer to a run.

    Attributes:
        failures: what failed in this run.
        releases: upload arena offsets that are free again.
        fetched: one Fetched or Failure a fetch.
        returned: what a data-dependent last node returned: (meta, id) pairs, lists, numbers.
        written: (meta, id) of the tensors it wrote.
        timings: of a timed run.
    """

    seq: int
    failures: list[Failure] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    fetched: list[Fetched | Failure] = field(default_factory=list)
    returned: Any = None
    written: Any = None
    timings: Timings | None = None


def plan_name(data: Buffer, salt: bytes = b"") -> bytes:
    """16 bytes that name an encoded graph.

    Args:
        salt: of a plan whose ranks have different graphs: tells it from others in which this
            rank has the same.
    """
    made = hashlib.sha256(data)
    made.update(salt)
    return made.digest()[:16]


def encode_plan(
    digest: bytes, graph: Graph, fresh: bool, forget: Sequence[bytes] = (), salt: bytes = b""
) -> list[Buffer]:
    """A PLAN message. ``fresh``: its id lists begin anew; ``forget``: plans never used again."""
    salted = (salt,) if salt else ()
    return [pack((PLAN, digest, fresh, tuple(forget), *salted)), encode_graph(graph)]


def encode_swap(digest: bytes, groups: Sequence[tuple[int, str]]) -> list[Buffer]:
    """A SWAP message: from now on these fused nodes of a plan run as these artifacts."""
    return [pack((SWAP, digest, list(groups)))]


def encode_swapped(digest: bytes, error: str) -> list[Buffer]:
    """A SWAPPED message: done, or why the plan stays on its tier."""
    return [pack((SWAPPED, digest, error))]


def encode_write(number: int, order: tuple[Any, ...]) -> list[Buffer]:
    """A WRITE message: copy blocks into a transfer's memory; see ``transfer.writer``."""
    return [pack((WRITE, number, order))]


def encode_wrote(
    number: int, checks: Sequence[int], error: str, handles: Sequence[Any] = ()
) -> list[Buffer]:
    """A WROTE message: the checksums of the blocks, or why they could not be written.

    Args:
        handles: by which receivers find the blocks; see ``transfer.orders``.
    """
    return [pack((WROTE, number, tuple(checks), error, tuple(handles)))]


def encode_left(number: int) -> list[Buffer]:
    """A LEFT message: the worker has left the session's process group of this number, for good."""
    return [pack((LEFT, number))]


def encode_renew(number: int, since: int) -> list[Buffer]:
    """A RENEW message: leave the group there is, and join the one of this number.

    Args:
        since: id of the first value of which it is not certain that ranks have met for it.
    """
    return [pack((RENEW, number, since))]


def encode_run(run: Run, buffers: Sequence[Buffer]) -> list[Buffer]:
    """A RUN message."""
    puts = [(p.id, p.meta, p.offset) for p in run.puts]
    header = (RUN, run.seq, run.digest, run.base, run.inputs, run.frees, run.params, puts,
              run.releases, run.fetches, *((True,) if run.timed else ()))  # fmt: skip
    try:
        return [pack(header), *buffers]
    except OverflowError as error:
        raise RuntimeError("value cannot be converted to type int64_t without overflow") from error


def encode_done(done: Done, buffers: Sequence[Buffer]) -> list[Buffer]:
    """A DONE message."""
    failures = [(f.node, f.kind, f.detail, f.seq) for f in done.failures]
    fetched = [
        (f.meta, f.offset) if isinstance(f, Fetched) else (f.node, f.kind, f.detail, f.seq)
        for f in done.fetched
    ]
    times = done.timings
    header = (DONE, done.seq, failures, done.releases, fetched, done.returned, done.written,
              *(() if times is None else (times.begin, times.end, times.steps)))  # fmt: skip
    return [pack(header), *buffers]


def received(data: Buffer) -> torch.Tensor:
    """The bytes of a buffer in memory of torch's own.

    torch aligns its memory to 64 bytes, and BLAS kernels round differently on other addresses.
    """
    flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    flat.numpy().data[:] = data
    return flat


def encode_need(seq: int, digest: bytes) -> list[Buffer]:
    """A NEED message: the worker has forgotten the plan of run ``seq``."""
    return [pack((NEED, seq, digest))]


def decode_run(fields: Any) -> Run:
    """A Run from a RUN header.

    Raises:
        ProtocolError: when the header is not of the schema.
    """
    try:
        _, seq, digest, base, inputs, frees, params, puts, releases, fetches, *timed = fields
        ok = (
            isinstance(seq, int)
            and (digest is None or (isinstance(digest, bytes) and len(digest) == 16))
            and isinstance(base, int)
            and all(isinstance(n, int) for n in (*releases, *fetches))
            and all(isinstance(i, int) and isinstance(m, TensorMeta) for i, m, _ in puts)
            and timed in ([], [True])
        )
        if not ok:
            raise ValueError("a field has the wrong type")
        made = [Put(*put) for put in puts]
        return Run(seq, digest, base, inputs, frees, params, made, releases, fetches, bool(timed))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a RUN message: {error}") from error


def decode_done(fields: Any) -> Done:
    """A Done from a DONE header."""
    _, seq, failures, releases, fetched, returned, written, *timings = fields
    made: list[Fetched | Failure] = [Failure(*f) if len(f) == 4 else Fetched(*f) for f in fetched]
    times = Timings(*timings) if timings else None
    found = [Failure(*f) for f in failures]
    return Done(seq, found, list(releases), made, returned, written, times)


class Prediction:
    """A list of ids that mostly repeats from run to run, sent as what is surprising in it.

    Both sides keep the last list. An id is expected to stay, or, if it moved with the base
    between the last two runs (a parameter that every step makes anew), to move with it again.
    """

    __slots__ = ("base", "ids", "moving")

    def __init__(self) -> None:
        self.base = 0
        self.ids: list[int] = []
        self.moving: list[bool] = []

    def encode(self, ids: list[int], base: int) -> Any:
        """The update that makes the other side's list equal ``ids``; None when it is already."""
        guess = self._guess(base)
        if len(guess) != len(ids):
            update: Any = (0, tuple(ids))
        else:
            wrong = [
                x for i, (a, b) in enumerate(zip(ids, guess, strict=True)) if a != b for x in (i, a)
            ]
            update = (1, tuple(wrong)) if wrong else None
        self._learn(list(ids), base)
        return update

    def decode(self, update: Any, base: int) -> list[int]:
        """The list that the sender encoded.

        Raises:
            ProtocolError: when the update does not fit the list.
        """
        ids = self._guess(base)
        try:
            if update is not None:
                kind, values = update
                if any(not isinstance(v, int) for v in values):
                    raise ValueError("ids are integers")
                if kind == 0:
                    ids = list(values)
                else:
                    for i in range(0, len(values), 2):
                        ids[values[i]] = values[i + 1]
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"not an id update: {error}") from error
        self._learn(list(ids), base)
        return ids

    def _guess(self, base: int) -> list[int]:
        step = base - self.base
        return [i + step if moves else i for i, moves in zip(self.ids, self.moving, strict=True)]

    def _learn(self, ids: list[int], base: int) -> None:
        step = base - self.base
        if len(ids) == len(self.ids):
            self.moving = [a == b + step and step != 0 for a, b in zip(ids, self.ids, strict=True)]
        else:
            self.moving = [False] * len(ids)
        self.ids, self.base = ids, base
