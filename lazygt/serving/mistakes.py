"""Mistakes of serving arithmetic (four), high loads, and claims to be judged.

    1  the wait counted as work: QPS of a GPU is batch / inference, and waiting is no part of it
    2  all requests counted for one queue: a batch is collected at the rate of one GPU
    3  the ring forgotten: an all-reduce sends 2 (N - 1) / N times its bytes (see ``lazygt comm``)
    4  a larger batch taken for a lower latency: it is a higher throughput, and a longer wait

A claim is a figure worked out elsewhere: ``rank:qps=5``, ``rank:collection=1.7ms``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lazygt.graph.text import count, duration
from lazygt.serving.formulas import HIGH_LOAD, StageNumbers, gpus_needed, stage_numbers
from lazygt.serving.stages import parse_count, parse_duration, parse_settings, read_settings

#: Claims are rounded.
_ROUNDING = 0.02
#: So many times the GPUs that are busy are more than a reserve.
_MANY = 1.75


class Remark(NamedTuple):
    """Remark on a plan.

    Attributes:
        mistake: number of the mistake; None: none of them.
    """

    mistake: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.mistake is None else f"mistake {self.mistake}: {self.text}"


class Claim(NamedTuple):
    """A figure of a stage worked out elsewhere; ``batch``: for batches of so many."""

    stage: str
    batch: int | None
    values: dict[str, float]


def parse_claim(text: str) -> Claim:
    """Parse the claim of a command line.

    Raises:
        ValueError: the text means none.
    """
    stage, settings = parse_settings(text, "rank:qps=500,collection=100ms")
    values = read_settings(f"the claim of {stage!r}", settings, _KEYS)
    return Claim(stage, values.pop("batch", None), values)


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError("expected a number, 0 or more")
    return number


_KEYS: dict[str, Callable[[str], Any]] = {
    "batch": parse_count, "qps": _number, "gpus": parse_count, "collection": parse_duration,
    "latency": parse_duration,
}  # fmt: skip


# -- remarks on the given numbers by themselves ----------------------------------------------------


def spotted(stages: Sequence[StageNumbers]) -> list[Remark]:
    """Return remarks on impossible loads, and on mistakes behind a number of GPUs or a wait."""
    remarks = []
    for numbers in stages:
        if numbers.gpus:
            remarks += [*_of_load(numbers), *_of_gpus(numbers), *_of_wait(numbers)]
            remarks += _of_batch(numbers)
    return remarks


def _of_load(numbers: StageNumbers) -> list[Remark]:
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


def _of_gpus(numbers: StageNumbers) -> list[Remark]:
    """Remark on as many GPUs as if they did nothing while requests wait."""
    stage, come = numbers.stage, numbers.qps
    fewest = gpus_needed(come, numbers.qps_of_gpu)
    if stage.gpus is None or stage.gpus < _MANY * fewest:
        return []
    full = stage_numbers(come / stage.fan, stage, fewest)
    wrong = [stage.batch / full.first, 1 / full.first, 1 / full.mean]
    if stage.gpus not in [gpus_needed(come, of_gpu) for of_gpu in wrong]:
        return []
    return [Remark(1, f"{stage.name}: {stage.gpus} GPUs are as many as come of counting the wait "
                      f"as work; a GPU does batch / inference = {_qps(numbers)} requests a second, "
                      f"so {fewest} are busy")]  # fmt: skip


def _of_wait(numbers: StageNumbers) -> list[Remark]:
    """Remark on a wait in which a batch fills only if all requests come into one queue."""
    stage = numbers.stage
    if stage.batch == 1 or not 0 < stage.wait < numbers.collection / 2:
        return []
    if stage.wait < 0.5 * stage.batch / numbers.qps or numbers.arriving == numbers.qps:
        return []
    return [Remark(2, f"{stage.name}: in wait={duration(stage.wait)} a batch of {stage.batch} does "
                      f"not fill: {numbers.arriving:g} requests a second come to each of "
                      f"{numbers.gpus} GPUs, so it takes {duration(numbers.collection)}; "
                      f"{duration(stage.batch / numbers.qps)} is at the rate of all")]  # fmt: skip


def _of_batch(numbers: StageNumbers) -> list[Remark]:
    """Remark on requests that wait for a batch to fill longer than it takes."""
    stage = numbers.stage
    if stage.wait < numbers.collection or numbers.collection < 2 * stage.inference:
        return []
    return [Remark(4, f"{stage.name}: a batch of {stage.batch} takes "
                      f"{duration(numbers.collection)} to fill and {duration(stage.inference)} to "
                      f"run: a larger batch is no lower latency; take a smaller one, or a "
                      f"wait=")]  # fmt: skip


# -- claims ----------------------------------------------------------------------------------------


def judged(qps: float, stages: Sequence[StageNumbers], claims: Sequence[Claim]) -> list[Remark]:
    """Return for each claim whether it holds, and the mistake that explains it if not.

    Raises:
        ValueError: a claim of a stage that is not there, or of one without GPUs.
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
            remarks.append(_judged(numbers, key, value, by_name[claim.stage]))
    return remarks


