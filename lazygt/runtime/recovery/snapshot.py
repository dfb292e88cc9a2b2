"""Snapshots: copies of a worker's values in memory that outlives it.

The memory is a memfd that the client holds open, so the process that takes a dead worker's place
finds it as it was. A value is written once, so what an earlier snapshot has is not copied again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.runtime.launch.procfs import memory_left
from lazygt.runtime.messages import Copied, Restore, Snap, Snapped
from lazygt.runtime.shared_memory import read_note
from lazygt.runtime.store import Failed, Store

if TYPE_CHECKING:
    from lazygt.runtime.shared_memory import Arena


class Snapshots:
    """One worker's.

    Args:
        memory: where copies go; nobody else allocates there.
        ranks: how many workers do so at once.
        upload: the client's arena: what still lies there needs no copy.
    """

    def __init__(
        self, memory: Arena, upload: Arena | None, device: torch.device, ranks: int
    ) -> None:
        self._memory, self._upload, self._device, self._ranks = memory, upload, device, ranks
        #: by the snapshot's number, and then by value
        self._tables: dict[int, dict[int, Copied]] = {}

    def take(self, snap: Snap, store: Store, next_dynamic: int, generator: torch.Tensor) -> Snapped:
        """Copy the values that no snapshot has.

        Args:
            next_dynamic, generator: see ``Snapped``.
        """
        begin = time.monotonic_ns()
        self._forget_all_but(snap.committed)
        before = self._tables.get(snap.committed, {})
        table = self._tables[snap.number] = {}
        copied, failed = 0, []
        try:
            self._check_room(store, before)
            for key, value in store.values.items():
                if isinstance(value, Failed):
                    failed.append((key, value.failure))
                elif key in before:
                    table[key] = before[key]
                else:
                    table[key] = self._copied(key, value, store.borrowed.get(key))
                    copied += 0 if key in store.borrowed else table[key].nbytes
        except (MemoryError, RuntimeError) as error:
            self._forget_all_but(snap.committed)
            return Snapped(snap.number, error=f"{type(error).__name__}: {error}")
        return Snapped(
            snap.number,
            tuple(table.values()),
            tuple(failed),
            next_dynamic,
            generator.numpy().tobytes(),
            copied,
            begin,
            time.monotonic_ns() - begin,
        )

    def _check_room(self, store: Store, before: Mapping[int, Copied]) -> None:
        """Raise MemoryError where copies would take more than half of the memory that is left.

        The kernel would not say no: it would kill somebody.
        """
        needed = self._ranks * sum(
            value.nbytes
            for key, value in store.values.items()
            if not (isinstance(value, Failed) or key in before or key in store.borrowed)
        )
        room = memory_left() + self._memory.bytes_held - self._memory.bytes_in_use
        if needed > room // 2:
            raise MemoryError(f"{needed:,} bytes to copy, and {room:,} bytes of memory are left")

    def restore(self, restore: Restore, store: Store) -> None:
        """Have the values of a snapshot again, and no others but those that count as failed
        where they are lost, and are still here."""
        here = ((key, store.values.get(key)) for key, _ in restore.failed)
        kept = {key: value for key, value in here if isinstance(value, torch.Tensor)}
        store.clear()
        known = self._tables.get(restore.number)
        self._forget_all_but(restore.number)
        if known is None and restore.number:
            for row in restore.values:
                if not row.borrowed:
                    self._memory.claim(row.offset, row.nbytes)
        self._tables = {restore.number: {row.id: row for row in restore.values}}
        for row in restore.values:
            store.put(row.id, self._value(row), row.offset if row.borrowed else None)
        for key, failure in restore.failed:
            store.put(key, kept.get(key, Failed(failure)))

    def mark(self, run: int, step: int) -> None:
        """Say which step of a run begins, to whoever looks for what killed this process."""
        self._memory.note(run, step)

    def marked(self) -> tuple[int, int]:
        """The run and the step that were said last."""
        return read_note(self._memory.fd)

    def _forget_all_but(self, number: int) -> None:
        """Give back the room of all snapshots but one."""
        kept = {row.offset for row in self._rows([number]) if not row.borrowed}
        others = [key for key in self._tables if key != number]
        gone = {row.offset for row in self._rows(others) if not row.borrowed}
        for offset in gone - kept:
            self._memory.free(offset)
        self._tables = {key: t for key, t in self._tables.items() if key == number}

    def _rows(self, numbers: Iterable[int]) -> Iterable[Copied]:
        return (row for number in numbers for row in self._tables.get(number, {}).values())

    def _copied(self, key: int, value: torch.Tensor, offset: int | None) -> Copied:
        meta = TensorMeta.of(value)
        if offset is not None:
            return Copied(key, meta, offset, _extent_bytes(meta), True)
        slot = self._memory.put(_memory_of(value, meta))
        return Copied(key, meta, slot.offset, slot.nbytes)

    def _value(self, row: Copied) -> torch.Tensor:
        memory = self._upload if row.borrowed else self._memory
        assert memory is not None
        flat = memory.view(row.offset, row.nbytes)
        if not row.borrowed or self._device.type != "cpu":
            flat = torch.empty(row.nbytes, dtype=torch.uint8, device=self._device).copy_(flat)
        return laid_out(flat, row.meta)


def _extent_bytes(meta: TensorMeta) -> int:
    return meta.extent * meta.dtype.itemsize if meta.numel else 0


def _memory_of(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The bytes that a tensor lies on, from where its storage begins."""
    if not meta.numel:
        return torch.empty(0, dtype=torch.uint8)
    if value._is_zerotensor():
        return torch.zeros(_extent_bytes(meta), dtype=torch.uint8)
    plain = value.detach()
    if meta.conj:
        plain = torch._conj(plain)
    if meta.neg:
        plain = torch._neg_view(plain)
    return plain.as_strided((meta.extent,), (1,), 0).view(torch.uint8)


def laid_out(flat: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor of this meta on these bytes."""
    if not meta.numel:
        return meta.empty(flat.device)
    value = flat.view(meta.dtype).as_strided(meta.shape, meta.stride, meta.offset)
    if meta.conj:
        value = torch._conj(value)
    return torch._neg_view(value) if meta.neg else value
