"""Client side of the compile process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from lazygt.graph.flags import Flags
from lazygt.host.processes import OOMKills, is_stopped, start_directory
from lazygt.runtime import graph_codec
from lazygt.runtime.compiling.compile_process import CompileAnswer, CompileRequest
from lazygt.runtime.executors.compiled import Cache
from lazygt.runtime.executors.kernel_group import KernelGroup

#: Bytes of the buffer of the pipe to the process.
_PIPE_BYTES = 1 << 20


_EXIT_TIMEOUT = 5.0  # for a process that has closed its pipe, or was killed


class Compiler:
    """Queue of groups to compile, one after another; the process starts with the first.

    Args:
        frozen_after: seconds after which a stopped process is killed.
        timeout: seconds without an answer after which the process is killed.

    Attributes:
        pending: keys that were requested and not answered.
    """

    def __init__(self, device: str, cache: Cache, frozen_after: float, timeout: float) -> None:
        self._cache = cache
        self._frozen_after, self._timeout = frozen_after, timeout
        #: time of the last answer, and time since which the process is stopped
        self._last_answer = 0.0
        self._stopped_since: float | None = None
        self.pending: set[str] = set()
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._oom_kills = OOMKills()
        self._unread = b""  # the beginning of an answer
        self._waiting: deque[tuple[str, bytes]] = deque()
        #: keys that were written and not answered, with the bytes of their requests
        self._sent_bytes: dict[str, int] = {}

    @property
    def pid(self) -> int | None:
        """Process id of the compile process; None without one."""
        return None if self._process is None else self._process.pid

    def request(self, key: str, group: KernelGroup, flags: Flags = ()) -> None:
        """Request the compile of a group under some flags of torch's; does not wait.

        Raises:
            OSError: the process can't be started, or the cache can't be used.
        """
        if self._process is None:
            self._process = _start(self._cache.directory())
        self.pending.add(key)
        request: CompileRequest = {
            "key": key,
            "body": graph_codec.encode_graph(group.body, flags),
            "writes": group.writes,
            "fresh": group.fresh,
            "flat": group.flat,
            "dynamic_dims": group.dynamic_dims,
            "lanes": group.lanes,
            "device": self._device,
        }
        self._waiting.append((key, msgspec.json.encode(request) + b"\n"))
        self._send()

    def _send(self) -> None:
        """Write the requests that fit into the pipe, so that the client never blocks."""
        if self._process is None:
            return
        pipe = _pipe(self._process.stdin)
        capacity = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        while self._waiting:
            key, data = self._waiting[0]
            if self._sent_bytes and sum(self._sent_bytes.values()) + len(data) > capacity:
                return
            self._waiting.popleft()
            self._sent_bytes[key] = len(data)
            with contextlib.suppress(BrokenPipeError):  # `answers` finds that it ended
                pipe.write(data)
                pipe.flush()

    @property
    def descriptor(self) -> int:
        """Readable once an answer has come or the process has ended; one must be pending."""
        assert self._process is not None
        return _pipe(self._process.stdout).fileno()

    def answers(self) -> dict[str, str]:
        """Return new answers: key -> error, empty for success. Does not wait."""
        answers: dict[str, str] = {}
        poller = select.poll()
        if self.pending:
            poller.register(self.descriptor, select.POLLIN)
        while self.pending and poller.poll(0):
            data = os.read(self.descriptor, 1 << 16)
            if not data:
                return answers | self._exit_errors()
            *lines, self._unread = (self._unread + data).split(b"\n")
            received = [msgspec.json.decode(line, type=CompileAnswer) for line in lines]
            answers.update((answer["key"], answer["error"]) for answer in received)
            self.pending -= answers.keys()
            self._last_answer = time.monotonic()
        for key in answers:
            self._sent_bytes.pop(key, None)
        self._send()
        return answers

    def end_if_stuck(self, since: float) -> dict[str, str]:
        """End the process if it is stopped or silent for too long.

        Returns:
            An error for each pending key; empty if the process goes on.

        Args:
            since: start of the wait, a time of the monotonic clock.
        """
        now = time.monotonic()
        if self._process is None or not self.pending:
            return {}
        if not is_stopped(self._process.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since >= self._frozen_after:
            return self._fail_pending("the compile process is stopped")
        if now - max(since, self._last_answer) >= self._timeout:
            return self._fail_pending(
                f"the compile process has answered nothing for {self._timeout:g} s; "
                f"lazygt.session(compile=Compile(timeout=...)) waits longer"
            )
        return {}

    def _exit_errors(self) -> dict[str, str]:
        """Release a process that has closed its pipe; return an error for each pending key."""
        assert self._process is not None
        try:
            code = self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            return self._fail_pending("the compile process has hung up")
        signalled = "signal SIGKILL" if code == -signal.SIGKILL else f"signal {-code}"
        how = self._oom_kills.explained(signalled if code < 0 else f"exit code {code}", "")
        return self._fail_pending(f"the compile process ended ({how})")

    def _fail_pending(self, why: str) -> dict[str, str]:
        errors = dict.fromkeys(self.pending, why)
        self.close()
        return errors

    def close(self) -> None:
        """End the process and its children. May be called twice."""
        process, self._process = self._process, None
        self._stopped_since = None
        self.pending.clear()
        self._waiting.clear()
        self._sent_bytes.clear()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, its group with it
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the disk hangs, say
            process.wait(_EXIT_TIMEOUT)
        for pipe in (process.stdin, process.stdout):
            _pipe(pipe).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def leave_only_spare_time(pid: int) -> None:
    """Give a process, which leads a kernel session, only otherwise idle CPU time."""
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    with contextlib.suppress(PermissionError):  # a container may forbid more than the above
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    # Where the kernel has autogroups, both count only among the processes of one session.
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19", encoding="ascii")


def _start(cache: Path) -> subprocess.Popen[bytes]:
    """Start the compile process, which leaves the processors to everything else.

    Args:
        cache: directory of the artifacts.
    """
    # why: a session loads its launcher when it opens, not when lazygt is imported
    from lazygt.runtime.launch.launcher import same_package

    environment = {
        **os.environ,
        **same_package(),
        "LAZYGT_WORKER": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "lazygt.runtime.compiling.compile_process",
            str(os.getpid()),
            str(cache),
        ],
        cwd=start_directory(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    leave_only_spare_time(process.pid)  # at once, since loading torch is work too
    with contextlib.suppress(PermissionError):  # this user's pipes may be at their limit
        fcntl.fcntl(_pipe(process.stdin), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process
