"""A whole plan: choices, curve, remarks, tables and JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import lazygt
from lazygt.serving.planning import fewest_gpus, fewest_gpus_for_slo
from lazygt.serving.report import AT_HIGH_LOAD, FOR_SLO, FORMULAS, GIVEN, ServicePlan
from lazygt.serving.simulation import Latency, ServiceRun
from lazygt.serving.stages import parse_stage

RANK = "rank:batch=50,infer=80ms"


def plan(*stages: str, qps: float = 3_000, **settings: object) -> ServicePlan:
    """A tenth of the worked cases, for a short time."""
    return lazygt.serving.plan(qps, stages or [RANK], **{"seconds": 20, **settings})


def texts(planned: ServicePlan) -> list[str]:
    return [str(remark) for remark in planned.remarks]


@pytest.fixture(scope="module")
def planned() -> ServicePlan:
    return plan(slo=0.2)


def test_choices_of_gpu_count(planned: ServicePlan) -> None:
    formulas, calm, fewest = planned.choices
    assert [choice.why for choice in planned.choices] == [FORMULAS, AT_HIGH_LOAD, FOR_SLO]
    assert (formulas.gpus, formulas.load) == ((5,), pytest.approx(0.96))
    assert (calm.gpus, calm.load) == ((6,), pytest.approx(0.8))
    assert planned.needed == planned.chosen == fewest
    assert fewest.run.latency.p99 <= 0.2
    assert fewest.gpus == (6,)
    assert formulas.run.latency.p99 > 0.2


def test_latency_rises_with_load(planned: ServicePlan) -> None:
    assert [point.load for point in planned.curve][-1] == 0.98
    for point in planned.curve:
        assert point.qps == pytest.approx(point.load * 6 * 625)
    first, *_, last = planned.curve
    assert first.run.latency.p99 < 0.17 < 0.2 < last.run.latency.p99
    assert first.mean > last.mean  # the formula waits for full batches


def test_plan_prints_its_tables(planned: ServicePlan) -> None:
    lines = str(planned).splitlines()
    assert lines[0] == "3,000 requests a second, 99 of 100 within 200 ms"
    for title in (
        "formulas",
        "simulated: Poisson arrivals, a queue a GPU (random), 20 s, seed 0",
        "latency against throughput, 6 GPUs (fewest for the SLO)",
        "to mind",
    ):
        assert any(line.startswith(title) for line in lines), title
    assert lines[4].split() == [
        "rank", "50", "80", "ms", "625", "5", "96%", "600", "83.3", "ms", "122", "ms", "163", "ms",
    ]  # fmt: skip


def test_plan_as_json(planned: ServicePlan) -> None:
    numbers = json.loads(json.dumps(planned.as_dict(), allow_nan=False))
    assert numbers["needed"] == {"rank": 6}
    assert numbers["formulas"]["mean"] == pytest.approx(planned.mean)
    assert numbers["choices"][0]["p99"] == planned.choices[0].run.latency.p99
    assert len(numbers["curve"]) == len(planned.curve)
    json.dumps(plan("find:delay=20ms", "rank:batch=8,infer=9ms,wait=full").as_dict(),
               allow_nan=False)  # fmt: skip


def test_gpus_that_are_given() -> None:
    planned = plan(RANK + ",gpus=12", slo=0.2)
    assert [choice.why for choice in planned.choices] == [GIVEN, AT_HIGH_LOAD, FOR_SLO]
    assert planned.chosen.gpus == (12,)
    assert planned.needed is not None
    assert planned.needed.gpus == (6,)
    assert not any("missed" in text for text in texts(planned))


def test_loads_are_said() -> None:
    (high, *_) = texts(plan(RANK + ",gpus=5"))
    assert high.startswith("rank: a load of 96% on 5 GPUs, more than 85%: queues build up")
    (full, *_) = texts(plan(RANK, qps=3_125))
    assert full.startswith("rank: a load of 100% on 5 GPUs: with random arrivals the queue")
    (over, *_) = texts(plan(RANK + ",gpus=4"))
    assert over.startswith("rank: a load of 120% on 4 GPUs: the queue grows as long")
    assert texts(plan(RANK + ",gpus=6")) == []


def test_an_slo_that_is_missed() -> None:
    (_, missed) = texts(plan(RANK + ",gpus=5", slo=0.17))[:2]
    assert missed.startswith("the SLO of 170 ms is missed as given: the p99 is ")


def test_few_gpus_for_an_slo_have_nothing_left() -> None:
    planned = plan(slo=0.5)
    assert planned.needed is not None
    assert planned.needed.gpus == (5,)
    said = "the fewest GPUs for the SLO are busy for 96% of the time, and nothing is left"
    assert any(text.startswith(said) for text in texts(planned))


def test_an_slo_that_no_number_of_gpus_holds() -> None:
    planned = plan("s:batch=50,infer=80ms,wait=full", qps=1_000, slo=0.081)
    assert planned.needed is None
    assert texts(planned)[-1].startswith("no number of GPUs that was tried has a p99 within 81 ms")


def test_stages_without_gpus() -> None:
    planned = plan("find:delay=20ms", slo=0.03)
    assert (planned.mean, planned.curve, texts(planned)) == (0.02, (), [])
    assert "simulated" not in str(planned)
    with pytest.raises(ValueError, match="no stage with GPUs"):
        planned.plot("curve.png")


def test_arrival_file_sets_rate(tmp_path: Path) -> None:
    path = tmp_path / "seen.txt"
    path.write_text("\n".join(str(0.01 * number) for number in range(501)))
    planned = plan("s:batch=4,infer=20ms", qps=None, arrivals=str(path))
    assert planned.qps == pytest.approx(100)
    assert planned.choices[0].run.requests == 501
    assert "simulated: 501 arrivals of seen.txt, a queue a GPU (random), 5.01 s" in str(planned)
    with pytest.raises(ValueError, match="how many requests a second"):
        lazygt.serving.plan(None, [RANK])


def test_one_queue_collects_at_the_rate_of_all() -> None:
    """Where GPUs take from one queue, the second mistake is none, and the formula holds."""
    planned = plan(
        "s:batch=50,infer=80ms,wait=50ms,gpus=6", balance="shared", claims=["s:collection=16.7ms"]
    )
    (numbers,) = planned.formulas
    assert (numbers.arriving, numbers.collection) == (3_000, pytest.approx(50 / 3_000))
    assert texts(planned) == [
        "s: collection=16.7 ms holds: batch / rate = 50 / 3,000 requests a second at one queue"
    ]
    assert planned.choices[0].run.latency.mean == pytest.approx(planned.mean, rel=0.02)
    alone = plan("s:batch=50,infer=80ms,wait=20ms,gpus=6")
    assert [remark.mistake for remark in alone.remarks] == [2]


def test_invalid_planning_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="balance is one of random, round-robin, shared, not 'x'"):
        plan(balance="x")
    for seconds in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="s can't be simulated: give more than 0"):
            plan(seconds=seconds)


# -- the fewest GPUs ---------------------------------------------------------------------------


def holding(needed: tuple[int, ...]) -> tuple[list[tuple[int, ...]], object]:
    """A simulation that holds 1 s with so many GPUs a stage or more, and what was tried."""
    tried: list[tuple[int, ...]] = []

    def simulated(gpus: tuple[int, ...]) -> ServiceRun:
        tried.append(gpus)
        enough = all(have >= need for have, need in zip(gpus, needed, strict=True))
        took = 0.5 if enough else 2.0
        return ServiceRun(1, 1.0, Latency(took, took, took), ())

    return tried, simulated


@pytest.mark.parametrize("needed", [(49,), (51,), (60,), (97,), (700,)])
def test_the_fewest_of_one_stage(needed: tuple[int, ...]) -> None:
    tried, simulated = holding(needed)
    found = fewest_gpus_for_slo(30_000, [parse_stage(RANK)], 1.0, simulated)
    assert found == needed
    assert len(tried) < 30


def test_the_fewest_of_several_stages() -> None:
    stages = [parse_stage(RANK), parse_stage("find:delay=1ms"), parse_stage("b:infer=1ms")]
    _, simulated = holding((55, 0, 33))
    assert fewest_gpus_for_slo(30_000, stages, 1.0, simulated) == (55, 0, 33)


def test_never_as_few_as_are_always_busy() -> None:
    _, simulated = holding((1,))
    assert fewest_gpus_for_slo(30_000, [parse_stage(RANK)], 1.0, simulated) == (49,)
    assert [fewest_gpus(busy) for busy in (0.5, 1.0, 48.0, 48.5)] == [1, 2, 49, 49]


def test_no_gpu_count_meets_impossible_limit() -> None:
    tried, simulated = holding((10**9,))
    assert fewest_gpus_for_slo(30_000, [parse_stage(RANK)], 1.0, simulated) is None
    assert len(tried) < 20
