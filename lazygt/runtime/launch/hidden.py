"""Processes that others of the same user may not look into."""

from __future__ import annotations

import ctypes
import os

VARIABLE = "LAZYGT_HIDDEN"
"""Set for a worker that is to `hide`."""

_SET_DUMPABLE = 4  # PR_SET_DUMPABLE of linux/prctl.h


def hide() -> None:
    """Have the kernel refuse other processes of this user a look into this one, from now on: at its
    memory, its descriptors and its environment, by ``/proc`` or as a debugger (prctl(2)).

    Root may look all the same.

    Raises:
        OSError: the kernel does not know that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_DUMPABLE): {os.strerror(number)}")
