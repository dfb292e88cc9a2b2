"""Launcher of worker processes on this host, and the boot configuration of a worker.

The boot configuration holds the session's secrets, so it travels through an inherited pipe and
never through the command line or the environment, which other users can read. The same pipe is
the worker's liveness pipe: end of file means that the client has ended.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import select
import signal
import subprocess
import sys
import sysconfig
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lazygt.errors import ProtocolError
from lazygt.host.processes import Usage, start_directory
from lazygt.net.channel import Address, Keys
from lazygt.net.mailbox import MailboxFiles
from lazygt.net.sockets import GroupSpec

# -- boot configuration ----------------------------------------------------------------------------

WORKER_FACTORY = "lazygt.runtime.worker.worker:Worker"


@dataclass(frozen=True, slots=True)
class Boot:
    """Boot configuration of a worker process."""

    #: ``module:attribute`` of a callable that takes device, rank, world_size, upload and fetch, and
    #: returns a `MessageHandler`
    factory: str
    device: str  # ``cpu`` or ``cuda:0``, in the worker's own numbering
    rank: int
    world_size: int
    threads: int  # torch threads of this worker
    neighbours: int  # number of workers on this host, this one included
    client_pid: int  # the client's process; the worker ends with it
    token: str  # the session's secret, as hex
    data: Address  # data, control: sockets at which the worker takes messages, and pings
    control: Address
    keys: Keys | None  # CURVE keys of this worker, or None for a local channel
    max_message: int
    upload: int | None  # upload, fetch: descriptors of the arenas' memfds, or None
    fetch: int | None
    #: descriptors of the mailboxes (message queues in shared memory) for small messages, or None
    mailboxes: MailboxFiles | None
    directory: str  # the session's directory, removed by the worker if the client was killed
    group: GroupSpec | None  # how to join the group of workers, or None; group_number: its number
    rendezvous: Address | None  # address at which other ranks reach this one, or None
    loads_torch: bool  # False for handlers that need no torch (tests), which start much faster
    copier: str = ""  # ``module:attribute`` of a factory of ``transfer.copier.Copier``, or ""
    #: True to spin briefly for the next message before sleeping, if cores are free
    spins: bool = True
    #: descriptor of the memory for copies of its values that outlive it, or None
    snapshots: int | None = None
    group_number: int = 0
    #: descriptors of every rank's snapshot memory, for a spare process, which gets its rank when a
    #: worker has died; else None
    spare: tuple[int, ...] | None = None
    status: int | None = None  # descriptor of the session's status pages, or None

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, text: bytes) -> Boot:
        """Read the output of `to_bytes`.

        Raises:
            ProtocolError: the text was cut short, or a field is of another type.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the boot configuration cannot be read: {error}") from error

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the process must inherit."""
        rendezvous = None if self.rendezvous is None else self.rendezvous.fd
        memory = self.upload, self.fetch, self.snapshots, self.status
        others = tuple(fd for fd in (*memory, rendezvous) if fd is not None)
        mailboxes = () if self.mailboxes is None else self.mailboxes.all
        return (self.data.fd, self.control.fd, *others, *mailboxes, *(self.spare or ()))


def load_named(name: str) -> Any:
    """Import and return the object named ``module:attribute``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


# -- processes -------------------------------------------------------------------------------------

#: Bytes of a worker's output that an error shows.
TAIL_BYTES = 8 << 10
_REAP_SECONDS = 1.0

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_liveness_pipes: weakref.WeakSet[Process] = weakref.WeakSet()


