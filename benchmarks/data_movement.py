"""Upload and fetch of one tensor, in GB/s, against a plain copy in this process.

The peer is `copy_` between two buffers that exist already: the least any transfer can cost.
`--fresh` makes it copy into new memory, which is what a fetch hands to its caller.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

import lazygt
from benchmarks.harness import Report, interleave, parser, pin, ratio

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)


def seconds(case: Callable[[], object]) -> float:
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def label(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def speed(size: int, took: float) -> str:
    return f"{size / took / 1e9:.2f}"


def cases(size: int, synchronize: Callable[[], object]) -> dict[str, Callable[[], float]]:
    """One upload, one fetch and one copy of `size` bytes; each waits until the data has arrived."""
    source = torch.rand(size // 4, device="cpu")
    target = torch.empty_like(source)
    held: list[Tensor] = [source.to("lazygt")]

    def upload() -> None:
        held[0] = source.to("lazygt")
        synchronize()

    return {
        "upload": lambda: seconds(upload),
        "fetch": lambda: seconds(lambda: held[0].cpu()),
        "copy": lambda: seconds(lambda: target.copy_(source)),
        "fresh copy": lambda: seconds(source.clone),
    }


def measure(args: argparse.Namespace) -> Report:
    columns = ["size", "copy_ GB/s", "clone GB/s", "upload GB/s", "x", "fetch GB/s", "x"]
    report = Report("data_movement", "Moving one float32 tensor to a worker and back", columns)
    with lazygt.session(workers=1, threads=1) as s:
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
