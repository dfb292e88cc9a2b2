"""Requests through queues: small cases by hand, one by one, and what is known of random ones."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from lazygt.serving.simulation import (
    Bursty,
    Poisson,
    RecordedArrivals,
    ServiceRun,
    _serve_queue,
    _serve_stage,
    simulate,
    simulated_seconds,
)
from lazygt.serving.stages import Stage, parse_stage, stage_numbers


def done(came: list[float], stage: str, gpus: int = 1) -> list[float]:
    """When requests are done that wait in one queue."""
    return np.round(_serve_queue(np.array(came), parse_stage(f"s:{stage}"), gpus).done, 9).tolist()


def run(qps: float, *stages: str, seconds: float = 30, **settings: object) -> ServiceRun:
    numbers = [stage_numbers(qps, parse_stage(stage)) for stage in stages]
    return simulate(qps, numbers, settings.pop("arrivals", Poisson()), seconds, **settings)


# -- by hand -----------------------------------------------------------------------------------


def test_free_gpu_takes_all_waiting_requests() -> None:
    """The first goes alone; two come meanwhile, and a third when these are under way."""
    assert done([0, 1, 2, 11], "batch=8,infer=10s") == [10, 20, 20, 30]


def test_a_batch_has_room_for_so_many() -> None:
    assert done([0, 1, 2, 3], "batch=2,infer=10s") == [10, 20, 20, 30]


def test_a_batch_waits_for_others() -> None:
    """At most 5 s, and no longer than until it is full."""
    assert done([0, 1, 2, 20], "batch=3,infer=10s,wait=5s") == [12, 12, 12, 30]
    assert done([0, 1, 9, 20], "batch=3,infer=10s,wait=5s") == [15, 15, 25, 35]
    assert done([0, 1, 50, 51], "batch=3,infer=10s,wait=full") == [60, 60, 60, 70]


def test_a_wait_begins_when_the_first_comes() -> None:
    """The second batch has waited long enough while the GPU was busy."""
    assert done([0, 4, 9], "batch=8,infer=10s,wait=3s") == [13, 23, 23]


def test_one_queue_for_two_gpus() -> None:
    assert done([0, 1, 2, 3], "batch=1,infer=10s", gpus=2) == [10, 11, 20, 21]
    assert done([0, 1, 2, 3], "batch=4,infer=10s", gpus=2) == [10, 11, 20, 20]


def test_a_fuller_batch_takes_longer() -> None:
    assert done([0, 1, 2], "batch=4,infer=1s,items=10,per_item=100ms") == [2, 5, 5]


def test_a_request_goes_on_when_its_last_part_is_done() -> None:
    numbers = stage_numbers(1, parse_stage("s:batch=1,infer=2s,fan=3,gpus=2,delay=1s"))
    served = _serve_stage(np.array([0.0, 10.0]), numbers, "round-robin", np.random.default_rng(0))
    assert served.done.tolist() == [5, 15]  # two of the parts follow one another on the first GPU


def test_an_arrival_file_goes_through_stage_by_stage() -> None:
    recorded = RecordedArrivals("seen", (0.0, 1.0, 2.0))
    stages = [stage_numbers(1, parse_stage(text)) for text in ("a:infer=2s", "b:delay=1s")]
    result = simulate(1.0, stages, recorded, 60)
    assert recorded.qps == 1
    assert result.latency.mean == pytest.approx((3 + 4 + 5) / 3)
    assert [each.latency.mean for each in result.stages] == pytest.approx([3, 1])
    assert result.requests == 3


@pytest.mark.parametrize("gpus", [1, 3])
@pytest.mark.parametrize("load", [0.5, 0.95])
def test_queue_matches_event_simulation(gpus: int, load: float) -> None:
    """What is computed at once for all requests, with a heap of free GPUs."""
    came = Poisson().times(load * gpus, 500, np.random.default_rng(3))
    free, expected = [0.0] * gpus, []
    for time in came:
        expected.append(max(time, free[0]) + 1)
        heapq.heapreplace(free, expected[-1])
    served = _serve_queue(came, Stage("s", infer=1.0), gpus)
    np.testing.assert_allclose(served.done, expected, rtol=0, atol=1e-9)


# -- what is known -----------------------------------------------------------------------------


def test_a_single_server_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) of a service."""
    for load in (0.3, 0.6, 0.8):
        result = run(100 * load, "s:infer=10ms", seconds=4_000)
        expected = 0.01 * (1 + load / (2 * (1 - load)))
        assert result.latency.mean == pytest.approx(expected, rel=0.02)
        assert result.stages[0].load == pytest.approx(load, rel=0.02)