class Launcher:
    """Starter of ``python -m lazygt.runtime.launch.process``, by subprocess.

    torch has threads, so workers are no forks. `start` does not wait for a worker to be ready.
    """

    def start(self, boot: Boot, environment: Mapping[str, str]) -> Process:
        """Start one worker with these variables added to the environment.

        Raises:
            OSError: the process could not be started.
        """
        with ExitStack() as undo:
            liveness_read, liveness_pipe = os.pipe()
            undo.callback(os.close, liveness_read)
            on_failure = undo.enter_context(ExitStack())
            on_failure.callback(os.close, liveness_pipe)
            output = os.memfd_create("lazygt-stderr", os.MFD_CLOEXEC)
            on_failure.callback(os.close, output)
            # O_APPEND: the worker truncates a long log, and continues at its new end.
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
            popen = subprocess.Popen(
                # -P: a file in the user's directory must not hide a module of the standard library
                [sys.executable, "-P", "-m", "lazygt.runtime.launch.process", str(liveness_read)],
                env={**os.environ, **_environment(boot.threads), **environment},
                pass_fds=(liveness_read, *boot.descriptors),
                cwd=start_directory(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in the terminal is for the client alone.
                start_new_session=True,
            )
            process = Process(popen, liveness_pipe, output)
            on_failure.pop_all()
        process.send_boot(boot)
        return process


class Process:
    """Started worker process: a child of this one.

    Attributes:
        pidfd: readable when the process has ended.
    """

    def __init__(self, popen: subprocess.Popen[bytes], liveness_pipe: int, output: int) -> None:
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self._popen = popen
        self._liveness_pipe = liveness_pipe
        self._output = output
        _liveness_pipes.add(self)

    def send_boot(self, boot: Boot) -> None:
        """Write the boot configuration; the pipe has capacity for it, so this does not wait."""
        text = boot.to_bytes()
        try:
            os.write(self._liveness_pipe, len(text).to_bytes(4, "little") + text)
        except BrokenPipeError:
            return  # the worker has died already: the next wait sees that by its pidfd

    def status(self) -> str | None:
        """Return the exit status (``signal SIGKILL``, ``exit code 1``); None while it runs."""
        code = self._popen.poll()
        if code is None:
            return None
        return f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"

    def usage(self) -> Usage:
        """Return its processor usage so far; a constant if it cannot be measured."""
        return Usage.of(self.pid)

    def stderr_tail(self) -> str:
        """Return the last few KiB of its standard output and error."""
        size = os.fstat(self._output).st_size
        start = max(size - TAIL_BYTES, 0)
        return os.pread(self._output, TAIL_BYTES, start).decode(errors="replace")

    def close_pipe(self) -> None:
        """Close the liveness pipe: the worker exits at once if its interpreter still runs."""
        liveness_pipe, self._liveness_pipe = self._liveness_pipe, -1
        if liveness_pipe >= 0:
            os.close(liveness_pipe)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._popen.terminate()

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self._popen.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end for at most ``seconds``; True if it has ended."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(max(seconds, 0) * 1000)) and self._popen.wait() is not None

    def close(self) -> None:
        """Close the descriptors. Idempotent; the process must have ended."""
        self.close_pipe()
        with suppress(subprocess.TimeoutExpired):  # SIGKILL can't end it while the disk hangs
            self._popen.wait(_REAP_SECONDS)
        output, self._output = self._output, -1
        if output >= 0:
            os.close(output)
            os.close(self.pidfd)


def _environment(threads: int) -> dict[str, str]:
    """Return the environment variables that all workers need: threads, malloc, PYTHONPATH."""
    variables = {
        "LAZYGT_WORKER": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Threads that spin at a barrier are slow as soon as another process needs the core.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        # The results of a step reuse the memory of the last step's results. malloc's default would
        # return blocks over 128 KiB to the kernel, and each page would be faulted in again.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        # Where memory is returned all the same (see ``runtime.worker.shipped_plans``), huge pages
        # cost least.
        "GLIBC_TUNABLES": ":".join(
            filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"))
        ),
    }
    return variables | same_package()


def same_package() -> dict[str, str]:
    """Return the PYTHONPATH with which another Python process imports this same lazygt."""
    if str(_PACKAGE_ROOT) in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        return {}
    inherited = os.environ.get("PYTHONPATH")  # run from a checkout
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), inherited)))}


def _signal_name(number: int) -> str:
    """Return the name of a signal; its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _forget_liveness_pipes() -> None:
    """Close the liveness pipes in a forked child (a DataLoader's worker): the client owns them."""
    for process in list(_liveness_pipes):
        process.close_pipe()


os.register_at_fork(after_in_child=_forget_liveness_pipes)
