"""Plan of a service: formulas, simulation with random arrivals, and GPUs needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from lazygt.graph.text import duration
from lazygt.serving.mistakes import Claim, Remark, check_claims, find_mistakes, parse_claim
from lazygt.serving.report import (
    AT_HIGH_LOAD,
    CURVE_LOADS,
    FOR_SLO,
    FORMULAS,
    GIVEN,
    Gpus,
    Point,
    ServiceChoice,
    ServicePlan,
)
from lazygt.serving.simulation import (
    BALANCES,
    Arrivals,
    Poisson,
    RecordedArrivals,
    ServiceRun,
    parse_arrivals,
    short_seconds,
    simulate,
    simulated_seconds,
)
from lazygt.serving.stages import (
    HIGH_LOAD,
    Stage,
    StageNumbers,
    busy_gpus,
    check_service,
    gpus_at_load,
    parse_stage,
    stage_numbers,
)

#: Maximum additions of GPUs after a long simulation misses the SLO that short ones held.
_MAX_ADDITIONS = 10


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
        qps: requests a second; None: the rate of the file of arrivals.
        stages: stages of a request, in order, such as ``"rank:batch=50,infer=80ms"``.
        slo: limit of the p99 latency in seconds.
        arrivals: ``poisson``, ``bursty:peak=3,share=0.2,burst=500ms``, or a file of times.
        balance: load balancing: ``random``, ``round-robin``, or ``shared``: one queue for all
            GPUs.
        seconds: simulated seconds; by default a minute, adapted if that has very many requests or
            few batches.
        seed: seed of the random numbers.
        claims: figures to check, such as ``"rank:qps=5"``.

    Raises:
        ValueError: an argument is impossible; the error has a remedy.
    """
    if isinstance(arrivals, str):
        arrivals = parse_arrivals(arrivals)
    if qps is None:
        if not isinstance(arrivals, RecordedArrivals):
            raise ValueError("how many requests a second? Give qps, or a file of arrival times")
        qps = arrivals.qps
    parsed_stages = tuple(
        parse_stage(stage) if isinstance(stage, str) else stage for stage in stages
    )
    check_service(qps, parsed_stages, slo)
    if balance not in BALANCES:
        raise ValueError(f"balance is one of {', '.join(BALANCES)}, not {balance!r}")
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"{seconds:g} s can't be simulated: give more than 0")
    parsed_claims = [parse_claim(claim) if isinstance(claim, str) else claim for claim in claims]
    service = _Service(qps, parsed_stages, arrivals, balance, seconds, seed)
    return service.plan(slo, parsed_claims)


