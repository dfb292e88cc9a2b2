"""The wire: values and messages as msgpack; no pickle.

A message is a list of frames: a header (see ``messages``), then the buffers that it refers to, in
order. Ops are named by their overload and looked up by the reader; a message that does not follow
the schema raises ProtocolError, and its sender is dropped by the channel.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from typing import Annotated, Any, TypeVar, cast

import msgpack
import msgspec
import torch

from lazygt.errors import ProtocolError
from lazygt.graph.meta import (
    TORCH_NAMES,
    TensorMeta,
    contiguous_stride,
    dtype_of,
    intern,
    short_dtype,
    torch_name,
)
from lazygt.graph.node import DEVICE, Param, Ref
from lazygt.graph.sizes import Size

#: the last format of marshal that depends on values alone, and not on their reference counts
_MARSHAL = 2
_REF, _PARAM, _TORCH, _DEVICE, _COMPLEX, _META, _SIZE = 1, 2, 3, 4, 5, 6, 7
#: Largest extension, since thousands are remembered; a meta of 64 dimensions takes 1,200 bytes.
_EXT_BYTES = 2048
_NUMBERED: dict[type, int] = {Ref: _REF, Param: _PARAM, Size: _SIZE}
#: torch's own: a session replaces it by one that depends on the default device
_empty = torch.empty

#: dtype -> converter between the result of ``item()`` and the bytes of a single element
NUMBERS = {
    dtype: struct.Struct(code)
    for dtype, code in (
        (torch.float32, "f"), (torch.float64, "d"), (torch.int64, "q"), (torch.int32, "i"),
        (torch.int16, "h"), (torch.int8, "b"), (torch.uint8, "B"), (torch.bool, "?"),
    )
}  # fmt: skip

Buffer = bytes | memoryview
Count = Annotated[int, msgspec.Meta(ge=0)]
P = TypeVar("P")


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A struct that travels as its fields, in order, and is its own schema.

    Trailing fields that have an empty default (None, False, empty) and that value are left out.
    """

    def packed(self) -> tuple[Any, ...]:
        """Return the fields as they travel."""
        tag, least = _form(type(self))
        fields = [*tag, *msgspec.structs.astuple(self)]
        while len(fields) > least and _says_nothing(fields[-1]):
            fields.pop()
        return tuple(fields)

    @classmethod
    def begins(cls, header: Buffer) -> bool:
        """Return whether a header says that its message is of this kind.

        Looks at its tag alone: a short array's own byte comes first, and then the number.
        """
        return len(header) > 1 and header[1] == cls.__struct_config__.tag


@cache
def _form(kind: type[Message]) -> tuple[tuple[Any, ...], int]:
    """Return a part's first fields (its tag), and the number of fields that always travel."""
    tag = kind.__struct_config__.tag
    begin = () if tag is None else (tag,)
    return begin, len(begin) + len(kind.__struct_fields__) - len(kind.__struct_defaults__)


def _says_nothing(value: Any) -> bool:
    return not value and (value is None or value is False or type(value) in _SIZED)


_SIZED = frozenset({tuple, list, bytes, str})


# -- values ------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """Encode ``value`` as msgpack, with lazygt's own types as extensions."""
    packed: bytes = msgpack.packb(value, default=_to_ext)
    return packed


def unpack(data: Buffer) -> Any:
    """Return the value that ``pack`` packed; arrays come back as tuples.

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
    code = _NUMBERED.get(kind)
    if code is not None:
        return _numbered_ext(code, value.index)
    if kind is complex:  # 0.0 and -0.0 are equal, and would share a place in the cache
        return msgpack.ExtType(_COMPLEX, msgpack.packb((value.real, value.imag)))
    if isinstance(value, Message):
        return value.packed()
    if kind is int:
        raise OverflowError(f"{value} does not fit into 64 bits")
    try:
        return _cached_ext(value)
    except TypeError as error:
        raise TypeError(f"{type(value).__name__} can't travel: {value!r}") from error


@lru_cache(maxsize=16384)
def _numbered_ext(code: int, index: int) -> Any:
    return msgpack.ExtType(code, msgpack.packb(index))


@lru_cache(maxsize=16384)
def _cached_ext(value: Any) -> Any:
    if isinstance(value, TORCH_NAMES):
        return msgpack.ExtType(_TORCH, str(value).encode())
    if value is DEVICE:
        return msgpack.ExtType(_DEVICE, b"")
    if isinstance(value, TensorMeta):
        return msgpack.ExtType(_META, msgpack.packb(_meta_fields(value)))
    raise TypeError("it has no extension type")


@lru_cache(maxsize=16384)
def _from_ext(code: int, data: bytes) -> Any:
    if len(data) > _EXT_BYTES:
        raise ProtocolError(f"an extension of {len(data)} bytes; {_EXT_BYTES} are the most")
    if code == _REF:
        return Ref(_integer(data))
    if code == _PARAM:
        return Param(_integer(data))
    if code == _SIZE:
        return Size(_integer(data))
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
    try:
        return torch_name(text)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


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


def bits(numbers: tuple[bool | int | float | complex, ...]) -> bytes:
    """Return a row of numbers as bytes: equal bytes, equal types and bits."""
    return marshal.dumps(numbers, _MARSHAL)


# -- messages ----------------------------------------------------------------------------


def encode(message: Message, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Encode a message as frames.

    Raises:
        RuntimeError: a number in it does not fit into 64 bits.
    """
    try:
        return [pack(message), *buffers]
    except OverflowError as error:
        raise RuntimeError("value cannot be converted to type int64_t without overflow") from error


