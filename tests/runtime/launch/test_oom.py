"""A process that the kernel has ended for want of memory is told from one that anybody else has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lazygt.errors import WorkerDied
from lazygt.host.processes import OOMKills
from tests.support.control_group import control_group

KILLED = "signal SIGKILL"
#: (what /proc/self/cgroup says, where the count stands)
PLACES = [
    pytest.param("0::/user/me", "sys/fs/cgroup/user/me/memory.events", id="version 2"),
    pytest.param("0::/seen/from/outside", "sys/fs/cgroup/memory.events", id="in a container"),
    pytest.param(
        "4:cpu,memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control", id="version 1"
    ),
    pytest.param("0::/", "proc/vmstat", id="the whole machine"),
]

IN_A_GROUP = """
import os, sys
from pathlib import Path

import torch, lazygt

group = Path(sys.argv[1])
(group / "memory.limit_in_bytes").write_text(str(1 << 30))
(group / "cgroup.procs").write_text(str(os.getpid()))
try:
    with lazygt.session(workers=lazygt.Workers(threads=1)) as s:
        s.synchronize()
        # the client is not to be the one
        Path(f"/proc/{s.worker_pids[0]}/oom_score_adj").write_text("1000")
        torch.ones(1 << 30).sum().item()
except lazygt.WorkerDied as error:
    print(error.status, *error.during.split()[:7])
finally:
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))
"""


@pytest.mark.parametrize(("cgroup", "counter"), PLACES)
def test_oom_kills_are_counted_by_cgroup(tmp_path: Path, cgroup: str, counter: str) -> None:
    own, place = tmp_path / "proc/self/cgroup", tmp_path / counter
    for path in (own, place):
        path.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(f"9:name=systemd:/\n{cgroup}\n")

    def count(killed: int) -> None:
        place.write_text(f"oom 4\noom_kill {killed}\noom_kill_disable 0\n")

    count(3)
    oom_kills = OOMKills(tmp_path)
    assert oom_kills.explained(KILLED, "") == KILLED  # somebody else's doing
    count(5)
    assert oom_kills.explained("exit code 1", "") == "exit code 1"
    assert oom_kills.explained(KILLED, "") == f"out of memory ({KILLED})"
    assert oom_kills.explained(KILLED, "") == f"out of memory ({KILLED})"
    assert oom_kills.explained(KILLED, "") == KILLED  # both that it counted are explained


def test_a_machine_without_any_count(tmp_path: Path) -> None:
    assert OOMKills(tmp_path).explained(KILLED, "") == KILLED


def test_memory_that_the_process_did_not_get() -> None:
    stderr = "terminate called after throwing an instance of 'std::bad_alloc'\n  what(): ..."
    assert OOMKills().explained("signal SIGABRT", stderr) == "out of memory (signal SIGABRT)"
    assert OOMKills().explained("signal SIGABRT", "Fatal") == "signal SIGABRT"


def test_out_of_memory_error_names_remedy() -> None:
    assert "more memory" in str(WorkerDied(0, 1, f"out of memory ({KILLED})", ""))
    assert "more memory" not in str(WorkerDied(0, 1, KILLED, ""))


@pytest.mark.slow
@pytest.mark.anew  # all of a group's memory is its own
@pytest.mark.timeout(100)
def test_a_worker_that_the_kernel_kills() -> None:
    with control_group("memory") as group:
        client = [sys.executable, "-c", IN_A_GROUP, str(group)]
        ended = subprocess.run(client, capture_output=True, text=True, timeout=600, check=False)
        expected = f"out of memory ({KILLED}) 2 processes died in this run, the"
        assert ended.stdout.strip() == expected, ended.stderr
