"""Transfer of 300 float32 tensors, 1 GB, to other processes, against memcpy and what others do.

A transfer lasts from the call until every receiver can read the new version. The peers do the same
with plain torch and ZMQ: an asynchronous Gloo broadcast of each tensor, and each tensor pickled
into a ZMQ message; both end with the values in parameters that exist already.
"""

import argparse
import ctypes
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor

from benchmarks.harness import Measured, Report, interleave, parser, ratio
from benchmarks.transfer_processes import (
    SECONDS,
    Other,
    broadcast,
    footprint,
    free_port,
    gloo,
    model,
    receive,
    receive_gloo,
    receive_pickled,
    reset_peak,
    status,
)
from lazygt.transfer import (
    BroadcastTransferSender,
    ModuleExtractor,
    Sender,
    SharedMemoryTransferSender,
)

FLAT_OVER = 100

MEMCPY, SHM, SHM_3 = "memcpy, one thread", "shared memory", "shared memory, 3 receivers"
SHM_CRC, SHM_3_CRC = "shared memory, crc32", "shared memory, 3 receivers, crc32"
SHM_BF16 = "shared memory, cast to bf16"
GLOO, PLAIN_GLOO, PICKLED = "BroadcastTransferSender", "plain Gloo broadcasts", "pickled, ZMQ"


# -- cases ---------------------------------------------------------------------------------


