"""Collectives of two CPU workers on one host, and on two hosts that are both this machine: what
encrypted connections cost, without a network.

One thread each. Both crews take turns within a round; on two cores the four processes and the
threads that encrypt share them, so figures are those of a busy machine.
"""

import argparse
import secrets
import tempfile
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.harness import Report, interleave, parser, ratio
from benchmarks.sharded_processes import Crew
from benchmarks.transfer_processes import SECONDS, requests
from lazygt.graph.collectives import ring_bytes
from lazygt.net.channel import listen_local
from lazygt.net.sockets import GroupSpec
from lazygt.runtime.collectives import group
from lazygt.runtime.collectives.backends import HOST
from lazygt.runtime.collectives.rendezvous_store import StoreServer

RANKS = 2
ONE, TWO = "one host", "two hosts"
LISTENS = "listens"


class Rank:
    """One rank of a group."""

    def __init__(self, rank: int, spec: GroupSpec) -> None:
        self._rank, self._spec = rank, spec
        self._listener = listen_local(Path(spec.rendezvous(rank))).fd

    def join(self) -> None:
        """Meet the others, all of which listen by now."""
        group.join(self._spec, self._rank, RANKS, self._listener)
        torch.set_num_threads(1)
        group.wait()

    def reduce(self, nbytes: int, times: int) -> float:
        """Seconds of an all-reduce of so many bytes."""
        line, buffer = group.axis_group("ranks"), torch.ones(nbytes // 4)
        backend = line.backend(buffer, "all_reduce", nbytes)
        backend.all_reduce(buffer, "sum").wait()
        begin = time.perf_counter()
        for _ in range(times):
            backend.all_reduce(buffer, "sum").wait()
        return (time.perf_counter() - begin) / times

    def there(self, nbytes: int, times: int) -> float:
        """Seconds that so many bytes take from one rank to the other: half of there and back."""
        peer, data = group.axis_group("ranks").single(1 - self._rank), memoryview(bytearray(nbytes))
        begin = time.perf_counter()
        for _ in range(times):
            if self._rank == 0:
                peer.send(data)
            peer.receive(data)
            if self._rank:
                peer.send(data)
        return (time.perf_counter() - begin) / times / 2


def serve(pipe: Connection, rank: int, spec: GroupSpec) -> None:
    """Be a rank, and do what is asked."""
    here = Rank(rank, spec)
    for what in requests(pipe):
        name, *numbers = what.split()
        pipe.send(name == LISTENS or getattr(here, name)(*map(int, numbers)))
    group.leave()


def duel(report: Report, crews: dict[str, Crew], what: str, nbytes: int, rounds: int) -> None:
    """Both crews on one size."""
    times = max((4 << 20) // nbytes, 2) if nbytes > 1 << 16 else 200
    found = interleave(
        {
            name: lambda crew=crew: crew.ask(f"{what} {nbytes} {times}")
            for name, crew in crews.items()
        },
        rounds,
    )
    sent = ring_bytes("all_reduce", nbytes, RANKS) if what == "reduce" else nbytes
    report.add(
        {"reduce": "all_reduce", "there": "one way"}[what],
        f"{nbytes} B" if nbytes < 1024 else f"{nbytes >> 10} KiB",
        *(f"{found[name].low * 1e6:.0f}, {found[name].median * 1e6:.0f}" for name in crews),
        f"{ratio(found[TWO], found[ONE]):.1f}x",
        f"{sent / found[TWO].median / 1e6:.0f}",
    )


def compare(args: argparse.Namespace) -> Report:
    report = Report(
        "between hosts",
        f"{RANKS} CPU workers, one thread each; us, least and median",
        ["what", "size", ONE, TWO, "takes", "MB/s sent"],
    )
    token = secrets.token_bytes(32)
    with (
        tempfile.TemporaryDirectory() as here,
        tempfile.TemporaryDirectory() as there,
        closing(StoreServer("127.0.0.1", token)) as store,
    ):
        axis = f"ranks={RANKS}"
        alone = GroupSpec(HOST, here, SECONDS, axis)
        apart = [
            GroupSpec(HOST, there, SECONDS, axis, store.endpoint, name, "127.0.0.1", token.hex())
            for name in ("a", "b")
        ]
        with (
            Crew(serve, [(rank, alone) for rank in range(RANKS)]) as one,
            Crew(serve, list(enumerate(apart))) as two,
        ):
            crews = {ONE: one, TWO: two}
            for crew in crews.values():
                crew.ask(LISTENS)
                crew.ask("join")
            for nbytes in (8, 64 << 10):
                duel(report, crews, "there", nbytes, args.rounds)
            for kib in args.kib:
                duel(report, crews, "reduce", kib << 10, args.rounds)
    return report


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--kib", type=int, nargs="*", default=[4, 256, 1024, 65536])
    args = options.parse_args()
    if args.pin:
        options.error("--pin is for one worker; the scheduler places these")
    compare(args).finish(save=args.save)


if __name__ == "__main__":
    main()
