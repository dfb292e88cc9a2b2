"""Fake tensors of a GPU, without a CUDA context in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses import fake_tensor

_create_context = fake_tensor.init_gpu_context
_here = threading.local()


def _init_gpu_context(device: torch.device) -> None:
    """Call torch's own, which allocates on the GPU, only outside of ``fake_tensors``."""
    if not getattr(_here, "is_inside", False):
        _create_context(device)


fake_tensor.init_gpu_context = _init_gpu_context  # type: ignore[assignment]


@contextmanager
def fake_tensors(fallback: bool) -> Iterator[None]:
    """Mode of fake tensors that opens no CUDA context.

    A context takes 0.5 GB, and children that are forked later could not use CUDA.

    Args:
        fallback: True to run an op without a fake kernel on zeros.
    """
    before = getattr(_here, "is_inside", False)
    _here.is_inside = True
    try:
        with fake_tensor.FakeTensorMode(allow_fallback_kernels=fallback):
            yield
    finally:
        _here.is_inside = before
