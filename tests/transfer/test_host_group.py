"""Sockets between who broadcasts and who receives: order, turns, deadlines, and who leaves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lazygt.transfer.control import Deadline
from lazygt.transfer.transports.broadcast_group import Broadcast, HostGroup
from tests.support.descriptors import descriptors_before, open_descriptors

pytestmark = pytest.mark.timeout(60)

SECONDS = 20.0
LARGE = 5 << 20  # more than a socket takes without a reader


def group(place: Path, size: int, ranks: list[int] | None = None) -> list[HostGroup]:
    """The ends of all ranks of a group, made in any order."""
    made = {rank: HostGroup(str(place / "group-1"), rank, size) for rank in ranks or range(size)}
    return [made[rank] for rank in range(size)]


def nothing() -> None:
    """Nobody waits."""


def bytes_of(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


def close(ends: list[HostGroup]) -> None:
    for each in ends:
        each.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("order", [1, -1])
def test_broadcasts_arrive_in_order_at_all_members(tmp_path: Path, size: int, order: int) -> None:
    ends = group(tmp_path, size, list(range(size))[::order])
    sent = [bytes_of(number, count) for number, count in enumerate((3, 0, LARGE, 70_001))]
    rooms = [[torch.zeros_like(one) for one in sent] for _ in range(1, size)]
    works: list[Broadcast] = []
    for one, *into in zip(sent, *rooms, strict=True):
        for end, run in zip(ends, (one, *into), strict=True):
            works.append(end.broadcast(run, Deadline(SECONDS), nothing))
    for work in works:
        work.wait()
        assert work.is_completed()
    for room in rooms:
        assert all(torch.equal(a, b) for a, b in zip(room, sent, strict=True))
    assert list(tmp_path.iterdir()) == [], "who has a socket needs its name no more"
    close(ends)


def test_receiver_is_woken_when_broadcast_ends(tmp_path: Path) -> None:
    ends = group(tmp_path, 2)
    woken = threading.Event()
    room = torch.zeros(4, dtype=torch.uint8)
    received = ends[1].broadcast(room, Deadline(SECONDS), woken.set)
    assert not received.is_completed()
    ends[0].broadcast(torch.ones_like(room), Deadline(SECONDS), nothing)
    assert woken.wait(SECONDS)
    assert received.is_completed()
    assert room.tolist() == [1, 1, 1, 1]
    close(ends)


@pytest.mark.parametrize("rank", [0, 1])
def test_absent_member_times_out(tmp_path: Path, rank: int) -> None:
    alone = HostGroup(str(tmp_path / "group-1"), rank, 2)
    run = torch.zeros(LARGE, dtype=torch.uint8)
    work = alone.broadcast(run, Deadline(0.05), nothing)
    with pytest.raises(RuntimeError, match=r"were not there within 0\.05 s"):
        work.wait()
    later = alone.broadcast(run, Deadline(SECONDS), nothing)
    with pytest.raises(RuntimeError, match=r"were not there"):
        later.wait()  # some of the bytes may have gone through
    alone.close()


def test_a_sender_that_leaves_is_noticed(tmp_path: Path) -> None:
    ends = group(tmp_path, 2)
    works = [end.broadcast(bytes_of(0, 8), Deadline(SECONDS), nothing) for end in ends]
    for work in works:
        work.wait()
    waiting = ends[1].broadcast(bytes_of(0, 8), Deadline(SECONDS), nothing)
    ends[0].close()
    with pytest.raises(RuntimeError, match="the sender of the group has left it"):
        waiting.wait()
    close(ends[1:])


@pytest.mark.parametrize("rank", [0, 1])
def test_close_ends_pending_broadcast(tmp_path: Path, rank: int) -> None:
    alone = HostGroup(str(tmp_path / "group-1"), rank, 2)
    work = alone.broadcast(bytes_of(0, LARGE), Deadline(1e6), nothing)
    alone.close()
    with pytest.raises(RuntimeError, match="this process has left the group"):
        work.wait()


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = descriptors_before()
    ends = group(tmp_path, 3)
    run = bytes_of(0, 9)
    for work in [end.broadcast(run.clone(), Deadline(SECONDS), nothing) for end in ends]:
        work.wait()
    close(ends)
    until(lambda: open_descriptors() <= before)
