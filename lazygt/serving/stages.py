"""Stages of a service, and their notation on a command line.

    rank:batch=50,infer=80ms            batches of at most 50 requests, 80 ms each
    rank:batch=50,infer=20ms,items=200,per_item=6us     and 6 us for each candidate
    find:delay=20ms                     20 ms elsewhere, without GPUs

Durations carry their unit (``us``, ``ms``, ``s``, ``min``); inside they are seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lazygt.graph.text import duration

#: Units a second; division by them rounds 5us to the float 5e-6.
_UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60}
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(\w*)", re.IGNORECASE)
#: The ``wait`` of a batch that goes only when it is full.
FULL = "full"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; each of its GPUs runs one batch after another.

    Attributes:
        infer: seconds that a batch takes, however full it is.
        batch: requests in one, at most; 1: there is no batching.
        wait: seconds that the first request of a batch waits at most for others while a GPU is
            free. 0: a free GPU takes what is there; infinity: it waits until the batch is full.
        gpus: that run it; None: as many as are needed.
        fan: requests that each request becomes in this stage; it goes on when the last is done.
        items: candidates that a request brings.
        per_item: seconds that each candidate in a batch adds to ``infer``.
        delay: seconds that a request takes besides, without a GPU.

    Raises:
        ValueError: an impossible number, with a remedy.
    """

    name: str
    infer: float = 0.0
    batch: int = 1
    wait: float = 0.0
    gpus: int | None = None
    fan: int = 1
    items: int = 1
    per_item: float = 0.0
    delay: float = 0.0

    def __post_init__(self) -> None:
        counts = {"batch": self.batch, "fan": self.fan, "items": self.items}
        if self.gpus is not None:
            counts["gpus"] = self.gpus
        for key, count in counts.items():
            if count != int(count) or count < 1:
                raise ValueError(
                    f"stage {self.name!r}: {key}={count}: expected a whole number of at least 1"
                )
        for key in ("infer", "wait", "per_item", "delay"):
            seconds = getattr(self, key)
            if not (0 <= seconds < math.inf or (key == "wait" and seconds == math.inf)):
                raise ValueError(
                    f"stage {self.name!r}: {key}={seconds}: expected seconds, 0 or more"
                )
        if not self.on_gpus and (not self.delay or self.gpus is not None or self.batch != 1):
            raise ValueError(
                f"stage {self.name!r} does not say how long a batch takes: add infer=80ms, or give "
                f"delay=20ms alone for a stage without GPUs"
            )

    @property
    def on_gpus(self) -> bool:
        """True if there are batches; else requests only take their ``delay``."""
        return bool(self.infer or self.per_item)

    def seconds(self, requests: int) -> float:
        """Return the seconds of a batch: infer + requests x items x per_item."""
        return self.infer + requests * self.items * self.per_item

    @property
    def inference(self) -> float:
        """Seconds of a full batch."""
        return self.seconds(self.batch)

    @property
    def least(self) -> float:
        """Seconds that a request takes which finds a free GPU and goes alone."""
        return self.seconds(1) * self.on_gpus + self.delay


def parse_stage(text: str) -> Stage:
    """Parse the stage of a command line.

    Raises:
        ValueError: the text means none.
    """
    name, settings = parse_settings(text, "rank:batch=50,infer=80ms")
    return Stage(name, **read_settings(f"stage {name!r}", settings, _KEYS))


def parse_settings(text: str, example: str) -> tuple[str, dict[str, str]]:
    """Parse ``NAME:key=value,key=value`` into the name and the values.

    Raises:
        ValueError: it is not written so, or has a key twice.
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not name or not colon or not rest:
        raise ValueError(f"{text!r}: expected a name and what it has, such as {example}")
    settings: dict[str, str] = {}
    for part in rest.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"{text!r}: {part!r} is no key=value; write for example {example}")
        if key in settings:
            raise ValueError(f"{text!r} has {key} twice")
        settings[key] = value
    return name, settings


def read_settings(
    whose: str, settings: Mapping[str, str], keys: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """Parse the value of each setting with the parser of its key.

    Raises:
        ValueError: a key that is not there, or a value that can't be read.
    """
    values = {}
    for key, text in settings.items():
        if key not in keys:
            raise ValueError(f"{whose} has no {key!r}: it takes {', '.join(keys)}")
        try:
            values[key] = keys[key](text)
        except ValueError as error:
            raise ValueError(f"{whose}: {key}={text}: {error}") from None
    return values


def parse_duration(text: str, unit: str = "") -> float:
    """Parse a duration, and return its seconds.

    Args:
        unit: of a number that has none; by default it must have one.

    Raises:
        ValueError: it is no duration.
    """
    number, given = _split(text)
    named = given or unit
    if not named and number != 0:
        raise ValueError(f"expected a duration with its unit, such as {text}ms")
    if named and named not in _UNITS:
        raise ValueError(f"there is no unit {named!r}, only {', '.join(_UNITS)}")
    return number / _UNITS[named] if named else 0.0


def parse_count(text: str) -> int:
    """Parse a whole number.

    Raises:
        ValueError: it is none.
    """
    number, unit = _split(text)
    if unit or number != int(number):
        raise ValueError("expected a whole number")
    return int(number)


def parse_wait(text: str) -> float:
    """Parse a wait, and return its seconds; infinity for ``full``."""
    return math.inf if text == FULL else parse_duration(text)


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not math.isfinite(float(match[1])):
        raise ValueError("expected a number")
    return float(match[1]), match[2]


_KEYS: dict[str, Callable[[str], Any]] = {
    "batch": parse_count, "infer": parse_duration, "wait": parse_wait, "gpus": parse_count,
    "fan": parse_count, "items": parse_count, "per_item": parse_duration, "delay": parse_duration,
}  # fmt: skip


def check_service(qps: float, stages: Iterable[Stage], slo: float | None) -> None:
    """Check that the service can be planned.

    Raises:
        ValueError: no requests, no stage, two of one name, or an SLO that nothing can hold.
    """
    stages = list(stages)
    if not 0 < qps < math.inf:
        raise ValueError(f"{qps:g} requests a second: expected more than 0")
    if not stages:
        raise ValueError("a service has at least one stage, such as rank:batch=50,infer=80ms")
    names = [stage.name for stage in stages]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two stages are named {twice[0]!r}: give each a name of its own")
    least = sum(stage.least for stage in stages)
    if slo is not None and slo <= least:
        parts = " + ".join(f"{stage.name} {duration(stage.least)}" for stage in stages)
        raise ValueError(
            f"an SLO of {duration(slo)} can't be held: a request that never waits takes "
            f"{duration(least)} ({parts}); make inference shorter, drop a stage, or allow more "
            f"than {duration(least)}"
        )
