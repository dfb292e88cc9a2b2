"""Mean-value formulas of a stage that batches requests, with their units.

    QPS of a GPU [1/s]      = batch / inference [s]         waiting is no part of it
    GPUs                    = ceil(total QPS / QPS of a GPU)
    load                    = total QPS / (GPUs x QPS of a GPU)
    arriving [1/s]          = total QPS / GPUs              each GPU has a queue of its own
    collection [s]          = batch / arriving              never batch / total QPS
    mean latency [s]        = collection / 2 + inference    on average half a batch is there
    first request [s]       = collection + inference        it finds an empty queue

They are the usual back-of-the-envelope arithmetic of dynamic batching: requests come like a clock
and every batch is full. Random arrivals do neither; see ``simulation``. Where one queue
serves all GPUs, and only there, all requests arrive at it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lazygt.serving.stages import Stage

#: Share of the time that GPUs are busy, above which random arrivals queue up.
HIGH_LOAD = 0.85
_SLACK = 1e-9  # 30,000 / (20 / 0.03) is 45, despite rounding


class StageNumbers(NamedTuple):
    """A stage by its formulas; seconds, and requests a second.

    Attributes:
        qps: that come in: the service's, times ``fan``.
        qps_of_gpu: that one GPU can do.
        gpus: that run it; 0 for a stage without.
        load: share of the time that they are busy; above 1 the queue grows for ever.
        arriving: requests a second at each queue.
        collection: until a batch of requests has arrived at one; 0 where there is no batching.
        mean: latency of a request.
        first: latency of one that finds an empty queue, and waits for a whole batch.
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
    """Return ceil(total QPS / QPS of a GPU): all GPUs are then busy all the time."""
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
        qps: of the service.
        gpus: that run it; by default the stage's number, or the fewest possible.
        shared: they take from one queue.
    """
    come = qps * stage.fan
    if not stage.on_gpus:
        return StageNumbers(stage, come, math.inf, 0, 0.0, 0.0, 0.0, stage.delay, stage.delay)
    of_gpu = qps_of_gpu(stage.batch, stage.inference)
    gpus = gpus or stage.gpus or gpus_needed(come, of_gpu)
    arriving = come / (1 if shared else gpus)
    collection = collection_seconds(stage.batch, arriving)
    after = stage.inference + stage.delay
    return StageNumbers(
        stage, come, of_gpu, gpus, come / (gpus * of_gpu), arriving, collection,
        collection / 2 + after, collection + after,
    )  # fmt: skip


def busy_gpus(qps: float, stage: Stage) -> float:
    """Return the mean number of busy GPUs with full batches; 0 for a stage without."""
    if not stage.on_gpus:
        return 0.0
    return qps * stage.fan / qps_of_gpu(stage.batch, stage.inference)


def gpus_at_load(qps: float, stage: Stage, load: float) -> int:
    """Return the fewest GPUs that are each busy for at most this share; 0 without GPUs."""
    return max(ceil(busy_gpus(qps, stage) / load), 1) if stage.on_gpus else 0


def ceil(number: float) -> int:
    """Round up to a whole number, but for rounding errors."""
    return math.ceil(number * (1 - _SLACK))
