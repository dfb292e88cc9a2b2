"""Check that this process can get the descriptors and threads of a session.

The check runs before anything is opened, and takes them for a moment: that respects every limit
there is, of the process, the user, the container and the machine. libzmq ends the whole process if
it does not get them.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from contextlib import ExitStack

#: File descriptors of the client; more than it was seen to have open at any time.
_DESCRIPTORS, _DESCRIPTORS_A_WORKER = 32, 15
#: Threads of the client, and of a worker besides those that compute; a process counts as one.
_THREADS, _THREADS_A_WORKER = 2, 8


def check_limits(workers: int, threads: int) -> None:
    """Raise OSError if a session of so many workers cannot be opened.

    Args:
        threads: compute threads of each worker.
    """
    wanted = _DESCRIPTORS + _DESCRIPTORS_A_WORKER * workers
    available = _descriptors(wanted)
    if available < wanted:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            errno.EMFILE,
            f"a session of {workers} worker(s) needs {wanted} file descriptors, and this process "
            f"gets {available} more; close files, or raise the limit, now {limit} (ulimit -n)",
        )
    wanted = _THREADS + (_THREADS_A_WORKER + threads) * workers
    available = _threads(wanted)
    if available < wanted:
        raise OSError(
            errno.EAGAIN,
            f"a session of {workers} worker(s) needs {wanted} processes and threads, and this "
            f"process gets {available} more; end some, or raise the limit of this user (ulimit -u) "
            f"or container (pids.max)",
        )


def _descriptors(wanted: int) -> int:
    """Return the number of file descriptors available, up to ``wanted``."""
    with ExitStack() as taken:
        for count in range(wanted):
            try:
                fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return count
            taken.callback(os.close, fd)
    return wanted


def _threads(wanted: int) -> int:
    """Return the number of threads that can be started, up to ``wanted``."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=end.wait, name="lazygt-room", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # there are no more
        return len(started)
    finally:
        end.set()
        for thread in started:
            thread.join()
    return wanted
