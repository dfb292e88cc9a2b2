"""Snapshots: copies of a worker's values in memory that outlives it.

The memory is a memfd that the client keeps open, so the process that replaces a dead worker finds
it unchanged. Snapshots are incremental: values are immutable, so a value that an earlier snapshot
has is not copied again. Nor is a value that still lies in the client's upload arena: it is
*borrowed* from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.host.processes import memory_left
from lazygt.runtime.arenas import read_note
from lazygt.runtime.executors import kernels
from lazygt.runtime.messages import Copied, Failure, Restore, Snap, Snapped
from lazygt.runtime.store import Failed, Store

if TYPE_CHECKING:
    from lazygt.runtime.arenas import Arena
    from lazygt.runtime.executors.exchange import HostCopies

#: Values that no snapshot has yet: id -> (meta, bytes of its memory).
Uncopied = dict[int, tuple[TensorMeta, torch.Tensor]]


class Snapshots:
    """Snapshots of one worker.

    Values of a GPU are copied to the host concurrently with later runs, if the GPU has memory for
    intermediate copies; ``finished`` returns the answer then.

    Args:
        memory: memory of the copies, which has no other user.
        ranks: number of workers that take snapshots at once.
        upload: the client's arena: values that still lie there need no copy.
        copies: the copies from a GPU; None: values lie in the host's memory.

    Attributes:
        wakes: eventfd that counts the answers for ``finished``; None: ``take`` returns all answers.
    """

    def __init__(
        self,
        memory: Arena,
        upload: Arena | None,
        device: torch.device,
        ranks: int,
        copies: HostCopies | None = None,
    ) -> None:
        self._memory, self._upload, self._device, self._ranks = memory, upload, device, ranks
        #: number of a snapshot -> its table: id of a value -> its copy
        self._tables: dict[int, dict[int, Copied]] = {}
        self._copies = copies
        self.wakes = None if copies is None else os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = ThreadPoolExecutor(1, "lazygt-snapshots")
        #: snapshot that is being copied on the thread
        self._pending: Future[Snapped] | None = None

    def take(
        self, snap: Snap, store: Store, next_dynamic: int, generator: torch.Tensor
    ) -> Snapped | None:
        """Copy the values that no snapshot has.

        Args:
            snap: the client's request.
            store: the worker's values.
            next_dynamic, generator: see ``Snapped``.

        Returns:
            The answer to the client; None: ``finished`` will return it.

        Raises:
            RuntimeError: the device can't be used any more.
        """
        self._wait_for_pending()
        begin = time.monotonic_ns()
        self._free_all_but(snap.committed)
        new, failed = self._begin_table(snap, store)
        state = generator.numpy().tobytes()
        answer = Snapped(snap.number, (), failed, next_dynamic, state, begin=begin)
        device_copies = None
        if self._copies is not None:  # copies on the GPU and their event; None: no memory for them
            device_copies = self._copies.copy_on_device([flat for _, flat in new.values()])
        if device_copies is None:
            kernels.synchronize(self._device)  # raises for a failed op, before the state is copied
            return self._copy_to_host(answer, snap.committed, new)
        copies, event = device_copies
        flat_of = dict(zip(new, copies, strict=True))
        new = {key: (meta, flat_of[key]) for key, (meta, _) in new.items()}
        self._pending = self._thread.submit(
            self._copy_after_event, event, answer, snap.committed, new
        )
        self._pending.add_done_callback(self._wake)
        return None

    def _begin_table(
        self, snap: Snap, store: Store
    ) -> tuple[Uncopied, tuple[tuple[int, Failure], ...]]:
        """Begin a snapshot's table with values that need no copy.

        Returns:
            The values to copy, and (id, failure) of failed values.
        """
        committed = self._tables.get(snap.committed, {})
        table = self._tables[snap.number] = {}
        failed: list[tuple[int, Failure]] = []
        new: Uncopied = {}
        for key, value in store.values.items():
            if isinstance(value, Failed):
                failed.append((key, value.failure))
            elif key in committed:
                table[key] = committed[key]
            else:
                meta, offset = TensorMeta.of(value), store.borrowed.get(key)
                if offset is None:
                    new[key] = meta, _bytes_of(value, meta)
                else:
                    table[key] = Copied(key, meta, offset, _extent_bytes(meta), True)
        return new, tuple(failed)

    def finished(self) -> Snapped | None:
        """Return the answer of a snapshot that is copied on the thread, once; None: not yet.

        Raises:
            RuntimeError: the device can't be used any more.
        """
        if self._pending is None or not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def _wake(self, _: object) -> None:
        """Write the eventfd: the thread has copied a snapshot."""
        assert self.wakes is not None
        os.eventfd_write(self.wakes, 1)

    def _wait_for_pending(self) -> None:
        """Wait for a snapshot that is being copied, and drop its answer."""
        if self._pending is not None:
            wait([self._pending])
            self._pending = None

    def _copy_after_event(
        self, event: Any, answer: Snapped, committed: int, new: Uncopied
    ) -> Snapped:
        """Copy as ``_copy_to_host``, on a side stream after an event of the GPU."""
        assert self._copies is not None
        with self._copies.download_stream(event):
            return self._copy_to_host(answer, committed, new)

    def _copy_to_host(self, answer: Snapped, committed: int, new: Uncopied) -> Snapped:
        """Copy values to the snapshot memory, and complete the answer, perhaps by an error.

        Args:
            answer: the answer to the client, without values.
            committed: number of the last complete snapshot; after an error only its copies stay.
            new: the values to copy.
        """
        table = self._tables[answer.number]
        nbytes = sum(flat.nbytes for _, flat in new.values())
        try:
            self._check_capacity(nbytes)
            for key, (meta, flat) in new.items():
                slot = self._memory.put(flat, non_blocking=True)
                table[key] = Copied(key, meta, slot.offset, slot.nbytes)
            if self._copies is not None:
                self._copies.synchronize()
        except (MemoryError, RuntimeError) as error:
            if kernels.is_lost(self._device):
                raise
            self._free_all_but(committed)
            return Snapped(answer.number, error=f"{type(error).__name__}: {error}")
        answer.values, answer.nbytes = tuple(table.values()), nbytes
        answer.nanoseconds = time.monotonic_ns() - answer.begin
        return answer

    def _check_capacity(self, nbytes: int) -> None:
        """Raise MemoryError if the copies of all workers need more than half of the free memory.

        Without this check the kernel would kill a process.
        """
        needed = self._ranks * nbytes
        room = memory_left() + self._memory.bytes_held - self._memory.bytes_in_use
        if needed > room // 2:
            raise MemoryError(f"{needed:,} bytes to copy, and {room:,} bytes of memory are left")

    def restore(self, restore: Restore, store: Store) -> None:
        """Restore the values of a snapshot, and drop all others.

        Of the values in ``restore.failed`` those that are still here are retained; the others fail.
        """
        self._wait_for_pending()
        current = ((key, store.values.get(key)) for key, _ in restore.failed)
        retained = {key: value for key, value in current if isinstance(value, torch.Tensor)}
        store.clear()
        table = self._tables.get(restore.number)
        self._free_all_but(restore.number)
        if table is None and restore.number:
            for copy in restore.values:
                if not copy.borrowed:
                    self._memory.claim(copy.offset, copy.nbytes)
        self._tables = {restore.number: {copy.id: copy for copy in restore.values}}
        for copy in restore.values:
            store.put(copy.id, self._value(copy), copy.offset if copy.borrowed else None)
        for key, failure in restore.failed:
            store.put(key, retained.get(key, Failed(failure)))

    def note_step(self, run: int, step: int) -> None:
        """Note the step that begins, in memory that outlives this process's death in the step."""
        self._memory.note(run, step)

    def noted_step(self) -> tuple[int, int]:
        """Return the run and the step that were noted last."""
        return read_note(self._memory.fd)

    def _free_all_but(self, number: int) -> None:
        """Free the copies of all snapshots but one; those that it shares with others stay."""
        retained = {copy.offset for copy in self._entries([number]) if not copy.borrowed}
        other_numbers = [key for key in self._tables if key != number]
        freed = {copy.offset for copy in self._entries(other_numbers) if not copy.borrowed}
        for offset in freed - retained:
            self._memory.free(offset)
        self._tables = {key: t for key, t in self._tables.items() if key == number}

    def _entries(self, numbers: Iterable[int]) -> Iterable[Copied]:
        """Return the copies of these snapshots."""
        return (copy for number in numbers for copy in self._tables.get(number, {}).values())

    def _value(self, copy: Copied) -> torch.Tensor:
        """Return the tensor of a copy, on the worker's device."""
        memory = self._upload if copy.borrowed else self._memory
        assert memory is not None
        flat = memory.view(copy.offset, copy.nbytes)
        if not copy.borrowed or self._device.type != "cpu":
            flat = torch.empty(copy.nbytes, dtype=torch.uint8, device=self._device).copy_(flat)
        return view_with_meta(flat, copy.meta)


def _extent_bytes(meta: TensorMeta) -> int:
    """Return the bytes from the beginning of a tensor's storage to its last element."""
    return meta.extent * meta.dtype.itemsize if meta.numel else 0


def _bytes_of(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the bytes of a tensor's memory, from the beginning of its storage."""
    if not meta.numel:
        return torch.empty(0, dtype=torch.uint8)
    if value._is_zerotensor():
        return torch.zeros(_extent_bytes(meta), dtype=torch.uint8)
    value_bits = value.detach()
    if meta.conj:
        value_bits = torch._conj(value_bits)
    if meta.neg:
        value_bits = torch._neg_view(value_bits)
    return value_bits.as_strided((meta.extent,), (1,), 0).view(torch.uint8)


def view_with_meta(flat: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return a view of bytes as a tensor with this meta: dtype, shape, strides, conj, neg."""
    if not meta.numel:
        return meta.empty(flat.device)
    value = flat.view(meta.dtype).as_strided(meta.shape, meta.stride, meta.offset)
    if meta.conj:
        value = torch._conj(value)
    return torch._neg_view(value) if meta.neg else value
