"""Measurements of real sessions: recording, runs, messages and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from lazygt.calibrate.fits import Exchange, fit_carrier
from lazygt.graph.collectives import goes_by_sockets, ring_bytes, socket_bytes
from lazygt.machine.model import Carrier
from lazygt.record.foreign.functions import apply
from lazygt.runtime.collectives import timed
from lazygt.session import Session

#: Ops that are recorded at once.
_OPS = 500
_AXIS = "workers"
#: Payloads up to which collectives are timed more often: they are disturbed more easily.
_SMALL = 1 << 20


class HostFigures:
    """Seconds of a message, of an op in a run, and of recording an op, in a session.

    Attributes:
        record, launch, message: see the schema.
    """

    def __init__(self, session: Session, rounds: int) -> None:
        x = torch.ones(4)
        session.synchronize()
        times = 3 * rounds + 2  # the first run of a plan is checked, the second makes its program
        records, runs = zip(*(_chain(session, x, _OPS) for _ in range(times)), strict=True)
        _, longer = zip(*(_chain(session, x, 5 * _OPS) for _ in range(times)), strict=True)
        self.record = min(records) / _OPS
        self.launch = max(min(longer) - min(runs), min(runs) / 10) / (4 * _OPS)
        self.message = min(_asked(x) for _ in range(20 * rounds + 2))


def _chain(session: Session, x: torch.Tensor, ops: int) -> tuple[float, float]:
    """Return the CPU seconds of recording a chain of ops, and the seconds of its run."""
    begin = time.thread_time()
    y = x
    for _ in range(ops):
        y = y + x
    recorded = time.thread_time() - begin
    begin = time.perf_counter()
    session.synchronize()
    return recorded, time.perf_counter() - begin


def _asked(x: torch.Tensor) -> float:
    """Seconds until a sum of four numbers is known."""
    begin = time.perf_counter()
    x.sum().item()
    return time.perf_counter() - begin


def carriers(
    device: str,
    groups: Sequence[int],
    sizes: Sequence[int],
    rounds: int,
    slopes: dict[str, float],
    threads: int,
    told: Callable[[], object],
) -> dict[str, Carrier]:
    """Measure and fit the carriers of collectives between numbers of workers.

    Args:
        groups: numbers of ranks.
        sizes: payloads in bytes.
        slopes: carrier -> seconds for each rank beyond the second, where two ranks are most.
    """
    names = ("local", "sockets") if device == "cpu" else ("local",)
    rows: dict[str, list[Exchange]] = {name: [] for name in names}
    for ranks in groups:
        with Session(workers=ranks, device=device, threads=threads, compile="off"):
            many, few = torch.zeros(5 * rounds), torch.zeros(rounds)
            for kind in timed.KINDS:
                for nbytes in sizes:
                    for name in names:
                        if name == "sockets" and not goes_by_sockets(kind, nbytes, ranks):
                            continue
                        sent = (ring_bytes if name == "local" else socket_bytes)(
                            kind, nbytes, ranks
                        )
                        start = many if nbytes <= _SMALL else few
                        took = apply(timed.seconds, start, _AXIS, name, kind, nbytes).item()
                        rows[name].append(Exchange(sent, ranks, took))
                        told()
    return {name: fit_carrier(rows[name], slopes[name]) for name in names}


def steps(device: str, groups: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of progress reports of ``carriers``."""
    count = 0
    for ranks in groups:
        for kind in timed.KINDS:
            small = sum(goes_by_sockets(kind, size, ranks) for size in sizes)
            count += len(sizes) + (small if device == "cpu" else 0)
    return count
