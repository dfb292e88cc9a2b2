"""The watch over the workers: lists of timed events in, lists of instructions out."""

from __future__ import annotations

import pytest

from lazygt.runtime.launch.supervise import (
    TICK_SECONDS,
    Ended,
    Heard,
    Ping,
    ReportDied,
    ReportFrozen,
    Tick,
    Used,
    Watch,
)


def run(watch, events):
    """Feed (time, event) pairs; the (time, instruction) pairs that came out."""
    return [(now, step) for now, event in events for step in watch.handle(event, now)]


def ticks(begin, end, step=TICK_SECONDS):
    count = round((end - begin) / step)
    return [(begin + index * step, Tick()) for index in range(count + 1)]


def started(frozen_after=10.0, start_timeout=60.0, world_size=1):
    watch = Watch(world_size, 0.0, frozen_after, start_timeout)
    for rank in range(world_size):
        watch.handle(Heard(rank), 0.0)
    return watch


def test_a_short_wait_asks_nothing():
    assert run(started(), ticks(0, 2)) == []


def test_a_silent_worker_is_asked_once_and_frozen_after_a_whole_deadline():
    assert run(started(), ticks(0, 10)) == [(2.5, Ping(0)), (10.0, ReportFrozen(0, 10.0))]


def test_not_frozen_one_tick_before_the_deadline():
    assert run(started(), ticks(0, 9.5)) == [(2.5, Ping(0))]


def test_a_worker_that_was_not_asked_before_has_time_to_answer():
    asked_late = [(100.0, Tick()), *ticks(100.5, 107.5)]
    assert run(started(), asked_late) == [(100.0, Ping(0)), (107.5, ReportFrozen(0, 10.0))]


def test_a_worker_that_works_has_longer():
    busy = [*ticks(0, 7), (7.0, Used(0, 0.1, runnable=False)), *ticks(7.5, 14.5)]
    assert run(started(), busy) == [(2.5, Ping(0)), (14.5, ReportFrozen(0, 10.0))]


def test_a_worker_that_works_and_never_answers_is_frozen_all_the_same():
    work = Used(0, TICK_SECONDS, runnable=True)
    busy = [(now, event) for now, tick in ticks(0, 70) for event in (work, tick)]
    assert run(started(), busy)[:2] == [(2.5, Ping(0)), (62.5, ReportFrozen(0, 10.0))]


@pytest.mark.parametrize(
    ("seconds", "runnable", "frozen"),
    [
        pytest.param(0.0, False, 10.0, id="still: stopped, in a lock, or in a disk's driver"),
        pytest.param(0.001, False, 10.0, id="asks for the interpreter again and again"),
        pytest.param(0.0, True, None, id="waits for a processor, or its cgroup is throttled"),
        pytest.param(0.005, True, None, id="a hundredth of a processor"),
        pytest.param(0.05, False, None, id="a tenth of a processor, with waits in between"),
        pytest.param(0.5, True, 62.5, id="a whole processor: six deadlines, then it spins"),
        pytest.param(8.0, True, 62.5, id="sixteen processors"),
    ],
)
def test_processor_use_defers_frozen_report(seconds, runnable, frozen):
    use = Used(0, seconds, runnable)
    events = [(now, event) for now, tick in ticks(0, 200) for event in (use, tick)]
    reports = [now for now, step in run(started(), events) if isinstance(step, ReportFrozen)]
    assert reports[:1] == ([] if frozen is None else [frozen])


def test_work_before_ping_is_no_answer():
    events = [(2.0, Used(0, 2.0, runnable=True)), *ticks(2.5, 10.0)]
    assert run(started(), events) == [(2.5, Ping(0)), (10.0, ReportFrozen(0, 10.0))]


def test_pong_restarts_silence():
    events = [*ticks(0, 3), (3.0, Heard(0)), *ticks(3.5, 5.0), *ticks(5.5, 12.5)]
    assert run(started(), events) == [(2.5, Ping(0)), (5.5, Ping(0))]


def test_a_long_computation_with_pongs_is_never_frozen():
    watch = started(frozen_after=1.0)
    seen = []
    for now, tick in ticks(0, 100):
        for step in watch.handle(tick, now):
            seen.append(step)
            watch.handle(Heard(step.rank), now)
    assert set(seen) == {Ping(0)}


def test_frozen_is_said_again_after_each_further_deadline():
    said = [now for now, step in run(started(), ticks(0, 33)) if isinstance(step, ReportFrozen)]
    assert said == [10.0, 20.0, 30.0]


def test_a_worker_that_wakes_is_no_longer_frozen():
    watch = started()
    run(watch, ticks(0, 12.5))
    assert watch.is_frozen(0)
    assert watch.awaiting_pong == (0,)
    watch.handle(Heard(0), 13.0)
    assert not watch.is_frozen(0)
    assert watch.awaiting_pong == ()


def test_a_starting_worker_has_the_longer_deadline():
    watch = Watch(1, 0.0, frozen_after=10.0, start_timeout=60.0)
    assert run(watch, ticks(0, 60)) == [(2.5, Ping(0)), (60.0, ReportFrozen(0, 60.0))]


def test_a_client_that_was_away_gives_the_answer_time_to_arrive():
    watch = started()
    away = [*ticks(0, 3), (100.0, Tick()), (100.25, Tick()), (100.25, Heard(0)), *ticks(100.5, 102)]
    assert run(watch, away) == [(2.5, Ping(0))]


def test_a_client_that_was_away_still_finds_a_frozen_worker():
    events = [*ticks(0, 3), *ticks(100.0, 101.0)]
    assert run(started(), events) == [(2.5, Ping(0)), (100.5, ReportFrozen(0, 10.0))]


def test_a_death_is_reported_once_and_the_dead_are_not_asked():
    events = [(1.0, Ended(0)), (1.0, Ended(0)), *ticks(1.5, 40)]
    assert run(started(), events) == [(1.0, ReportDied(0))]


def test_ranks_are_judged_each_for_itself():
    events = [*ticks(0, 2.5), (2.6, Heard(1)), (3.0, Ended(2)), *ticks(3.0, 5.0)]
    said = run(started(world_size=3), events)
    assert said == [(2.5, Ping(0)), (2.5, Ping(1)), (2.5, Ping(2)), (3.0, ReportDied(2))]


@pytest.mark.parametrize(
    ("events", "now", "seconds"),
    [
        ([], 0.0, TICK_SECONDS),
        ([(0.0, Tick())], 2.25, 0.25),
        ([(2.5, Tick())], 9.75, 0.25),
        ([(2.5, Tick())], 20.0, 0.0),
        ([(0.0, Ended(0))], 20.0, TICK_SECONDS),
    ],
)
def test_seconds_to_next_tick(events, now, seconds):
    watch = started()
    run(watch, events)
    assert watch.seconds_to_next(now) == seconds


def test_a_worker_that_answers_has_started():
    watch = Watch(1, 0.0, 1.0, 60.0)
    watch.handle(Heard(0), 1.0)
    assert watch.is_started(0)
    frozen = [step for _, step in run(watch, ticks(1, 10))]
    assert ReportFrozen(0, 1.0) in frozen
