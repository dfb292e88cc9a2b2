"""CUDA graphs with ops that they may not hold, failures of workers, and the tests for GPUs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


#: Ops that wait for the GPU, draw, or write, on 64 floats.
WAITING: dict[str, Callable[[Tensor], Tensor]] = {
    "randperm": lambda x: x[torch.randperm(64)],
    "multinomial": lambda x: x[torch.multinomial(x.softmax(0), 64)],
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: F.dropout(x, 0.3),
    "index_put_ with a mask": lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
    "masked_scatter_": lambda x: x.clone().masked_scatter_(x > 0, x * 2),
    "put_": lambda x: x.clone().put_(torch.arange(4), torch.ones(4)),
    "sort": lambda x: x.sort().values,
    "cholesky": lambda x: torch.linalg.cholesky(torch.eye(8) * 2 + x.sum() * 0).sum() + x,
    "inverse": lambda x: torch.linalg.inv(torch.eye(8) * 2).sum() + x,
    "svdvals": lambda x: torch.linalg.svdvals(x.view(8, 8)).sum() + x,
    "bincount": lambda x: torch.bincount(torch.arange(64)).sum() + x,
    "conv1d": lambda x: F.conv1d(x.view(1, 1, 64), torch.ones(1, 1, 3), padding=1).view(64),
    "median": lambda x: x.median() + x,
}


def waiting(device: str) -> Iterator[Row]:
    """Programs with an op that a CUDA graph may not hold: no capture fails for it."""
    for name, op in WAITING.items():
        try:
            yield _captured(name, op)
        except lazygt.LazyGTError as error:
            yield Row(name, text_of(error), goal="no failure", met=False)


def _captured(name: str, op: Callable[[Tensor], Tensor]) -> Row:
    """Run two plans until they are hot, one of them with the op."""
    with lazygt.session(
        compile=lazygt.Compile("off", cuda_graphs="now"), recovery="off"
    ) as session:
        x, y = torch.randn(64), torch.randn(64)
        for _ in range(10):
            x = op(((x.sin() * 0.5).exp() + 0.1).tanh()).cos().sin().tanh().cos()
            session.flush()
        for _ in range(8):
            y = ((y.sin() + 1).exp() * 0.1).tanh().cos()
            session.flush()
        finite = bool((x.isfinite() & y.isfinite()).all().item())
        failed = [told.error for _, _, told in session.cuda_graphs() if told.failed]
        graphs = session.stats()["cuda_graphs"]
    figure = "; ".join([f"{graphs} graphs", *failed, *([] if finite else ["not finite"])])
    return Row(name, figure, goal="no failure", met=finite and graphs > 0 and not failed)


def seeds(device: str) -> Iterator[Row]:
    """Attention with dropout in a captured forward pass, its backward pass in another plan."""
    with lazygt.session(compile=lazygt.Compile("off", cuda_graphs="now"), recovery="off"):
        start, numbers = torch.randn(2, 4, 16, 32), []
        for _ in range(STEPS):
            x = start.clone().requires_grad_()
            y = F.scaled_dot_product_attention(x.sin(), x.cos(), x.tanh(), dropout_p=0.2)
            loss = y.exp().square().mean()
            numbers.append(loss.item())  # the plan ends here
            loss.backward()
            assert x.grad is not None
            numbers.append(x.grad.square().sum().item())
    finite = all(torch.tensor(numbers, device="cpu").isfinite().tolist())
    yield Row("forward and backward apart", f"{STEPS} steps", goal="finite numbers", met=finite)


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
        with lazygt.session(
            recovery=lazygt.Recovery(recover, snapshot_cost=1.0), compile="off"
        ) as session:
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