class _Service:
    """Planner of one service; simulations are cached by GPUs, rate and length.

    Attributes:
        seconds, trial_seconds: length of a simulation, and of a short one.
        numbers: figures of the stages by the formulas, with the GPUs of the settings.
        run: ``_run``, cached.
    """

    def __init__(
        self, qps: float, stages: tuple[Stage, ...], arrivals: Arrivals, balance: str,
        seconds: float | None, seed: int,
    ) -> None:  # fmt: skip
        self.qps, self.stages, self.arrivals = qps, stages, arrivals
        self.balance, self.seed = balance, seed
        if isinstance(arrivals, RecordedArrivals):
            self.seconds = self.trial_seconds = len(arrivals.seen) / qps
        else:
            self.seconds = self.trial_seconds = seconds or simulated_seconds(qps, stages)
            if isinstance(arrivals, Poisson):  # a short simulation would have few bursts
                self.trial_seconds = min(self.seconds, short_seconds(qps, stages))
        self.numbers = self._numbers(qps, [None] * len(stages))
        self.run = cache(self._run)

    def _numbers(self, qps: float, gpus: Sequence[int | None]) -> tuple[StageNumbers, ...]:
        """Return the figures of the stages by the formulas; None: the fewest possible GPUs."""
        shared = self.balance == "shared"
        return tuple(
            stage_numbers(qps, stage, count, shared)
            for stage, count in zip(self.stages, gpus, strict=True)
        )

    def _run(self, gpus: Gpus, qps: float, seconds: float) -> ServiceRun:
        """Simulate the service with some GPUs."""
        numbers = self._numbers(qps, gpus)
        return simulate(qps, numbers, self.arrivals, seconds, self.balance, self.seed)

    def plan(self, slo: float | None, claims: Sequence[Claim]) -> ServicePlan:
        """Return the plan: figures, choices and remarks."""
        remarks = check_claims(self.qps, self.numbers, claims)
        choices = self._choices(slo)
        chosen = choices[0 if choices[0].why == GIVEN else -1]
        remarks += [
            *find_mistakes(self.numbers),
            *_slo_remarks(slo, choices),
            *self._formula_remarks(choices[0]),
        ]
        return ServicePlan(
            self.qps, slo, self.arrivals, self.balance, self.seed, self.seconds, self.numbers,
            tuple(choices), chosen, tuple(self._curve(chosen)), tuple(remarks),
        )  # fmt: skip

    def _choices(self, slo: float | None) -> list[ServiceChoice]:
        """Simulate the GPUs of the formulas or settings, those at high load, and for the SLO."""
        gpus_requested = any(stage.gpus for stage in self.stages)
        first = tuple(numbers.gpus for numbers in self.numbers)
        choices = [self._choice(GIVEN if gpus_requested else FORMULAS, first)]
        if not any(first):
            return choices
        at_high_load = tuple(gpus_at_load(self.qps, stage, HIGH_LOAD) for stage in self.stages)
        choices.append(self._choice(AT_HIGH_LOAD, at_high_load))
        if slo is not None and (for_slo := self._gpus_for_slo(slo)) is not None:
            choices.append(self._choice(FOR_SLO, for_slo))
        return choices

    def _gpus_for_slo(self, slo: float) -> Gpus | None:
        """Search the fewest GPUs for the SLO by short simulations; confirm them by a long one."""
        enough = fewest_gpus_for_slo(
            self.qps, self.stages, slo, lambda gpus: self.run(gpus, self.qps, self.trial_seconds)
        )
        if enough is None:
            return None
        for _ in range(_MAX_ADDITIONS):
            if self.run(enough, self.qps, self.seconds).latency.p99 <= slo:
                return enough
            enough = with_more_gpus(enough)
        return None

    def _choice(self, reason: str, gpus: Gpus) -> ServiceChoice:
        """Return a number of GPUs with its simulation."""
        return ServiceChoice(reason, gpus, self._load(gpus), self.run(gpus, self.qps, self.seconds))

    def _load(self, gpus: Gpus) -> float:
        """Return the load of the busiest stage, by the formulas."""
        return max(numbers.load for numbers in self._numbers(self.qps, gpus))

    def _curve(self, chosen: ServiceChoice) -> list[Point]:
        """Simulate the chosen GPUs at each load of ``CURVE_LOADS``."""
        if not chosen.load:
            return []
        points = []
        for load in CURVE_LOADS:
            qps = self.qps * load / chosen.load
            mean = sum(numbers.mean for numbers in self._numbers(qps, chosen.gpus))
            seconds = self.trial_seconds * self.qps / qps  # the same number of requests
            points.append(Point(load, qps, mean, self.run(chosen.gpus, qps, seconds)))
        return points

    def _formula_remarks(self, first: ServiceChoice) -> list[Remark]:
        """Return a remark if the formulas are far from the simulation."""
        mean, simulated = sum(each.mean for each in self.numbers), first.run.latency.mean
        if abs(simulated - mean) <= 0.1 * mean or first.load >= 1:
            return []
        return [Remark(None, f"the formulas give a mean of {duration(mean)}, and the simulation of "
                             f"the same GPUs {duration(simulated)}: arrivals are not a clock, and "
                             f"batches are not always full")]  # fmt: skip


