"""Sessions under fire: workers and clients killed, stopped and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import lazygt
from lazygt.settings import grouped
from tests.support.descriptors import descriptors_before, open_descriptors
from tests.support.timeouts import patience

ROOT = Path(__file__).parents[2]
DEATH_SECONDS = 1.0
ORPHAN_SECONDS = 2.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def slow_work(s: lazygt.Session) -> torch.Tensor:
    """Recorded work that keeps a worker busy for many seconds."""
    x = torch.ones(600, 600)
    for _ in range(2_000):
        x = (x @ x).mul(1e-3)
    s.flush()
    return x


@pytest.mark.parametrize("wait", ["fetch", "synchronize", "record on"])
def test_a_killed_worker_is_named_at_once(wait: str) -> None:
    settings = {"workers": 1, "threads": 1, "recovery": "off"}
    with pytest.raises(lazygt.WorkerDied) as caught, lazygt.session(**grouped(settings)) as s:
        assert torch.ones(3).sum().item() == 3
        x = slow_work(s)
        pid = s.worker_pids[0]
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(0.2, kill)
        timer.start()
        try:
            if wait == "fetch":
                x.sum().item()
            elif wait == "synchronize":
                s.synchronize()
            else:
                while True:
                    torch.ones(3).add(1)
                    s.flush()
        except lazygt.WorkerDied:
            assert time.monotonic() - killed[0] < patience(DEATH_SECONDS)
            raise
        finally:
            timer.join()
    assert caught.value.rank == 0
    assert caught.value.pid == pid
    assert "SIGKILL" in str(caught.value)


def test_a_stopped_worker_is_frozen_at_the_deadline() -> None:
    settings = {"workers": 1, "frozen_after": 1.5, "recovery": "off"}
    with pytest.raises(lazygt.WorkerFrozen), lazygt.session(**grouped(settings)) as s:
        assert torch.ones(3).sum().item() == 3
        os.kill(s.worker_pids[0], signal.SIGSTOP)
        torch.ones(3).sum().item()


def test_a_worker_that_has_dropped_the_session_is_named_at_every_wait() -> None:
    with (
        pytest.raises(lazygt.ProtocolError) as last,
        lazygt.session(workers=lazygt.Workers(1, threads=1)) as s,
    ):
        x = torch.ones(3)
        s.synchronize()
        s._client.link.send(0, [b"nonsense"])
        for wait in (s.synchronize, x.sum().item, x.tolist, s.synchronize):
            with pytest.raises(lazygt.ProtocolError, match="worker 0 dropped this session"):
                wait()
        raise lazygt.ProtocolError("the end")
    assert str(last.value) == "the end"


def test_worker_at_work_for_many_deadlines_in_one_run_is_not_frozen() -> None:
    deadline, even = 0.2, torch.full((256, 256), 1 / 256, device="cpu")
    with lazygt.session(workers=lazygt.Workers(1, threads=1, frozen_after=deadline)) as s:
        worker = psutil.Process(s.worker_pids[0])

        def seconds_of(products: int) -> float:
            """Processor time that the worker takes for so many in one run."""
            x = even.to("lazygt")
            s.synchronize()
            before = sum(worker.cpu_times()[:2])
            for _ in range(products):
                x = x @ x
            assert torch.equal(x.cpu(), even)
            return sum(worker.cpu_times()[:2]) - before

        products = 50
        # a worker that answers no ping is forgiven six deadlines of processor time, but not eight
        while seconds_of(products) < 8 * deadline:
            products *= 2
        assert s.worker_pids == [worker.pid]
        assert not s.recoveries


CLIENT = """
import os, sys, torch, lazygt
torch.set_num_threads(1)
s = lazygt.session(workers=lazygt.Workers(2, threads=1)).__enter__()
x = torch.ones(400, 400)
x.sum().item()
print(*s.worker_pids, flush=True)
{end}
"""
ENDS = {
    "killed": "\nwhile True:\n    x = (x @ x).mul(1e-3); s.flush()",
    "exception": "raise KeyError('mine')",
    "exit": "sys.exit(3)",
    "os._exit": "os._exit(4)",
    "falls off the end": "",
}


@pytest.mark.parametrize("end", ENDS)
def test_workers_never_outlive_their_client(end: str) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT.format(end=ENDS[end])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert client.stdout is not None
    pids = [int(pid) for pid in client.stdout.readline().split()]
    assert len(pids) == 2
    workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    if end == "killed":
        client.kill()
    client.wait(300)
    client.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=patience(ORPHAN_SECONDS))
    # one that init has not reaped yet has ended all the same
    assert not [w for w in alive if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]


def test_an_interrupted_fetch_shifts_no_later_answer() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        assert torch.ones(3).sum().item() == 3
        x = torch.ones(600, 600)
        for _ in range(300):
            x = (x @ x).mul(1e-3)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                x = (x @ x).mul(1e-3)
                x.sum().item()
        timer.join()
        for n in range(1, 5):
            assert torch.full((n,), 2.0).sum().item() == 2.0 * n
        s.synchronize()


def test_sessions_leave_nothing_behind() -> None:
    def use() -> None:
        with lazygt.session(workers=lazygt.Workers(1, threads=1)):
            big = torch.arange(1 << 17, dtype=torch.float32, device="cpu")
            assert torch.equal(big.to("lazygt").cpu(), big)

    use()
    before, children = len(descriptors_before()), len(psutil.Process().children())
    for _ in range(5):
        use()
    assert len(open_descriptors()) <= before + 2
    assert len(psutil.Process().children()) == children


def test_a_forked_child_harms_nobody() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        x = torch.ones(3) * 2
        s.synchronize()
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.ones(2).device.type == "cpu" else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert x.sum().item() == 6
