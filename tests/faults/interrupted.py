"""A training that another process interrupts at random moments; run in a process of its own.

    python -m tests.faults.interrupted --interrupts 1000 --compile now

After each Ctrl-C it saves, as people do, and goes on from its last checkpoint. Every loss, and the
weights at the end, must have the bits of a training that nobody interrupted (with compiled code,
whose rounding depends on when it is swapped in, nearly). Prints counts as JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import select
import signal
import subprocess
import sys
import traceback
from collections import Counter
from typing import Any

import torch
from torch import nn

import lazygt
from lazygt.runtime.compiling import compiler
from lazygt.settings import grouped

STEPS = 8
#: Seconds within which an interrupt comes: some steps.
LONGEST = 0.08
#: Steps after which one that was sent should have come.
PATIENCE = 200
#: So much goes through shared memory.
LARGE = torch.arange(100_000.0)
INTERRUPTER = """
import os, select, signal, sys
for line in sys.stdin:
    select.select([], [], [], float(line))
    os.kill(os.getppid(), signal.SIGINT)
    print("sent", flush=True)
"""


class Interrupter:
    """A process that sends its parent one SIGINT at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def after(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n".encode())
        self._process.stdin.flush()

    def has_sent(self, seconds: float = 0.0) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def acknowledge(self) -> None:
        """Wait until the signal has been sent, so that none comes later."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Training:
    """A model that is trained for some steps, again and again from the same weights.

    Several workers share it.

    Attributes:
        step: updates so far.
        counts: two numbers on the workers; each update adds 1 to both, one after the other.
        updates: how many updates have done so since ``counts`` was made.
    """

    def __init__(self, session: lazygt.Session) -> None:
        self.session = session
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 300), nn.Linear(300, 4)
        )
        if session.mesh.world_size > 1:
            lazygt.fully_shard(self.model, "workers")
        self.model[0].weight.register_hook(lambda grad: grad * 1.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.update(0)  # makes the optimizer's state
        self.begin = self.checkpoint = self.saved(0)
        self.count_anew()

    def count_anew(self) -> None:
        self.counts, self.updates = torch.zeros(2), 0

    def saved(self, step: int) -> tuple[int, bytes]:
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
        return step, file.getvalue()

    def restore(self) -> None:
        model, optimizer = torch.load(io.BytesIO(self.checkpoint[1]), map_location="cpu")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def update(self, step: int) -> float:
        generator = torch.Generator().manual_seed(step)
        x = torch.rand(32, 16, generator=generator, device="cpu").to("lazygt")
        loss = (self.model(x) - x[:, :4].tanh()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def steps(self) -> list[float]:
        """Train to the last step, with a checkpoint after each; the losses from here on."""
        losses = []
        while self.checkpoint[0] < STEPS:
            step = self.checkpoint[0]
            losses.append(self.update(step))
            self.counts[0] += 1
            self.counts[1] += 1
            self.updates += 1
            self.checkpoint = self.saved(step + 1)
        return losses

    def run(self) -> tuple[list[float], list[torch.Tensor]]:
        """A whole training: its losses and its weights."""
        self.checkpoint = self.begin
        self.restore()
        losses = self.steps()
        return losses, [p.detach().cpu() for p in self.model.parameters()]


class Stress:
    """Interrupts a training so many times and looks at what is left after each."""

    def __init__(self, training: Training, seed: int) -> None:
        self.training = training
        self.seen: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._interrupter = Interrupter()
        self._exact = training.session.config.compile == "off"
        self._losses, self._weights = training.run()
        self._sizes = 0

    def run(self, interrupts: int) -> None:
        for _ in range(interrupts):
            try:
                self._until_interrupted()
                self.seen["swallowed"] += 1
            except KeyboardInterrupt:
                self.seen["interrupts"] += 1
            self._interrupter.acknowledge()
            self._look()
        self._check(*self.training.run())
        self._interrupter.close()

    def _until_interrupted(self) -> None:
        """Train, with new plans and waits for compiled code in between."""
        self._interrupter.after(self._draw.uniform(0.0, LONGEST))
        late = 0
        while late < PATIENCE:
            self._check(self.training.steps())
            late += self._interrupter.has_sent()
            self._sizes += 1
            assert torch.full((self._sizes,), 2.0).sum().item() == 2 * self._sizes
            assert torch.equal(LARGE.to("lazygt").cpu(), LARGE)
            self.training.session.compiled(timeout=0.01)
            self.training.checkpoint = self.training.begin
            self.training.restore()

    def _check(self, losses: list[float], weights: list[torch.Tensor] | None = None) -> None:
        """These are the last losses of a training."""
        expected = torch.tensor(self._losses[len(self._losses) - len(losses) :], device="cpu")
        self._same(torch.tensor(losses, device="cpu"), expected)
        for mine, theirs in zip(weights or (), self._weights, strict=False):
            self._same(mine, theirs)

    def _same(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        rtol = 0.0 if self._exact else 1e-3
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)

    def _look(self) -> None:
        """Everything is there: save, as after Ctrl-C, and go back to the checkpoint."""
        training = self.training
        first, second = training.counts.tolist()
        assert first - training.updates in (0, 1), (first, training.updates)
        assert first - second in (0, 1), (first, second)
        model, _ = torch.load(io.BytesIO(training.saved(0)[1]), map_location="cpu")
        assert all(value.isfinite().all() for value in model.values())
        training.count_anew()
        training.restore()


def say(unraisable: Any) -> None:
    """Where Python has ignored an exception: in a finalizer, or in a callback of C code."""
    print(f"ignored in {unraisable.object!r}", file=sys.stderr)
    traceback.print_exception(unraisable.exc_value, file=sys.stderr)


def main() -> None:
    sys.unraisablehook = say
    parser = argparse.ArgumentParser()
    parser.add_argument("--interrupts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", default="off")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cache", default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a compile process at idle priority gets nowhere on a busy machine
    compiler.leave_only_spare_time = lambda pid: None
    settings: dict[str, Any] = {"compile": given.compile, "cache_dir": given.cache}
    with lazygt.session(**grouped({"workers": given.workers, "threads": 1, **settings})) as session:
        stress = Stress(Training(session), given.seed)
        stress.run(given.interrupts)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print(json.dumps(stress.seen))


if __name__ == "__main__":
    main()
