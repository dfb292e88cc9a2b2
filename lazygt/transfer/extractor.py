"""Extractors: sources of a model's parameters, independent of transport and threshold."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lazygt.transfer.manifest import DTYPE_NAMES, Manifest, ParamSpec

if TYPE_CHECKING:
    from lazygt.transfer.copy_request import RemoteModel


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


class HeldElsewhere:
    """Extractor of a model with its values in other processes.

    Attributes:
        remote: the model, with the source that sends its values.
    """

    def __init__(self, manifest: Manifest, remote: RemoteModel) -> None:
        self.remote, self._manifest = remote, manifest

    def manifest(self) -> Manifest:
        """See `Extractor`."""
        return self._manifest

    def chunks(self) -> Iterator[Chunk]:
        """Return an empty iterator: this process sends nothing itself."""
        return iter(())


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
