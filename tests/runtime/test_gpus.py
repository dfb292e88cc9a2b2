"""GPUs of a host as a stand-in of the driver's library tells of them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from lazygt.runtime import gpus
from lazygt.runtime.compiling import kernel_group
from lazygt.runtime.gpus import HostGpu

H100, A10 = HostGpu("NVIDIA H100 80GB HBM3", (9, 0)), HostGpu("NVIDIA A10", (8, 6))


class Driver:
    """NVML of a host whose second GPU does not answer."""

    def __init__(self, *known: HostGpu, works: bool = True) -> None:
        self.known, self.works = [*known[:1], None, *known[1:]], works

    def nvmlInit_v2(self) -> int:
        return 0 if self.works else 9

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.known)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0 if self.known[index] else 15

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        gpu = self.known[handle.value - 1]
        assert gpu is not None
        major._obj.value, minor._obj.value = gpu.capability
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, length: Any) -> int:
        gpu = self.known[handle.value - 1]
        assert gpu is not None
        name.value = gpu.name.encode()
        assert len(name.value) < length.value
        return 0


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (Driver(H100, A10), (H100, A10)),
        (Driver(H100), (H100,)),
        (Driver(H100, works=False), ()),
        (OSError("no library"), ()),
    ],
)
def test_gpus_are_told_by_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | OSError, expected: tuple[HostGpu, ...]
) -> None:
    def load(name: str) -> Driver:
        assert name == "libnvidia-ml.so.1"
        if isinstance(driver, OSError):
            raise driver
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert gpus.host_gpus.__wrapped__() == expected


def test_code_for_gpus_is_told_by_their_names_without_initializing_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_group, "host_gpus", lambda: (H100, A10, A10))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialized"))
    told = kernel_group.toolchain.__wrapped__("cuda")
    assert told.endswith(f"cuda {torch.version.cuda} {A10.name}, {H100.name}")