def _judged(numbers: StageNumbers, key: str, value: float, asked: StageNumbers) -> Remark:
    stage = numbers.stage
    right, how = _right(numbers, key)
    shown = _SHOWN[key]
    claim = f"{stage.name}: {key}={shown(value)}"
    if _near(value, right):
        return Remark(None, f"{claim} holds: {how}")
    for mistake, wrong, why in _wrong(numbers, key):
        if _near(value, wrong):
            return Remark(mistake, f"{claim} {why}; it is {shown(right)}: {how}")
    if key == "latency" and numbers.stage.batch > asked.stage.batch and value < asked.mean:
        why = (
            f"takes batches of {stage.batch} for faster than those of {asked.stage.batch} "
            f"({duration(asked.mean)}): a larger batch does more requests a second, and takes "
            f"longer to collect"
        )
        return Remark(4, f"{claim} {why}; it is {shown(right)}: {how}")
    return Remark(None, f"{claim} is wrong; it is {shown(right)}: {how}")


def _right(numbers: StageNumbers, key: str) -> tuple[float, str]:
    stage, inference = numbers.stage, duration(numbers.stage.inference)
    if key == "qps":
        return numbers.qps_of_gpu, f"batch / inference = {stage.batch} / {inference}"
    if key == "gpus":
        right = gpus_needed(numbers.qps, numbers.qps_of_gpu)
        return right, f"ceil({numbers.qps:,g} / {_qps(numbers)})"
    queue = "one queue" if numbers.arriving == numbers.qps else f"each of {numbers.gpus} GPUs"
    rate = f"{numbers.arriving:,g} requests a second at {queue}"
    if key == "collection":
        return numbers.collection, f"batch / rate = {stage.batch} / {rate}"
    collection = duration(numbers.collection)
    return numbers.mean, f"collection / 2 + inference = {collection} / 2 + {inference}"


def _wrong(numbers: StageNumbers, key: str) -> list[tuple[int, float, str]]:
    """List mistakes that explain a claim: (mistake, its result, its reasoning)."""
    stage = numbers.stage
    at_once = stage.batch / numbers.qps
    totals = (numbers.first, numbers.mean)
    waited = "counts the wait as work"
    all_in_one = (
        f"collects a batch at the rate of all GPUs together ({numbers.qps:,g} requests a second)"
    )
    if key == "qps":
        return [(1, share / total, waited) for total in totals for share in (1, stage.batch)]
    if key == "gpus":
        return [
            (1, gpus_needed(numbers.qps, share / total), waited)
            for total in totals
            for share in (1, stage.batch)
        ]
    if key == "collection":
        return [(2, at_once, all_in_one), (2, 0.0, "leaves it out")]
    after = stage.inference + stage.delay
    return [(2, at_once / 2 + after, all_in_one), (2, after, "leaves the collection out")]


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= _ROUNDING * max(abs(other), 1e-12)


def _qps(numbers: StageNumbers) -> str:
    return f"{numbers.qps_of_gpu:.4g}"


def _plain(value: float) -> str:
    return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"


_SHOWN: dict[str, Callable[[float], str]] = {
    "qps": _plain, "gpus": _plain, "collection": duration, "latency": duration,
}  # fmt: skip
