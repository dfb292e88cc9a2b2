"""Parts of a worker beside runs: weight transfers, status, memory, data-dependent results."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import msgspec
import torch

from lazygt.errors import ProtocolError, kind_of
from lazygt.graph.meta import TensorMeta
from lazygt.host.processes import resident
from lazygt.runtime.collectives import group
from lazygt.runtime.executors.eager import Outcome
from lazygt.runtime.messages import (
    Done,
    Failure,
    Made,
    MemoryUse,
    Plain,
    Reply,
    Run,
    Several,
    Write,
    Wrote,
)
from lazygt.runtime.store import Failed, Store, Value
from lazygt.runtime.wire import Buffer

# -- copies of a worker's values for a transfer of weights -----------------------------------------


class WeightCopier(Protocol):
    """Protocol of a copier of values into the buffers of a weight transfer."""

    def copy_packed(
        self, packed: Any, value_of: Callable[[int], torch.Tensor]
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Carry out a request; return the checksums of the copied blocks, and handles to them.

        Args:
            packed: the request, as ``Write.request`` has it.
            value_of: returns the value of an id.
        """

    def close(self) -> None:
        """Release its resources."""


class WeightCopies:
    """A worker's side of weight transfers.

    Args:
        make: see ``Worker``.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device,
        make: Callable[[torch.device], WeightCopier] | None,
    ) -> None:
        self._store, self._device, self._make_copier = store, device, make
        self._copier: WeightCopier | None = None

    def write(self, message: Write) -> Wrote:
        """Copy blocks of values into the buffers of a transfer; return checksums or the error."""
        number = message.number
        try:
            if self._copier is None:
                if self._make_copier is None:
                    raise ProtocolError("this worker was started without a copier")
                self._copier = self._make_copier(self._device)
            checks, handles = self._copier.copy_packed(message.request, self._value)
        except Exception as error:  # noqa: BLE001 - reported to the client
            return Wrote(number, error=f"{type(error).__name__}: {error}")
        return Wrote(number, checks, "", handles)

    def _value(self, key: int) -> torch.Tensor:
        """Return the value of an id; RuntimeError if it has failed."""
        value = self._store.get(key)
        if isinstance(value, Failed):
            raise RuntimeError(f"the value could not be computed: {value.failure.detail}")
        return value

    def close(self) -> None:
        """Release the copier's resources."""
        if self._copier is not None:
            self._copier.close()
            self._copier = None


# -- state of a worker for the status page, read while the worker is busy --------------------------


class _RunHead(msgspec.Struct, array_like=True, tag=Run.__struct_config__.tag):
    """First fields of a `Run`: all that the status page decodes."""

    seq: int
    digest: bytes | None = None


_HEAD = msgspec.msgpack.Decoder(_RunHead)


class WorkerInsight:
    """Reader of a worker's state for the control thread, while the main thread works.

    Args:
        memory: returns the worker's memory.
        marked: returns (run, step) of the step that began last; None: steps are not marked.
    """

    def __init__(
        self, memory: Callable[[], MemoryUse], marked: Callable[[], tuple[int, int]] | None
    ) -> None:
        self._memory, self._marked = memory, marked

    def run_named(self, header: Buffer) -> tuple[int, str] | None:
        """Return a run message's run number and plan name in hex; None for other messages."""
        try:
            run = _HEAD.decode(header)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return run.seq, "" if run.digest is None else run.digest.hex()

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that a collective waits for."""
        process_group = group.current()
        return () if process_group is None else process_group.late()

    def step(self, run: int) -> int:
        """Return the step that run number ``run``, a timed one, has begun last; -1 if unknown."""
        marked_run, step = (0, -1) if self._marked is None else self._marked()
        return step if marked_run == run else -1

    def memory(self) -> tuple[int, int, int, int]:
        """Return (living, allocated, peak, resident) bytes."""
        memory = self._memory()
        return sum(memory.living), memory.allocated, memory.peak, memory.resident


# -- memory of a worker: of its values, of its allocator and of its process ------------------------


def measured_memory(
    store: Store, groups: Sequence[Iterable[int]], device: torch.device
) -> MemoryUse:
    """Measure the memory of this process, which computes values on ``device``.

    Args:
        groups: ids of values; each group's bytes are reported as one number.
    """
    pid, seen = os.getpid(), set[int]()
    current = resident(pid)
    values = dict(store.values)
    living = [_living_bytes([values.pop(key, None) for key in group], seen) for group in groups]
    living.append(_living_bytes(values.values(), seen))
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        allocated, peak = _malloc_bytes() or sum(living), max(current, resident(pid, "VmHWM"))
    return MemoryUse(tuple(living), allocated, peak, current)


def _living_bytes(values: Iterable[Value | None], seen: set[int]) -> int:
    """Return the bytes of the values' storages; a storage in ``seen`` does not count.

    Args:
        seen: storage addresses counted so far; updated.
    """
    total = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_meta:
            total += value.nbytes
            continue
        storage = value.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            total += storage.nbytes()
            seen.add(address)
    return total


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = tuple([
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ])  # fmt: skip


@cache
def _mallinfo() -> ctypes._NamedFuncPointer | None:
    """Return glibc's ``mallinfo2`` (from 2.33 on); None with another libc."""
    function: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo
    return function


def _malloc_bytes() -> int:
    """Return the bytes that malloc has handed out; 0 if it does not report them."""
    function = _mallinfo()
    if function is None:
        return 0
    info = function()
    return int(info.uordblks + info.hblkhd)


# -- data-dependent results: described to the client, and stored under the worker's ids ------------

#: First id that a worker assigns: above all ids of the client.
DYNAMIC_IDS = 1 << 48


class DynamicResults:
    """Data-dependent results of one worker.

    Attributes:
        next_id: id of the next result.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.next_id = DYNAMIC_IDS

    def describe(self, outcome: Outcome, done: Done, seq: int, last: int) -> None:
        """Set ``done.reply`` to a description of a data-dependent last node's results.

        The tensors themselves stay in the worker's store, under new ids.

        Args:
            seq: number of the run.
            last: number of the node.
        """
        if type(outcome.returned) is Failed:
            done.reply = Reply(failure=outcome.returned.failure.during(seq))
            return
        try:
            returned = tuple(map(self._described_item, outcome.returned))
            done.reply = Reply(returned, tuple(map(self._stored_tensor, outcome.written)))
        except NotImplementedError as error:
            done.reply = Reply(failure=Failure(last, kind_of(error), str(error), seq))

    def _described_item(self, item: Any) -> Made | Several | Plain:
        """Return the message for a returned tensor, list or plain Python value."""
        if isinstance(item, torch.Tensor):
            return self._stored_tensor(item)
        if isinstance(item, (list, tuple)):
            return Several(tuple(map(self._described_item, item)))
        return Plain(item)

    def _stored_tensor(self, tensor: torch.Tensor) -> Made:
        """Store a tensor under the next id; return its description."""
        if tensor.layout != torch.strided:
            raise NotImplementedError(
                f"the result is a {tensor.layout} tensor; lazygt has dense strided ones only"
            )
        key = self.next_id
        self.next_id += 1
        value = _with_own_storage(tensor)
        self._store.put(key, value)
        return Made(TensorMeta.of(value), key)


def _with_own_storage(item: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is a view or does not start its storage."""
    owns_storage = item.storage_offset() == 0 and item.untyped_storage().nbytes() >= item.nbytes
    return item if owns_storage and item._base is None else item.clone()
