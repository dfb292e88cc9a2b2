"""What the kernel tells of processes: their time and state (proc(5)), and whether one was ended
because memory ran out.

The kernel sends SIGKILL then, as anybody may. But it counts whom it kills: in the memory cgroup of
the process, and on the whole machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of its stat file after the name: the first is the state. Empty: it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def processor_time(pid: int) -> float:
    """Seconds of processor time that it has used, in all its threads; 0 once it has gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND if fields else 0.0


def is_stopped(pid: int) -> bool:
    """Whether it does not run at all, by SIGSTOP or a debugger."""
    return _stat(pid)[:1] in (["T"], ["t"])


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
        mounted = self._root / "sys/fs/cgroup"
        try:
            lines = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield mounted / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                yield mounted / "memory" / path.lstrip("/") / "memory.oom_control"
        yield mounted / "memory.events"  # a container may see no more than its own
        yield mounted / "memory/memory.oom_control"
        yield self._root / "proc/vmstat"
