"""GPU of the workers, described for torch's choice of kernels."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from lazygt.host.gpus import host_gpus


class Gpu(NamedTuple):
    """Kind of GPU; by default one that satisfies every kernel of attention."""

    capability: tuple[int, int] = (8, 0)  # compute capability
    cudnn: int = 0  # version of cuDNN, such as 91900; 0: none is known


@functools.cache
def workers_gpu() -> Gpu:
    """Return the least capable GPU of this host: its kernels run on all of them.

    On a host without a GPU (workers are elsewhere, or there are none) it is the default.
    """
    capability = min((gpu.capability for gpu in host_gpus()), default=None)
    if capability is None:
        return Gpu()
    return Gpu(capability, torch.backends.cudnn.version() or 0)
