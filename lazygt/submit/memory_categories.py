"""Memory categories of the workers' values, as far as the client knows."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from lazygt.graph.mesh import Mesh, has_any, region
from lazygt.graph.meta import TensorMeta
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import Storage, is_lazy, storage_of
from lazygt.runtime.values import RemoteValue

PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = "parameters", "gradients", "optimizer", "other"


class MemoryCategories:
    """Memory categories of a session's values: parameters, gradients and optimizer states.

    An optimizer is registered at its first step. Parameters without an optimizer are searched among
    all Python objects on request, since a list of them would cost every session time.

    Args:
        recorder: of the session.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: id -> an optimizer that has stepped; without a callback, which would swallow a Ctrl-C
        self.optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        #: all parameters of the process at the last search
        self._all_parameters_found: list[weakref.ref[torch.Tensor]] = []

    @property
    def trains(self) -> bool:
        """True if an optimizer has stepped."""
        return bool(self.optimizers)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer at its first step; remove those that no longer exist."""
        alive = {key: other for key, other in self.optimizers.items() if other() is not None}
        self.optimizers = {**alive, id(optimizer): weakref.ref(optimizer)}

    def by_id(self, everywhere: bool = True) -> dict[int, str]:
        """Return id -> category of the values of tensors; other values have no category.

        Args:
            everywhere: search for parameters without an optimizer; else use the last search.
        """
        if everywhere:
            self._all_parameters_found = [weakref.ref(parameter) for parameter in _all_parameters()]
        kinds: dict[int, str] = {}
        for storage, kind in self._categorised():
            assert storage.remote is not None
            for key in storage.remote.ids:
                kinds.setdefault(key, kind)
        return kinds

    def sizes(self, ranks: Mesh) -> dict[str, int]:
        """Return the bytes of each category on the first rank, of the values of tensors.

        Parameters without an optimizer count if the last search included them.

        Args:
            ranks: the mesh for which plans are built.
        """
        sizes = dict.fromkeys((PARAMETERS, GRADIENTS, OPTIMIZER), 0)
        seen: set[int] = set()
        for storage, kind in self._categorised():
            remote = storage.remote
            assert remote is not None
            if remote.id not in seen:
                sizes[kind] += _bytes_on_first(storage.meta, remote, ranks)
                seen.add(remote.id)
        return sizes

    def _categorised(self) -> Iterator[tuple[Storage, str]]:
        """Yield the storages with a value on the workers, with their categories."""
        other_parameters = [
            parameter for other in self._all_parameters_found if (parameter := other()) is not None
        ]
        optimizers = [
            optimizer
            for reference in self.optimizers.values()
            if (optimizer := reference()) is not None
        ]
        parameters = [p for optimizer in optimizers for p in _parameters(optimizer)]
        for parameter in [*parameters, *other_parameters]:
            yield from self._owned_storage(parameter, PARAMETERS)
            yield from self._owned_storage(parameter.grad, GRADIENTS)
        for optimizer in optimizers:
            for value in _state(optimizer):
                yield from self._owned_storage(value, OPTIMIZER)

    def _owned_storage(self, t: object, kind: str) -> Iterator[tuple[Storage, str]]:
        """Yield the storage of a tensor of this session, if its value is on the workers."""
        if is_lazy(t):
            storage = storage_of(t)
            if storage.owner is self._recorder and storage.remote is not None:
                yield storage, kind


def _bytes_on_first(meta: TensorMeta, remote: RemoteValue, ranks: Mesh) -> int:
    """Return the bytes of a value on the first rank.

    Args:
        ranks: the mesh for which plans are built.
    """
    if remote.sharding is None:
        return meta.nbytes
    if not has_any(ranks, remote.sharding.placements, 0):
        return 0
    block = region(ranks, remote.sharding.placements, meta.shape, 0)
    elements: int = math.prod(dim_range.stop - dim_range.start for dim_range in block)
    return elements * meta.dtype.itemsize * len(remote.ids)


def by_kind(kinds: Mapping[int, str]) -> dict[str, list[int]]:
    """Return category -> ids of its values."""
    groups: dict[str, list[int]] = {PARAMETERS: [], GRADIENTS: [], OPTIMIZER: []}
    for key, kind in kinds.items():
        groups[kind].append(key)
    return groups


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _state(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """Yield the values of an optimizer's state."""
    for values in optimizer.state.values():
        if isinstance(values, dict):
            yield from values.values()


def _all_parameters() -> Iterable[torch.Tensor]:
    """Return all parameters that Python's garbage collector tracks."""
    tensors = (
        candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.Tensor)
    )
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
