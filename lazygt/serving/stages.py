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
from typing import Any, NamedTuple

from lazygt.graph.text import duration

#: Unit -> number of it in a second; dividing by these gives the nearest float: 5us is 5e-6.
_UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60}
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(\w*)", re.IGNORECASE)
#: ``wait`` of a stage that runs full batches only.
FULL = "full"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; each of its GPUs runs one batch after another.

    Attributes:
        infer: seconds of a batch of any size.
        batch: maximum requests of a batch; 1: no batching.
        wait: maximum seconds that the first request of a batch waits for others while a GPU is
            free. 0: a free GPU starts at once; infinity: it waits until the batch is full.
        gpus: number of GPUs; None: as many as are needed.
        fan: requests that each request becomes in this stage; it leaves when the last is done.
        items: candidates of a request.
        per_item: seconds that each candidate in a batch adds to ``infer``.
        delay: additional seconds of a request, without a GPU.

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
        """True if the stage runs batches on GPUs; else requests only take their ``delay``."""
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
        """Minimum seconds of a request: alone in its batch, on a free GPU."""
        return self.seconds(1) * self.on_gpus + self.delay


def parse_stage(text: str) -> Stage:
    """Parse a stage such as ``rank:batch=50,infer=80ms``.

    Raises:
        ValueError: the text is invalid.
    """
    name, settings = parse_settings(text, "rank:batch=50,infer=80ms")
    return Stage(name, **read_settings(f"stage {name!r}", settings, _KEYS))


def parse_settings(text: str, example: str) -> tuple[str, dict[str, str]]:
    """Parse ``NAME:key=value,key=value`` into the name and the values.

    Raises:
        ValueError: the text has another form, or a key twice.
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not name or not colon or not rest:
        raise ValueError(f"{text!r}: expected a name and what it has, such as {example}")
    settings: dict[str, str] = {}
    for item in rest.split(","):
        key, equals, value = (word.strip() for word in item.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"{text!r}: {item!r} is no key=value; write for example {example}")
        if key in settings:
            raise ValueError(f"{text!r} has {key} twice")
        settings[key] = value
    return name, settings


def read_settings(
    owner: str, settings: Mapping[str, str], keys: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """Parse the value of each setting with the parser of its key.

    Args:
        owner: name of the object with the settings, for errors.
        keys: parser of each key's text.

    Raises:
        ValueError: a key is unknown, or a value is invalid.
    """
    values = {}
    for key, text in settings.items():
        if key not in keys:
            raise ValueError(f"{owner} has no {key!r}: it takes {', '.join(keys)}")
        try:
            values[key] = keys[key](text)
        except ValueError as error:
            raise ValueError(f"{owner}: {key}={text}: {error}") from None
    return values


def parse_duration(text: str, unit: str = "") -> float:
    """Parse a duration, and return its seconds.

    Args:
        unit: unit of a number without one; by default a unit is required.

    Raises:
        ValueError: the text is no duration.
    """
    number, own_unit = _split(text)
    used_unit = own_unit or unit
    if not used_unit and number != 0:
        raise ValueError(f"expected a duration with its unit, such as {text}ms")
    if used_unit and used_unit not in _UNITS:
        raise ValueError(f"there is no unit {used_unit!r}, only {', '.join(_UNITS)}")
    return number / _UNITS[used_unit] if used_unit else 0.0


def parse_count(text: str) -> int:
    """Parse a whole number.

    Raises:
        ValueError: the text is no whole number.
    """
    number, unit = _split(text)
    if unit or number != int(number):
        raise ValueError("expected a whole number")
    return int(number)


def parse_wait(text: str) -> float:
    """Parse a wait, and return its seconds; infinity for ``full``."""
    return math.inf if text == FULL else parse_duration(text)


def _split(text: str) -> tuple[float, str]:
    """Split a text into its number and its unit."""
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
        ValueError: no requests, no stage, two stages of one name, or an SLO that can't be met.
    """
    stages = list(stages)
    if not 0 < qps < math.inf:
        raise ValueError(f"{qps:g} requests a second: expected more than 0")
    if not stages:
        raise ValueError("a service has at least one stage, such as rank:batch=50,infer=80ms")
    names = [stage.name for stage in stages]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise ValueError(f"two stages are named {duplicates[0]!r}: give each a name of its own")
    least = sum(stage.least for stage in stages)
    if slo is not None and slo <= least:
        terms = " + ".join(f"{stage.name} {duration(stage.least)}" for stage in stages)
        raise ValueError(
            f"an SLO of {duration(slo)} can't be held: a request that never waits takes "
            f"{duration(least)} ({terms}); make inference shorter, drop a stage, or allow more "
            f"than {duration(least)}"
        )


