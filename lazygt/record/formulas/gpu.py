"""The GPU that workers compute on, as torch's choice of kernels asks for it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from lazygt.runtime.gpus import host_gpus


class Gpu(NamedTuple):
    """A kind of GPU; as it stands, one with what every kernel of attention asks for.

    Attributes:
        capability: its compute capability.
        cudnn: the version of cuDNN, such as 91900; 0: none is known.
    """

    capability: tuple[int, int] = (8, 0)
    cudnn: int = 0


@functools.cache
def workers_gpu() -> Gpu:
    """The least capable GPU of this host, whose kernels run on all of them.

    Without one the workers are elsewhere, or there are none: the default then.
    """
    capability = min((gpu.capability for gpu in host_gpus()), default=None)
    if capability is None:
        return Gpu()
    return Gpu(capability, torch.backends.cudnn.version() or 0)
