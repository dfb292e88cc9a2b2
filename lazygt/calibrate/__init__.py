"""Calibration: measurements of this machine, written as a machine file.

Collectives are measured for each *carrier*, the way on which their bytes travel between the workers
of a host: ``local`` is shared memory between CPU workers, and NCCL between GPUs; ``sockets`` are
UNIX sockets, which CPU workers use for small payloads.

Every figure is the minimum of several rounds, so that other load counts little. Figures that are
not measured (compiled calls, networks, datasheet peaks) are copied from the default machine of the
device, with their sources.
"""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lazygt.calibrate import device_benchmarks
from lazygt.calibrate.device_benchmarks import (
    FULL,
    QUICK,
    SMALLEST,
    BenchmarkSize,
    Device,
    EventClock,
    ExchangeFit,
    HostClock,
    fit_carrier,
)
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
from lazygt.settings import Workers

# -- timed collectives, run on every rank ----------------------------------------------------------

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def time_collective(
    start: torch.Tensor, axis: str, carrier: str, kind: str, nbytes: int
) -> torch.Tensor:
    """Time a collective: the minimum of this rank's rounds, then the maximum over the ranks.

    Every rank runs this function, as an op of a recorded program (`apply`).

    Args:
        start: tensor on the device; its number of elements is the number of rounds.
        axis: axis of the mesh along which the ranks communicate.
        carrier: ``sockets`` or ``local``.
        kind: one of `KINDS`.
        nbytes: payload size, as in ``Communication``.

    Returns:
        The seconds, as a tensor of one element.
    """
    axis_group = group.axis_group(axis)
    elements = max(nbytes // 4 // axis_group.size, 1) * axis_group.size
    buffer = torch.ones(elements, device=start.device)
    if carrier == "sockets":
        backend: Backend = axis_group.sockets
    else:
        backend = (
            axis_group.shared
            if start.device.type == "cpu"
            else axis_group.backend(buffer, kind, nbytes)
        )
    work, fastest = _collective_call(backend, kind, buffer, axis_group.size), float("inf")
    barrier = _collective_call(
        backend, "all_reduce", torch.ones(axis_group.size, device=start.device), axis_group.size
    )
    for _ in range(start.numel() + 1):  # the first round allocates, and is the slowest
        barrier()
        _synchronize_device(start)
        begin = time.perf_counter()
        work()
        _synchronize_device(start)
        fastest = min(fastest, time.perf_counter() - begin)
    slowest = torch.tensor([fastest], device=start.device)
    axis_group.backend(slowest, "all_reduce", slowest.nbytes).all_reduce(slowest, "max").wait()
    return slowest.double()


def _collective_call(
    backend: Backend, kind: str, buffer: torch.Tensor, ranks: int
) -> Callable[[], object]:
    """Return a function that runs one collective to its end.

    Args:
        kind: one of `KINDS`.
        buffer: the payload on this rank; gathered or exchanged blocks are parts of it.
    """
    if kind == "all_reduce":
        return lambda: backend.all_reduce(buffer, "sum").wait()
    block, send_buffer = buffer[: buffer.numel() // ranks].clone(), buffer.clone()
    counts = [block.numel()] * ranks
    return {
        "all_gather": lambda: backend.all_gather(buffer, block).wait(),
        "reduce_scatter": lambda: backend.reduce_scatter(block, send_buffer, "sum").wait(),
        "all_to_all": lambda: backend.all_to_all(buffer, send_buffer, counts, counts).wait(),
    }[kind]


def _synchronize_device(value: torch.Tensor) -> None:
    """Wait for the device."""
    if value.device.type == "cuda":
        torch.cuda.synchronize(value.device)


# -- measurements of sessions ----------------------------------------------------------------------

#: Number of ops recorded at once.
_OPS = 500
_AXIS = "workers"
#: Payload up to which collectives are timed more often, as they are disturbed more easily.
_SMALL = 1 << 20


def host_figures(session: Session, rounds: int) -> dict[str, float]:
    """Measure the seconds of recording an op, of an op in a run, and of a message.

    Returns:
        Key of a figure in the machine file -> seconds.
    """
    x = torch.ones(4)
    session.synchronize()
    times = 3 * rounds + 2  # the first runs of a plan are slower: it is checked and compiled
    records, runs = zip(*(_time_chain(session, x, _OPS) for _ in range(times)), strict=True)
    _, longer = zip(*(_time_chain(session, x, 5 * _OPS) for _ in range(times)), strict=True)
    return {
        "host.record": min(records) / _OPS,
        "host.launch": max(min(longer) - min(runs), min(runs) / 10) / (4 * _OPS),
        "host.message": min(_fetch_seconds(x) for _ in range(20 * rounds + 2)),
    }


def _time_chain(session: Session, x: torch.Tensor, ops: int) -> tuple[float, float]:
    """Record and run a chain of additions; return the CPU seconds of recording, and the run's."""
    begin = time.thread_time()
    y = x
    for _ in range(ops):
        y = y + x
    recorded = time.thread_time() - begin
    begin = time.perf_counter()
    session.synchronize()
    return recorded, time.perf_counter() - begin


def _fetch_seconds(x: torch.Tensor) -> float:
    """Measure the seconds of a run of one op with a fetched result."""
    begin = time.perf_counter()
    x.sum().item()
    return time.perf_counter() - begin


def fit_carriers(
    device: str,
    groups: Sequence[int],
    sizes: Sequence[int],
    rounds: int,
    slopes: dict[str, float],
    threads: int,
    progress: Callable[[], object],
) -> dict[str, Carrier]:
    """Time collectives between workers, and fit the latency and bandwidth of each carrier.

    Args:
        device: ``cpu`` or ``cuda``.
        groups: numbers of ranks.
        sizes: payloads in bytes.
        rounds: times that each collective is run; small ones five times as often.
        threads: threads of a rank on the CPU.
        slopes: carrier -> seconds for each rank beyond the second, used if only two ranks fit.
        progress: called after each measurement.
    """
    rows: dict[str, list[ExchangeFit]] = defaultdict(list)
    for ranks in groups:
        with Session(workers=Workers(ranks, threads=threads), device=device, compile="off"):
            many, few = torch.zeros(5 * rounds), torch.zeros(rounds)
            for carrier, kind, nbytes in _timed_collectives(device, ranks, sizes):
                bytes_sent = ring_bytes if carrier == "local" else socket_bytes
                start = many if nbytes <= _SMALL else few
                duration = apply(time_collective, start, _AXIS, carrier, kind, nbytes).item()
                rows[carrier].append(ExchangeFit(bytes_sent(kind, nbytes, ranks), ranks, duration))
                progress()
    return {carrier: fit_carrier(timed, slopes[carrier]) for carrier, timed in rows.items()}


def _timed_collectives(device: str, ranks: int, sizes: Sequence[int]) -> list[tuple[str, str, int]]:
    """List the collectives to time between a number of ranks: (carrier, kind, payload in bytes).

    Payloads that a session would not send through sockets are timed on the ``local`` carrier only.
    """
    return [
        (carrier, kind, nbytes)
        for kind in KINDS
        for nbytes in sizes
        for carrier in ("local", "sockets")
        if carrier == "local" or (device == "cpu" and goes_by_sockets(kind, nbytes, ranks))
    ]


def progress_count(device: str, groups: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of progress reports of ``fit_carriers``."""
    return sum(len(_timed_collectives(device, ranks, sizes)) for ranks in groups)


# -- calibration -----------------------------------------------------------------------------------

__all__ = ["FULL", "QUICK", "SMALLEST", "measure", "write"]

#: Progress report. Arguments: the measurement, its number of steps done, and that of all steps (0:
#: unknown).
Progress = Callable[[str, int, int], object]


def measure(
    device: str = "cpu",
    size: BenchmarkSize = FULL,
    threads: int = 1,
    progress: Progress = lambda what, done, of: None,
) -> Machine:
    """Measure this machine, as seen from one rank.

    Args:
        device: ``cpu`` or ``cuda``.
        size: sizes and rounds of the measurements: ``FULL``, ``QUICK`` or ``SMALLEST``.
        threads: threads of a rank on the CPU.
        progress: called with progress reports.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _Calibration(device, size, threads, progress).machine()
    finally:
        torch.set_num_threads(previous)


class _Calibration:
    """Measurements of one machine.

    Attributes:
        base: the default machine of the device; its figures stand for those not measured.
        values: the figures measured so far, by key of the machine file.
        ranks: number of ranks that this host has room for.
        groups: numbers of ranks between which collectives are measured.
    """

    def __init__(self, device: str, size: BenchmarkSize, threads: int, progress: Progress) -> None:
        self.base = default_machine(device)
        self.device, self.size, self.threads, self._progress = device, size, threads, progress
        self.values: dict[str, float] = {}
        cores = len(os.sched_getaffinity(0))
        self.ranks = torch.cuda.device_count() if device == "cuda" else max(cores // threads, 1)
        self.groups = [n for n in (2, 4, 8) if n <= max(self.ranks, 2)]
        if device == "cuda" and self.ranks < 2:
            self.groups = []  # NCCL allows one rank a GPU

    def machine(self) -> Machine:
        """Measure everything, and return the machine; other figures are those of the default."""
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
        """Describe the origin of the measured figures."""
        threads = f", {self.threads} thread(s) a rank" if self.device == "cpu" else ""
        return (
            f"lazygt calibrate {VERSION} with torch {torch.__version__} on "
            f"{_processor(self.device)}{threads}, {time.strftime('%Y-%m-%d')}: the least of "
            f"{self.size.rounds} round(s); products of matrices are off their law by "
            f"{self.law.error:.0%} in the mean"
        )

    # -- one device --------------------------------------------------------------------------------

    def _kernels(self) -> None:
        """Measure ops of one device: launch, memory, pointwise ops, matmuls."""
        clock = EventClock() if self.device == "cuda" else HostClock(self.threads)

        def device_for(measurement: str) -> Device:
            """Return the device, which reports the progress of this measurement."""
            self._progress(measurement, 0, 0)
            return Device(self.device, clock, self.size, lambda: self._progress(measurement, 0, 0))

        launch_seconds = device_benchmarks.launch(device_for("an op"))
        memory = device_benchmarks.memory(device_for("memory"), launch_seconds)._asdict()
        self.values |= {f"memory.{name}": v for name, v in memory.items() if v is not None}
        self.values["memory.capacity"] = self._capacity()
        for family, rate in device_benchmarks.pointwise(
            device_for("pointwise ops"), launch_seconds
        ).items():
            self.values[f"pointwise.{family}"] = rate
        units = 1
        if self.device == "cuda":
            units = torch.cuda.get_device_properties(0).multi_processor_count
        law = self.law = device_benchmarks.matmuls(device_for("matmuls"), launch_seconds, units)
        self.values |= {f"matmul.rate.{dtype}": rate for dtype, rate in law.rate.items()}
        self.values |= {
            "matmul.tile_rows": law.tile_rows,
            "matmul.tile_columns": law.tile_columns,
            "matmul.units": units,
            "matmul.depth": law.depth,
        }

    def _ranges(self) -> None:
        """Record the ranges of measured sizes, beyond which predictions are extrapolations."""
        device = Device(self.device, HostClock(), self.size)
        products = [device.scale * each for shape in self.size.products for each in shape]
        ranges: dict[str, Sequence[int]] = {
            "products": products,
            "bytes": device_benchmarks.addition_bytes(device),
            "payloads": self.size.collectives if self.groups else (),
            "ranks": self.groups,
        }
        for name, sizes in ranges.items():
            if sizes:
                self.values[f"range.{name}.least"] = min(sizes)
                self.values[f"range.{name}.most"] = max(sizes)

    def _capacity(self) -> float:
        """Return the memory of a rank in bytes."""
        if self.device == "cuda":
            return float(torch.cuda.get_device_properties(0).total_memory)
        pages: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages / self.ranks

    # -- client and workers ------------------------------------------------------------------------

    def _host(self) -> None:
        """Measure recording, launches and messages in a session with one worker."""
        self._progress("messages and recording", 0, 0)
        workers = Workers(1, threads=self.threads)
        with Session(workers=workers, device=self.device, compile="off") as session:
            self.values |= host_figures(session, self.size.rounds)
        self.values["collectives.ranks"] = self.ranks

    def _collectives(self) -> None:
        """Measure collectives between workers, and fit their carriers."""
        if not self.groups:
            return
        done, total = 0, progress_count(self.device, self.groups, self.size.collectives)

        def progress() -> None:
            """Report one more measurement of collectives."""
            nonlocal done
            done += 1
            self._progress("collectives", done, total)

        self._progress("collectives", 0, total)
        base = self.base.collectives
        base_carriers = {"local": base.local, "sockets": base.sockets}
        slopes = {name: carrier[0].each for name, carrier in base_carriers.items() if carrier}
        measured = fit_carriers(
            self.device, self.groups, self.size.collectives, self.size.rounds, slopes,
            self.threads, progress,
        )  # fmt: skip
        for name, carrier in measured.items():
            self._carrier(name, carrier)

    def _carrier(self, name: str, carrier: Carrier) -> None:
        """Record the figures of a carrier; a missing bound (infinity) has no figure."""
        for index, link in enumerate(carrier):
            for field, value in link._asdict().items():
                if value != float("inf"):
                    self.values[f"collectives.{name}[{index}].{field}"] = value


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
    """Write a machine's file atomically, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, text_of(replace(machine, path=str(path))).encode(), 0o644)
    return path
