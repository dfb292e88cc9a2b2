"""Arrival times of requests: at random, in bursts, or from a file.

poisson                                     independent, at a constant rate
bursty:peak=3,share=0.2,burst=500ms         three times the mean for a fifth of the time
arrivals.txt                                a time a line: seconds, or with a unit
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lazygt.serving.stages import parse_duration, parse_settings, read_settings

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Poisson:
    """Poisson process: independent arrivals at a constant rate."""

    def times(self, qps: float, seconds: float, rng: np.random.Generator) -> Times:
        """Return the arrivals in ``seconds`` seconds, in order."""
        return _uniform(rng.poisson(qps * seconds), seconds, rng)

    def __str__(self) -> str:
        return "Poisson arrivals"


@dataclass(frozen=True, slots=True)
class Bursty:
    """Markov-modulated Poisson process: bursts and calm phases of exponential length.

    Attributes:
        peak: rate in a burst, as a multiple of the mean.
        share: share of the time in bursts.
        burst: mean seconds of a burst.

    Raises:
        ValueError: the bursts alone exceed the mean rate.
    """

    peak: float = 3.0
    share: float = 0.2
    burst: float = 0.5

    def __post_init__(self) -> None:
        if not (self.peak >= 1 and 0 < self.share < 1 and self.burst > 0):
            raise ValueError(
                f"bursts of {self.peak:g} times the mean for {self.share:g} of the time, "
                f"{self.burst:g} s each: expected peak >= 1, 0 < share < 1, burst > 0"
            )
        if self.peak * self.share > 1:
            raise ValueError(
                f"bursts of {self.peak:g} times the mean for {self.share:g} of the time bring more "
                f"than the mean; peak x share is at most 1: lower one of them"
            )

    def times(self, qps: float, seconds: float, rng: np.random.Generator) -> Times:
        """Return arrivals in about ``seconds`` seconds, in order; ``qps * seconds`` on average."""
        calm_rate = (1 - self.peak * self.share) / (1 - self.share)
        cycles = max(round(seconds * self.share / self.burst), 1)
        phases = np.empty(2 * cycles)
        phases[::2] = rng.exponential(self.burst * (1 - self.share) / self.share, cycles)
        phases[1::2] = rng.exponential(self.burst, cycles)
        phases *= seconds / phases.sum()
        switches = np.concatenate(([0.0], np.cumsum(phases)))
        rates = qps * np.tile([calm_rate, self.peak], cycles)
        expected = np.concatenate(([0.0], np.cumsum(phases * rates)))
        total = float(expected[-1])
        # time change: uniform in the cumulated rate, then mapped back to seconds
        warped = _uniform(rng.poisson(qps * seconds), total, rng)
        return np.interp(warped, expected, switches)

    def __str__(self) -> str:
        return (
            f"bursty arrivals ({self.peak:g} times the mean for {self.share:.0%} of the time, "
            f"{self.burst:g} s each)"
        )


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded arrivals, scaled in time to the requested rate.

    Attributes:
        name: name of the file.
        seen: arrival times in seconds since the first one, in order.
    """

    name: str
    seen: tuple[float, ...]

    @property
    def qps(self) -> float:
        """Recorded requests a second."""
        return (len(self.seen) - 1) / self.seen[-1]

    def times(self, qps: float, seconds: float, rng: np.random.Generator) -> Times:
        """Return all arrivals, scaled to ``qps`` requests a second; ``seconds`` is ignored."""
        return np.array(self.seen) * (self.qps / qps)

    def __str__(self) -> str:
        return f"{len(self.seen):,} arrivals of {self.name}"


Arrivals = Poisson | Bursty | Recorded
_KEYS: dict[str, Callable[[str], float]] = {
    "peak": float, "share": float, "burst": parse_duration,
}  # fmt: skip


def parse_arrivals(text: str) -> Arrivals:
    """Parse arrivals: ``poisson``, ``bursty:...`` or the path of a file.

    Raises:
        ValueError: the text is invalid, or the file can't be read.
    """
    if text == "poisson":
        return Poisson()
    if text == "bursty":
        return Bursty()
    if text.startswith("bursty:"):
        _, settings = parse_settings(text, "bursty:peak=3,share=0.2,burst=500ms")
        return Bursty(**read_settings("bursty", settings, _KEYS))
    return read_arrivals(Path(text))


def read_arrivals(path: Path) -> Recorded:
    """Read arrivals from a file: a time a line, in any order; # begins a comment.

    Raises:
        ValueError: the file can't be read, or has fewer than two times.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"arrivals are poisson, bursty or a file of times, and {str(path)!r} can't be read: "
            f"{error}"
        ) from None
    times = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                times.append(parse_duration(text, "s"))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {text!r}: {error}") from None
    times.sort()
    if len(times) < 2 or not math.isfinite(times[-1]) or times[-1] == times[0]:
        raise ValueError(f"{path} has no two times: expected an arrival a line, in seconds")
    return Recorded(path.name, tuple(time - times[0] for time in times))


def _uniform(count: int, end: float, rng: np.random.Generator) -> Times:
    """Draw sorted uniform times before ``end``, by exponential gaps instead of a sort."""
    times: Times = np.cumsum(rng.standard_exponential(count + 1))
    times *= end / times[-1]
    return times[:-1]
