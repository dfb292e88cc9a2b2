"""Mean-value formulas of a stage that batches requests, with their units.

    QPS of a GPU [1/s]      = batch / inference [s]         waiting is no part of it
    GPUs                    = ceil(total QPS / QPS of a GPU)
    load                    = total QPS / (GPUs x QPS of a GPU)
    arriving [1/s]          = total QPS / GPUs              each GPU has a queue of its own
    collection [s]          = batch / arriving              never batch / total QPS
    mean latency [s]        = collection / 2 + inference    on average half a batch has arrived
    first request [s]       = collection + inference        the queue was empty

These are the usual back-of-the-envelope formulas of dynamic batching: they assume evenly spaced
arrivals and full batches. Random arrivals are simulated (``simulation``). Only a queue that is
shared by all GPUs gets all requests.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lazygt.serving.stages import Stage

#: Load above which random arrivals queue up.
HIGH_LOAD = 0.85
_SLACK = 1e-9  # 30,000 / (20 / 0.03) is 45, despite rounding


class StageNumbers(NamedTuple):
    """A stage by its formulas; seconds, and requests a second.

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
