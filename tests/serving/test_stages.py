"""How stages are written, and what is said where they can't be."""

from __future__ import annotations

import math

import pytest

from lazygt.serving.stages import Stage, check_service, parse_duration, parse_stage


def test_stage_with_all_settings() -> None:
    text = (
        "rank: batch=50, infer=0.08s, wait=full, gpus=60, fan=2, items=20, per_item=5us, delay=1ms"
    )
    assert parse_stage(text) == Stage("rank", 0.08, 50, math.inf, 60, 2, 20, 5e-6, 1e-3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("80ms", 0.08), ("1.5 s", 1.5), ("250us", 2.5e-4), ("2min", 120), ("1e3us", 1e-3), ("0", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank", "'rank': expected a name and what it has, such as rank:batch=50,infer=80ms"),
        (":infer=80ms", "expected a name and what it has"),
        ("rank:batch", "'batch' is no key=value; write for example rank:batch=50,infer=80ms"),
        ("rank:batch=50,batch=60,infer=80ms", "has batch twice"),
        ("rank:btach=50,infer=80ms",
         "stage 'rank' has no 'btach': it takes batch, infer, wait, gpus, fan, items, per_item, "
         "delay"),
        ("rank:batch=0,infer=80ms", "batch=0: expected a whole number of at least 1"),
        ("rank:batch=2.5,infer=80ms", "batch=2.5: expected a whole number"),
        ("rank:batch=50ms,infer=80ms", "batch=50ms: expected a whole number"),
        ("rank:batch=50,infer=80", "infer=80: expected a duration with its unit, such as 80ms"),
        ("rank:batch=50,infer=80h", "infer=80h: there is no unit 'h', only us, ms, s, min"),
        ("rank:batch=50,infer=fast", "infer=fast: expected a number"),
        ("rank:batch=50,infer=-80ms", "infer=-0.08: expected seconds, 0 or more"),
        ("rank:batch=50,infer=1e999s", "expected a number"),
        ("rank:infer=80ms,gpus=0", "gpus=0: expected a whole number of at least 1"),
        ("rank:batch=50", "stage 'rank' does not say how long a batch takes: add infer=80ms"),
        ("rank:batch=50,delay=5ms", "does not say how long a batch takes"),
        ("rank:infer=0ms", "does not say how long a batch takes"),
    ],
)  # fmt: skip
def test_malformed_stage_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_stage(text)
    assert message in str(error.value)


def test_invalid_service_is_refused() -> None:
    stage = parse_stage("rank:batch=50,infer=80ms")
    with pytest.raises(ValueError, match=r"^0 requests a second: expected more than 0$"):
        check_service(0, [stage], None)
    with pytest.raises(ValueError, match="at least one stage, such as rank:batch=50,infer=80ms"):
        check_service(1, [], None)
    with pytest.raises(ValueError, match="two stages are named 'rank'"):
        check_service(1, [stage, stage], None)


def test_an_slo_below_inference() -> None:
    stages = [Stage("find", delay=0.02), parse_stage("rank:batch=50,infer=80ms")]
    with pytest.raises(ValueError) as error:
        check_service(1, stages, 0.1)
    assert str(error.value) == (
        "an SLO of 100 ms can't be held: a request that never waits takes 100 ms (find 20 ms + "
        "rank 80 ms); make inference shorter, drop a stage, or allow more than 100 ms"
    )
    check_service(1, stages, 0.101)