def _slo_remarks(slo: float | None, choices: Sequence[ServiceChoice]) -> list[Remark]:
    """Return remarks on choices that miss the SLO."""
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


# -- provisioning: the fewest simulated GPUs with a p99 within the SLO -----------------------------

#: Function that simulates the service with some GPUs.
SimulateGpus = Callable[[Gpus], ServiceRun]
#: Growth of the multiple of the busy GPUs until the SLO holds.

_GROWTH = 1.25
#: Maximum multiple of the busy GPUs: beyond it latency is not caused by waiting.
_MAX_FACTOR = 20.0


def fewest_gpus_for_slo(
    qps: float, stages: Sequence[Stage], slo: float, simulated: SimulateGpus
) -> Gpus | None:
    """Search the fewest GPUs with a simulated p99 within ``slo`` seconds; None if none are found.

    First the common multiple of the busy GPUs of all stages is searched, by growth and bisection;
    then GPUs are removed stage by stage (greedy descent). No stage gets so few GPUs that they are
    busy all the time: its queue would grow with the simulated time.

    Args:
        simulated: returns the simulation with some GPUs.
    """

    def meets_slo(gpus: Gpus) -> bool:
        return simulated(gpus).latency.p99 <= slo

    too_few, factor = None, 1.0
    while not meets_slo(enough := _scaled_gpus(qps, stages, factor)):
        too_few, factor = factor, factor * _GROWTH
        if factor > _MAX_FACTOR:
            return None
    if too_few is not None:
        enough = _bisected(qps, stages, too_few, factor, meets_slo)
    return _reduced(qps, stages, enough, meets_slo) if sum(map(bool, enough)) > 1 else enough


def _scaled_gpus(qps: float, stages: Sequence[Stage], factor: float) -> Gpus:
    """Return ``factor`` times the busy GPUs of each stage, rounded up, at least `fewest_gpus`."""
    return tuple(
        max(math.ceil(busy * factor), fewest_gpus(busy)) if (busy := busy_gpus(qps, stage)) else 0
        for stage in stages
    )


def with_more_gpus(gpus: Gpus) -> Gpus:
    """Add one GPU in a hundred to the stage that has the most."""
    index = gpus.index(max(gpus))
    return (*gpus[:index], gpus[index] + math.ceil(gpus[index] / 100), *gpus[index + 1 :])


def fewest_gpus(busy: float) -> int:
    """Return the fewest GPUs that are not busy all the time."""
    return math.floor(busy * (1 + 1e-9)) + 1


def _bisected(
    qps: float, stages: Sequence[Stage], low: float, high: float, meets_slo: Callable[[Gpus], bool]
) -> Gpus:
    """Bisect the multiple of the busy GPUs, between ``low`` (too few) and ``high`` (enough)."""
    too_few, enough = (_scaled_gpus(qps, stages, factor) for factor in (low, high))
    while sum(enough) - sum(too_few) > 1:
        middle = (low + high) / 2
        gpus = _scaled_gpus(qps, stages, middle)
        if gpus in (too_few, enough) and high - low < 1e-6:
            break
        if meets_slo(gpus):
            high, enough = middle, gpus
        else:
            low, too_few = middle, gpus
    return enough


def _reduced(
    qps: float, stages: Sequence[Stage], enough: Gpus, meets_slo: Callable[[Gpus], bool]
) -> Gpus:
    """Remove GPUs from one stage after another while the SLO holds, the largest stage first.

    Args:
        enough: GPUs with which the SLO holds.
        meets_slo: returns whether it holds with some GPUs.
    """
    lowest = [fewest_gpus(busy_gpus(qps, stage)) for stage in stages]
    for at in sorted(range(len(enough)), key=lambda at: -enough[at]):
        while enough[at] > lowest[at]:
            gpus = (*enough[:at], enough[at] - 1, *enough[at + 1 :])
            if not meets_slo(gpus):
                break
            enough = gpus
    return enough
