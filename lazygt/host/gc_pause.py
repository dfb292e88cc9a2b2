"""Pause of garbage collection while many objects without cycles are created.

A module of its own, since the package imports it before torch and the rest of lazygt.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Holders:
    """Reference count of the blocks with collection paused; the last one resumes collection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._was_enabled = 0, False

    def enter(self) -> None:
        """Disable collection for the first block."""
        with self._lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1

    def leave(self) -> None:
        """Restore collection after the last block."""
        with self._lock:
            self._count -= 1
            if not self._count and self._was_enabled:
                gc.enable()


_holders = _Holders()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn garbage collection off for a block, also used as a decorator.

    A plan consists of many small objects, and during imports a traversal of all objects of torch
    takes as long as the rest of the import.
    """
    holders = _holders
    holders.enter()
    try:
        yield
    finally:
        holders.leave()


def _after_fork() -> None:
    """Resume collection in a child, which has none of the threads that paused it."""
    global _holders
    inherited, _holders = _holders, _Holders()
    inherited._lock = threading.Lock()
    if inherited._count and inherited._was_enabled:
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
