"""Worker processes on this machine, started by subprocess: torch has threads, so no forks."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import sysconfig
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from lazygt.host import processes
from lazygt.host.gpus import why_none
from lazygt.host.processes import start_directory
from lazygt.runtime.launch.launcher import Boot, Launcher, Process

TAIL_BYTES = 8 << 10
_REAP_SECONDS = 1.0

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_liveness_pipes: weakref.WeakSet[LocalProcess] = weakref.WeakSet()


class LocalLauncher(Launcher):
    """Launcher of ``python -m lazygt.runtime.launch.process`` on this machine."""

    def start(self, boot: Boot, environment: Mapping[str, str]) -> Process:
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
            process = LocalProcess(popen, liveness_pipe, output)
            on_failure.pop_all()
        process.send_boot(boot)
        return process


class LocalProcess(Process):
    """Child process of this process."""

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
        code = self._popen.poll()
        if code is None:
            return None
        return f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"

    def usage(self) -> processes.Usage:
        return processes.Usage.of(self.pid)

    def stderr_tail(self) -> str:
        size = os.fstat(self._output).st_size
        start = max(size - TAIL_BYTES, 0)
        return os.pread(self._output, TAIL_BYTES, start).decode(errors="replace")

    def close_pipe(self) -> None:
        """Close this end of the liveness pipe; its end of file tells the worker of our end."""
        liveness_pipe, self._liveness_pipe = self._liveness_pipe, -1
        if liveness_pipe >= 0:
            os.close(liveness_pipe)

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def wait(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(max(seconds, 0) * 1000)) and self._popen.wait() is not None

    def close(self) -> None:
        self.close_pipe()
        with suppress(subprocess.TimeoutExpired):  # SIGKILL can't end it while the disk hangs
            self._popen.wait(_REAP_SECONDS)
        output, self._output = self._output, -1
        if output >= 0:
            os.close(output)
            os.close(self.pidfd)


def share_of_cores(world_size: int) -> int:
    """Return the number of threads for each of ``world_size`` workers here; at least 1."""
    return max(len(os.sched_getaffinity(0)) // world_size, 1)


def visible_gpu(number: int, count: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a worker: visible GPU ``number``, modulo ``count``.

    Raises:
        ValueError: there is no GPU.
    """
    if count < 1:
        raise ValueError(f"device='cuda', but torch sees no GPU: {why_none()}")
    listed = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = listed if listed != [""] else [str(index) for index in range(count)]
    return names[number % count]


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
        # Where memory is returned all the same (see ``runtime.heap``), huge pages cost least.
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
