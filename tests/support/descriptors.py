"""The descriptors of this process, for tests that leave none behind."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> set[str]:
    """The numbers of the descriptors that are open, the listing's own among them."""
    return set(os.listdir("/proc/self/fd"))


def descriptors_before() -> set[str]:
    """The same at the begin of a test.

    Garbage is collected first: what earlier tests left in cycles may hold some, and would give
    them back in the middle of the test that counts. What ends in a thread of its own may do so all
    the same, so tests ask for no more than before, not for as many.
    """
    gc.collect()
    return open_descriptors()
