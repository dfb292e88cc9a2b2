"""Rendezvous of a job's hosts with the client: rank 0 publishes its endpoint.

Under torchrun the job's port belongs to torchrun's own store. The client's endpoint is published in
that store, with a code that proves the session's token (HMAC-SHA256, RFC 2104). Under other engines
the client listens on the job's own port, and nothing is published.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lazygt.errors import LaunchError, SecurityError
from lazygt.host.processes import parent
from lazygt.runtime.cluster.environment import Job

# -- idle processes of a job: they hold their slots until their host's first one ends --------------
# The engine started all processes of a host as children of one of its own: torchrun's agent,
# mpirun's or SLURM's daemon. So the first one is a sibling of ours, with local rank 0 in its
# environment. It exists before this process, needs no port and no file, and its end can be waited
# for.
#
#     engine (no rank in its environment)
#     ├── [shell that it was told to run] ── process of local rank 0
#     └── [shell that it was told to run] ── this process

#: Seconds for an engine to start the first process after this one; the reverse order is usual.
_APPEAR_SECONDS = 5.0
_IDLE_LOOK_SECONDS = 0.1


def hold(job: Job) -> None:
    """Wait until the process with local rank 0 on this host has ended, however it ends.

    Returns at once if it has ended already, or if each host has one process. There is no deadline:
    the wait is for a process that lives.
    """
    until = time.monotonic() + _APPEAR_SECONDS
    while (pidfd := _open_first(job)) is None:
        if time.monotonic() > until:
            return
        time.sleep(_IDLE_LOOK_SECONDS)
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


# -- rendezvous of a job's hosts with the client: rank 0 publishes its endpoint --------------------

_POLL_SECONDS = 0.05
_PURPOSE = b"lazygt client endpoint"


def port_to_bind(job: Job) -> int:
    """Return the port for the client's listener; 0: any free one."""
    return 0 if job.meets_by_store else job.port


def publish(job: Job, endpoint: str, token: bytes, deadline: float) -> None:
    """Publish the client's endpoint, so that `find` finds it; called by rank 0.

    Args:
        endpoint: such as ``tcp://host0:4711``.
        token: the secret that all processes of the job share.
        deadline: time limit in seconds.

    Raises:
        LaunchError: torchrun's store can't be reached, or the client listens on another port than
            the job's.
    """
    if job.meets_by_store:
        _store(job, deadline).set(_key(job), f"{_code(job, endpoint, token)} {endpoint}")
    elif not endpoint.endswith(f":{job.port}"):
        raise LaunchError(
            "MASTER_PORT",
            f"is {job.port}, but the client listens on {endpoint}; please report this",
        )


def find(job: Job, token: bytes, deadline: float) -> str:
    """Return the client's endpoint.

    Args:
        token: as for `publish`.
        deadline: seconds to wait for rank 0.

    Raises:
        LaunchError: rank 0 has not published it in time.
        SecurityError: the publisher has another token.
    """
    if not job.meets_by_store:
        host = f"[{job.address}]" if ":" in job.address else job.address
        return f"tcp://{host}:{job.port}"
    until = time.monotonic() + deadline
    store, key = _store(job, deadline), _key(job)
    while not _query(job, lambda: store.check([key])):
        if time.monotonic() > until:
            raise _absence_error(job, deadline)
        time.sleep(_POLL_SECONDS)
    published = _query(job, lambda: store.get(key)).decode(errors="replace")
    code, _, endpoint = published.partition(" ")
    if not hmac.compare_digest(code.encode(), _code(job, endpoint, token).encode()):
        with suppress(RuntimeError):  # the store has ended, as has rank 0
            store.set(_refusal_key(job), f"rank {job.rank} on {socket.gethostname()}")
        raise SecurityError(
            f"rank 0 of the job says that it listens on {endpoint!r}, with another token than "
            f"this process has: give LAZYGT_TOKEN or LAZYGT_TOKEN_FILE the same value on all hosts"
        )
    return str(endpoint)


def refusals(job: Job, deadline: float) -> Callable[[], str]:
    """Return a function that returns a process which rejected the endpoint; "": there is none.

    Any process that can reach torchrun's store may write a rejection, and could end the job by the
    store anyway.

    Args:
        deadline: as for `publish`.

    Raises:
        LaunchError: torchrun's store can't be reached.
    """
    if not job.meets_by_store:
        return lambda: ""
    store, key = _store(job, deadline), _refusal_key(job)

    def read_refusal() -> str:
        if not _query(job, lambda: store.check([key])):
            return ""
        return str(_query(job, lambda: store.get(key)).decode(errors="replace")[:200])

    return read_refusal


def _store(job: Job, deadline: float) -> Any:
    """Connect to torchrun's store, which lives as long as torchrun on rank 0's host."""
    # why: torch.distributed is not needed by sessions on one host
    import torch.distributed as dist

    connect: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch does not say that it exports it
    try:
        return connect(
            job.address,
            job.port,
            is_master=False,
            timeout=timedelta(seconds=max(deadline, 0.1)),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            "MASTER_ADDR",
            f"and MASTER_PORT say that torchrun's store is at {job.address}:{job.port}, which "
            f"can't be reached ({error}): look whether that host can be reached from here",
        ) from error


def _query(job: Job, request: Any) -> Any:
    """Execute a request to the store, and return its result.

    Raises:
        LaunchError: the store has gone.
    """
    try:
        return request()
    except RuntimeError as error:  # torch's DistError, and exceptions of its C++
        raise LaunchError(
            "", f"torchrun's store at {job.address}:{job.port} has gone: {error}"
        ) from error


def _absence_error(job: Job, deadline: float) -> LaunchError:
    """Return the error for a rank 0 that has not published its endpoint in time."""
    return LaunchError(
        "",
        f"rank 0 did not appear within {deadline:g} s: no session was opened there, or it runs on "
        f"another host than {job.address}. Every process of the job has to open the same sessions "
        f"in the same order; raise the deadline with "
        f"lazygt.session(workers=Workers(start_timeout=...))",
    )


def _key(job: Job) -> str:
    """Return the store's key of the client's endpoint."""
    return f"lazygt/client/{job.name}"


def _refusal_key(job: Job) -> str:
    return f"{_key(job)}/refused"


def _code(job: Job, endpoint: str, token: bytes) -> str:
    """Return the HMAC of a job's endpoint, with the token as its key, in hexadecimal."""
    text = b"\0".join((_PURPOSE, job.name.encode(), endpoint.encode()))
    return hmac.new(token, text, hashlib.sha256).hexdigest()
