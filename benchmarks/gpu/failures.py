"""Failures of workers, and the price of being ready for them; the tests that need a GPU."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazygt
from benchmarks.gpu.rows import Goal, Row, text_of
from benchmarks.gpu.speed import gpt2_step, size_for
from benchmarks.harness import ROOT, Measured
from benchmarks.models import Step

GIB = 1 << 30
STEPS = 30


def index(device: str) -> Iterator[Row]:
    """An index out of range, which ends a GPU's context: its result raises, and nothing else."""
    with lazygt.session(compile="off") as session:
        before = torch.arange(4.0) + 1
        before.sum().item()
        begin = time.perf_counter()
        try:
            F.embedding(torch.tensor([99]), torch.zeros(7, 3)).sum().item()
            raised = "no error"
        except (lazygt.LazyGTError, IndexError) as error:
            raised = text_of(error)
        yield Row("its result", raised, goal="an error", met=raised != "no error")
        after = [before.sum().item(), (torch.ones(3) + 1).sum().item()]
        took = time.perf_counter() - begin
        figure = f"{after}, {len(session.recoveries)} recoveries, {took:.1f} s"
        yield Row("other values", figure, goal="[10.0, 6.0]", met=after == [10.0, 6.0])


def memory(device: str) -> Iterator[Row]:
    """More memory than there is: torch's own error, and the session goes on."""
    with lazygt.session(compile="off"):
        kept = torch.ones(1000)
        try:
            torch.ones(1024 * GIB // 4).sum().item()
            raised = "no error"
        except torch.OutOfMemoryError as error:
            raised = text_of(error)
        yield Row("1 TiB", raised, goal="OutOfMemoryError", met=raised != "no error")
        total = kept.sum().item()
        yield Row("other values", f"{total}", goal="1000.0", met=total == 1000.0)


def killed(device: str) -> Iterator[Row]:
    """A training whose worker is killed, beside one that nobody disturbs."""
    undisturbed, _ = _trained(None)
    for step in (3, STEPS // 2, STEPS - 5):
        numbers, seconds = _trained(step)
        same = torch.equal(numbers, undisturbed)
        figure = f"{'same' if same else 'other'} bits, back after {seconds:.1f} s"
        yield Row(f"kill -9 in step {step}", figure, goal="same bits", met=same)


def _trained(kill_at: int | None) -> tuple[Tensor, float]:
    """Losses and weights, and the seconds of the step in which the worker was killed."""
    with lazygt.session(compile="off") as session:
        torch.manual_seed(3)
        layers = [nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 1)]
        model, data = nn.Sequential(*layers), torch.randn(32, 64)
        optimizer, seconds, losses = torch.optim.AdamW(model.parameters()), 0.0, []
        for step in range(STEPS):
            begin = time.perf_counter()
            if step == kill_at:
                os.kill(session.worker_pids[0], signal.SIGKILL)
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == kill_at:
                seconds = time.perf_counter() - begin
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    return torch.cat([torch.tensor(losses, device="cpu"), weights]), seconds


def snapshots(device: str) -> Iterator[Row]:
    """Steps of GPT-2 small while snapshots are taken as often as can be, beside steps without."""
    seconds, took = 15.0 if device == "cuda" else 4.0, {}
    for recover in ("off", "auto"):
        with lazygt.session(recover=recover, snapshot_cost=1.0, compile="off") as session:
            step = gpt2_step("lazygt", size=size_for(device))
            for _ in range(10):
                step().item()
            before = session.stats()["snapshots"]
            took[recover] = Measured(tuple(_times(step, seconds)))
            count = session.stats()["snapshots"] - before
    without, ours = (mean(took[recover].rounds) for recover in ("off", "auto"))
    figure = f"{ours * 1e3:.3g} ms, {count} snapshots in {len(took['auto'].rounds)} steps"
    yield Goal("a session without", 1.02).row("a step", figure, ours / without, device)
    longest = took["auto"].high
    yield Row("the longest step", f"{longest * 1e3:.3g} ms", f"{longest / without:.1f}x")


def _times(step: Step, seconds: float) -> list[float]:
    """Seconds of each step, its loss read, for so long."""
    end, took = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        begin = time.perf_counter()
        step().item()
        took.append(time.perf_counter() - begin)
    return took


def suites(device: str) -> Iterator[Row]:
    """The tests that need a GPU."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LAZYGT_")}
    for path in ("tests/gpu", "tests/transfer/test_gpu.py"):
        command = [sys.executable, "-m", "pytest", path, "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            command, cwd=ROOT, env=plain, capture_output=True, text=True, check=False
        )
        lines = done.stdout.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        figure = "; ".join([*(lines or ["no output"])[-1:], *failed])[:600].strip("= ")
        yield Row(path, figure, goal="all pass", met=done.returncode == 0)
