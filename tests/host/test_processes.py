"""What the kernel tells of other processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazygt.host.processes import Usage, cpu_quota, is_stopped, memory_left, start

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
    begun, until = Usage.of(os.getpid()).seconds, time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert Usage.of(os.getpid()).seconds - begun >= 0.05


def usage(root: Path, ticks: int, threads: dict[int, tuple[str, int]]) -> Usage:
    """The usage of process 7 with these threads: state and how often each has slept."""
    (root / "proc/7").mkdir(parents=True, exist_ok=True)
    (root / "proc/7/stat").write_text("7 (a) T 1 (b) S 1" + " 0" * 9 + f" {ticks} 0 0")
    for thread, (state, slept) in threads.items():
        status = root / f"proc/7/task/{thread}/status"
        status.parent.mkdir(parents=True, exist_ok=True)
        switches = f"voluntary_ctxt_switches:\t{slept}\nnonvoluntary_ctxt_switches:\t9\n"
        status.write_text(f"Name:\tR\nState:\t{state}\n{switches}")
    return Usage.of(7, root)


@pytest.mark.parametrize(
    ("before", "now", "runnable"),
    [
        pytest.param({7: ("R (running)", 3)}, {7: ("R (running)", 3)}, True, id="all the while"),
        pytest.param({7: ("R (running)", 3)}, {7: ("R (running)", 4)}, False, id="slept between"),
        pytest.param({7: ("S (sleeping)", 3)}, {7: ("R (running)", 3)}, False, id="just woken"),
        pytest.param({7: ("S (sleeping)", 3)}, {7: ("S (sleeping)", 3)}, False, id="in a lock"),
        pytest.param({7: ("T (stopped)", 3)}, {7: ("T (stopped)", 3)}, False, id="stopped"),
        pytest.param({7: ("D (disk sleep)", 3)}, {7: ("D (disk sleep)", 3)}, False, id="disk"),
        pytest.param({7: ("S (sleeping)", 3), 8: ("R (running)", 1)},
                     {7: ("S (sleeping)", 3), 8: ("R (running)", 1)}, True, id="another thread"),
        pytest.param({8: ("R (running)", 1)}, {9: ("R (running)", 1)}, True, id="and a new one"),
    ],
)  # fmt: skip
def test_thread_that_is_runnable_all_the_while(
    tmp_path: Path, before: dict[int, tuple[str, int]], now: dict[int, tuple[str, int]],
    runnable: bool,
) -> None:  # fmt: skip
    first, second = usage(tmp_path, 100, before), usage(tmp_path, 150, now)
    assert second.is_runnable_since(first) == runnable
    assert second.seconds - first.seconds == pytest.approx(50 / os.sysconf("SC_CLK_TCK"))


def test_thread_that_ended_is_none(tmp_path: Path) -> None:
    usage(tmp_path, 1, {7: ("R (running)", 1)})
    (tmp_path / "proc/7/task/8").mkdir()
    assert Usage.of(7, tmp_path).runnable == {7: 1}
    assert Usage.of(6, tmp_path) == Usage()


def test_a_process_that_is_stopped_and_one_that_has_gone() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"named\n"
    assert Usage.of(child.pid).seconds > 0.02
    assert not is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert is_stopped(child.pid)
    child.kill()
    child.communicate()
    assert not is_stopped(child.pid)
    assert Usage.of(child.pid) == Usage()


def test_exhausted_descriptors_are_no_end_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(Path, "read_text", exhausted)
    with pytest.raises(OSError, match="Too many open files"):
        Usage.of(os.getpid())
    with pytest.raises(OSError, match="Too many open files"):
        start(os.getpid())


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
def test_memory_left_in_cgroup(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   2048 kB\n")
    for name, text in files.items():
        place = tmp_path / "sys/fs/cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    assert memory_left(tmp_path) == expected
