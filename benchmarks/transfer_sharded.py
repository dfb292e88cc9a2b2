"""Transfer out of a session whose two workers hold the weights in blocks (FSDP, Shard(0)).

Each worker writes its own blocks into the receivers' memory, or broadcasts them; beside
it the same weights gathered by the client, which is what a sender does that knows no blocks, and a
plain memcpy of as many bytes.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import lazygt
from benchmarks.harness import Report, interleave, ratio
from benchmarks.transfer import memcpy, run, seconds
from benchmarks.transfer_processes import SECONDS, Other, receive
from lazygt.transfer import (
    BroadcastTransferSender,
    Chunk,
    Manifest,
    ModuleExtractor,
    Sender,
    SharedMemoryTransferSender,
)
from lazygt.transfer.layout import route

WIDTH = 1_024
MEMCPY, WHOLE, CRC = "memcpy, one thread", "to whole", "to whole, crc32"
PARALLEL, CLIENT = "to two tensor parallel ranks", "gathered by the client, to whole"
BROADCAST, BROADCAST_PARALLEL = "broadcast, to whole", "broadcast, to two tensor parallel ranks"
BROADCAST_CLIENT = "broadcast, gathered by the client, to whole"
#: column parallel, row parallel
TARGET = {"*.up.weight": {"model": Shard(0)}, "*.down.weight": {"model": Shard(1)}}


class Layer(nn.Module):
    """50 MB in two matrices and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 6 * WIDTH)
        self.down = nn.Linear(6 * WIDTH, WIDTH)


class Gathered:
    """An extractor that hides where its parameters are."""

    def __init__(self, module: nn.Module) -> None:
        self._inner = ModuleExtractor(module)

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def chunks(self) -> Iterator[Chunk]:
        return self._inner.chunks()


@contextmanager
def sender_to(
    *receivers: dict[str, Any], kind: Callable[[], Sender] = SharedMemoryTransferSender
) -> Iterator[Sender]:
    """A sender with a receiver for each dict of arguments."""
    with kind() as sender, ExitStack() as stack:
        for number, options in enumerate(receivers):
            arguments = (receive, sender.strategy, sender.address, f"r{number}", options)
            stack.enter_context(Other(*arguments))
        sender.wait_for_receivers(len(receivers), SECONDS)
        yield sender


def through_client(session: lazygt.Session, sender: Sender, source: Any) -> int:
    """Bytes that the client sends and receives for one transfer."""
    ways = ("bytes_sent", "bytes_received", "bytes_fetched", "bytes_uploaded")
    before = session.stats()
    sender.send(source, timeout=SECONDS)
    after = session.stats()
    return sum(after[way] - before[way] for way in ways)


def model_of(megabytes: float) -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(max(round(megabytes / 50), 1))))


def measure(args: argparse.Namespace) -> Report:
    with torch.device("meta"):
        params = list(model_of(args.megabytes).parameters())
    nbytes = sum(p.nbytes for p in params)
    copy = memcpy(nbytes / 1e6)
    ranks = [{"mesh": "model=2", "rank": rank, "placements": TARGET} for rank in (0, 1)]
    with (
        lazygt.session(mesh={"data": 2, "model": 1}) as s,
        sender_to({}) as whole,
        sender_to(*ranks) as parallel,
        sender_to({}) as client,
        sender_to({}, kind=BroadcastTransferSender) as broadcast,
        sender_to(*ranks, kind=BroadcastTransferSender) as broadcast_parallel,
        sender_to({}, kind=BroadcastTransferSender) as broadcast_client,
    ):
        model = model_of(args.megabytes)
        lazygt.parallelize_module(model, parallelize_plan={"*": [Shard(0), Replicate()]})
        s.synchronize()

        def sent(sender: Sender, verify: str, source: Any) -> float:
            sender.verify = verify
            return seconds(lambda: sender.send(source, timeout=SECONDS))

        direct, gathered = ModuleExtractor(model), Gathered(model)
        cases = {
            MEMCPY: copy,
            WHOLE: lambda: sent(whole, "none", direct),
            CRC: lambda: sent(whole, "crc32", direct),
            PARALLEL: lambda: sent(parallel, "none", direct),
            CLIENT: lambda: sent(client, "none", gathered),
            BROADCAST: lambda: sent(broadcast, "none", direct),
            BROADCAST_PARALLEL: lambda: sent(broadcast_parallel, "none", direct),
            BROADCAST_CLIENT: lambda: sent(broadcast_client, "none", gathered),
        }
        interleave(cases, 3)  # memory is faulted in, routes are planned
        planned = route.cache_info().misses
        found = interleave(cases, args.rounds)
        through = [through_client(s, sender, direct) for sender in (whole, broadcast)]
        report = whole.send(direct, timeout=SECONDS)
    table = Report(
        "transfer_sharded",
        f"{nbytes / 1e9:.3f} GB in {len(params)} parameters, Shard(0) on 2 workers",
        ["transfer", "ms", "lowest", "highest", "GB/s", "x memcpy"],
    )
    for name, value in found.items():
        times = [f"{each * 1e3:.0f}" for each in (value.median, value.low, value.high)]
        speed = f"{nbytes / value.median / 1e9:.2f}"
        table.add(name, *times, speed, f"{ratio(found[MEMCPY], value):.2f}x")
    written = ", ".join(f"{done / 1e6:.0f} MB by worker {n}" for n, done in report.written.items())
    table.remarks += [
        f"against gathering in the client: {ratio(found[CLIENT], found[WHOLE]):.2f}x as fast",
        f"by broadcast: {ratio(found[BROADCAST_CLIENT], found[BROADCAST]):.2f}x as fast",
        f"one transfer: {written}; {through[0]} bytes through the client ({through[1]} by "
        f"broadcast), all of them requests and their answers",
        f"routes planned during the rounds: {route.cache_info().misses - planned}",
        "each worker copies with its share of the cores",
    ]
    return table


def main() -> None:
    run(__doc__, measure)


if __name__ == "__main__":
    main()
