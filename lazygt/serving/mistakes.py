"""Checks of a plan: four common mistakes of serving arithmetic, high loads, and users' claims.

    1  waiting counted as work: QPS of a GPU is batch / inference, without waiting
    2  all requests counted for one queue: a batch is collected at the rate of one GPU
    3  the ring forgotten: an all-reduce sends 2 (N - 1) / N times its bytes (see ``lazygt comm``)
    4  a larger batch expected to lower latency: it raises throughput, and lengthens the wait

A claim is a user's own figure: ``rank:qps=5``, ``rank:collection=1.7ms``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lazygt.graph.text import count, duration
from lazygt.serving.stages import (
    HIGH_LOAD,
    StageNumbers,
    gpus_needed,
    parse_count,
    parse_duration,
    parse_settings,
    read_settings,
    stage_numbers,
)

#: Relative tolerance: claims are rounded.
_ROUNDING = 0.02
#: Multiple of the busy GPUs above which GPUs are more than a reserve.
_OVERPROVISIONED = 1.75


class Remark(NamedTuple):
    """Remark on a plan.

    Attributes:
        mistake: number of the mistake; None if it is none of the four.
    """

    mistake: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.mistake is None else f"mistake {self.mistake}: {self.text}"


class Claim(NamedTuple):
    """A user's figures of a stage."""

    stage: str
    batch: int | None  # size of the batches that they refer to; None: the stage's
    values: dict[str, float]  # by key, see ``_KEYS``


def parse_claim(text: str) -> Claim:
    """Parse a claim such as ``rank:qps=500,collection=100ms``.

    Raises:
        ValueError: the text is invalid.
    """
    stage, settings = parse_settings(text, "rank:qps=500,collection=100ms")
    values = read_settings(f"the claim of {stage!r}", settings, _KEYS)
    return Claim(stage, values.pop("batch", None), values)


