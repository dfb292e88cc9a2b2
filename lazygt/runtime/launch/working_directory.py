"""Working directory of processes, which the user may have removed meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


def start_directory() -> str | None:
    """Return a child's working directory; None for this process's own.

    It is another one only if this process's own was removed: in a removed folder torch can't load
    its own libraries.


    """
    try:
        os.getcwd()
    except OSError:
        return tempfile.gettempdir()
    return None


@contextmanager
def in_some_directory() -> Iterator[None]:
    """Context manager: work in an existing folder, for imports that need one; then go back."""
    folder = start_directory()
    if folder is None:
        yield
        return
    removed = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(removed)
        os.close(removed)
