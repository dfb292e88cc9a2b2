"""Manifest of a transfer: names, dtypes, shapes, order and ties, without the bytes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, starmap
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from lazygt.errors import ProtocolError

ALIGNMENT = 256
"""Every parameter starts at a multiple of so many bytes, as CUDA and SIMD kernels like it."""

#: the spelling of safetensors
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

#: The fields of `ParamSpec` on the wire.
_Row = tuple[
    str,
    Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(DTYPES)})\Z")],
    tuple[Annotated[int, msgspec.Meta(ge=0)], ...],
    str | None,
]


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter on the wire.

    Attributes:
        dtype: a key of `DTYPES`.
        alias_of: name of the parameter that this one is tied to; their bytes are sent once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: none for an alias."""
        return 0 if self.alias_of else math.prod(self.shape) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        tie = f" tied to {self.alias_of}" if self.alias_of else ""
        return f"{self.dtype}{list(self.shape)}{tie}"


@dataclass(frozen=True)
class Manifest:
    """The parameters of a model, in the order in which they are sent.

    Raises:
        ValueError: a name comes twice, or an alias names no earlier parameter of its dtype and
            shape.
    """

    params: tuple[ParamSpec, ...]

    def __post_init__(self) -> None:
        seen: dict[str, ParamSpec] = {}
        for spec in self.params:
            if spec.name in seen:
                raise ValueError(f"the manifest names {spec.name!r} twice")
            target = seen.get(spec.alias_of) if spec.alias_of else None
            if spec.alias_of and (
                target is None
                or target.alias_of
                or (target.dtype, target.shape) != (spec.dtype, spec.shape)
            ):
                raise ValueError(
                    f"{spec.name!r} is tied to {spec.alias_of!r}, which is no earlier parameter "
                    f"of the same dtype and shape"
                )
            seen[spec.name] = spec

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The position of each name."""
        return {spec.name: number for number, spec in enumerate(self.params)}

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Offset of each parameter in one flat buffer of `extent` bytes."""
        return tuple(accumulate((aligned(spec.nbytes) for spec in self.params), initial=0))[:-1]

    @cached_property
    def extent(self) -> int:
        """Bytes of a flat buffer that holds all parameters, each aligned."""
        return sum(aligned(spec.nbytes) for spec in self.params)

    @cached_property
    def wholes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Bounds of each whole parameter: (0, size) of each dim."""
        return tuple(tuple((0, size) for size in spec.shape) for spec in self.params)

    @cached_property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(spec.nbytes for spec in self.params)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest: of names, dtypes, shapes, order and ties."""
        return hashlib.sha256(self.packed).hexdigest()

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a flat uint8 buffer of `extent` bytes, by name.

        Tied names share a tensor.
        """
        views: dict[str, Tensor] = {}
        for spec, place in zip(self.params, self.places, strict=True):
            if spec.alias_of:
                views[spec.name] = views[spec.alias_of]
            else:
                piece = flat[place : place + spec.nbytes]
                views[spec.name] = piece.view(spec.torch_dtype).view(spec.shape)
        return views

    @cached_property
    def packed(self) -> bytes:
        """The manifest in wire format."""
        specs = [[spec.name, spec.dtype, spec.shape, spec.alias_of] for spec in self.params]
        return msgspec.msgpack.encode(specs)

    @classmethod
    def unpack(cls, given: bytes) -> Manifest:
        """Read the result of `packed`.

        Raises:
            ProtocolError: the data is no manifest.
        """
        try:
            rows = msgspec.msgpack.decode(given, type=tuple[_Row, ...])
            return cls(tuple(starmap(ParamSpec, rows)))
        except (TypeError, ValueError, msgspec.DecodeError) as error:
            raise ProtocolError(f"this is no manifest: {error}") from error


def difference(expected: Manifest, offered: Manifest) -> str | None:
    """Return the difference between two manifests, in words; None when they are equal."""
    if expected.packed == offered.packed:
        return None
    parts = [
        _listed("missing", [name for name in expected.index if name not in offered.index]),
        _listed("unexpected", [name for name in offered.index if name not in expected.index]),
        _listed("different", _changed(expected, offered)),
    ]
    differences = [part for part in parts if part]
    return (
        "; ".join(differences) or f"the order differs, first at {_first_moved(expected, offered)}"
    )


def _changed(expected: Manifest, offered: Manifest) -> list[str]:
    return [
        f"{ours.name} (expected {ours}, offered {theirs})"
        for ours in expected.params
        if ours.name in offered.index
        and str(theirs := offered.params[offered.index[ours.name]]) != str(ours)
    ]


def _first_moved(expected: Manifest, offered: Manifest) -> str:
    pairs = zip(expected.params, offered.params, strict=True)
    return next(
        f"{theirs.name} where {ours.name} belongs"
        for ours, theirs in pairs
        if ours.name != theirs.name
    )


def _listed(what: str, names: Sequence[str], most: int = 4) -> str | None:
    if not names:
        return None
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{what}: {', '.join(names[:most])}{more}"


def check_complete(manifest: Manifest, arrived: Counter[int]) -> str | None:
    """Return the incomplete parameters, in words; ``arrived`` counts bytes by position."""
    short = [
        f"{spec.name} ({arrived[number]} of {spec.nbytes} bytes)"
        for number, spec in enumerate(manifest.params)
        if arrived[number] != spec.nbytes
    ]
    return _listed("incomplete", short)