def _number(text: str) -> float:
    """Parse a number of at least 0."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError("expected a number, 0 or more")
    return number


_KEYS: dict[str, Callable[[str], Any]] = {
    "batch": parse_count, "qps": _number, "gpus": parse_count, "collection": parse_duration,
    "latency": parse_duration,
}  # fmt: skip


# -- remarks on stages -----------------------------------------------------------------------------


def find_mistakes(stages: Sequence[StageNumbers]) -> list[Remark]:
    """Return remarks on high loads, and on mistakes behind a number of GPUs, a wait or a batch."""
    remarks = []
    for numbers in stages:
        if numbers.gpus:
            remarks += [*_load_remarks(numbers), *_gpu_remarks(numbers), *_wait_remarks(numbers)]
            remarks += _batch_remarks(numbers)
    return remarks


def _load_remarks(numbers: StageNumbers) -> list[Remark]:
    """Return a remark on a load that is too high."""
    name, load = numbers.stage.name, numbers.load
    if load <= HIGH_LOAD * (1 + 1e-9):
        return []
    busy = f"{name}: a load of {load:.0%} on {count(numbers.gpus, 'GPU')}"
    if load > 1 + 1e-9:
        return [Remark(None, f"{busy}: the queue grows as long as requests come; add GPUs")]
    if load > 1 - 1e-9:
        return [Remark(None, f"{busy}: with random arrivals the queue has no end, and what is "
                             f"simulated grows with the time that is; add GPUs")]  # fmt: skip
    return [Remark(None, f"{busy}, more than {HIGH_LOAD:.0%}: queues build up, and little is left "
                         f"for a burst, or a GPU that fails")]  # fmt: skip


def _gpu_remarks(numbers: StageNumbers) -> list[Remark]:
    """Return a remark if the number of GPUs follows from counting waiting as work (mistake 1)."""
    stage, stage_qps = numbers.stage, numbers.qps
    fewest = gpus_needed(stage_qps, numbers.qps_of_gpu)
    if stage.gpus is None or stage.gpus < _OVERPROVISIONED * fewest:
        return []
    at_full_load = stage_numbers(stage_qps / stage.fan, stage, fewest)
    mistaken_qps = [stage.batch / at_full_load.first, 1 / at_full_load.first, 1 / at_full_load.mean]
    if stage.gpus not in [gpus_needed(stage_qps, of_gpu) for of_gpu in mistaken_qps]:
        return []
    return [Remark(1, f"{stage.name}: {stage.gpus} GPUs are as many as come of counting the wait "
                      f"as work; a GPU does batch / inference = {_qps(numbers)} requests a second, "
                      f"so {fewest} are busy")]  # fmt: skip


def _wait_remarks(numbers: StageNumbers) -> list[Remark]:
    """Return a remark if the wait assumes that all requests share one queue (mistake 2)."""
    stage = numbers.stage
    if stage.batch == 1 or not 0 < stage.wait < numbers.collection / 2:
        return []
    if stage.wait < 0.5 * stage.batch / numbers.qps or numbers.arriving == numbers.qps:
        return []
    return [Remark(2, f"{stage.name}: in wait={duration(stage.wait)} a batch of {stage.batch} does "
                      f"not fill: {numbers.arriving:g} requests a second come to each of "
                      f"{numbers.gpus} GPUs, so it takes {duration(numbers.collection)}; "
                      f"{duration(stage.batch / numbers.qps)} is at the rate of all")]  # fmt: skip


def _batch_remarks(numbers: StageNumbers) -> list[Remark]:
    """Return a remark if filling a batch takes much longer than running it (mistake 4)."""
    stage = numbers.stage
    if stage.wait < numbers.collection or numbers.collection < 2 * stage.inference:
        return []
    return [Remark(4, f"{stage.name}: a batch of {stage.batch} takes "
                      f"{duration(numbers.collection)} to fill and {duration(stage.inference)} to "
                      f"run: a larger batch is no lower latency; take a smaller one, or a "
                      f"wait=")]  # fmt: skip


# -- claims ----------------------------------------------------------------------------------------


def check_claims(
    qps: float, stages: Sequence[StageNumbers], claims: Sequence[Claim]
) -> list[Remark]:
    """Check each claim, and return a remark on each: it holds, or the mistake that explains it.

    Raises:
        ValueError: the stage of a claim is unknown, or has no GPUs.
    """
    by_name = {numbers.stage.name: numbers for numbers in stages if numbers.gpus}
    remarks = []
    for claim in claims:
        if claim.stage not in by_name:
            raise ValueError(
                f"a claim of {claim.stage!r}: the stages with GPUs are {', '.join(by_name)}"
            )
        numbers = by_name[claim.stage]
        if claim.batch is not None:
            of_batch = replace(numbers.stage, batch=claim.batch)
            shared = numbers.arriving == numbers.qps
            numbers = stage_numbers(qps, of_batch, numbers.gpus, shared)
        for key, value in claim.values.items():
            remarks.append(_check_claim(numbers, key, value, by_name[claim.stage]))
    return remarks


def _check_claim(numbers: StageNumbers, key: str, value: float, planned: StageNumbers) -> Remark:
    """Compare a claimed value with the correct one, then with the results of known mistakes.

    Args:
        numbers: the stage's figures, with the claim's batch size.
        planned: the stage's figures as planned.
    """
    stage = numbers.stage
    correct, derivation = _correct_value(numbers, key)
    show = _FORMATS[key]
    claim = f"{stage.name}: {key}={show(value)}"
    if _near(value, correct):
        return Remark(None, f"{claim} holds: {derivation}")
    for mistake, mistaken, reasoning in _known_mistakes(numbers, key):
        if _near(value, mistaken):
            return Remark(mistake, f"{claim} {reasoning}; it is {show(correct)}: {derivation}")
    if key == "latency" and numbers.stage.batch > planned.stage.batch and value < planned.mean:
        reasoning = (
            f"takes batches of {stage.batch} for faster than those of {planned.stage.batch} "
            f"({duration(planned.mean)}): a larger batch does more requests a second, and takes "
            f"longer to collect"
        )
        return Remark(4, f"{claim} {reasoning}; it is {show(correct)}: {derivation}")
    return Remark(None, f"{claim} is wrong; it is {show(correct)}: {derivation}")


def _correct_value(numbers: StageNumbers, key: str) -> tuple[float, str]:
    """Return the correct value of a claimed figure, and its derivation."""
    stage, inference = numbers.stage, duration(numbers.stage.inference)
    if key == "qps":
        return numbers.qps_of_gpu, f"batch / inference = {stage.batch} / {inference}"
    if key == "gpus":
        gpus = gpus_needed(numbers.qps, numbers.qps_of_gpu)
        return gpus, f"ceil({numbers.qps:,g} / {_qps(numbers)})"
    queue = "one queue" if numbers.arriving == numbers.qps else f"each of {numbers.gpus} GPUs"
    rate = f"{numbers.arriving:,g} requests a second at {queue}"
    if key == "collection":
        return numbers.collection, f"batch / rate = {stage.batch} / {rate}"
    collection = duration(numbers.collection)
    return numbers.mean, f"collection / 2 + inference = {collection} / 2 + {inference}"


def _known_mistakes(numbers: StageNumbers, key: str) -> list[tuple[int, float, str]]:
    """List mistakes that explain a claim: (mistake, its result, its reasoning)."""
    stage = numbers.stage
    collection_of_all = stage.batch / numbers.qps
    totals = (numbers.first, numbers.mean)  # waiting and inference
    waiting_counted = "counts the wait as work"
    one_queue = (
        f"collects a batch at the rate of all GPUs together ({numbers.qps:,g} requests a second)"
    )
    if key == "qps":
        return [
            (1, share / total, waiting_counted) for total in totals for share in (1, stage.batch)
        ]
    if key == "gpus":
        return [
            (1, gpus_needed(numbers.qps, share / total), waiting_counted)
            for total in totals
            for share in (1, stage.batch)
        ]
    if key == "collection":
        return [(2, collection_of_all, one_queue), (2, 0.0, "leaves it out")]
    service_seconds = stage.inference + stage.delay
    return [
        (2, collection_of_all / 2 + service_seconds, one_queue),
        (2, service_seconds, "leaves the collection out"),
    ]


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= _ROUNDING * max(abs(other), 1e-12)


def _qps(numbers: StageNumbers) -> str:
    return f"{numbers.qps_of_gpu:.4g}"


def _plain(value: float) -> str:
    return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "qps": _plain, "gpus": _plain, "collection": duration, "latency": duration,
}  # fmt: skip
