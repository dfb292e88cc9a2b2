"""One contestant in a process of its own: eager torch, torch.compile or lazygt, and one workload.

A compiler's stall, its threads and its memory then disturb nobody else. The process reads one
request a line (`make`, `burst 40`, `settle`, `forget`, `peak`) and answers each with a number.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lazygt
from benchmarks.harness import CORES, ROOT, pin, pin_process
from benchmarks.models import (
    SMALL_GPT,
    TINY_GPT,
    GPTSize,
    Step,
    Wrap,
    as_it_is,
    chain_step,
    gpt_step,
    mlp_step,
    pointwise_step,
    varying_step,
)
from lazygt.config import Config
from lazygt.native.fit import build_directory, facts_here
from lazygt.runtime.compiling import compiler
from lazygt.settings import grouped

EAGER, COMPILE, LAZYGT, LAZYGT_COMPILED = "eager", "torch.compile", "lazygt", "lazygt, compiled"

#: When results are read: after every step, after the last step of a burst, or not at all (then
#: the process only waits until a step is done: reading would cost more than the step).
EACH, LAST, NEVER = "each", "last", "never"


@dataclass(frozen=True)
class Workload:
    """What is run: how to make its step on a device, when to read, and the steps in a burst."""

    make: Callable[..., Step]
    reads: str
    steps: int


WORKLOADS: dict[str, Workload] = {
    "W1": Workload(chain_step, EACH, 5),
    "W2": Workload(pointwise_step, NEVER, 3),
    "W3 SGD": Workload(mlp_step, LAST, 40),
    "W3 Adam": Workload(partial(mlp_step, optimizer="adam"), LAST, 40),
    "W4": Workload(partial(gpt_step, size=SMALL_GPT), LAST, 3),
    "W4-tiny": Workload(partial(gpt_step, size=TINY_GPT), LAST, 20),
    "W5": Workload(varying_step, LAST, 60),
    "wide MLP, SGD": Workload(partial(mlp_step, batch=256, width=2048), LAST, 5),
    "wide MLP, AdamW": Workload(
        partial(mlp_step, optimizer="adamw", batch=256, width=2048), LAST, 5
    ),
}

_SMALLEST = GPTSize(dim=8, layers=1, length=4, batch=1, vocabulary=10)

#: The same, so small that a test can run them.
QUICK: dict[str, Workload] = {
    "W1": Workload(partial(chain_step, ops=10), EACH, 2),
    "W2": Workload(partial(pointwise_step, elements=1 << 18), NEVER, 1),
    "W3 SGD": Workload(partial(mlp_step, batch=2, width=8), LAST, 2),
    "W3 Adam": Workload(partial(mlp_step, optimizer="adam", batch=2, width=8), LAST, 2),
    "W4": Workload(partial(gpt_step, size=_SMALLEST), LAST, 2),
    "W4-tiny": Workload(partial(gpt_step, size=_SMALLEST), LAST, 2),
    "W5": Workload(varying_step, LAST, 3),
    "wide MLP, SGD": Workload(partial(mlp_step, batch=2, width=64), LAST, 2),
    "wide MLP, AdamW": Workload(partial(mlp_step, optimizer="adamw", batch=2, width=64), LAST, 2),
}


def can_compile() -> bool:
    """Whether lazygt has compiled executors."""
    return "compile" in {field.name for field in fields(Config)} and hasattr(
        lazygt.Session, "compiled"
    )


def session(kind: str, **settings: Any) -> lazygt.Session:
    """A session that compiles its plans, or does not, as the kind of contestant says."""
    if can_compile():
        settings["compile"] = "auto" if kind == LAZYGT_COMPILED else "off"
    return lazygt.session(**grouped({"workers": 1, **settings}))


# -- the driver's side ---------------------------------------------------------------------


class Contestant:
    """The process, as whoever asks it sees it; a context manager.

    Whatever it compiles, it compiles for the first time: its cache on disk is new and empty.
    """

    def __init__(self, kind: str, workload: str, args: argparse.Namespace) -> None:
        self.kind, self.workload = kind, workload
        self._cache = tempfile.TemporaryDirectory(prefix="lazygt-benchmark-")
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": self._cache.name,
            "LAZYGT_CACHE_DIR": f"{self._cache.name}/lazygt",
        }
        build = build_directory() / facts_here().key
        if build.is_dir():  # the native extension is built at set-up, and nothing else
            shutil.copytree(build, f"{self._cache.name}/lazygt/native/{build.name}")
        command = [sys.executable, "-m", "benchmarks.contestant", kind, workload]
        command += [flag for flag in ("--pin", "--quick") if getattr(args, flag[2:])]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its requests; it leaves
        self._cache.cleanup()

    def ask(self, request: str) -> float:
        """Send a request and wait for its number.

        Raises:
            RuntimeError: the process ended; what it said is on stderr.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(request + "\n")
            stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = stdout.readline()
        if not answer:
            raise RuntimeError(
                f"{self.kind} on {self.workload} ended with code {self._process.wait()} at "
                f"{request!r}; see its error above"
            )
        return float(answer)


