"""Files in memory that processes share: without a name, gone with the last one that holds them."""

from __future__ import annotations

import fcntl
import os

# Not named by Python's fcntl module everywhere
_ADD_SEALS, _SEAL_SHRINK = 1033, 2


def create_file(name: str, nbytes: int) -> int:
    """A new memfd, which may grow and never shrink: that would be a SIGBUS in other processes."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK)
    return fd


def memory_of(fd: int) -> int:
    """Bytes of memory that a memfd takes: of what was written, holes not."""
    return os.fstat(fd).st_blocks * 512
