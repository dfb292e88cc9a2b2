"""The wire: values and messages as msgpack, by msgspec; no pickle.

A message is a list of frames: a header (see ``messages``), then the buffers that it refers to, in
order. Ops are named by their overload and looked up by the reader; a message that does not follow
the schema raises ProtocolError, and its sender is dropped by the channel.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from typing import Annotated, Any, NamedTuple, Union, cast, get_args, get_type_hints

import msgspec
import torch
from msgspec import msgpack

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
#: Largest extension, since thousands are cached; a meta of 64 dimensions takes 1,200 bytes.
_EXT_BYTES = 2048
_NUMBERED: dict[type, int] = {Ref: _REF, Param: _PARAM, Size: _SIZE}
#: (extension type, data) -> its value; cleared when it is full
_VALUES: dict[tuple[int, bytes], Any] = {}
_MAX_VALUES = 16384
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


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A struct that travels as its fields, in order, and is its own schema.

    Trailing fields that have an empty default (None, False, empty) and that value are left out.
    """

    def packed(self) -> tuple[Any, ...]:
        """Return the fields as they travel."""
        form = _form(type(self))
        fields = [*form.tag, *msgspec.structs.astuple(self)]
        while len(fields) > form.required and _is_empty_default(fields[-1]):
            fields.pop()
        for position in form.nested:
            if position < len(fields) and fields[position]:
                fields[position] = _with_packed(fields[position])
        return tuple(fields)

    @classmethod
    def begins(cls, header: Buffer) -> bool:
        """Return whether a header says that its message is of this kind.

        Looks at its tag alone, the second byte: msgpack's byte of a short array comes first.
        """
        return len(header) > 1 and header[1] == cls.__struct_config__.tag


class _Form(NamedTuple):
    """Form of a kind of message on the wire."""

    tag: tuple[Any, ...]  # the first field, if it has a tag
    required: int  # number of the fields without a default, which always travel
    nested: tuple[int, ...]  # positions of fields that have messages in them


@cache
def _form(kind: type[Message]) -> _Form:
    """Return the form of a kind of message."""
    tag = kind.__struct_config__.tag
    begin = () if tag is None else (tag,)
    hints = get_type_hints(kind)
    nested = [
        position
        for position, name in enumerate(kind.__struct_fields__, len(begin))
        if _has_message(hints[name])
    ]
    required = len(begin) + len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    return _Form(begin, required, tuple(nested))


def _has_message(hint: Any) -> bool:
    """Return whether values of this type may have a message in them."""
    if isinstance(hint, type) and issubclass(hint, Message):
        return True
    return any(map(_has_message, get_args(hint)))


def _with_packed(value: Any) -> Any:
    """Return a field's value with the messages in it packed."""
    if isinstance(value, Message):
        return value.packed()
    if type(value) is list or type(value) is tuple:
        return [_with_packed(item) for item in value]
    return value


def _is_empty_default(value: Any) -> bool:
    return not value and (value is None or value is False or type(value) in _SIZED)


_SIZED = frozenset({tuple, list, bytes, str})


# -- values ------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """Encode ``value`` as msgpack, with lazygt's own types as extensions."""
    return _ENCODER.encode(value.packed() if isinstance(value, Message) else value)


def unpack(data: Buffer, kind: Any) -> Any:
    """Decode what ``pack`` encoded; untyped arrays come back as lists.

    Args:
        kind: type of the value.

    Raises:
        ProtocolError: for anything that is not well formed, or of another type.
    """
    try:
        return _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"not a {kind.__name__} message: {error}") from error
    except ProtocolError:
        raise
    except Exception as error:  # bad bytes raise many types
        raise ProtocolError(f"not a message: {type(error).__name__}: {error}") from error


def tuples(value: Any) -> Any:
    """Return an untyped value with tuples in place of its lists."""
    return tuple(map(tuples, value)) if type(value) is list else value


def _to_ext(value: Any) -> msgpack.Ext:
    """Return the msgpack extension of a value of lazygt's, torch's or Python's complex type."""
    kind = type(value)
    code = _NUMBERED.get(kind)
    if code is not None:
        return _numbered_ext(code, value.index)
    if kind is complex:  # 0.0 and -0.0 are equal, and would share a place in the cache
        return msgpack.Ext(_COMPLEX, msgpack.encode((value.real, value.imag)))
    try:
        return _cached_ext(value)
    except TypeError as error:
        raise TypeError(f"{kind.__name__} can't travel: {value!r}") from error


@lru_cache(maxsize=16384)
def _numbered_ext(code: int, index: int) -> msgpack.Ext:
    return msgpack.Ext(code, msgpack.encode(index))


@lru_cache(maxsize=16384)
def _cached_ext(value: Any) -> msgpack.Ext:
    """Return the extension of a torch name, the device, or a meta, which recur often."""
    if isinstance(value, TORCH_NAMES):
        return msgpack.Ext(_TORCH, str(value).encode())
    if value is DEVICE:
        return msgpack.Ext(_DEVICE, b"")
    if isinstance(value, TensorMeta):
        return msgpack.Ext(_META, msgpack.encode(_meta_fields(value)))
    raise TypeError("it has no extension type")