def test_full_batches_wait_as_the_formula_says() -> None:
    """Far from full load only the collection is waited for: (batch - 1) / 2 arrivals."""
    result = run(1_000, "s:batch=50,infer=10ms,wait=full,gpus=4", seconds=100)
    assert result.latency.mean == pytest.approx(49 / 2 / 250 + 0.01, rel=0.01)
    assert result.stages[0].requests > 49.9  # but for the last
    formula = stage_numbers(1_000, parse_stage("s:batch=50,infer=10ms,gpus=4")).mean
    assert result.latency.mean == pytest.approx(formula, rel=0.03)


def test_greedy_batches_wait_half_an_inference() -> None:
    result = run(400, "s:batch=50,infer=100ms,gpus=1", seconds=500)
    assert result.latency.mean == pytest.approx(0.15, rel=0.01)
    assert result.latency.p99 == pytest.approx(0.2, rel=0.01)
    assert result.stages[0].requests == pytest.approx(40, rel=0.02)


@pytest.mark.parametrize(("gpus", "mean", "p99"), [(63, 164, 246), (75, 152, 200)])
def test_known_figures(gpus: int, mean: float, p99: float) -> None:
    """30,000 QPS, batches of 50 in 100 ms that wait as long as one takes: known figures in ms."""
    result = run(30_000, f"rank:batch=50,infer=100ms,wait=100ms,gpus={gpus}", seconds=30)
    assert 1e3 * result.latency.mean == pytest.approx(mean, rel=0.01)
    assert 1e3 * result.latency.p99 == pytest.approx(p99, rel=0.03)


def test_at_full_load_it_grows_with_the_time_that_is_simulated() -> None:
    """60 GPUs have no steady state: queues walk at random. Four times as long is about twice the
    wait; 357 ms in the mean is what comes of a minute."""
    short, long = (
        run(30_000, "rank:batch=50,infer=100ms,gpus=60", seconds=seconds).latency.mean - 0.15
        for seconds in (15, 60)
    )
    assert long / short == pytest.approx(2, rel=0.15)
    assert long + 0.15 == pytest.approx(0.357, rel=0.1)


def test_one_queue_waits_least() -> None:
    waits = [
        run(1_000, "s:batch=10,infer=20ms,wait=5ms,gpus=2", balance=balance).latency.mean
        for balance in ("random", "round-robin", "shared")
    ]
    assert waits == sorted(waits, reverse=True)


def test_bursts_wait_longer() -> None:
    stage = "s:batch=10,infer=20ms,gpus=3"
    calm, bursty = (
        run(1_000, stage, arrivals=arrivals).latency.p99 for arrivals in (Poisson(), Bursty())
    )
    assert bursty > 2 * calm


def test_the_same_seed_gives_the_same() -> None:
    stages = "a:batch=10,infer=20ms", "b:batch=4,infer=10ms,fan=2"
    first, again, other = (run(500, *stages, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


# -- how much is simulated ---------------------------------------------------------------------


def test_simulated_duration() -> None:
    stage = parse_stage("s:batch=50,infer=100ms")
    assert simulated_seconds(30_000, [stage]) == 60
    assert simulated_seconds(10, [stage]) == 2_000  # enough requests for a percentile
    assert simulated_seconds(1e6, [stage]) == pytest.approx(10)  # 100 batches of each GPU


def test_more_than_fits() -> None:
    with pytest.raises(ValueError, match="and at most 5e\\+07 can be: give fewer seconds"):
        run(1e9, "s:batch=50,infer=100ms", seconds=60)


def test_simulation_without_arrivals_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing arrives in .* give more seconds"):
        run(1e-9, "s:infer=1s", seconds=1)


def test_a_stage_waits_until_full_by_its_own_word() -> None:
    assert parse_stage("s:batch=2,infer=1s,wait=full").wait == math.inf
