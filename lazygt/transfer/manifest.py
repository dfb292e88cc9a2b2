"""Contents of a transfer: manifests, and the extractors that yield a model's parameters.

A manifest has names, dtypes, shapes, order and ties, without the bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, groupby, starmap
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn

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


# -- extractors ------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """The parameters of one module, with those tied to earlier ones left out.

    The tensors may have another dtype than their spec: the sender casts while it copies. They
    must stay as they are until the transfer ends, so an extractor never reuses their memory.
    """

    module: str
    params: Sequence[tuple[ParamSpec, Tensor]]


class Extractor(Protocol):
    """Source of the weights.

    `chunks` covers every parameter of `manifest` that is no alias, once, in the same order.
    """

    def manifest(self) -> Manifest:
        """Return the manifest of the transfer; moves no data."""

    def chunks(self) -> Iterator[Chunk]:
        """Return an iterator over the parameters, a module at a time; each call begins anew."""


def parent_module(name: str) -> str:
    """Return a parameter's module: ``layers.0.attention`` of ``layers.0.attention.weight``."""
    return name.rpartition(".")[0]


class ModuleExtractor:
    """Extractor of a torch module's parameters and persistent buffers, or of a mapping.

    Works on the CPU, on GPUs, and in a lazygt session. There the workers send their values
    themselves if the sender supports it; else each chunk is fetched from them on demand.

    Args:
        module: the module or mapping, read anew at each transfer.
        cast: name pattern (as in a shell: ``*``, ``?``) -> dtype. The first that matches a
            floating-point parameter decides; without a match it is not cast.
        group: name -> the module it is sent with; neighbours of one group form a chunk.
        rename: name -> its name in receivers.

    Raises:
        TypeError: a cast is to a dtype that can't be sent; or a parameter is sparse or without
            memory, or only one rank's block, when it is read.
        ValueError: tied parameters would get different dtypes; when they are read.
    """

    def __init__(
        self,
        module: nn.Module | Mapping[str, Tensor],
        *,
        cast: Mapping[str, torch.dtype] | None = None,
        group: Callable[[str], str] = parent_module,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        self._module = module
        self._cast = dict(cast or {})
        for pattern, dtype in self._cast.items():
            if dtype not in DTYPE_NAMES:
                raise TypeError(f"cast {pattern!r} to {dtype!r}: that is no dtype that travels")
        self._group = group
        self._rename = rename or (lambda name: name)

    def manifest(self) -> Manifest:
        """Return names, dtypes on the wire, shapes and ties, in the module's order."""
        return Manifest(tuple(spec for _, spec, _ in self.entries()))

    def chunks(self) -> Iterator[Chunk]:
        """Yield one chunk a module; lazygt tensors come as fetched CPU tensors."""
        untied = (entry for entry in self.entries() if entry[1].alias_of is None)
        for module, entries in groupby(untied, key=lambda entry: self._group(entry[0])):
            yield Chunk(module, [(spec, _reachable(tensor, spec)) for _, spec, tensor in entries])

    def entries(self) -> Iterator[tuple[str, ParamSpec, Tensor]]:
        """Yield each parameter's name in the module, its spec on the wire, and its tensor."""
        by_identity: dict[object, ParamSpec] = {}
        for name, tensor in self._named_tensors():
            _check_dense(name, tensor)
            dtype = DTYPE_NAMES[self._dtype_for(name, tensor)]
            wire_name, shape = self._rename(name), tuple(tensor.shape)
            first_spec = by_identity.setdefault(
                _identity(tensor), ParamSpec(wire_name, dtype, shape)
            )
            if first_spec.name != wire_name and first_spec.dtype != dtype:
                raise ValueError(
                    f"{wire_name} is tied to {first_spec.name}, but the casts send one as {dtype} "
                    f"and the other as {first_spec.dtype}; give both the same"
                )
            alias_of = None if first_spec.name == wire_name else first_spec.name
            yield name, ParamSpec(wire_name, dtype, shape, alias_of), tensor

    def is_elsewhere(self, kinds: Container[str]) -> bool:
        """Return whether the first parameter is on one of these kinds of devices."""
        first = next(self._named_tensors(), None)
        return first is not None and first[1].device.type in kinds

    def is_sharded(self) -> bool:
        """Return whether a parameter is a DTensor: this process is a rank of a sharded trainer."""
        return any(is_block(tensor) for _, tensor in self._named_tensors())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self._module, nn.Module):
            yield from self._module.state_dict(keep_vars=True).items()
        else:
            yield from self._module.items()

    def _dtype_for(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype on the wire: that of the first matching cast, else the tensor's."""
        if tensor.dtype.is_floating_point:
            for pattern, dtype in self._cast.items():
                if fnmatchcase(name, pattern):
                    return dtype
        return tensor.dtype


def is_block(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor."""
    return hasattr(tensor, "full_tensor")


def _identity(tensor: Tensor) -> object:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    if tensor.device.type not in {"cpu", "cuda"} or not tensor.numel() or is_block(tensor):
        return id(tensor)
    start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    view = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, start, view


def _reachable(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """Return the tensor in memory of this process, fetched from a worker if necessary."""
    if is_block(tensor):
        raise TypeError(
            f"parameter {spec.name!r} lies in blocks on several ranks: every rank has to call "
            f"lazygt.transfer_weights() with the module or its ModuleExtractor"
        )
    if tensor.device.type in {"cpu", "cuda"}:
        return tensor.detach()
    # The cast runs on the tensor's own device, so that fewer bytes are fetched.
    return tensor.detach().to(spec.torch_dtype).cpu()


def _check_dense(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a parameter that has no dense values of a supported dtype."""
    problem = None
    if not isinstance(tensor, Tensor):
        problem = f"a {type(tensor).__name__} and no tensor"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        problem = "sparse or quantized; send a dense copy of it"
    elif tensor.is_meta:
        problem = "on device meta, without values; materialise the module first"
    elif tensor.dtype not in DTYPE_NAMES:
        problem = f"of dtype {tensor.dtype}, which does not travel"
    if problem is not None:
        raise TypeError(f"parameter {name!r} is {problem}")