def seconds(case: Callable[[], object]) -> float:
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def memcpy(megabytes: float) -> Callable[[], float]:
    size = int(megabytes * 1e6)
    source, target = torch.rand(size // 4), torch.rand(size // 4)
    # The lambda holds both tensors; the address of one that was freed would be another's.
    pair = (source, target)
    return lambda: seconds(
        lambda: ctypes.memmove(pair[1].data_ptr(), pair[0].data_ptr(), size // 4 * 4)
    )


@contextmanager
def sending(sender: Sender, count: int) -> Iterator[tuple[Sender, list[Other]]]:
    """The sender with so many receivers."""
    with sender, ExitStack() as stack:
        others = [
            stack.enter_context(Other(receive, sender.strategy, sender.address, f"r{number}"))
            for number in range(count)
        ]
        sender.wait_for_receivers(count, SECONDS)
        yield sender, others


def sent(sender: Sender, source: ModuleExtractor, verify: str = "none") -> Callable[[], float]:
    def once() -> float:
        sender.verify = verify
        return seconds(lambda: sender.send(source, timeout=SECONDS))

    return once


@contextmanager
def shared_memory(params: dict[str, Tensor], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Cases that write into shared memory, and what the processes hold meanwhile."""
    source = ModuleExtractor(params)
    narrow = ModuleExtractor(params, cast={"*": torch.bfloat16})
    with (
        sending(SharedMemoryTransferSender(), 1) as (one, others),
        sending(SharedMemoryTransferSender(), 3) as (three, _),
        sending(SharedMemoryTransferSender(), 1) as (cast, _),
    ):
        yield {
            "cases": {
                MEMCPY: memcpy(args.megabytes),
                SHM: sent(one, source),
                SHM_CRC: sent(one, source, "crc32"),
                SHM_3: sent(three, source),
                SHM_3_CRC: sent(three, source, "crc32"),
                SHM_BF16: sent(cast, narrow),
            },
            "sender": one,
            "receiver": others[0],
            "source": source,
        }


@contextmanager
def peers(params: dict[str, Tensor], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What lazygt and others do through sockets, beside shared memory."""
    source, tensors = ModuleExtractor(params), list(params.values())
    port, path = free_port(), f"ipc:///tmp/lazygt-benchmark-{os.getpid()}"
    with (
        sending(SharedMemoryTransferSender(), 1) as (one, _),
        sending(BroadcastTransferSender(), 1) as (ours, _),
        Other(receive_gloo, port, args.megabytes) as plain,
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
        Other(receive_pickled, path, args.megabytes) as pickled,
    ):
        push.setsockopt(zmq.LINGER, 0)
        push.bind(path)
        group = gloo(port, 0)

        def broadcast_all() -> None:
            plain.pipe.send("go")
            broadcast(group, tensors)
            plain.answer()

        def pickle_all() -> None:
            pickled.pipe.send("go")
            for tensor in tensors:
                push.send(pickle.dumps(tensor))
            pickled.answer()

        yield {
            "cases": {
                SHM: sent(one, source),
                GLOO: sent(ours, source),
                PLAIN_GLOO: lambda: seconds(broadcast_all),
                PICKLED: lambda: seconds(pickle_all),
            }
        }
    Path(path.removeprefix("ipc://")).unlink(missing_ok=True)


# -- the report ----------------------------------------------------------------------------


def verdict(name: str, value: float, bound: float, *, least: bool) -> str:
    met = value >= bound if least else value <= bound
    word = "at least" if least else "at most"
    return f"{name}: {value:.2f}x; aim: {word} {bound}x: {'met' if met else 'MISSED'}"


def extra_memory(group: dict[str, Any], megabytes: float) -> list[str]:
    """Peak memory beside what is mapped, and growth over many transfers."""
    sender, receiver, source = group["sender"], group["receiver"], group["source"]
    sender.verify = "crc32"
    for _ in range(2):
        sender.send(source, timeout=SECONDS)  # now the receiver has touched both slots
    held = sum(os.fstat(slot.arena.fd).st_blocks * 512 for slot in sender.transport.slots) / 1e6
    before = reset_peak(), receiver.ask("reset peak")
    sender.send(source, timeout=SECONDS)
    peaks = status("VmHWM") - before[0], receiver.ask("peak") - before[1]
    first = footprint(), receiver.ask("footprint")
    for _ in range(FLAT_OVER):
        sender.send(source, timeout=SECONDS)
    last = footprint(), receiver.ask("footprint")
    changes = [
        f"{who} {new[0] - old[0]:+d} descriptors, {new[1] - old[1]:+d} mappings, "
        f"{new[2] - old[2]:+.1f} MB"
        for who, old, new in zip(("sender", "receiver"), first, last, strict=True)
    ]
    return [
        f"shared memory on the host: {held / megabytes:.2f}x the model for any number of "
        f"receivers; declared: 2x",
        f"peak beside it during a transfer: sender {peaks[0]:+.1f} MB, receiver {peaks[1]:+.1f} MB",
        f"{FLAT_OVER} more transfers: {'; '.join(changes)}",
    ]


def measured(group: dict[str, Any], rounds: int) -> dict[str, Measured]:
    interleave(group["cases"], 3)  # memory is faulted in, groups are joined
    return interleave(group["cases"], rounds)


def measure(args: argparse.Namespace) -> Report:
    params = model(args.megabytes)
    nbytes = sum(p.nbytes for p in params.values())
    report = Report(
        "transfer",
        f"{len(params)} float32 tensors, {nbytes / 1e9:.3f} GB, to other processes",
        ["transfer", "ms", "lowest", "highest", "GB/s", "x memcpy"],
    )
    with shared_memory(params, args) as group:
        found = measured(group, args.rounds)
        memory = extra_memory(group, nbytes / 1e6)
    with peers(params, args) as group:
        group["cases"][MEMCPY] = memcpy(args.megabytes)
        beside = measured(group, args.rounds)
    rows = [(name, value, found[MEMCPY]) for name, value in found.items()]
    rows += [(name, beside[name], beside[MEMCPY]) for name in (GLOO, PLAIN_GLOO, PICKLED)]
    for name, value, copy in rows:
        report.add(
            name,
            f"{value.median * 1e3:.0f}",
            f"{value.low * 1e3:.0f}",
            f"{value.high * 1e3:.0f}",
            f"{nbytes / value.median / 1e9:.2f}",
            f"{ratio(copy, value):.2f}x",
        )
    report.remarks += [
        verdict("shared memory against memcpy", ratio(found[MEMCPY], found[SHM]), 0.75, least=True),
        verdict("3 receivers against 1, time", ratio(found[SHM_3], found[SHM]), 1.15, least=False),
        verdict("faster than plain Gloo", ratio(beside[PLAIN_GLOO], beside[SHM]), 4, least=True),
        verdict("faster than pickled ZMQ", ratio(beside[PICKLED], beside[SHM]), 15, least=True),
        verdict(
            "crc32 against unverified, time", ratio(found[SHM_CRC], found[SHM]), 2, least=False
        ),
        verdict("bf16 against the plain copy", ratio(found[SHM_BF16], found[SHM]), 1, least=False),
        *memory,
        "our copies run in threads of their own, as many as 4 or the cores that there are",
    ]
    return report


def run(description: str | None, measure: Callable[[argparse.Namespace], Report]) -> None:
    """The command of a benchmark of transfers."""
    options = parser(description, rounds=7)
    options.add_argument("--megabytes", type=float, default=1_000, help="of weights (1000)")
    args = options.parse_args()
    if args.pin:
        options.error("--pin would leave the threads that copy one core")
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


def main() -> None:
    run(__doc__, measure)


if __name__ == "__main__":
    main()
