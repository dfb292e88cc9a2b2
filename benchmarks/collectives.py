"""Collectives of CPU workers against plain Gloo in the same processes; and of what carries them
sockets against shared memory, for the costs in ``lazygt/passes/sharding/choose``.

One thread a worker. Contestants take turns within a round, and every collective is checked once
before it is timed.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Report, interleave, parser, ratio
from benchmarks.sharded_processes import Crew
from benchmarks.transfer import verdict
from benchmarks.transfer_processes import SECONDS, requests
from lazygt.net.channel import listen_local
from lazygt.net.sockets import GroupSpec
from lazygt.runtime.collectives import group
from lazygt.runtime.collectives.backends import HOST, Backend

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LAZYGT, GLOO = "lazygt", "Gloo"
CARRIERS = SOCKETS, SHARED = "sockets", "shared"
AIM = 1.0

Exchange = Callable[[str, Tensor, Tensor], object]


class Rank:
    """One rank: its own end of both contestants."""

    def __init__(self, rank: int, workers: int, place: Path) -> None:
        self._rank, self._workers, self._place = rank, workers, place
        self._listener = listen_local(place / f"rendezvous{rank}").fd

    def join(self) -> None:
        """Meet the others, all of which listen by now."""
        spec = GroupSpec(HOST, str(self._place), SECONDS, f"ranks={self._workers}")
        group.join(spec, self._rank, self._workers, self._listener)
        torch.set_num_threads(1)
        line = group.axis_group("ranks")
        store = dist.FileStore(str(self._place / "gloo"), self._workers)
        gloo = dist.ProcessGroupGloo(store, self._rank, self._workers, timedelta(seconds=SECONDS))
        equal = [0] * self._workers

        def through(backend: Backend, kind: str, buffer: Tensor, sent: Tensor) -> object:
            counts = [buffer.numel() // self._workers] * self._workers
            given: dict[str, tuple[Any, ...]] = {
                "all_reduce": (buffer, "sum"),
                "all_gather": (buffer, sent),
                "reduce_scatter": (buffer, sent, "sum"),
                "all_to_all": (buffer, sent, counts, counts),
            }
            return getattr(backend, kind)(*given[kind]).wait()

        def plain(kind: str, buffer: Tensor, sent: Tensor) -> object:
            if kind == "all_reduce":
                return gloo.allreduce([buffer]).wait()
            if kind == "all_gather":
                return gloo._allgather_base(buffer, sent).wait()
            if kind == "reduce_scatter":
                return gloo._reduce_scatter_base(buffer, sent).wait()
            return gloo.alltoall_base(buffer, sent, equal[:0], equal[:0]).wait()

        def chosen(kind: str, buffer: Tensor, sent: Tensor) -> object:
            payload = max(buffer.nbytes, sent.nbytes) if kind != "all_reduce" else buffer.nbytes
            backend = line.backend(buffer, kind, payload)
            return through(backend, kind, buffer, sent)

        self._contestants: dict[str, Exchange] = {
            LAZYGT: chosen,
            GLOO: plain,
            SOCKETS: partial(through, line.sockets),
            SHARED: partial(through, line.shared),
        }

    def run(self, name: str, kind: str, nbytes: int, times: int) -> float:
        """Seconds a collective."""
        buffer, sent = self._tensors(kind, nbytes // 4)
        start = time.perf_counter()
        for _ in range(times):
            self._contestants[name](kind, buffer, sent)
        return (time.perf_counter() - start) / times

    def check(self, kind: str, nbytes: int) -> None:
        """Whether both give the same bits; of two ranks they do."""
        found = []
        for exchange in (self._contestants[LAZYGT], self._contestants[GLOO]):
            buffer, sent = self._tensors(kind, nbytes // 4)
            exchange(kind, buffer, sent)
            found.append(buffer)
        close = torch.equal if self._workers == 2 else torch.allclose
        if not close(*found):
            raise RuntimeError(f"{kind} of {nbytes} bytes: lazygt and Gloo come to other results")

    def _tensors(self, kind: str, elements: int) -> tuple[Tensor, Tensor]:
        """What is received into, and what is sent; the larger has so many elements."""
        whole = torch.rand(elements, generator=torch.Generator().manual_seed(self._rank))
        part = whole[: elements // self._workers].clone()
        if kind == "reduce_scatter":
            return part, whole
        return whole, whole.clone() if kind == "all_to_all" else part


def serve(pipe: Connection, rank: int, workers: int, place: Path) -> None:
    """Be a rank, and do what is asked."""
    here = Rank(rank, workers, place)
    for what in requests(pipe):
        name, *given = what.split()
        numbers = [int(one) if one.isdigit() else one for one in given]
        pipe.send(getattr(here, name)(*numbers))
    group.leave()


def exchanges(args: argparse.Namespace, workers: int) -> Iterator[Report]:
    report = Report(
        f"collectives of {workers}",
        f"One collective between {workers} CPU workers, one thread each",
        ["collective", "MiB", "lazygt ms", "Gloo ms", "as fast"],
    )
    with tempfile.TemporaryDirectory(dir=os.environ.get("XDG_RUNTIME_DIR")) as place:
        ranks = [(rank, workers, Path(place)) for rank in range(workers)]
        with Crew(serve, ranks) as crew:
            crew.ask("_tensors all_reduce 4")  # so that all listen
            crew.ask("join")
            for kind in KINDS:
                for mib in args.mib:
                    duel(report, crew, kind, mib, args.rounds)
            yield report
            if args.kib:
                yield carriers(args, crew, workers)


def duel(report: Report, crew: Crew, kind: str, mib: int, rounds: int) -> None:
    """lazygt and Gloo on one kind and size."""
    crew.ask(f"check {kind} {mib << 20}")
    times = max(64 // mib, 2)
    found = interleave(
        {
            name: lambda name=name: crew.ask(f"run {name} {kind} {mib << 20} {times}")
            for name in (LAZYGT, GLOO)
        },
        rounds,
    )
    as_fast = ratio(found[GLOO], found[LAZYGT])
    times_ms = [f"{found[name].median * 1e3:.2f}" for name in (LAZYGT, GLOO)]
    report.add(kind, str(mib), *times_ms, f"{as_fast:.2f}x")
    report.remarks.append(verdict(f"{kind} of {mib} MiB", as_fast, AIM, least=True))


def carriers(args: argparse.Namespace, crew: Crew, workers: int) -> Report:
    """What each carrier takes, also where the other one is chosen."""
    report = Report(
        f"carriers of {workers}",
        f"One collective between {workers} CPU workers, one thread each; us, least and median",
        ["collective", "KiB", *CARRIERS, "as fast", "chosen"],
    )
    for kind in KINDS:
        for kib in args.kib:
            duel_of_carriers(report, crew, kind, kib, args.rounds)
    return report


def duel_of_carriers(report: Report, crew: Crew, kind: str, kib: int, rounds: int) -> None:
    """Sockets and shared memory on one kind and size."""
    times = max(4096 // kib, 8)
    found = interleave(
        {
            name: lambda name=name: crew.ask(f"run {name} {kind} {kib << 10} {times}")
            for name in (*CARRIERS, LAZYGT)
        },
        rounds,
    )
    times_us = [f"{found[name].low * 1e6:.0f}, {found[name].median * 1e6:.0f}" for name in CARRIERS]
    as_fast = ratio(found[SHARED], found[SOCKETS])
    report.add(kind, str(kib), *times_us, f"{as_fast:.2f}x", f"{found[LAZYGT].median * 1e6:.0f}")


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--workers", type=int, nargs="+", default=[2])
    options.add_argument("--mib", type=int, nargs="*", default=[1, 16, 64])
    options.add_argument("--kib", type=int, nargs="*", default=[4, 64, 256, 1024])
    args = options.parse_args()
    if args.pin:
        options.error("--pin is for one worker; the scheduler places these")
    for workers in args.workers:
        for report in exchanges(args, workers):
            report.finish(save=args.save)


if __name__ == "__main__":
    main()
