"""Plan of a service: formulas, simulation with random arrivals, and GPUs needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from lazygt.graph.text import duration
from lazygt.serving.arrivals import Arrivals, Poisson, Recorded, parse_arrivals
from lazygt.serving.formulas import HIGH_LOAD, StageNumbers, gpus_at_load, stage_numbers
from lazygt.serving.mistakes import Claim, Remark, judged, parse_claim, spotted
from lazygt.serving.provision import (
    AT_HIGH_LOAD,
    CURVE_LOADS,
    FOR_SLO,
    FORMULAS,
    GIVEN,
    Choice,
    Gpus,
    Point,
    gpus_that_hold,
    more,
)
from lazygt.serving.report import ServicePlan
from lazygt.serving.simulation import (
    BALANCES,
    Run,
    simulate,
    simulated_seconds,
    tried_seconds,
)
from lazygt.serving.stages import Stage, check_service, parse_stage

#: Most additions of GPUs because a long simulation misses the SLO that a short one held.
_LONGER = 10


def plan(
    qps: float | None,
    stages: Sequence[Stage | str],
    slo: float | None = None,
    *,
    arrivals: Arrivals | str = "poisson",
    balance: str = "random",
    seconds: float | None = None,
    seed: int = 0,
    claims: Sequence[Claim | str] = (),
) -> ServicePlan:
    """Plan a service of batching stages: its GPUs, and the latency of its requests.

    Args:
        qps: requests a second; None: those of the file that ``arrivals`` names.
        stages: that a request goes through, such as ``"rank:batch=50,infer=80ms"``.
        slo: seconds within which 99 of 100 requests are to be done.
        arrivals: ``poisson``, ``bursty:peak=3,share=0.2,burst=500ms``, or a file of times.
        balance: choice of the GPU of a request: ``random``, ``round-robin``, or ``shared``: one
            queue for all of them.
        seconds: that are simulated; by default a minute, if that is neither very many requests
            nor few batches.
        seed: of the random numbers.
        claims: figures worked out elsewhere, to be judged: ``"rank:qps=5"``.

    Raises:
        ValueError: an impossible argument, with a remedy.
    """
    if isinstance(arrivals, str):
        arrivals = parse_arrivals(arrivals)
    if qps is None:
        if not isinstance(arrivals, Recorded):
            raise ValueError("how many requests a second? Give qps, or a file of arrival times")
        qps = arrivals.qps
    parsed = tuple(parse_stage(stage) if isinstance(stage, str) else stage for stage in stages)
    check_service(qps, parsed, slo)
    if balance not in BALANCES:
        raise ValueError(f"balance is one of {', '.join(BALANCES)}, not {balance!r}")
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"{seconds:g} s can't be simulated: give more than 0")
    asked = [parse_claim(claim) if isinstance(claim, str) else claim for claim in claims]
    service = _Service(qps, parsed, arrivals, balance, seconds, seed)
    return service.plan(slo, asked)


class _Service:
    """A service with cached simulations."""

    def __init__(
        self, qps: float, stages: tuple[Stage, ...], arrivals: Arrivals, balance: str,
        seconds: float | None, seed: int,
    ) -> None:  # fmt: skip
        self.qps, self.stages, self.arrivals = qps, stages, arrivals
        self.balance, self.seed = balance, seed
        if isinstance(arrivals, Recorded):
            self.seconds = self.tried = len(arrivals.seen) / qps
        else:
            self.seconds = self.tried = seconds or simulated_seconds(qps, stages)
            if isinstance(arrivals, Poisson):  # bursts are few in a short time
                self.tried = min(self.seconds, tried_seconds(qps, stages))
        self.numbers = self._numbers(qps, [None] * len(stages))
        self.run = cache(self._run)

    def _numbers(self, qps: float, gpus: Sequence[int | None]) -> tuple[StageNumbers, ...]:
        shared = self.balance == "shared"
        return tuple(
            stage_numbers(qps, stage, count, shared)
            for stage, count in zip(self.stages, gpus, strict=True)
        )

    def _run(self, gpus: Gpus, qps: float, seconds: float) -> Run:
        numbers = self._numbers(qps, gpus)
        return simulate(qps, numbers, self.arrivals, seconds, self.balance, self.seed)

    def plan(self, slo: float | None, claims: Sequence[Claim]) -> ServicePlan:
        """Return the plan: figures, choices and remarks."""
        remarks = judged(self.qps, self.numbers, claims)
        choices = self._choices(slo)
        chosen = choices[0 if choices[0].why == GIVEN else -1]
        remarks += [
            *spotted(self.numbers), *_of_slo(slo, choices), *self._of_formulas(choices[0])
        ]  # fmt: skip
        return ServicePlan(
            self.qps, slo, self.arrivals, self.balance, self.seed, self.seconds, self.numbers,
            tuple(choices), chosen, tuple(self._curve(chosen)), tuple(remarks),
        )  # fmt: skip

    def _choices(self, slo: float | None) -> list[Choice]:
        given = any(stage.gpus for stage in self.stages)
        first = tuple(numbers.gpus for numbers in self.numbers)
        choices = [self._choice(GIVEN if given else FORMULAS, first)]
        if not any(first):
            return choices
        calm = tuple(gpus_at_load(self.qps, stage, HIGH_LOAD) for stage in self.stages)
        choices.append(self._choice(AT_HIGH_LOAD, calm))
        if slo is not None and (enough := self._enough(slo)) is not None:
            choices.append(self._choice(FOR_SLO, enough))
        return choices

    def _enough(self, slo: float) -> Gpus | None:
        """Return the fewest GPUs for the SLO by short simulations, confirmed by a long one."""
        enough = gpus_that_hold(
            self.qps, self.stages, slo, lambda gpus: self.run(gpus, self.qps, self.tried)
        )
        if enough is None:
            return None
        for _ in range(_LONGER):
            if self.run(enough, self.qps, self.seconds).latency.p99 <= slo:
                return enough
            enough = more(enough)
        return None

    def _choice(self, why: str, gpus: Gpus) -> Choice:
        return Choice(why, gpus, self._load(gpus), self.run(gpus, self.qps, self.seconds))

    def _load(self, gpus: Gpus) -> float:
        return max(numbers.load for numbers in self._numbers(self.qps, gpus))

    def _curve(self, chosen: Choice) -> list[Point]:
        if not chosen.load:
            return []
        points = []
        for load in CURVE_LOADS:
            qps = self.qps * load / chosen.load
            mean = sum(numbers.mean for numbers in self._numbers(qps, chosen.gpus))
            seconds = self.tried * self.qps / qps  # as many requests
            points.append(Point(load, qps, mean, self.run(chosen.gpus, qps, seconds)))
        return points

    def _of_formulas(self, first: Choice) -> list[Remark]:
        """Remark on formulas that are far from the simulation."""
        mean, simulated = sum(each.mean for each in self.numbers), first.run.latency.mean
        if abs(simulated - mean) <= 0.1 * mean or first.load >= 1:
            return []
        return [Remark(None, f"the formulas give a mean of {duration(mean)}, and the simulation of "
                             f"the same GPUs {duration(simulated)}: arrivals are not a clock, and "
                             f"batches are not always full")]  # fmt: skip


def _of_slo(slo: float | None, choices: Sequence[Choice]) -> list[Remark]:
    """Remark on choices that miss the SLO."""
    if slo is None or not choices[0].load:
        return []
    first, last = choices[0], choices[-1]
    remarks = []
    if first.run.latency.p99 > slo:
        remarks.append(Remark(None, f"the SLO of {duration(slo)} is missed {first.why}: the p99 is "
                                    f"{duration(first.run.latency.p99)}"))  # fmt: skip
    if last.why == FOR_SLO and last.load > HIGH_LOAD:
        remarks.append(Remark(None, f"the fewest GPUs for the SLO are busy for {last.load:.0%} of "
                                    f"the time, and nothing is left for a burst, or a GPU that "
                                    f"fails"))  # fmt: skip
    if last.why != FOR_SLO:
        remarks.append(Remark(None, f"no number of GPUs that was tried has a p99 within "
                                    f"{duration(slo)}: make inference or the wait shorter, or let "
                                    f"all GPUs take from one queue (shared)"))  # fmt: skip
    return remarks