# -- the process's side --------------------------------------------------------------------


class Runner:
    """Runs one workload in one way."""

    def __init__(self, kind: str, workload: Workload, wrap: Wrap, stack: ExitStack) -> None:
        self.kind, self.workload, self.wrap = kind, workload, wrap
        self.session: lazygt.Session | None = None
        self.base = 0.0
        if kind.startswith(LAZYGT):
            self.session = stack.enter_context(session(kind, threads=torch.get_num_threads()))
        self.device = "lazygt" if self.session else "cpu"
        square = torch.ones(2, 2, device=self.device)
        (square @ square).tolist()  # the libraries are loaded, a worker is up
        self.step: Step | None = None

    @property
    def pids(self) -> list[int]:
        """The process that computes."""
        return self.session.worker_pids if self.session else [os.getpid()]

    def wait(self) -> None:
        if self.session is not None:
            self.session.synchronize()

    def make(self) -> float:
        """Make the model or the inputs; seconds."""
        start = time.perf_counter()
        self.step = self.workload.make(self.device, wrap=self.wrap)
        self.wait()
        return time.perf_counter() - start

    def burst(self, steps: int) -> float:
        """Seconds a step."""
        assert self.step is not None
        start = time.perf_counter()
        for _ in range(steps):
            result: Tensor | None = None  # the last step's must not live while this one runs
            result = self.step()
            if self.workload.reads == EACH:
                result.tolist()
            elif self.workload.reads == NEVER:
                self.wait()
        if self.workload.reads == LAST and result is not None:
            result.tolist()
        return (time.perf_counter() - start) / steps

    def settle(self) -> float:
        """Run until nothing new happens any more; seconds."""
        start = time.perf_counter()
        for _ in range(3):
            self.burst(self.workload.steps)
            if self.kind == LAZYGT_COMPILED and self.session is not None:
                self.session.compiled()
        return time.perf_counter() - start

    def forget(self) -> float:
        """Count peak memory from here on; MB resident now."""
        self.wait()
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # see proc(5)
        self.base = self._resident("VmRSS")
        return self.base

    def peak(self) -> float:
        """MB by which resident memory exceeded what it was at `forget`."""
        self.wait()
        return self._resident("VmHWM") - self.base

    def _resident(self, what: str) -> float:
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids]
        found = [re.search(rf"(?m)^{what}:\s+(\d+) kB", text) for text in texts]
        return sum(int(match[1]) for match in found if match) * 1024 / 1e6

    def answer(self, request: str) -> float:
        name, *numbers = request.split()
        requests: dict[str, Callable[..., float]] = {
            "make": self.make,
            "burst": self.burst,
            "settle": self.settle,
            "forget": self.forget,
            "peak": self.peak,
        }
        return requests[name](*map(int, numbers))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kind", choices=[EAGER, COMPILE, LAZYGT, LAZYGT_COMPILED])
    options.add_argument("workload", choices=list(WORKLOADS))
    options.add_argument("--pin", action="store_true")
    options.add_argument("--quick", action="store_true")
    args = options.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler that prints must not be taken for an answer
    torch.set_num_threads(1 if args.pin else len(CORES))
    backend = "eager" if args.quick else "inductor"
    wrap = partial(torch.compile, backend=backend) if args.kind == COMPILE else as_it_is
    workload = (QUICK if args.quick else WORKLOADS)[args.workload]
    if args.quick:  # beside other tests, which leave no spare time
        compiler.leave_only_spare_time = lambda pid: None
    with ExitStack() as stack:
        runner = Runner(args.kind, workload, wrap, stack)
        if args.pin:
            _pin(runner)
        for line in sys.stdin:
            print(runner.answer(line), file=answers, flush=True)


def _pin(runner: Runner) -> None:
    """What computes on the second core, whoever it is; lazygt's client on the first."""
    if runner.session is not None:
        pin(runner.pids)
    else:
        pin_process(os.getpid(), CORES[1 % len(CORES)])


if __name__ == "__main__":
    main()
