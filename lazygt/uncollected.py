"""Putting garbage collection off while much is made that leaves no cycle.

A file of its own, since imports want it before anything else of lazygt, or torch, is loaded.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Put garbage collection off: of a plan, which is made of many small objects, and of imports,
    where a walk through all that torch has loaded takes as long as everything else."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
