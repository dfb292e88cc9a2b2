"""torch's accelerator: lazygt in threads with a session, CUDA in all others.

torch has one accelerator a process, a private backend before CUDA. Autograd takes its streams from
the accelerator alone, so a backward pass of CUDA tensors fails wherever device lazygt is registered
(pytorch/pytorch#161129). The extension makes torch decide by thread instead (``accelerator.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lazygt.errors import LazyGTError
from lazygt.record.tensor import NATIVE

#: The engine's assertion about a node on a device that is not the accelerator.
_ASSERT = "opt_ready_stream && opt_parent_stream"


def _shared() -> bool:
    """Make torch choose its accelerator by thread; return False if it can't, or has no CUDA."""
    return bool(torch.backends.cuda.is_built() and NATIVE and NATIVE.share_accelerator())


SHARED = _shared()


def select(lazygt_current: bool) -> None:
    """Set this thread's accelerator: lazygt, or the one that torch has without lazygt.

    Args:
        lazygt_current: True for lazygt.
    """
    if SHARED:
        NATIVE.take_accelerator(lazygt_current)


@contextmanager
def selected(lazygt_current: bool) -> Iterator[None]:
    """Context in which ``select(lazygt_current)`` holds; the earlier choice is restored after it.

    Raises:
        LazyGTError: CUDA tensors have a backward pass, and torch can't decide by thread.
    """
    if SHARED:
        before = NATIVE.take_accelerator(lazygt_current)
        try:
            yield
        finally:
            NATIVE.take_accelerator(before)
        return
    try:
        yield
    except RuntimeError as error:
        if _ASSERT not in str(error):
            raise
        raise LazyGTError(
            "torch runs no backward pass of CUDA tensors in a process with another accelerator, "
            "which device lazygt is (pytorch/pytorch#161129). Build lazygt's extension (run "
            "`lazygt build-native`), with which both work, or train on CUDA in a process that does "
            "not import lazygt."
        ) from error
