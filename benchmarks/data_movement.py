"""Upload and fetch of one tensor, in GB/s, against a plain copy in this process.

The peer is `copy_` between two buffers that exist already: the least any transfer can cost; and
`clone`, which copies into new memory, as a fetch does for its caller. Uploads go out one after the
other, as in a loop over batches, and end with one wait; every fetch waits for its own answer.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import lazygt
from benchmarks.harness import Report, interleave, parser, pin, ratio

KIB, MIB = 1 << 10, 1 << 20
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)


BURST = 32 * MIB


def seconds(case: Callable[[], object]) -> float:
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def label(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def speed(size: int, took: float) -> str:
    return f"{size / took / 1e9:.2f}"


def cases(size: int, synchronize: Callable[[], object]) -> dict[str, Callable[[], float]]:
    """Seconds for an upload, a fetch and a copy of `size` bytes, over a burst of them.

    A burst walks over different tensors, as batches are, so that no side copies within a cache.
    """
    times = max(BURST // size, 1)
    sources = [torch.rand(size // 4, device="cpu") for _ in range(times)]
    targets = [torch.empty_like(source) for source in sources]
    held = [source.to("lazygt") for source in sources]

    def uploads() -> float:
        start = time.perf_counter()
        for index, source in enumerate(sources):
            held[index] = source.to("lazygt")
        synchronize()
        return (time.perf_counter() - start) / times

    def copies() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return {
        "upload": uploads,
        "fetch": lambda: seconds(lambda: [tensor.cpu() for tensor in held]) / times,
        "copy": lambda: seconds(copies) / times,
        "fresh copy": lambda: seconds(lambda: [source.clone() for source in sources]) / times,
    }


def round_trip() -> float:
    """Seconds to fetch four floats that a worker holds already."""
    small = torch.ones(4, device="lazygt")
    small.cpu()
    return statistics.median(seconds(small.cpu) for _ in range(200))


def measure(args: argparse.Namespace) -> Report:
    columns = ["size", "copy_ GB/s", "clone GB/s", "upload GB/s", "x", "fetch GB/s", "x"]
    report = Report("data_movement", "Moving one float32 tensor to a worker and back", columns)
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        s.synchronize()
        if args.pin:
            pin(s.worker_pids)
        for size in (size for size in SIZES if size <= args.largest * MIB):
            made = cases(size, s.synchronize)
            interleave(made, rounds=3)
            found = interleave(made, args.rounds)
            copy = found["copy"]
            report.add(
                label(size),
                speed(size, copy.median),
                speed(size, found["fresh copy"].median),
                speed(size, found["upload"].median),
                f"{1 / ratio(found['upload'], copy):.2f}x",
                speed(size, found["fetch"].median),
                f"{1 / ratio(found['fetch'], copy):.2f}x",
            )
        trip = round_trip()
    report.remarks.append(f"fetching 4 floats takes {trip * 1e6:.0f} us: what small tensors pay")
    report.remarks.append("x: speed as a share of copy_ into a buffer that exists; aim: 0.4x")
    return report


def main() -> None:
    options = parser(__doc__, rounds=11)
    options.add_argument("--largest", type=int, default=256, help="largest size in MiB (256)")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