def hand_over(message: Message, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return a message for a receiver in this process, which gets the object itself.

    Raises:
        RuntimeError: for the same messages as ``encode``.
    """
    numbers = getattr(message, "params", None)
    if numbers and any(type(number) is int and abs(number) >> 63 for number in numbers):
        encode(message)
    # no bytes, but nothing reads it before ``decode``
    return [cast(Buffer, message), *buffers]


def _handed_over(message: Message, kinds: tuple[type[Message], ...]) -> Message:
    if type(message) not in kinds:
        raise ProtocolError(f"unknown message kind {type(message).__name__}")
    return message


def size_of(frames: Sequence[Buffer]) -> int:
    """Return the bytes that a message takes on its way."""
    return sum([len(frame) for frame in frames if not isinstance(frame, Message)])


def decode(frames: Sequence[Buffer], kinds: tuple[type[Message], ...]) -> Message:
    """Decode the message in these frames.

    Args:
        kinds: the kinds of message that it may be.

    Raises:
        ProtocolError: it is none of them.
    """
    if frames and isinstance(frames[0], Message):
        return _handed_over(frames[0], kinds)
    header = unpack(frames[0]) if frames else None
    tag = header[0] if type(header) is tuple and header else None
    kind = _by_tag(kinds).get(tag) if type(tag) is int else None
    if kind is None:
        raise ProtocolError(f"unknown message kind {tag!r}")
    return fitting(header, kind)


@cache
def _by_tag(kinds: tuple[type[Message], ...]) -> dict[Any, type[Message]]:
    return {kind.__struct_config__.tag: kind for kind in kinds}


def fitting(value: Any, kind: type[P]) -> P:
    """Convert an unpacked value to a kind of message.

    Raises:
        ProtocolError: it does not fit.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"not a {kind.__name__} message: {error}") from error


def received(data: Buffer) -> torch.Tensor:
    """Copy the bytes of a buffer into memory of torch's own.

    torch aligns its memory to 64 bytes, and BLAS kernels round differently on other addresses.
    """
    flat = _empty(len(data), dtype=torch.uint8, device="cpu")
    flat.numpy().data[:] = data
    return flat


class DeltaCodec:
    """A codec of a list of ids that mostly repeats from run to run: only surprises are sent.

    Both sides keep the last list. An id is expected to stay, or, if it moved with the base
    between the last two runs (a parameter that every step makes anew), to move with it again.
    """

    __slots__ = ("base", "ids", "moving")

    def __init__(self) -> None:
        self.base = 0
        self.ids: list[int] = []
        self.moving: list[bool] = []

    def encode(self, ids: Collection[int], base: int) -> Any:
        """Return the update that makes the other side's list equal ``ids``; None: it already is."""
        if not ids and not self.ids:
            self.base = base
            return None
        guess, ids = self._guess(base), list(ids)
        if guess == ids:
            self._keep(guess, base)
            return None
        if len(guess) != len(ids):
            update: Any = (0, tuple(ids))
        else:
            wrong = [
                x for i, (a, b) in enumerate(zip(ids, guess, strict=True)) if a != b for x in (i, a)
            ]
            update = (1, tuple(wrong))
        self._learn(ids, base)
        return update

    def decode(self, update: Any, base: int) -> list[int]:
        """Return the list that the sender encoded.

        Raises:
            ProtocolError: when the update does not fit the list.
        """
        if update is None and not self.ids:
            self.base = base
            return []
        ids = self._guess(base)
        if update is None:
            self._keep(list(ids), base)
            return ids
        try:
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

    def _keep(self, ids: list[int], base: int) -> None:
        """Learn that the guess was right: only the moving ids have moved."""
        if base == self.base:
            self.moving = [False] * len(ids)
        self.ids, self.base = ids, base

    def _learn(self, ids: list[int], base: int) -> None:
        step = base - self.base
        if len(ids) == len(self.ids):
            self.moving = [a == b + step and step != 0 for a, b in zip(ids, self.ids, strict=True)]
        else:
            self.moving = [False] * len(ids)
        self.ids, self.base = ids, base
