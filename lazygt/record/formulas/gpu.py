"""The GPU that workers compute on, as torch's choice of kernels asks for it."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch


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
    capability = min(_capabilities(), default=None)
    if capability is None:
        return Gpu()
    return Gpu(capability, torch.backends.cudnn.version() or 0)


def _capabilities() -> list[tuple[int, int]]:
    """Compute capabilities by the driver's library: torch would open a context to tell them."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    capabilities = []
    for index in range(count.value):
        gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)):
            continue
        if not nvml.nvmlDeviceGetCudaComputeCapability(
            gpu, ctypes.byref(major), ctypes.byref(minor)
        ):
            capabilities.append((major.value, minor.value))
    return capabilities
