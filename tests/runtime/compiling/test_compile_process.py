"""The compile process ends with its client, however far it has come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: Takes the place of torch: says that it is being loaded, and never is.
SLOW = "import sys, signal; print('loading', file=sys.stderr, flush=True); signal.pause()"


@pytest.mark.anew
@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["the pipe is closed", "the client is gone"])
def test_compile_process_ends_while_loading_torch(tmp_path: Path, end: str) -> None:
    (tmp_path / "torch.py").write_text(SLOW)
    client = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    service = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "lazygt.runtime.compiling.compile_process",
            str(client.pid),
            "none",
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
            "LAZYGT_WORKER": "1",
        },
        start_new_session=True,
    )
    assert client.stdin is not None
    assert service.stdin is not None
    assert service.stderr is not None
    try:
        assert service.stderr.readline() == b"loading\n"
        if end == "the pipe is closed":
            service.stdin.close()
        else:
            client.kill()
            client.wait()
        assert service.wait(30) == -signal.SIGKILL
    finally:
        for process in (client, service):
            process.kill()
            process.wait()
        for pipe in (client.stdin, service.stdin, service.stderr):
            pipe.close()


@pytest.mark.anew
@pytest.mark.timeout(60)
def test_compile_process_has_idle_priority(compile_like_others: Callable[[int], None]) -> None:
    service = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
    group = Path(f"/proc/{service.pid}/autogroup")
    try:
        compile_like_others(service.pid)
        assert os.getpriority(os.PRIO_PROCESS, service.pid) == 19
        assert os.sched_getscheduler(service.pid) == os.SCHED_IDLE
        if os.access(group, os.W_OK):  # the kernel has autogroups
            assert group.read_text().endswith("nice 19\n")
    finally:
        service.kill()
        service.communicate()
