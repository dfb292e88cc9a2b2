"""GPUs of this host, as the driver's library (NVML) reports them, and the kind that kernels need.

NVML, since torch would initialize CUDA for that: CUDA takes memory of a GPU, and no child that the
process forks may use CUDA after its initialization.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class HostGpu(NamedTuple):
    """A GPU: its product name and its compute capability."""

    name: str
    capability: tuple[int, int]


class Gpu(NamedTuple):
    """Kind of GPU; by default one that satisfies every kernel of attention."""

    capability: tuple[int, int] = (8, 0)  # compute capability
    cudnn: int = 0  # version of cuDNN, such as 91900; 0: none is known


@functools.cache
def host_gpus() -> tuple[HostGpu, ...]:
    """Return all GPUs of this host that answer, visible to CUDA or not; none without a driver."""
    count = _queried(lambda: int(_driver().nvmlDeviceGetCount())) or 0
    gpus = (_queried(functools.partial(_gpu, index)) for index in range(count))
    return tuple(gpu for gpu in gpus if gpu is not None)


@functools.cache
def workers_gpu() -> Gpu:
    """Return the least capable GPU of this host: its kernels run on all of them.

    On a host without a GPU (workers are elsewhere, or there are none) it is the default.
    """
    capability = min((gpu.capability for gpu in host_gpus()), default=None)
    if capability is None:
        return Gpu()
    return Gpu(capability, torch.backends.cudnn.version() or 0)


def why_none() -> str:
    """Describe the reason for which torch sees no GPU here, with a remedy."""
    built = torch.version.cuda
    if built is None:
        return (
            f"torch {torch.__version__} is built without CUDA: install a build for your driver "
            f"(https://pytorch.org/get-started), or use device='cpu'"
        )
    count = len(host_gpus())
    if not count:
        return "this host has no GPU that NVIDIA's driver knows: use device='cpu'"
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides this host's {gpus}: unset it or name one"
    driver = _queried(lambda: int(_driver().nvmlSystemGetCudaDriverVersion_v2())) or 0
    major, minor = driver // 1000, driver % 1000 // 10
    if major < int(built.partition(".")[0]):
        return (
            f"the driver supports CUDA {major}.{minor} at most, and torch {torch.__version__} is "
            f"built for {built}: update the driver, or install a build of torch for CUDA {major}"
        )
    return f"the driver knows {gpus}; torch.cuda.init() says why torch can use none"


def why_unusable(index: int, error: BaseException) -> str:
    """Describe the reason for which a process can't use a visible GPU, with the GPU's processes."""
    users = _queried(lambda: torch.cuda.list_gpu_processes(index)) or "the driver does not tell"
    return (
        f"{error}. Processes on it ({'; '.join(users.splitlines())}). Wait for them, end them, or "
        f"choose other GPUs with CUDA_VISIBLE_DEVICES. In the compute mode EXCLUSIVE_PROCESS, a "
        f"GPU takes one process: ask for at most as many workers as there are GPUs"
    )


def _driver() -> Any:
    """Return the initialized NVML library."""
    driver = _library()
    driver.nvmlInit()  # counts its calls; the library stays open
    return driver


def _library() -> Any:
    """Import and return NVML's Python binding."""
    # why: programs without GPUs need not wait 40 ms for it
    import pynvml

    return pynvml


def _gpu(index: int) -> HostGpu:
    """Query NVML for a GPU by its index in the driver's order."""
    driver = _driver()
    handle = driver.nvmlDeviceGetHandleByIndex(index)
    major, minor = driver.nvmlDeviceGetCudaComputeCapability(handle)
    return HostGpu(driver.nvmlDeviceGetName(handle), (major, minor))


def _queried(query: Callable[[], T]) -> T | None:
    """Return the result of an NVML query; None if it raises NVMLError."""
    try:
        return query()
    except _library().NVMLError:
        return None
