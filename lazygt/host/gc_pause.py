"""Putting garbage collection off while much is made that leaves no cycle.

A file of its own, since imports want it before anything else of lazygt, or torch, is loaded.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Holders:
    """Count of the blocks that keep collection off; the last one turns it on again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._was_enabled = 0, False

    def enter(self) -> None:
        with self._lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_enabled:
                gc.enable()


_holders = _Holders()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn garbage collection off for a block.

    A plan is made of many small objects; and during imports a walk through all objects of torch
    takes as long as everything else.
    """
    holders = _holders
    holders.enter()
    try:
        yield
    finally:
        holders.leave()


def _after_fork() -> None:
    """Other threads, which would have put it back, are not in the child; one may have had the
    lock."""
    global _holders
    before, _holders = _holders, _Holders()
    before._lock = threading.Lock()
    if before._count and before._was_enabled:
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
