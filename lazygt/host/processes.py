"""Facts from procfs and cgroups: states and times of processes, cores, memory left, OOM kills.

Out of memory the kernel sends SIGKILL, as anybody may. But it counts the processes that it kills:
in the memory cgroup of the process, and on the whole machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

# -- working directory of processes, which the user may have removed meanwhile ---------------------


def start_directory() -> str | None:
    """Return a child's working directory; None for this process's own.

    It is another one only if this process's own was removed: in a removed folder torch can't load
    its own libraries.
    """
    try:
        os.getcwd()
    except OSError:
        return tempfile.gettempdir()
    return None


@contextmanager
def in_some_directory() -> Iterator[None]:
    """Context manager: work in an existing folder, for imports that need one; then go back."""
    folder = start_directory()
    if folder is None:
        yield
        return
    removed = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(removed)
        os.close(removed)


# -- processes hidden from other processes of the same user ----------------------------------------

VARIABLE = "LAZYGT_HIDDEN"
"""Set for a worker that is to `hide`."""

_SET_DUMPABLE = 4  # PR_SET_DUMPABLE of linux/prctl.h


def hide() -> None:
    """Make the kernel refuse other processes of this user access to this one.

    That covers its memory, its descriptors and its environment, through ``/proc`` or as a debugger
    (prctl(2)). Root keeps its access.

    Raises:
        OSError: the kernel does not support this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_DUMPABLE): {os.strerror(number)}")


# -- facts from procfs and cgroups: processes, cores, memory left, OOM kills -----------------------

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def _stat(pid: int, root: Path = Path("/")) -> list[str]:
    """Return the stat fields after the name, the state first; empty if it can't be read."""
    try:
        text = (root / f"proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return text.rpartition(")")[2].split()


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor usage of a process at one moment."""

    seconds: float = 0.0  # processor time of all its threads; 0 once it has gone
    #: threads that run or wait for a processor -> the number of times each has slept
    runnable: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(pid: int, root: Path = Path("/")) -> Usage:
        """Return the usage of a process now."""
        fields = _stat(pid, root)
        if not fields:
            return Usage()
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
        return Usage(seconds, dict(_runnable(root / f"proc/{pid}/task")))

    def is_runnable_since(self, earlier: Usage) -> bool:
        """Return whether a thread has been runnable all the time since ``earlier``.

        Threads that wait for the interpreter's lock wake again and again, and sleep in between.
        """
        return any(earlier.runnable.get(thread) == slept for thread, slept in self.runnable.items())


_SLEPT = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)


def _runnable(threads: Path) -> Iterator[tuple[int, int]]:
    """Yield the runnable threads of a process, each with its count of sleeps."""
    try:
        statuses = [each / "status" for each in threads.iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return
    for status in statuses:
        with suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
            text = status.read_text()
            slept = _SLEPT.search(text)
            if slept and "\nState:\tR" in text:
                yield int(status.parent.name), int(slept[1])


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    return state(pid) in ("T", "t")


def state(pid: int) -> str:
    """Return a process's state, a letter of proc(5); empty if it has gone."""
    return "".join(_stat(pid)[:1]).strip("ZX")


def parent(pid: int) -> int:
    """Return a process's parent; 0 once the process has gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def start(pid: int) -> int | None:
    """Return a process's start time, in ticks since the boot; None once it has ended."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def resident(pid: int, what: str = "VmRSS") -> int:
    """Return a process's bytes in memory; 0 once it has gone.

    Args:
        what: ``VmRSS``: now; ``VmHWM``: peak; ``RssAnon``, ``RssShmem``: now, of its own and of
            shared memory.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    named = (line.split() for line in lines)
    return next((int(words[1]) << 10 for words in named if words[0] == f"{what}:"), 0)


_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
#: The message of C++ when it gets no memory, before it aborts.
_BAD_ALLOC = "std::bad_alloc"


class OOMKills:
    """Processes that the kernel has killed for want of memory since this was made.

    Args:
        root: root of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._known = self._count()

    def explained(self, status: str, stderr: str) -> str:
        """Return the exit status of a process, with the reason if it ran out of memory.

        Args:
            status: result of ``Process.status``.
            stderr: the end of its output.
        """
        aborted = status == "signal SIGABRT" and _BAD_ALLOC in stderr
        if aborted or (status == "signal SIGKILL" and self._one_more()):
            return f"out of memory ({status})"
        return status

    def _one_more(self) -> bool:
        """Return whether there is an OOM kill not counted before, and count it."""
        more = self._count() > self._known
        self._known += more
        return more

    def _count(self) -> int:
        """Return the number of OOM kills so far, of the innermost scope that counts them."""
        for path in self._counter_files():
            try:
                match = _COUNT.search(path.read_text())
            except OSError:
                continue  # another version of cgroups, or none
            if match:
                return int(match[1])
        return 0

    def _counter_files(self) -> Iterator[Path]:
        """Yield the files that may have the count, this process's cgroup first."""
        for cgroup in _cgroups(self._root, "memory"):
            yield cgroup / "memory.events"
            yield cgroup / "memory.oom_control"
        yield self._root / "proc/vmstat"


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's cgroup and its ancestors, innermost first."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        cgroup = mounted / path.lstrip("/")
        if controller in controllers.split(","):  # version 1
            cgroup = mounted / controller / path.lstrip("/")
        elif controllers:
            continue
        yield cgroup
        yield from [outer for outer in cgroup.parents if outer.is_relative_to(mounted)]
    yield mounted  # a container may see no more than its own
    yield mounted / controller


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of cores that the cgroups allow; None without a bound."""
    quotas = [quota for cgroup in _cgroups(root, "cpu") if (quota := _quota(cgroup)) is not None]
    return min(quotas, default=None)


def _quota(cgroup: Path) -> float | None:
    """Return the quota of one cgroup, of either version; None without one."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu.cfs_period_us").read_text()
    except OSError:
        return None
    return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)


_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.MULTILINE)
_CACHED = re.compile(r"^inactive_file (\d+)$", re.MULTILINE)


def memory_left(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take, by machine and cgroups."""
    match = _AVAILABLE.search((root / "proc/meminfo").read_text())
    machine = int(match[1]) << 10 if match else 0
    cgroup_bytes = [
        free for cgroup in _cgroups(root, "memory") if (free := _free_bytes(cgroup)) is not None
    ]
    return min([machine, *cgroup_bytes])


def _free_bytes(cgroup: Path) -> int | None:
    """Return the bytes left in one cgroup, of either version, with reclaimable file cache."""
    try:
        if (cgroup / "memory.max").exists():
            limit, used = ((cgroup / f"memory.{name}").read_text() for name in ("max", "current"))
        else:
            limit, used = (
                (cgroup / f"memory.{name}_in_bytes").read_text() for name in ("limit", "usage")
            )
        cached = _CACHED.search((cgroup / "memory.stat").read_text())
    except OSError:
        return None
    if limit.strip() == "max":
        return None
    return int(limit) - int(used) + (int(cached[1]) if cached else 0)
