"""Clients of real sessions that are killed, leave, fork and are interrupted."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import lazygt
from tests.support.descriptors import descriptors_before, open_descriptors
from tests.support.timeouts import patience

ROOT = Path(__file__).parents[2]
ORPHAN_SECONDS = 2.0
#: The same of a worker that loads torch's libraries: nothing else runs in it meanwhile.
LOADING_SECONDS = 10.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

BEGIN = """
import os, signal, sys, time, torch, lazygt
torch.set_num_threads(1)
s = lazygt.session(workers=lazygt.Workers(2, threads=1)).__enter__()
up = torch.ones(1)
s.synchronize()  # every worker has come up, and answered
print("open", flush=True)

def train():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        loss = model(torch.randn(64, 64)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        loss.item()

def busy(size=3000):
    x = torch.eye(size)
    for _ in range(8):  # seconds of work, most of them after the client's end
        x = x @ x
    s.flush()
    return x
"""


class Script:
    """A client in its own process, and what is left of it."""

    def __init__(self, program: str) -> None:
        self.base = tempfile.mkdtemp(prefix="lg-", dir="/tmp")
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": self.base},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def workers(self) -> list[psutil.Process]:
        """All living workers of this client, whoever their parent is now."""
        return [found for found in psutil.process_iter() if self._is_worker(found)]

    def _is_worker(self, process: psutil.Process) -> bool:
        try:
            given = process.environ()
        except psutil.Error:
            return False
        return given.get("XDG_RUNTIME_DIR") == self.base and given.get("LAZYGT_WORKER") == "1"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def assert_gone(self, seconds: float = ORPHAN_SECONDS) -> None:
        """The client has just ended: so do its workers."""
        until = time.monotonic() + patience(seconds)
        assert all(ends_before(until, worker.pid) for worker in self.workers())

    def close(self) -> None:
        self.kill()
        for worker in self.workers():
            worker.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        shutil.rmtree(self.base, ignore_errors=True)


def ends_before(until: float, pid: int) -> bool:
    """Whether a process ends in time; not when init, which may take seconds, has reaped it."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], max(until - time.monotonic(), 0))[0])
    finally:
        os.close(fd)


@pytest.fixture
def start() -> Iterator[Callable[[str], Script]]:
    started: list[Script] = []

    def begin(program: str) -> Script:
        started.append(Script(program))
        return started[-1]

    yield begin
    for script in started:
        script.close()


ENDS = {
    "falls off the end": ("", 0, ""),
    "exception": ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "work in flight": ("x = busy()", 0, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "Ctrl-C in a fetch": (
        "signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.3)\nbusy().sum().item()",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
}


def test_a_client_that_does_not_close_leaves_nothing(start: Callable[[str], Script]) -> None:
    started = {name: start(end) for name, (end, _, _) in ENDS.items()}
    for name, script in started.items():
        _, err = script.process.communicate(timeout=300)
        script.assert_gone()
        _, expected, text = ENDS[name]
        assert (name, script.process.returncode) == (name, expected), err
        assert text in err
        assert "Exception ignored" not in err
        assert os.listdir(script.base) == []


@pytest.mark.parametrize("work", ["train()", "busy().sum().item()", "busy(); time.sleep(99)"])
def test_workers_of_a_killed_client_are_gone(start: Callable[[str], Script], work: str) -> None:
    """In a training loop, and inside a long kernel with the client waiting or not."""
    script = start(work)
    assert script.line() == "open"
    assert len(script.workers()) == 2
    time.sleep(0.2)  # into the work
    script.kill()
    script.assert_gone()


@pytest.mark.anew
@pytest.mark.timed
def test_workers_are_gone_whenever_the_client_is_killed(start: Callable[[str], Script]) -> None:
    """Kill points from the import of torch to the middle of the training."""
    draw = random.Random(8)
    started = [start("train()") for _ in range(8)]
    begun = time.monotonic()
    points = sorted(draw.uniform(0.5, 8.0) for _ in started)
    for script, point in zip(started, points, strict=True):
        time.sleep(max(0.0, begun + point - time.monotonic()))
        script.kill()
        script.assert_gone(LOADING_SECONDS)


def test_a_forked_child_of_a_killed_client_keeps_no_worker(start: Callable[[str], Script]) -> None:
    script = start(
        "if os.fork() == 0: print(os.getpid(), flush=True); time.sleep(60)\nbusy().cpu()"
    )
    assert script.line() == "open"
    forked = int(script.line())
    script.kill()
    script.assert_gone()
    os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("end", ["", "s.close(); ", "import gc; del s; gc.collect(); "])
def test_exit_of_forked_child_does_not_affect_session(
    start: Callable[[str], Script], end: str
) -> None:
    script = start(f"""
x = torch.arange(5.0)
s.synchronize()
child = os.fork()
if child == 0:
    {end}sys.exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), (x * 2).sum().item(), flush=True)
s.close()
""")
    out, err = script.process.communicate(timeout=300)
    assert (out.split(), err) == (["open", "0", "20.0"], "")
    assert os.listdir(script.base) == []


# Python itself swallows an interrupt that falls into a finalizer; the next one is 0.2 s later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("size", [10, 100_000], ids=["small", "through the arena"])
def test_interrupts_at_random_moments_of_a_fetch_shift_no_answer(size: int) -> None:
    draw = random.Random(size)
    caught = 0
    plain = torch.arange(float(size))
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
            kept = plain.to("lazygt")
            s.synchronize()
            for number in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0002, 0.006), 0.2)
                    while True:
                        kept.cpu()
                except KeyboardInterrupt:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    caught += 1
                assert torch.equal((kept + number).cpu(), plain + number)
            s.synchronize()
            assert torch.equal(kept.cpu(), plain)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert caught == 150


def test_twenty_sessions_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tempfile.mkdtemp(prefix="lg-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    big = torch.arange(1 << 17, dtype=torch.float32)

    def use(number: int) -> None:
        with lazygt.session(workers=lazygt.Workers(1 + number % 2, threads=1)) as s:
            if number % 4 == 0:
                assert torch.equal(big.to("lazygt").add(0).cpu(), big)
            s.close()

    use(0)
    descriptors, tasks = len(descriptors_before()), len(os.listdir("/proc/self/task"))
    for number in range(20):
        use(number)
        assert os.listdir(base) == []
        with open("/proc/self/maps") as maps:
            assert "memfd:lazygt" not in maps.read()
    assert len(open_descriptors()) <= descriptors
    assert len(os.listdir("/proc/self/task")) <= tasks
    os.rmdir(base)
