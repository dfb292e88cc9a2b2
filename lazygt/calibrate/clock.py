"""Clocks, and minimum times on a machine with other load."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, TypeVar

import torch

Work = Callable[[], object]
K = TypeVar("K", bound=Hashable)
#: At most so many calls are timed together.
_MOST = 10_000


class Clock(Protocol):
    """Times work on one kind of device."""

    def seconds(self, work: Work, times: int) -> float:
        """Of ``times`` calls in a row, until the last one is done."""
        ...


class HostClock:
    """Clock for work that is done when its call returns.

    Args:
        threads: that do the work. A single thread's CPU time counts, so that other load on its
            core does not matter.
    """

    def __init__(self, threads: int = 1) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter

    def seconds(self, work: Work, times: int) -> float:
        begin = self._now()
        for _ in range(times):
            work()
        return self._now() - begin


class EventClock:
    """Clock for kernels of a GPU: events before and behind them, on the same stream.

    Args:
        cuda: ``torch.cuda``, or a stand-in of a test.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda

    def seconds(self, work: Work, times: int) -> float:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda.synchronize()  # what was launched before is none of this
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


def least(
    clock: Clock,
    works: Mapping[K, Work],
    rounds: int,
    spend: float,
    told: Callable[[], object] = lambda: None,
) -> dict[K, float]:
    """Return the minimum seconds of each work over all rounds.

    Disturbances only ever add time, and last a while: so all works are timed once a round.

    Args:
        spend: seconds for each in a round, about.
        told: called after each.
    """
    times = {}
    for key, work in works.items():
        clock.seconds(work, 1)
        once = max(clock.seconds(work, 1), 1e-7)
        times[key] = min(max(int(spend / once), 1), _MOST)
    best: dict[K, float] = {}
    for _ in range(rounds):
        for key, work in works.items():
            took = clock.seconds(work, times[key]) / times[key]
            best[key] = min(best.get(key, took), took)
            told()
    return best
