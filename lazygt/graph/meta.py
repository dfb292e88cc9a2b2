"""TensorMeta: shape, strides, dtype and lazy bits of a tensor, known before its value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from marshal import dumps
from math import prod
from typing import Any

import torch

# -- typed keys of numbers -------------------------------------------------------------------------
# In Python 1, 1.0 and True are equal, 0.0 and -0.0 too, and a NaN differs from itself. Caches with
# numbers in their keys, and passes that merge numbers, compare typed keys: type and bits.

#: The last format that depends on the number alone, and not on Python's reference counts.
_FORMAT = 2


def typed_key(arg: Any) -> Any:
    """Return an argument as a typed key: equal for numbers of the same type and bits."""
    kind = type(arg)
    if kind is tuple:
        return tuple([typed_key(item) for item in arg])
    return kind, dumps(arg, _FORMAT) if kind is float or kind is complex else arg


# -- TensorMeta ------------------------------------------------------------------------------------

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.complex32: "c32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


class TensorMeta:
    """Shape, strides and storage offset (all in elements) and dtype of one tensor; immutable.

    ``conj`` and ``neg`` are torch's lazy conjugate and negative bits.

    Attributes:
        plain: row-major from offset 0 and no lazy bits: shape and dtype determine the meta.
        numel, nbytes: number of elements, and their bytes (not those of the storage behind them).
    """

    # not a dataclass: msgspec would encode its fields without calling our extension hook
    __slots__ = ("conj", "dtype", "nbytes", "neg", "numel", "offset", "plain", "shape", "stride")

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        offset: int = 0,
        conj: bool = False,
        neg: bool = False,
    ) -> None:
        self.shape, self.stride, self.dtype = shape, stride, dtype
        self.offset, self.conj, self.neg = offset, conj, neg
        self.plain = not (offset or conj or neg) and stride == contiguous_stride(shape)
        self.numel = prod(shape)
        self.nbytes = self.numel * dtype.itemsize

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.shape, self.stride, self.dtype, self.offset, self.conj, self.neg

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and self._fields == other._fields)

    def __hash__(self) -> int:
        return hash(self._fields)

    def __repr__(self) -> str:
        names = ("shape", "stride", "dtype", "offset", "conj", "neg")
        shown = (f"{name}={field!r}" for name, field in zip(names, self._fields, strict=True))
        return f"TensorMeta({', '.join(shown)})"

    @staticmethod
    def of(t: torch.Tensor) -> TensorMeta:
        """Return the meta of a strided tensor; equal metas are the same object."""
        offset = int(t.storage_offset())
        return intern(tuple(t.shape), t.stride(), t.dtype, offset, t.is_conj(), t.is_neg())

    @property
    def extent(self) -> int:
        """Elements of the smallest storage that holds the tensor, from storage offset 0."""
        if self.numel == 0:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * step for size, step in steps)

    def is_contiguous(self) -> bool:
        """Return whether the strides are those of a fresh row-major tensor."""
        return self.has_same_layout(contiguous_stride(self.shape))

    def has_same_layout(self, stride: Sequence[int]) -> bool:
        """Return whether every element has the memory offset that ``stride`` gives it."""
        return self.numel == 0 or all(
            size == 1 or actual == expected
            for size, actual, expected in zip(self.shape, self.stride, stride, strict=True)
        )

    def empty(self, device: str | torch.device) -> torch.Tensor:
        """Return an uninitialised tensor of this meta on ``device``."""
        t = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.offset:
            storage = torch.empty(self.extent, dtype=self.dtype, device=device)
            t = storage.as_strided(self.shape, self.stride, self.offset)
        if self.conj:
            t = torch._conj(t)
        if self.neg:
            t = torch._neg_view(t)
        return t

    def __str__(self) -> str:
        """Return ``f32[64, 784]``, with strides and offset only if they are not the usual ones."""
        text = f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"
        if self.stride != contiguous_stride(self.shape):
            text += f"@({', '.join(map(str, self.stride))})"
        if self.offset:
            text += f"+{self.offset}"
        return text + ("~conj" if self.conj else "") + ("~neg" if self.neg else "")


def intern(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    offset: int = 0,
    conj: bool = False,
    neg: bool = False,
) -> TensorMeta:
    """Return the unique object of a meta: comparing and hashing unique objects is cheap."""
    return _interned(shape, stride, dtype, offset, conj, neg)


#: Called with all arguments: the cache distinguishes passed arguments from defaults.
_interned = lru_cache(maxsize=65536)(TensorMeta)


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """Return row-major strides in elements; torch counts a size of 0 as 1."""
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def short_dtype(dtype: torch.dtype) -> str:
    """Return ``f32`` for ``torch.float32``; the full name for rarer types."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


#: Types of torch's named constants; parsers of names accept no other attribute of torch.
TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)
#: Those constants by name: a closed table, so that no name from elsewhere reaches ``getattr``.
_NAMED = {name: value for name, value in vars(torch).items() if isinstance(value, TORCH_NAMES)}
_LONG = {short: dtype for dtype, short in _SHORT.items()}


def torch_name(text: str) -> torch.dtype | torch.layout | torch.memory_format:
    """Return the torch constant named by ``torch.NAME``; ValueError for anything else."""
    value = _NAMED.get(text.removeprefix("torch."))
    if value is None or not text.startswith("torch."):
        raise ValueError(f"{text!r} names no dtype, layout or memory format")
    return value


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype that ``short_dtype`` prints as ``text``; ValueError for anything else."""
    dtype = _LONG.get(text) or _NAMED.get(text)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a torch dtype")
    return dtype
