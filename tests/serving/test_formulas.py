"""The formulas of a service: every worked case of the notes that they are from, to the digit."""

from __future__ import annotations

import pytest

from lazygt.serving.stages import (
    HIGH_LOAD,
    Stage,
    busy_gpus,
    collection_seconds,
    gpus_at_load,
    gpus_needed,
    parse_stage,
    qps_of_gpu,
    stage_numbers,
)


@pytest.mark.parametrize(
    ("total", "stage", "of_gpu", "gpus", "arriving", "collection", "mean", "first"),
    [
        (30_000, "batch=50,infer=100ms", 500, 60, 500, 100, 150, 200),
        (30_000, "batch=20,infer=40ms", 500, 60, 500, 40, 60, 80),
        (30_000, "batch=20,infer=30ms", 667, 45, 667, 30, 45, 60),
        (30_000, "batch=50,infer=80ms", 625, 48, 625, 80, 120, 160),
        (50_000, "batch=50,infer=80ms", 625, 80, 625, 80, 120, 160),
        (30_000, "batch=50,infer=50ms", 1000, 30, 1000, 50, 75, 100),
        (50_000, "batch=30,infer=50ms", 600, 84, 595, 50.4, 75.2, 100.4),
    ],
)
def test_worked_cases(
    total: float, stage: str, of_gpu: int, gpus: int, arriving: int, collection: float,
    mean: float, first: float,
) -> None:  # fmt: skip
    """Requests a second, GPUs and milliseconds."""
    numbers = stage_numbers(total, parse_stage(f"rank:{stage}"))
    assert round(numbers.qps_of_gpu) == of_gpu
    assert numbers.gpus == gpus
    assert round(numbers.arriving) == arriving
    milliseconds = [1e3 * each for each in (numbers.collection, numbers.mean, numbers.first)]
    assert milliseconds == pytest.approx([collection, mean, first], rel=1e-12)


def test_stages_add_up() -> None:
    stages = ["find:delay=20ms", "light:batch=50,infer=50ms", "heavy:batch=20,infer=40ms"]
    means = [stage_numbers(30_000, parse_stage(stage)).mean for stage in stages]
    assert [1e3 * mean for mean in means] == pytest.approx([20, 75, 60])
    assert 1e3 * sum(means) == pytest.approx(155)


def test_budget_left_after_stage() -> None:
    """Of 200 ms, 20 ms and inference of 80 ms leave 100; with the wait for a batch they leave 60,
    into which a stage of 75.2 ms does not go."""
    second = stage_numbers(50_000, parse_stage("light:batch=50,infer=80ms"))
    third = stage_numbers(50_000, parse_stage("heavy:batch=30,infer=50ms"))
    assert 200 - 20 - 1e3 * second.stage.inference == pytest.approx(100)
    assert 200 - 20 - 1e3 * second.mean == pytest.approx(60)
    assert 1e3 * third.mean == pytest.approx(75.2)


def test_gpu_throughput_excludes_waiting() -> None:
    assert qps_of_gpu(50, 0.1) == 500  # and not 50 / 0.2, nor 1 / 0.2


def test_a_batch_is_collected_at_one_gpu() -> None:
    assert collection_seconds(50, 30_000 / 60) == 0.1  # and not 50 / 30,000
    assert collection_seconds(1, 500) == 0  # there is nothing to collect


def test_whole_gpus_are_not_rounded_up() -> None:
    """30,000 / (20 / 0.03) is 45.000000000000004 by floating point."""
    for batch, milliseconds in [(20, 30), (50, 80), (7, 13), (3, 11)]:
        of_gpu = qps_of_gpu(batch, milliseconds / 1e3)
        for gpus in (1, 3, 45, 999):
            assert gpus_needed(gpus * of_gpu, of_gpu) == gpus
            assert gpus_needed(gpus * of_gpu * 1.0001, of_gpu) == gpus + 1


def test_load() -> None:
    stage = parse_stage("rank:batch=50,infer=80ms,gpus=60")
    assert stage_numbers(30_000, stage).load == pytest.approx(0.8)
    assert stage_numbers(30_000, stage, 96).load == pytest.approx(0.5)
    assert busy_gpus(30_000, stage) == pytest.approx(48)
    gpus = gpus_at_load(30_000, stage, HIGH_LOAD)
    assert gpus == 57
    assert stage_numbers(30_000, stage, gpus).load <= HIGH_LOAD
    assert stage_numbers(30_000, stage, gpus - 1).load > HIGH_LOAD


def test_candidates_make_a_batch_longer() -> None:
    """20 requests of 20 candidates are 400 items."""
    stage = parse_stage("rank:batch=20,infer=8ms,items=20,per_item=80us")
    assert stage.inference == pytest.approx(0.040)
    assert stage.seconds(1) == pytest.approx(0.0096)
    assert stage_numbers(30_000, stage).gpus == 60


def test_a_request_that_becomes_several() -> None:
    numbers = stage_numbers(1_000, parse_stage("find:batch=10,infer=10ms,fan=4"))
    assert (numbers.qps, numbers.gpus, numbers.arriving) == (4_000, 4, 1_000)


def test_a_stage_without_gpus() -> None:
    numbers = stage_numbers(30_000, Stage("find", delay=0.02))
    assert (numbers.gpus, numbers.load, numbers.mean, numbers.first) == (0, 0, 0.02, 0.02)
    assert gpus_at_load(30_000, numbers.stage, HIGH_LOAD) == 0
