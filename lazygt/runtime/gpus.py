"""The GPUs of this host, as the driver's library (NVML) tells.

torch would initialize CUDA to tell: that takes memory of a GPU, and no child of a process may use
CUDA after that.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


class HostGpu(NamedTuple):
    """A GPU: its product name and its compute capability."""

    name: str
    capability: tuple[int, int]


@functools.cache
def host_gpus() -> tuple[HostGpu, ...]:
    """All GPUs of this host, visible to CUDA or not; none without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return ()
    gpus = (_gpu(nvml, index) for index in range(count.value))
    return tuple(gpu for gpu in gpus if gpu is not None)


def _gpu(nvml: Any, index: int) -> HostGpu | None:
    """The GPU of this index; None: the driver can't tell."""
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    if (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        or nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES))
    ):
        return None
    return HostGpu(name.value.decode(errors="replace"), (major.value, minor.value))