def _from_ext(code: int, data: memoryview) -> Any:
    """Return the value of an extension, from the cache if it has been decoded before."""
    key = code, data.tobytes()
    try:
        return _VALUES[key]
    except KeyError:  # `lru_cache` would take twice as long
        value = _value_from(*key)
    if len(_VALUES) >= _MAX_VALUES:
        _VALUES.clear()
    _VALUES[key] = value
    return value


def _value_from(code: int, data: bytes) -> Any:
    """Decode an extension.

    Raises:
        ProtocolError: its type is unknown, or its data are no value of the type.
    """
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
        return complex(*msgpack.decode(data, type=tuple[float, float]))
    if code == _META:
        return _meta_from(data)
    raise ProtocolError(f"unknown extension type {code}")


def _integer(data: bytes) -> int:
    return msgpack.decode(data, type=int)


def _torch_name(text: str) -> Any:
    try:
        return torch_name(text)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


class _MetaFields(NamedTuple):
    dtype: str
    shape: tuple[Count, ...]
    stride: tuple[Count, ...] | None  # None: row-major
    offset: Count
    flags: Count  # 1: conj, 2: neg


def _meta_fields(meta: TensorMeta) -> _MetaFields:
    """Return a meta in the form in which it is encoded."""
    usual = meta.plain or meta.stride == contiguous_stride(meta.shape)
    stride = None if usual else meta.stride
    flags = ((meta.conj and 1) or 0) | ((meta.neg and 2) or 0)
    return _MetaFields(short_dtype(meta.dtype), meta.shape, stride, meta.offset, flags)


def _meta_from(data: bytes) -> TensorMeta:
    """Decode and check a meta."""
    try:
        dtype, shape, stride, offset, flags = msgpack.decode(data, type=_MetaFields)
        if stride is not None and len(stride) != len(shape):
            raise ValueError("as many strides as sizes")
        steps = contiguous_stride(shape) if stride is None else stride
        return intern(shape, steps, dtype_of(dtype), offset, bool(flags & 1), bool(flags & 2))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a tensor meta: {error}") from error


_ENCODER = msgpack.Encoder(enc_hook=_to_ext)


@cache
def _decoder(kind: Any) -> msgpack.Decoder[Any]:
    """Return the decoder of a type, or of one of several."""
    union = Union[kind] if type(kind) is tuple else kind  # noqa: UP007 - of any number
    return msgpack.Decoder(union, ext_hook=_from_ext)


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
    header = frames[0] if frames else b"\x90"  # an array of nothing
    if isinstance(header, Message):
        return _handed_over(header, kinds)
    try:
        return cast(Message, _decoder(kinds).decode(header))
    except Exception as error:
        raise _refusal(header, kinds, error) from error


def _refusal(header: Buffer, kinds: tuple[type[Message], ...], error: Exception) -> ProtocolError:
    """Return the error of a header that is no message of these kinds.

    Raises:
        ProtocolError: it is not even well formed.
    """
    fields = unpack(header, Any)
    tag = fields[0] if type(fields) is list and fields else None
    names = [kind.__name__ for kind in kinds if kind.__struct_config__.tag == tag]
    if type(tag) is not int or not names:
        return ProtocolError(f"unknown message kind {tag!r}")
    return ProtocolError(f"not a {names[0]} message: {error}")


def received(data: Buffer) -> torch.Tensor:
    """Copy the bytes of a buffer into memory of torch's own.

    torch aligns its memory to 64 bytes, and BLAS kernels round differently on other addresses.
    """
    flat = _empty(len(data), dtype=torch.uint8, device="cpu")
    flat.numpy().data[:] = data
    return flat


class DeltaCodec:
    """A codec of a list of ids that mostly repeats from run to run: only mispredictions are sent.

    Both sides keep the last list, and predict the next one from it. The *base* is the id of a run's
    first output. An id is expected to stay, or, if it moved with the base between the last two runs
    (a parameter that every step computes anew), to move with it again.
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
        """Return the predicted list of a run with this base."""
        step = base - self.base
        return [i + step if moves else i for i, moves in zip(self.ids, self.moving, strict=True)]

    def _keep(self, ids: list[int], base: int) -> None:
        """Learn that the guess was right: only the moving ids have moved."""
        if base == self.base:
            self.moving = [False] * len(ids)
        self.ids, self.base = ids, base

    def _learn(self, ids: list[int], base: int) -> None:
        """Store the actual list, and which of its ids have moved with the base."""
        step = base - self.base
        if len(ids) == len(self.ids):
            self.moving = [a == b + step and step != 0 for a, b in zip(ids, self.ids, strict=True)]
        else:
            self.moving = [False] * len(ids)
        self.ids, self.base = ids, base
