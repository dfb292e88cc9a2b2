"""What malloc keeps of a CPU worker's memory.

Workers keep what is freed, so that a step finds the pages of the last one. Blocks of one size take
each other's place there. Of weights that are gathered and gradients that are scattered, whole ones
and blocks take turns, and leave holes that nothing fits: half as much again is kept for nothing. So
a worker that does this gives large tensors back to the kernel as they die.
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
    """Whether a graph gathers or scatters something large."""
    return any(
        node.op == LAUNCH
        and node.args[0] in ("all_gather", "reduce_scatter")
        and (meta := node.fresh[0]) is not None
        and meta.nbytes >= LARGE
        for node in graph.nodes
    )


def is_own() -> bool:
    """Whether this process is a worker's, and not the client's as well."""
    return os.environ.get("LAZYGT_WORKER") == "1"


@cache
def give_back() -> bool:
    """From here on large tensors go back to the kernel when they die, and what is free now.

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
