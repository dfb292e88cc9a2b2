"""torch's accelerator: lazygt in threads with a session, CUDA in all others.

torch has one accelerator a process, a private backend before CUDA. Autograd asks its streams of the
accelerator alone, so that a backward pass of CUDA tensors fails wherever device lazygt is there
(pytorch/pytorch#161129). The extension has torch decide by thread instead (``accelerator.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lazygt.errors import LazyGTError
from lazygt.record.tensor import NATIVE

#: What the engine says of a node on a device that is not the accelerator.
_ASSERT = "opt_ready_stream && opt_parent_stream"


def _shared() -> bool:
    """Have torch decide by thread; False where it can't, or has no CUDA to decide for."""
    return bool(torch.backends.cuda.is_built() and NATIVE and NATIVE.share_accelerator())


SHARED = _shared()


def take(ours: bool) -> None:
    """Make lazygt the accelerator in this thread, or what torch has without it."""
    if SHARED:
        NATIVE.take_accelerator(ours)


@contextmanager
def taken(ours: bool) -> Iterator[None]:
    """For a while; see ``take``.

    Raises:
        LazyGTError: a backward pass of CUDA tensors, where torch can't decide by thread.
    """
    if SHARED:
        before = NATIVE.take_accelerator(ours)
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
