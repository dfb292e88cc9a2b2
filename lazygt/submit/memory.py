"""Report of ``s.memory()``: the memory of each worker, as measured there."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import nn

from lazygt.graph.mesh import Mesh, has_any, region
from lazygt.graph.meta import TensorMeta
from lazygt.graph.text import amount
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import Storage, is_lazy, storage_of
from lazygt.runtime.values import RemoteValue
from lazygt.tables import Printed, plain_table

# -- memory categories of the workers' values, as far as the client knows --------------------------

PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = "parameters", "gradients", "optimizer", "other"


class Kinds:
    """Parameters, gradients and optimizer states among a session's values.

    Optimizers tell of their parameters once they step. Those that no optimizer has are looked for
    among all that Python has: no list of them is kept, which every session would pay for.

    Args:
        recorder: of the session whose values are meant.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: identity -> an optimizer that has stepped; no callback, in which a Ctrl-C would be lost
        self.optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        #: parameters that no optimizer may have, as they were last looked for
        self._others: list[weakref.ref[torch.Tensor]] = []

    @property
    def trains(self) -> bool:
        """True if an optimizer has stepped."""
        return bool(self.optimizers)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped for the first time; those that are no more are forgotten."""
        alive = {key: other for key, other in self.optimizers.items() if other() is not None}
        self.optimizers = {**alive, id(optimizer): weakref.ref(optimizer)}

    def by_id(self, everywhere: bool = True) -> dict[int, str]:
        """The kinds of values that handles show, by id; of all others nothing is known.

        Args:
            everywhere: look for parameters that no optimizer has, too; else those count that were
                there when they were last looked for.
        """
        if everywhere:
            self._others = [weakref.ref(parameter) for parameter in _all_parameters()]
        kinds: dict[int, str] = {}
        for storage, kind in self._known():
            assert storage.remote is not None
            for key in storage.remote.ids:
                kinds.setdefault(key, kind)
        return kinds

    def sizes(self, ranks: Mesh) -> dict[str, int]:
        """Return the bytes of each category on the first rank, of the values of handles.

        Parameters that no optimizer has count where they were looked for before.

        Args:
            ranks: that plans are made for.
        """
        sizes = dict.fromkeys((PARAMETERS, GRADIENTS, OPTIMIZER), 0)
        seen: set[int] = set()
        for storage, kind in self._known():
            remote = storage.remote
            assert remote is not None
            if remote.id not in seen:
                sizes[kind] += _bytes_on_first(storage.meta, remote, ranks)
                seen.add(remote.id)
        return sizes

    def _known(self) -> Iterator[tuple[Storage, str]]:
        """Yield the storages of handles that the workers have, with their categories."""
        others = [parameter for other in self._others if (parameter := other()) is not None]
        optimizers = [
            optimizer for known in self.optimizers.values() if (optimizer := known()) is not None
        ]
        parameters = [p for optimizer in optimizers for p in _parameters(optimizer)]
        for parameter in [*parameters, *others]:
            yield from self._remote(parameter, PARAMETERS)
            yield from self._remote(parameter.grad, GRADIENTS)
        for optimizer in optimizers:
            for value in _state(optimizer):
                yield from self._remote(value, OPTIMIZER)

    def _remote(self, t: object, kind: str) -> Iterator[tuple[Storage, str]]:
        """Yield the storage of a handle, if the workers have it."""
        if is_lazy(t):
            storage = storage_of(t)
            if storage.owner is self._recorder and storage.remote is not None:
                yield storage, kind


def _bytes_on_first(meta: TensorMeta, remote: RemoteValue, ranks: Mesh) -> int:
    """Return the bytes of a value on the first rank."""
    if remote.sharding is None:
        return meta.nbytes
    if not has_any(ranks, remote.sharding.placements, 0):
        return 0
    block = region(ranks, remote.sharding.placements, meta.shape, 0)
    elements: int = math.prod(part.stop - part.start for part in block)
    return elements * meta.dtype.itemsize * len(remote.ids)


def by_kind(kinds: Mapping[int, str]) -> dict[str, list[int]]:
    """The ids of each kind that is known."""
    groups: dict[str, list[int]] = {PARAMETERS: [], GRADIENTS: [], OPTIMIZER: []}
    for key, kind in kinds.items():
        groups[kind].append(key)
    return groups


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _state(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    for values in optimizer.state.values():
        if isinstance(values, dict):
            yield from values.values()


def _all_parameters() -> Iterable[torch.Tensor]:
    """Those that Python's garbage collector knows, which has all but those of other languages."""
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]


# -- report of ``s.memory()``: the memory of each worker, as measured there ------------------------


class RankMemory(NamedTuple):
    """A worker's memory in bytes.

    Attributes:
        kinds: of the values that it holds: ``parameters`` (of optimizers that have stepped, and
            other ``nn.Parameter``\\ s), their ``gradients``, the state of ``optimizer``\\ s, and
            ``other``; memory that several values share counts once.
        allocated: memory that torch's allocator has handed out on a GPU. On CPUs malloc's, of the
            whole process; where malloc does not say (it is not glibc's), ``living``.
        peak: on a GPU the most that was allocated; on CPUs the most that was resident, ever.
        resident: of the process in the host's memory.
    """

    rank: int
    kinds: Mapping[str, int]
    allocated: int
    peak: int
    resident: int

    @property
    def living(self) -> int:
        """Of all values that it holds."""
        return sum(self.kinds.values())


@dataclass(frozen=True, repr=False)
class SessionMemory(Printed):
    """The memory of a session's workers. Prints as a table.

    Attributes:
        ranks: by rank. With ``launcher="inline"`` the one there is is this process, and in a dry
            session values have their sizes, but no memory.
    """

    ranks: Sequence[RankMemory]

    @property
    def living(self) -> int:
        """Bytes of the values that all workers hold."""
        return sum(memory.living for memory in self.ranks)

    @property
    def peak(self) -> int:
        """Of the worker that needed the most."""
        return max(memory.peak for memory in self.ranks)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("memory of the workers, as measured", style="bold")
        kinds = list(self.ranks[0].kinds)
        columns = (*kinds, "living", "allocated", "peak", "resident")
        table = plain_table("rank", *(f">{name}" for name in columns))
        for memory in self.ranks:
            sizes = (*memory.kinds.values(), memory.living, *memory[2:])
            table.add_row(str(memory.rank), *(amount(size, "B") for size in sizes))
        yield table
