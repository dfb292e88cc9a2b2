"""The four mistakes are named where a question or a claim has them."""

from __future__ import annotations

import pytest

from lazygt.serving.mistakes import Remark, check_claims, find_mistakes, parse_claim
from lazygt.serving.stages import parse_stage, stage_numbers

#: 60 GPUs of 500 requests a second, 100 ms to collect a batch.
RANK = "rank:batch=50,infer=100ms"


def claimed(*claims: str, stage: str = RANK) -> list[Remark]:
    numbers = [stage_numbers(30_000, parse_stage(stage))]
    return check_claims(30_000, numbers, [parse_claim(claim) for claim in claims])


def seen(stage: str, qps: float = 30_000) -> list[Remark]:
    return [
        each for each in find_mistakes([stage_numbers(qps, parse_stage(stage))]) if each.mistake
    ]


@pytest.mark.parametrize(
    ("claim", "mistake", "text"),
    [
        ("qps=500", None, "rank: qps=500 holds: batch / inference = 50 / 100 ms"),
        ("qps=5", 1, "qps=5 counts the wait as work; it is 500: batch / inference = 50 / 100 ms"),
        ("qps=250", 1, "counts the wait as work"),
        ("qps=333", 1, "counts the wait as work"),
        ("qps=6.67", 1, "counts the wait as work"),
        ("qps=700", None, "qps=700 is wrong; it is 500"),
        ("gpus=60", None, "gpus=60 holds: ceil(30,000 / 500)"),
        ("gpus=120", 1, "gpus=120 counts the wait as work; it is 60"),
        ("gpus=6000", 1, "gpus=6,000 counts the wait as work"),
        ("collection=100ms", None, "collection=100 ms holds: batch / rate = 50 / 500 requests"),
        ("collection=1.7ms", 2, "collects a batch at the rate of all GPUs together (30,000"),
        ("collection=0", 2, "leaves it out; it is 100 ms"),
        ("latency=150ms", None, "holds: collection / 2 + inference = 100 ms / 2 + 100 ms"),
        ("latency=100.8ms", 2, "collects a batch at the rate of all GPUs together"),
        ("latency=100ms", 2, "latency=100 ms"),
        ("latency=300ms", None, "is wrong; it is 150 ms"),
        ("batch=100,latency=120ms", 4,
         "takes batches of 100 for faster than those of 50 (150 ms): a larger batch does more "
         "requests a second, and takes longer to collect; it is 200 ms"),
    ],
)  # fmt: skip
def test_claim_is_judged(claim: str, mistake: int | None, text: str) -> None:
    (remark,) = claimed(f"rank:{claim}")
    assert remark.mistake == mistake
    assert text in remark.text


def test_a_mistake_is_named() -> None:
    (remark,) = claimed("rank:qps=5")
    assert str(remark).startswith("mistake 1: rank: qps=5 counts the wait as work")


def test_several_claims_are_judged() -> None:
    remarks = claimed("rank:qps=5,collection=1.7ms", "rank:latency=150ms")
    assert [remark.mistake for remark in remarks] == [1, 2, None]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("sort:qps=5", "a claim of 'sort': the stages with GPUs are rank"),
        ("rank:speed=5", "the claim of 'rank' has no 'speed': it takes batch, qps, gpus"),
        ("rank:qps=-5", "expected a number, 0 or more"),
        ("rank", "expected a name and what it has, such as rank:qps=500,collection=100ms"),
    ],
)
def test_malformed_claim_is_refused(claim: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        claimed(claim)


def test_gpu_count_that_includes_waiting_is_noticed() -> None:
    (remark,) = seen(f"{RANK},gpus=120")
    assert remark.mistake == 1
    assert remark.text.startswith("rank: 120 GPUs are as many as come of counting the wait")
    for gpus in (60, 63, 75, 90, 119, 121):
        assert seen(f"{RANK},gpus={gpus}") == []


def test_a_wait_at_the_rate_of_all_gpus() -> None:
    (remark,) = seen(f"{RANK},gpus=75,wait=2ms")
    assert remark.mistake == 2
    assert "it takes 125 ms; 1.67 ms is at the rate of all" in remark.text
    for wait in ("0", "100ms", "full"):
        assert seen(f"{RANK},gpus=75,wait={wait}") == []


def test_a_batch_that_waits_longer_than_it_takes() -> None:
    (remark,) = seen("rank:batch=50,infer=100ms,wait=full,gpus=4", qps=500)
    assert remark.mistake == 4
    assert remark.text == (
        "rank: a batch of 50 takes 400 ms to fill and 100 ms to run: a larger batch is no lower "
        "latency; take a smaller one, or a wait="
    )
    assert seen("rank:batch=50,infer=100ms,gpus=4", qps=500) == []  # it does not wait
