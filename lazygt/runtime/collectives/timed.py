"""Timed collectives of this worker's group, for ``lazygt calibrate`` on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lazygt.runtime.collectives import group
from lazygt.runtime.collectives.backends import Backend

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def seconds(start: torch.Tensor, axis: str, carrier: str, kind: str, nbytes: int) -> torch.Tensor:
    """Time a collective: the minimum of this rank's rounds, then the maximum over the ranks.

    Args:
        start: a tensor on the device, with as many elements as there are rounds.
        carrier: ``sockets`` or ``local``.
        nbytes: payload size, as in ``Communication``.
    """
    line = group.line(axis)
    elements = max(nbytes // 4 // line.size, 1) * line.size
    buffer = torch.ones(elements, device=start.device)
    if carrier == "sockets":
        backend: Backend = line.sockets
    else:
        backend = line.shared if start.device.type == "cpu" else line.backend(buffer, kind, nbytes)
    work, least = _work(backend, kind, buffer, line.size), float("inf")
    meet = _work(backend, "all_reduce", torch.ones(line.size, device=start.device), line.size)
    for _ in range(start.numel() + 1):  # the first round allocates for the others
        meet()
        _settle(start)
        begin = time.perf_counter()
        work()
        _settle(start)
        least = min(least, time.perf_counter() - begin)
    slowest = torch.tensor([least], device=start.device)
    line.backend(slowest, "all_reduce", slowest.nbytes).all_reduce(slowest, "max").wait()
    return slowest.double()


def _work(backend: Backend, kind: str, buffer: torch.Tensor, ranks: int) -> Callable[[], object]:
    """Return a function that runs one collective to its end."""
    if kind == "all_reduce":
        return lambda: backend.all_reduce(buffer, "sum").wait()
    block, sent = buffer[: buffer.numel() // ranks].clone(), buffer.clone()
    counts = [block.numel()] * ranks
    return {
        "all_gather": lambda: backend.all_gather(buffer, block).wait(),
        "reduce_scatter": lambda: backend.reduce_scatter(block, sent, "sum").wait(),
        "all_to_all": lambda: backend.all_to_all(buffer, sent, counts, counts).wait(),
    }[kind]


def _settle(value: torch.Tensor) -> None:
    """Wait for the device."""
    if value.device.type == "cuda":
        torch.cuda.synchronize(value.device)
