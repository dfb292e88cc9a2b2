"""Calibration of the machine: measurements that make a machine file.

Every figure is the minimum of several rounds, so that other load counts little. Figures that are
not measured (compiled calls, networks, datasheet peaks) are taken over from the default machine of
the kind, with their sources.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lazygt.calibrate import device_benchmarks
from lazygt.calibrate.device_benchmarks import FULL, QUICK, SMALLEST, Device, Size
from lazygt.calibrate.fits import EventClock, Exchange, HostClock, fit_carrier
from lazygt.config import VERSION
from lazygt.graph.collectives import goes_by_sockets, ring_bytes, socket_bytes
from lazygt.host import files
from lazygt.machine.file import text_of
from lazygt.machine.find import CALIBRATED, default_machine
from lazygt.machine.model import Carrier, Figure, Machine
from lazygt.record.custom.functions import apply
from lazygt.runtime.collectives import group
from lazygt.runtime.collectives.backends import Backend
from lazygt.session import Session

# -- timed collectives of this worker's group, for ``lazygt calibrate`` on every rank --------------

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def seconds(start: torch.Tensor, axis: str, carrier: str, kind: str, nbytes: int) -> torch.Tensor:
    """Time a collective: the minimum of this rank's rounds, then the maximum over the ranks.

    Args:
        start: a tensor on the device, with as many elements as there are rounds.
        carrier: ``sockets`` or ``local``.
        nbytes: payload size, as in ``Communication``.
    """
    line = group.axis_group(axis)
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


# -- measurements of real sessions: recording, runs, messages and collectives ----------------------

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
            for kind in KINDS:
                for nbytes in sizes:
                    for name in names:
                        if name == "sockets" and not goes_by_sockets(kind, nbytes, ranks):
                            continue
                        sent = (ring_bytes if name == "local" else socket_bytes)(
                            kind, nbytes, ranks
                        )
                        start = many if nbytes <= _SMALL else few
                        took = apply(seconds, start, _AXIS, name, kind, nbytes).item()
                        rows[name].append(Exchange(sent, ranks, took))
                        told()
    return {name: fit_carrier(rows[name], slopes[name]) for name in names}


def steps(device: str, groups: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of progress reports of ``carriers``."""
    count = 0
    for ranks in groups:
        for kind in KINDS:
            small = sum(goes_by_sockets(kind, size, ranks) for size in sizes)
            count += len(sizes) + (small if device == "cpu" else 0)
    return count


# -- calibration of the machine: measurements that make a machine file -----------------------------

__all__ = ["FULL", "QUICK", "SMALLEST", "measure", "write"]

#: (what is being measured, how many steps of how many are done)
Told = Callable[[str, int, int], object]


