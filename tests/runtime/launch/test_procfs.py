"""What the kernel tells of other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazygt.runtime.launch.procfs import cpu_quota, is_stopped, memory_left, processor_time

# a name that looks like the end of a name
CHILD = """
import ctypes, sys, time
while time.process_time() < 0.05:
    pass
ctypes.CDLL(None).prctl(15, b"a) T 1 (b", 0, 0, 0)
print("named", flush=True)
sys.stdin.read()
"""


def test_processor_time_grows_with_work_only() -> None:
    begun, until = processor_time(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert processor_time(os.getpid()) - begun >= 0.05


def test_a_process_that_is_stopped_and_one_that_has_gone() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"named\n"
    assert processor_time(child.pid) > 0.02
    assert not is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert is_stopped(child.pid)
    child.kill()
    child.communicate()
    assert not is_stopped(child.pid)
    assert processor_time(child.pid) == 0


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/seen/from/outside", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "80000 100000\n"}, 0.8),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1",
                                "cpu/job/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "25000",
                                "cpu/job/cpu.cfs_period_us": "100000"}, 0.25),
    ],
)  # fmt: skip
def test_cores_that_may_be_used_up(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None
) -> None:
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (texts | {"proc/self/cgroup": f"9:name=systemd:/\n{cgroup}\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {}, 2 << 20),
        ("0::/", {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 2 << 20),
        (
            "0::/a",
            {
                "a/memory.max": "1000000\n",
                "a/memory.current": "900000\n",
                "a/memory.stat": "anon 5\ninactive_file 50000\n",
            },
            150_000,
        ),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": "700000\n",
                "memory/job/memory.usage_in_bytes": "600000\n",
                "memory/job/memory.stat": "inactive_file 0\n",
            },
            100_000,
        ),
    ],
)
def test_memory_left(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   2048 kB\n")
    for name, text in files.items():
        place = tmp_path / "sys/fs/cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    assert memory_left(tmp_path) == expected
