"""Processes hidden from other processes of the same user."""

from __future__ import annotations

import ctypes
import os

VARIABLE = "LAZYGT_HIDDEN"
"""Set for a worker that is to `hide`."""

_SET_DUMPABLE = 4  # PR_SET_DUMPABLE of linux/prctl.h


def hide() -> None:
    """Make the kernel refuse other processes of this user access to this one.

    That covers its memory, its descriptors and its environment, through ``/proc`` or as a debugger
    (prctl(2)).

    Root keeps its access.

    Raises:
        OSError: the kernel does not support this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_DUMPABLE): {os.strerror(number)}")
