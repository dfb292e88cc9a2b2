"""Threads that record into one session at once, each a training and views that it writes.

Run as ``python -m tests.native.threads THREADS ROUNDS``, which a sanitizer may watch.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import Tensor, nn

import lazygt
from lazygt import native


def work(seed: int, rounds: int, device: str) -> list[Tensor]:
    """What one thread computes: without draws, whose order would be up to the threads."""
    start = torch.linspace(-1.0, 1.0, 32 + 8 * seed, device="cpu").view(-1, 8)
    model = nn.Linear(8, 3, device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.5, 0.5, p.numel(), device="cpu").view_as(p) / (seed + 1))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, seen = start.to(device), []
    for number in range(rounds):
        x = (x * 0.5 + number).sin()
        x[number % 4].add_(seed + 0.25)
        x.view(-1)[::3].mul_(-1.0)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if number % 5 == 0:
            seen.append(torch.tensor(loss.item(), device="cpu"))
        if number % 7 == 0:
            seen.append(x[x > 0].cpu())
    return [*seen, x.cpu(), *(p.detach().cpu() for p in model.parameters())]


def at_once(threads: int, rounds: int) -> list[list[Tensor]]:
    """What so many threads compute in one session."""
    results: dict[int, list[Tensor]] = {}
    together = threading.Barrier(threads)

    def run(seed: int) -> None:
        together.wait()
        results[seed] = work(seed, rounds, "lazygt")

    with lazygt.session(launcher="inline", compile="off"):
        started = [threading.Thread(target=run, args=(seed,)) for seed in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    return [results[seed] for seed in range(threads)]


def main() -> None:
    """Have threads record, and compare with eager torch."""
    threads, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-6)
    found = at_once(threads, rounds)
    for seed, mine in enumerate(found):
        theirs = work(seed, rounds, "cpu")
        assert [*map(torch.equal, mine, theirs)] == [True] * len(theirs), seed
    print(native.choice().recorder, "equal")


if __name__ == "__main__":
    main()
