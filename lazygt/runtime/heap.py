"""Policy of malloc in a CPU worker: freed memory is kept, or returned to the kernel.

Workers keep freed memory, so that a step finds the pages of the last one. There, blocks of one size
replace each other. A run that gathers weights and scatters gradients alternates between whole
tensors and blocks, which leaves holes that nothing fits: half as much memory again is kept for
nothing. So such a worker returns large tensors to the kernel as they die.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH

#: Bytes from which a tensor is large.
LARGE = 1 << 20
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def takes_turns(graph: Graph) -> bool:
    """Return whether a graph gathers or scatters something large."""
    return any(
        node.op == LAUNCH
        and node.args[0] in ("all_gather", "reduce_scatter")
        and (meta := node.fresh[0]) is not None
        and meta.nbytes >= LARGE
        for node in graph.nodes
    )


def is_own() -> bool:
    """Return whether this process is a worker's, and not the client's as well."""
    return os.environ.get("LAZYGT_WORKER") == "1"


@cache
def give_back() -> bool:
    """Return large tensors to the kernel when they die, from now on, and free memory now.

    Returns:
        Whether malloc can do that: glibc's can.
    """
    libc = ctypes.CDLL(None)
    try:
        done: bool = libc.mallopt(_MMAP_THRESHOLD, LARGE) == 1
        libc.malloc_trim(0)
    except AttributeError:
        return False
    return done