def measure(
    device: str = "cpu",
    size: Size = FULL,
    threads: int = 1,
    told: Told = lambda what, done, of: None,
) -> Machine:
    """The machine that this is, seen from one rank.

    Args:
        device: ``cpu`` or ``cuda``.
        threads: of a rank on the CPU.
        told: called while it goes on.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _Calibration(device, size, threads, told).machine()
    finally:
        torch.set_num_threads(before)


class _Calibration:
    """The figures so far."""

    def __init__(self, device: str, size: Size, threads: int, told: Told) -> None:
        self.base = default_machine(device)
        self.device, self.size, self.threads, self._told = device, size, threads, told
        self.values: dict[str, float] = {}
        cores = len(os.sched_getaffinity(0))
        self.ranks = torch.cuda.device_count() if device == "cuda" else max(cores // threads, 1)
        self.groups = [n for n in (2, 4, 8) if n <= max(self.ranks, 2)]
        if device == "cuda" and self.ranks < 2:
            self.groups = []  # NCCL takes one rank a GPU

    def machine(self) -> Machine:
        self._kernels()
        self._host()
        self._collectives()
        self._ranges()
        figures = {
            key: figure for key, figure in self.base.figures.items() if not self._replaced(key)
        }
        measured = {
            key: Figure(_rounded(key, value), "measured", CALIBRATED)
            for key, value in self.values.items()
        }
        figures |= measured
        used = {figure.source for figure in figures.values()}
        sources = {name: text for name, text in self.base.sources.items() if name in used}
        return Machine(
            CALIBRATED,
            self.device,
            f"{_processor(self.device)}, {self.ranks} ranks on a host",
            figures,
            {CALIBRATED: self._source(), **sources},
        )

    def _replaced(self, key: str) -> bool:
        """Return whether a figure of the base machine was measured, in any dtype or entry."""
        section = key.partition("[")[0] if "[" in key else ""
        return any(section and other.startswith(f"{section}[") for other in self.values) or (
            key.startswith("matmul.rate.")
        )

    def _source(self) -> str:
        where = f", {self.threads} thread(s) a rank" if self.device == "cpu" else ""
        return (
            f"lazygt calibrate {VERSION} with torch {torch.__version__} on "
            f"{_processor(self.device)}{where}, {time.strftime('%Y-%m-%d')}: the least of "
            f"{self.size.rounds} round(s); products of matrices are off their law by "
            f"{self.law.error:.0%} in the mean"
        )

    # -- what one device does alone ----------------------------------------------------------------

    def _kernels(self) -> None:
        clock = EventClock() if self.device == "cuda" else HostClock(self.threads)

        def measured(what: str) -> Device:
            self._told(what, 0, 0)
            return Device(self.device, clock, self.size, lambda: self._told(what, 0, 0))

        launched = device_benchmarks.launch(measured("an op"))
        memory = device_benchmarks.memory(measured("memory"), launched)._asdict()
        self.values |= {f"memory.{name}": v for name, v in memory.items() if v is not None}
        self.values["memory.capacity"] = self._capacity()
        for family, rate in device_benchmarks.pointwise(
            measured("pointwise ops"), launched
        ).items():
            self.values[f"pointwise.{family}"] = rate
        units = 1
        if self.device == "cuda":
            units = torch.cuda.get_device_properties(0).multi_processor_count
        law = self.law = device_benchmarks.matmuls(measured("matmuls"), launched, units)
        self.values |= {f"matmul.rate.{dtype}": rate for dtype, rate in law.rate.items()}
        self.values |= {
            "matmul.tile_rows": law.tile_rows,
            "matmul.tile_columns": law.tile_columns,
            "matmul.units": units,
            "matmul.depth": law.depth,
        }

    def _ranges(self) -> None:
        """The sizes that were measured."""
        device = Device(self.device, HostClock(), self.size)
        products = [device.scale * each for shape in self.size.products for each in shape]
        ranges: dict[str, Sequence[int]] = {
            "products": products,
            "bytes": device_benchmarks.moved(device),
            "payloads": self.size.collectives if self.groups else (),
            "ranks": self.groups,
        }
        for what, sizes in ranges.items():
            if sizes:
                self.values[f"range.{what}.least"] = min(sizes)
                self.values[f"range.{what}.most"] = max(sizes)

    def _capacity(self) -> float:
        """Bytes of a rank."""
        if self.device == "cuda":
            return float(torch.cuda.get_device_properties(0).total_memory)
        pages: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages / self.ranks

    # -- what client and workers do ----------------------------------------------------------------

    def _host(self) -> None:
        self._told("messages and recording", 0, 0)
        settings: dict[str, Any] = {
            "device": self.device,
            "threads": self.threads,
            "compile": "off",
        }
        with Session(workers=1, **settings) as session:
            host = HostFigures(session, self.size.rounds)
        self.values |= {
            "host.record": host.record,
            "host.launch": host.launch,
            "host.message": host.message,
            "collectives.ranks": self.ranks,
        }

    def _collectives(self) -> None:
        if not self.groups:
            return
        done, of = 0, steps(self.device, self.groups, self.size.collectives)

        def told() -> None:
            nonlocal done
            done += 1
            self._told("collectives", done, of)

        self._told("collectives", 0, of)
        base = self.base.collectives
        known = {"local": base.local, "sockets": base.sockets}
        slopes = {name: carrier[0].each for name, carrier in known.items() if carrier}
        measured = carriers(
            self.device, self.groups, self.size.collectives, self.size.rounds, slopes,
            self.threads, told,
        )  # fmt: skip
        for name, carrier in measured.items():
            self._carrier(name, carrier)

    def _carrier(self, name: str, carrier: Carrier) -> None:
        for at, link in enumerate(carrier):
            for field, value in link._asdict().items():
                if value != float("inf"):
                    self.values[f"collectives.{name}[{at}].{field}"] = value


def _rounded(key: str, value: float) -> float:
    """Round times to four digits, and leave sizes as they are."""
    return float(value) if key.startswith("range.") else float(f"{value:.4g}")


def _processor(device: str) -> str:
    """Return the name of the processor or GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    rows = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (row.partition(":")[2].strip() for row in rows if row.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def write(machine: Machine, path: Path) -> Path:
    """Write a machine's file, whole or not at all; where it lies now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, text_of(replace(machine, path=str(path))).encode(), 0o644)
    return path
