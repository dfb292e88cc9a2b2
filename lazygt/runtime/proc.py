"""What the kernel tells of another process of this machine: see proc(5)."""

from __future__ import annotations

import os
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
