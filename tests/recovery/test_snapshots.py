"""Snapshots of a GPU's values: they are copied to the host beside later runs."""

from __future__ import annotations

import os
import select

import pytest
import torch

from lazygt.graph.meta import TensorMeta
from lazygt.recovery.snapshot import Snapshots
from lazygt.runtime.arenas import Arena
from lazygt.runtime.executors.exchange import HostCopies
from lazygt.runtime.messages import Restore, Snap, Snapped
from lazygt.runtime.store import Store
from tests.runtime.copies_stand_in import Cuda

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
STATE = torch.zeros(8, dtype=torch.uint8)
MIB = 1 << 20


class Taker:
    """Snapshots of a store, copied by a stand-in of torch.cuda."""

    def __init__(self, free: int = 1 << 30) -> None:
        self.cuda, self.store = Cuda(free=free), Store()
        copies = HostCopies(CPU, self.cuda)
        self.snapshots = Snapshots(Arena.create(MIB), None, CPU, 1, copies)

    def take(self, number: int, committed: int = 0) -> Snapped | None:
        return self.snapshots.take(Snap(number, committed), self.store, 0, STATE)

    def finished(self) -> Snapped:
        """The answer, once the eventfd tells of it."""
        assert self.snapshots.wakes is not None
        ready, _, _ = select.select([self.snapshots.wakes], [], [], 60.0)
        assert ready
        os.eventfd_read(self.snapshots.wakes)
        answer = self.snapshots.finished()
        assert answer is not None
        return answer

    def restored(self, answer: Snapped) -> dict[int, torch.Tensor]:
        """The values after a restore of a snapshot."""
        restore = Restore(1, 0, answer.number, answer.values, answer.failed)
        self.snapshots.restore(restore, self.store)
        return {key: self.store.get(key) for key in self.store.values}  # type: ignore[misc]


def test_values_overwritten_meanwhile_are_restored_as_they_were() -> None:
    taker = Taker()
    value = torch.arange(1000.0)
    taker.store.put(7, value)
    assert taker.take(1) is None
    assert taker.snapshots.finished() is None, "its copy has not been made yet"
    value.zero_()
    (made,) = taker.cuda.events
    made.came.set()
    answer = taker.finished()
    assert taker.cuda.side.waits == 1
    assert (answer.error, answer.nbytes) == ("", 4000)
    assert taker.snapshots.finished() is None, "it is told once"
    assert torch.equal(taker.restored(answer)[7], torch.arange(1000.0))
    assert taker.cuda.kernels.waits == 0


def test_later_snapshot_copies_only_new_values() -> None:
    taker = Taker()
    taker.store.put(1, torch.ones(10))
    taker.take(1)
    taker.cuda.events[0].came.set()
    first = taker.finished()
    taker.store.put(2, torch.full((3, 2), 2.0).T)
    taker.take(2, committed=1)
    taker.cuda.events[-1].came.set()
    second = taker.finished()
    assert (first.nbytes, second.nbytes) == (40, 24)
    values = taker.restored(second)
    assert torch.equal(values[1], torch.ones(10))
    assert TensorMeta.of(values[2]) == TensorMeta.of(torch.full((3, 2), 2.0).T)


def test_a_snapshot_that_nobody_wants_any_more_is_waited_for_and_given_back() -> None:
    taker = Taker()
    taker.store.put(1, torch.ones(MIB // 8))
    taker.take(1)
    taker.cuda.events[0].came.set()
    taker.snapshots.restore(Restore(1, 0, 0), taker.store)
    assert taker.snapshots.finished() is None
    assert taker.snapshots._memory.bytes_in_use == 0


def test_without_room_on_the_gpu_the_copies_are_made_at_once() -> None:
    taker = Taker(free=1000)
    taker.store.put(1, torch.ones(1000))
    answer = taker.take(1)
    assert answer is not None
    assert (answer.error, answer.nbytes) == ("", 4000)
    assert taker.cuda.kernels.waits == 1


def test_snapshots_of_cpu_values_are_taken_at_once() -> None:
    store = Store()
    store.put(1, torch.ones(10))
    snapshots = Snapshots(Arena.create(MIB), None, CPU, 1)
    assert snapshots.wakes is None
    answer = snapshots.take(Snap(1), store, 5, STATE)
    assert answer is not None
    assert (answer.nbytes, answer.next_dynamic, answer.generator) == (40, 5, bytes(8))
