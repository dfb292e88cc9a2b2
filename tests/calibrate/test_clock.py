"""Clocks, by stand-ins for time that passes and for a GPU."""

from __future__ import annotations

from collections.abc import Callable

from lazygt.calibrate.device_benchmarks import EventClock, HostClock, minimum_seconds


class Scripted:
    """A clock on which each piece of work takes what is said, slower when it is disturbed."""

    def __init__(self, disturbed: tuple[int, ...]) -> None:
        self.now, self.calls, self.disturbed, self.timed = 0.0, 0, disturbed, 0

    def lasting(self, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.calls += 1
            self.now += seconds

        return work

    def seconds(self, work: Callable[[], object], times: int) -> float:
        self.timed += 1
        begin = self.now
        for _ in range(times):
            work()
        return (self.now - begin) * (10 if self.timed in self.disturbed else 1)


def test_the_least_of_all_rounds_counts() -> None:
    clock = Scripted(disturbed=(5, 6, 7, 10))  # the first four are for finding out how often
    works = {"fast": clock.lasting(1e-3), "slow": clock.lasting(0.5)}
    told: list[None] = []
    found = minimum_seconds(clock, works, 3, 0.01, lambda: told.append(None))
    assert {name: round(took, 9) for name, took in found.items()} == {"fast": 1e-3, "slow": 0.5}
    assert len(told) == 6
    assert clock.calls == 2 * 2 + 3 * (10 + 1)


def test_zero_time_function_has_bounded_repeats() -> None:
    clock = Scripted(disturbed=())
    assert minimum_seconds(clock, {"nothing": clock.lasting(0.0)}, 1, 1.0) == {"nothing": 0.0}
    assert clock.calls == 2 + 10_000


def test_the_host_clock_counts_calls() -> None:
    calls: list[None] = []
    assert HostClock().seconds(lambda: calls.append(None), 7) >= 0
    assert len(calls) == 7


class Cuda:
    """What of ``torch.cuda`` a clock needs: work is launched and takes 2 ms when it is run."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queued = 0
        self.done = 0.0

    def launch(self) -> None:
        self.log.append("work")
        self.queued += 1

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.run()

    def run(self) -> None:
        self.done += 2.0 * self.queued
        self.queued = 0

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.at, self.reached = cuda, -1.0, False

    def record(self) -> None:
        self.cuda.log.append("event")
        self.at = self.cuda.done + 2.0 * self.cuda.queued

    def synchronize(self) -> None:
        self.cuda.run()
        self.reached = True

    def elapsed_time(self, end: Event) -> float:
        assert end.reached, "an event that was not waited for has no time"
        return end.at - self.at


def test_a_gpu_is_timed_between_two_events_of_its_stream() -> None:
    cuda = Cuda()
    for _ in range(3):  # of whoever was before
        cuda.launch()
    assert EventClock(cuda).seconds(cuda.launch, 4) == 4 * 2e-3
    assert cuda.log[3:] == ["synchronize", "event", *["work"] * 4, "event"]
