"""Deaths at odd moments: while nobody waits, while the session closes, where there is no memory."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import lazygt
from lazygt.runtime.launch import worker_pool
from lazygt.runtime.launch.worker_pool import WorkerPool, WorkerProcess
from tests.support.control_group import control_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]


def kill(s: lazygt.Session, *ranks: int) -> None:
    for rank in ranks:
        os.kill(s.worker_pids[rank], signal.SIGKILL)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[int]:
    """The process ids of workers, as they are started."""
    pids = queue.Queue[int]()
    launched = WorkerPool._start_process

    def noted(pool: WorkerPool, *args: Any) -> WorkerProcess:
        worker = launched(pool, *args)
        pids.put(worker.process.pid)
        return worker

    monkeypatch.setattr(WorkerPool, "_start_process", noted)
    return pids


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than select() can count: descriptors from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with ExitStack() as stack:
        for _ in range(1_100):
            stack.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_is_replaced_however_many_files_are_open(many_files: None) -> None:
    with lazygt.session(workers=lazygt.Workers(threads=1)) as s:
        x = torch.ones(8) * 3
        s.synchronize()
        kill(s, 0)
        assert x.sum().item() == 24
        assert len(s.recoveries) == 1


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_process_is_started_while_nobody_waits(
    ranks: Sequence[int], started: queue.Queue[int]
) -> None:
    with lazygt.session(mesh={"ranks": 2}, workers=lazygt.Workers(threads=1)) as s:
        x = torch.ones(8) * 3
        s.synchronize()
        assert [started.get(), started.get()] == s.worker_pids
        kill(s, *ranks)
        fresh = {started.get() for _ in ranks}  # nobody has asked for one
        assert x.sum().item() == 24
        s.synchronize()
        assert {s.worker_pids[rank] for rank in ranks} == fresh
        assert started.empty()


def test_no_process_is_started_for_one_that_dies_at_the_end(
    started: queue.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = worker_pool._wait_for

    def killed(processes: Sequence[Any], seconds: float) -> Any:
        for process in processes:
            process.kill()
        return waited(processes, seconds)

    monkeypatch.setattr(worker_pool, "_wait_for", killed)
    with lazygt.session(mesh={"ranks": 2}, workers=lazygt.Workers(threads=1)) as s:
        x = torch.ones(8) * 3
        s.synchronize()
        pids = s.worker_pids
        del x
    assert [started.get(), started.get()] == pids
    assert started.empty()
    assert not s.recoveries


def test_a_worker_that_dies_before_a_session_closes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = lazygt.session(workers=lazygt.Workers(1, threads=1))
        with s:
            x = torch.ones(8) * 3
            s.synchronize()
            kill(s, 0)
            del x
            s.close()
    assert not s.recoveries


def bounded(x: torch.Tensor, path: str) -> torch.Tensor:
    """From here on this worker's files, also those in memory, grow no more."""
    if "LAZYGT_WORKER" in os.environ and not Path(path).exists():
        Path(path).touch()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    return x + 1


def test_a_snapshot_that_finds_no_room_is_the_last(tmp_path: Path) -> None:
    """The first write beyond the limit is the snapshot's, in a real worker."""
    with lazygt.session(workers=lazygt.Workers(1, threads=1), recovery="auto") as s:
        x = lazygt.apply(bounded, torch.ones(1000), str(tmp_path / "once"))
        recovery = s._client.recovery
        assert recovery is not None
        recovery._due = 0.0
        x = x + 1
        s.synchronize()  # the snapshot comes after it
        x = x + 1
        with pytest.warns(RuntimeWarning, match="From here on the death of a worker loses values"):
            assert x.sum().item() == 4000
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (x * 2).sum().item() == 8000
        kill(s, 0)
        with pytest.raises(lazygt.WorkerDied):
            x.sum().item()
        s.close()


def test_a_spare_that_can_not_be_started_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(pool: WorkerPool) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        x = torch.ones(8) * 3
        s.synchronize()
        monkeypatch.setattr(WorkerPool, "refill", none_left)
        kill(s, 0)
        assert x.sum().item() == 24
        assert len(s.recoveries) == 1
    assert "no spare process could be started" in caplog.text


def gets_none_once(x: torch.Tensor, path: str) -> torch.Tensor:
    """C++ of this worker gets no memory, the first time, and aborts."""
    if "LAZYGT_WORKER" in os.environ and not Path(path).exists():
        Path(path).touch()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms, hard))
        ctypes.CDLL("libstdc++.so.6")._Znwm(ctypes.c_size_t(1 << 30))  # operator new
    return x + 1


def test_a_worker_beyond_its_limit_of_memory(tmp_path: Path) -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        x = torch.arange(8.0) * 3
        y = lazygt.apply(gets_none_once, x, str(tmp_path / "once"))
        assert (x + y).tolist() == [6.0 * n + 1 for n in range(8)]
        assert "out of memory (signal SIGABRT)" in s.recoveries[0].why


#: Takes memory until the kernel ends its worker, the first time.
IN_A_GROUP = """
import os, sys
from pathlib import Path

import torch, lazygt

group, once = map(Path, sys.argv[1:])

def eats_once(x):
    if "LAZYGT_WORKER" in os.environ and not once.exists():
        once.touch()
        Path("/proc/self/oom_score_adj").write_text("1000")  # the client is not to be the one
        eaten = []
        while True:
            eaten.append(bytearray(b"." * (32 << 20)))
    return x + 1

(group / "memory.limit_in_bytes").write_text(str(1 << 30))
(group / "cgroup.procs").write_text(str(os.getpid()))
try:
    with lazygt.session(workers=lazygt.Workers(threads=1)) as s:
        x = torch.arange(8.0) * 3
        print((x + lazygt.apply(eats_once, x)).tolist(), s.recoveries[0].why.split(": ")[1])
finally:
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))
"""


@pytest.mark.anew  # all of a group's memory is its own
def test_a_worker_that_the_kernel_kills_for_its_memory(tmp_path: Path) -> None:
    with control_group("memory") as group:
        client = [sys.executable, "-c", IN_A_GROUP, str(group), str(tmp_path / "once")]
        ended = subprocess.run(client, capture_output=True, text=True, timeout=600, check=False)
        expected = f"{[6.0 * n + 1 for n in range(8)]} out of memory (signal SIGKILL)"
        assert ended.stdout.strip() == expected, ended.stderr
