"""The folder that processes work in, which the user may have removed meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


def start_directory() -> str | None:
    """Where a child is to start: None for this process's own folder, unless that was removed.

    In a folder that is no more torch can't load its own libraries.
    """
    try:
        os.getcwd()
    except OSError:
        return tempfile.gettempdir()
    return None


@contextmanager
def in_some_directory() -> Iterator[None]:
    """Work in a folder that there is, for imports that ask for the current one; then go back."""
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
