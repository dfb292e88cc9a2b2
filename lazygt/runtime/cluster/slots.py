"""Idle processes of a job: they hold their slots until their host's first one ends.

The engine started all processes of a host as children of one of its own: torchrun's agent, mpirun's
or SLURM's daemon. So the first one is a sibling of ours, with local rank 0 in its environment. It
exists before this process, needs no port and no file, and its end can be waited for.

    engine (no rank in its environment)
    ├── [shell that it was told to run] ── process of local rank 0
    └── [shell that it was told to run] ── this process
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from lazygt.host.processes import parent
from lazygt.runtime.cluster.environment import Job

#: Seconds for an engine to start the first process after this one; the reverse order is usual.
_APPEAR_SECONDS = 5.0
_LOOK_SECONDS = 0.1


def hold(job: Job) -> None:
    """Wait until the process with local rank 0 on this host has ended, however it ends.

    Returns at once if it has ended already, or if each host has one process. There is no deadline:
    the wait is for a process that lives.
    """
    until = time.monotonic() + _APPEAR_SECONDS
    while (pidfd := _open_first(job)) is None:
        if time.monotonic() > until:
            return
        time.sleep(_LOOK_SECONDS)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
    finally:
        os.close(pidfd)


def _open_first(job: Job) -> int | None:
    """Return a pidfd of the process with local rank 0, or None if it is not there."""
    engine = _engine(job)
    for pid in _children(engine):
        if _environment(pid).get(job.local_rank_variable) != "0":
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if _environment(pid).get(job.local_rank_variable) == "0":  # still the same process
            return pidfd
        os.close(pidfd)
    return None


def _engine(job: Job) -> int:
    """Return our nearest ancestor without a readable rank in its environment."""
    pid = os.getppid()
    while pid > 1 and job.rank_variable in _environment(pid):
        pid = parent(pid)
    return pid


def _environment(pid: int) -> dict[str, str]:
    """Return a process's initial environment; empty if it may not be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in text.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _children(pid: int) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and parent(int(entry.name)) == pid
    ]
