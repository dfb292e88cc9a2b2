"""Copies between host and GPU beside pinned ones, and weights that go to another process."""

import time
from collections.abc import Callable, Iterator

import torch

import lazygt
from benchmarks import data_movement
from benchmarks.gpu.rows import Goal, Row
from benchmarks.harness import interleave, ratio
from benchmarks.transfer import sending, sent
from benchmarks.transfer_processes import model
from lazygt.transfer import (
    CudaIpcTransferSender,
    ModuleExtractor,
    SharedMemoryTransferSender,
)

MIB = 1 << 20
ROUNDS = 7
#: Copies from this size on have the goal; smaller ones are bound by a round trip.
LARGE = 64 * MIB
PINNED = Goal("a pinned copy", 0.9, at_least=True)
WITHIN = Goal("a copy within the device", 0.9, at_least=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(copy: Callable[[], object], device: str) -> float:
    synchronize(device)
    begin = time.perf_counter()
    copy()
    synchronize(device)
    return time.perf_counter() - begin


def host(device: str) -> Iterator[Row]:
    """Uploads and fetches of one tensor by size."""
    sizes = (MIB, 16 * MIB, LARGE, 256 * MIB, 1024 * MIB) if device == "cuda" else (MIB, 16 * MIB)
    for size in sizes:
        pinned = interleave(_pinned(size, device), ROUNDS)
        with lazygt.session() as session:
            cases = data_movement.cases(size, session.synchronize)
            interleave(cases, 3)
            took = interleave({name: cases[name] for name in pinned}, ROUNDS)
        for name, ours in took.items():
            case = f"{name}, {data_movement.label(size)}"
            figure = f"{data_movement.speed(size, ours.median)} GB/s"
            share = pinned[name].median / ours.median
            if size < LARGE:
                yield Row(case, figure, f"{share:.2f}x {PINNED.peer}")
            else:
                yield PINNED.row(case, figure, share, device)


def _pinned(size: int, device: str) -> dict[str, Callable[[], float]]:
    """Seconds of an upload and a fetch between pinned memory and the device."""
    there = torch.zeros(size // 4, device=device)
    here = torch.zeros(size // 4, pin_memory=device == "cuda")
    return {
        "upload": lambda: seconds(lambda: there.copy_(here, non_blocking=True), device),
        "fetch": lambda: seconds(lambda: here.copy_(there, non_blocking=True), device),
    }


def transfer(device: str) -> Iterator[Row]:
    """Weights to another process: by CUDA IPC, on a CPU by shared memory."""
    gpu = device == "cuda"
    weights = {name: p.to(device) for name, p in model(1000.0 if gpu else 16.0).items()}
    nbytes = sum(p.nbytes for p in weights.values())
    others = {name: torch.empty_like(p) for name, p in weights.items()}

    def within() -> float:
        return seconds(lambda: [others[name].copy_(p) for name, p in weights.items()], device)

    source = ModuleExtractor(weights)
    with sending(CudaIpcTransferSender() if gpu else SharedMemoryTransferSender(), 1) as (to, _):
        for verify in ("none", "xor64" if gpu else "crc32"):
            cases = {"within": within, "transfer": sent(to, source, verify)}
            interleave(cases, 3)
            took = interleave(cases, ROUNDS)
            share = ratio(took["within"], took["transfer"])
            figure = f"{data_movement.speed(nbytes, took['transfer'].median)} GB/s"
            yield WITHIN.row(f"{to.strategy}, verify {verify}", figure, share, device)
