"""What the kernel tells of processes: their time and state (proc(5)), the cores that they may use
up, how much memory is left, and whether one was ended because that ran out.

The kernel sends SIGKILL then, as anybody may. But it counts whom it kills: in the memory cgroup of
the process, and on the whole machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def _stat(pid: int, root: Path = Path("/")) -> list[str]:
    """The fields of its stat file after the name: the first is the state. Empty: it has gone."""
    try:
        text = (root / f"proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of the processor by a process at one moment.

    Attributes:
        seconds: of processor time, in all its threads; 0 once it has gone.
        runnable: threads that run or wait for a processor, with how often each has slept so far.
    """

    seconds: float = 0.0
    runnable: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(pid: int, root: Path = Path("/")) -> Usage:
        """The usage of a process now."""
        fields = _stat(pid, root)
        if not fields:
            return Usage()
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
        return Usage(seconds, dict(_runnable(root / f"proc/{pid}/task")))

    def is_runnable_since(self, earlier: Usage) -> bool:
        """Whether a thread has been runnable all the time since then.

        Threads that wait for the interpreter's lock wake again and again, and sleep in between.
        """
        return any(earlier.runnable.get(thread) == slept for thread, slept in self.runnable.items())


_SLEPT = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)


def _runnable(threads: Path) -> Iterator[tuple[int, int]]:
    """The runnable threads of a process, with how often each has slept."""
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
    """Whether it does not run at all, by SIGSTOP or a debugger."""
    return state(pid) in ("T", "t")


def state(pid: int) -> str:
    """The letter that proc(5) has for what it does; empty: it has gone."""
    return "".join(_stat(pid)[:1]).strip("ZX")


def parent(pid: int) -> int:
    """The process id of its parent; 0 once it has gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def resident(pid: int, what: str = "VmRSS") -> int:
    """Bytes of a process in memory; 0 once it has gone.

    Args:
        what: ``VmRSS``: now; ``VmHWM``: at most; ``RssAnon``, ``RssShmem``: now, of its own and of
            shared memory.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    named = (line.split() for line in lines)
    return next((int(words[1]) << 10 for words in named if words[0] == f"{what}:"), 0)


_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
#: What C++ says when it gets no memory, before it aborts.
_BAD_ALLOC = "std::bad_alloc"


class OOMKills:
    """What the kernel has killed since this was made.

    Args:
        root: of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._known = self._count()

    def explained(self, status: str, stderr: str) -> str:
        """How a process ended, with the reason if that was want of memory.

        Args:
            status: as ``Process.status`` says.
            stderr: the end of what it wrote.
        """
        aborted = status == "signal SIGABRT" and _BAD_ALLOC in stderr
        if aborted or (status == "signal SIGKILL" and self._one_more()):
            return f"out of memory ({status})"
        return status

    def _one_more(self) -> bool:
        """Whether the kernel has killed one that was not counted here."""
        more = self._count() > self._known
        self._known += more
        return more

    def _count(self) -> int:
        for place in self._places():
            try:
                match = _COUNT.search(place.read_text())
            except OSError:
                continue  # another version of cgroups, or none
            if match:
                return int(match[1])
        return 0

    def _places(self) -> Iterator[Path]:
        """Where the count may stand, the one that means this process's cgroup first."""
        for cgroup in _cgroups(self._root, "memory"):
            yield cgroup / "memory.events"
            yield cgroup / "memory.oom_control"
        yield self._root / "proc/vmstat"


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's cgroup and of those that it lies in, its own first."""
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
    """So many cores may be used up, as the cgroups say; None where they set no bound."""
    quotas = [quota for cgroup in _cgroups(root, "cpu") if (quota := _quota(cgroup)) is not None]
    return min(quotas, default=None)


def _quota(cgroup: Path) -> float | None:
    """Of one cgroup, of either version."""
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
    """Bytes of memory that this process may still take, as the machine and the cgroups say."""
    match = _AVAILABLE.search((root / "proc/meminfo").read_text())
    machine = int(match[1]) << 10 if match else 0
    rooms = [room for cgroup in _cgroups(root, "memory") if (room := _room(cgroup)) is not None]
    return min([machine, *rooms])


def _room(cgroup: Path) -> int | None:
    """Bytes left in one cgroup, of either version, with what it would drop of its files."""
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