# -- mean-value formulas of a stage that batches requests, with their units ------------------------
# QPS of a GPU [1/s]      = batch / inference [s]         waiting is no part of it
#     GPUs                    = ceil(total QPS / QPS of a GPU)
#     load                    = total QPS / (GPUs x QPS of a GPU)
#     arriving [1/s]          = total QPS / GPUs              each GPU has a queue of its own
#     collection [s]          = batch / arriving              never batch / total QPS
#     mean latency [s]        = collection / 2 + inference    on average half a batch has arrived
#     first request [s]       = collection + inference        the queue was empty
#
# These are the usual back-of-the-envelope formulas of dynamic batching: they assume evenly spaced
# arrivals and full batches. Random arrivals are simulated (``simulation``). Only a queue that is
# shared by all GPUs gets all requests.

#: Load above which random arrivals queue up.
HIGH_LOAD = 0.85
_SLACK = 1e-9  # 30,000 / (20 / 0.03) is 45, despite rounding


class StageNumbers(NamedTuple):
    """Figures of a stage by the formulas above; in seconds, and in requests a second.

    Attributes:
        qps: arriving requests: the service's, times ``fan``.
        qps_of_gpu: capacity of one GPU.
        gpus: number of GPUs; 0 for a stage without.
        load: share of the time that the GPUs are busy; above 1 the queue grows without bound.
        arriving: requests a second at each queue.
        collection: seconds until a batch has arrived at a queue; 0 without batching.
        mean: mean latency of a request.
        first: latency of a request that finds an empty queue, and waits for a full batch.
    """

    stage: Stage
    qps: float
    qps_of_gpu: float
    gpus: int
    load: float
    arriving: float
    collection: float
    mean: float
    first: float


def qps_of_gpu(batch: int, inference: float) -> float:
    """Return the requests a second: batch / inference."""
    return batch / inference


def gpus_needed(qps: float, of_gpu: float) -> int:
    """Return ceil(total QPS / QPS of a GPU), the GPUs at full load."""
    return max(ceil(qps / of_gpu), 1)


def collection_seconds(batch: int, arriving: float) -> float:
    """Return the seconds until a batch has arrived: batch / requests a second at one queue.

    A batch of one request needs no time.
    """
    return batch / arriving if batch > 1 else 0.0


def stage_numbers(
    qps: float, stage: Stage, gpus: int | None = None, shared: bool = False
) -> StageNumbers:
    """Compute the figures of a stage by its formulas.

    Args:
        qps: requests a second of the service.
        gpus: number of GPUs; by default the stage's, or the fewest possible.
        shared: True if one queue serves all GPUs.
    """
    stage_qps = qps * stage.fan
    if not stage.on_gpus:
        return StageNumbers(stage, stage_qps, math.inf, 0, 0.0, 0.0, 0.0, stage.delay, stage.delay)
    of_gpu = qps_of_gpu(stage.batch, stage.inference)
    gpus = gpus or stage.gpus or gpus_needed(stage_qps, of_gpu)
    arriving = stage_qps / (1 if shared else gpus)
    collection = collection_seconds(stage.batch, arriving)
    service_seconds = stage.inference + stage.delay
    return StageNumbers(
        stage, stage_qps, of_gpu, gpus, stage_qps / (gpus * of_gpu), arriving, collection,
        collection / 2 + service_seconds, collection + service_seconds,
    )  # fmt: skip


def busy_gpus(qps: float, stage: Stage) -> float:
    """Return the mean number of busy GPUs with full batches; 0 for a stage without."""
    if not stage.on_gpus:
        return 0.0
    return qps * stage.fan / qps_of_gpu(stage.batch, stage.inference)


def gpus_at_load(qps: float, stage: Stage, load: float) -> int:
    """Return the fewest GPUs with at most this load; 0 for a stage without GPUs."""
    return max(ceil(busy_gpus(qps, stage) / load), 1) if stage.on_gpus else 0


def ceil(number: float) -> int:
    """Round up to a whole number, ignoring floating-point errors."""
    return math.ceil(number * (1 - _SLACK))
