"""Anonymous memory files (memfd) that processes share; gone with their last holder."""

from __future__ import annotations

import fcntl
import os

# Not named by Python's fcntl module everywhere
_ADD_SEALS, _SEAL_SHRINK = 1033, 2


def create_file(name: str, nbytes: int) -> int:
    """Create a memfd that may grow and never shrink: that would raise SIGBUS elsewhere."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK)
    return fd


def memory_of(fd: int) -> int:
    """Return the bytes of memory that a memfd takes: written ones, without holes."""
    return os.fstat(fd).st_blocks * 512
