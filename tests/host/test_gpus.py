"""GPUs of a host as a stand-in of the driver's library tells of them."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
import torch

from lazygt.host import gpus
from lazygt.host.gpus import HostGpu
from lazygt.runtime.executors import kernel_group, kernels

H100, A10 = HostGpu("NVIDIA H100 80GB HBM3", (9, 0)), HostGpu("NVIDIA A10", (8, 6))


class Driver:
    """NVML of a host whose second GPU does not answer.

    Args:
        cuda: the version of CUDA that it supports, such as 12040.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *known: HostGpu, works: bool = True, cuda: int = 13_000) -> None:
        self.known, self.works, self.cuda = [*known[:1], None, *known[1:]], works, cuda

    def nvmlInit(self) -> None:
        if not self.works:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.known)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> HostGpu:
        gpu = self.known[index]
        if gpu is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def nvmlDeviceGetCudaComputeCapability(self, handle: HostGpu) -> list[int]:
        return list(handle.capability)

    def nvmlDeviceGetName(self, handle: HostGpu) -> str:
        return handle.name

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_library", lambda: request.param)
    monkeypatch.setattr(gpus, "host_gpus", gpus.host_gpus.__wrapped__)


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (Driver(H100, A10), (H100, A10)),
        (Driver(H100), (H100,)),
        (Driver(H100, works=False), ()),
    ],
    indirect=["driver"],
)
def test_gpus_are_told_by_the_driver(driver: None, expected: tuple[HostGpu, ...]) -> None:
    assert gpus.host_gpus() == expected


@pytest.mark.parametrize(
    ("driver", "built", "visible", "why"),
    [
        (Driver(H100), None, None, "is built without CUDA: install a build for your driver"),
        (Driver(works=False), "13.0", None, "this host has no GPU that NVIDIA's driver knows"),
        (Driver(H100, A10), "13.0", "", "CUDA_VISIBLE_DEVICES='' hides this host's 2 GPUs: unset"),
        (Driver(H100, cuda=12_080), "13.0", None, "supports CUDA 12.8 at most, and torch .* 13.0"),
        (Driver(H100), "13.0", None, r"the driver knows 1 GPU; torch.cuda.init\(\) says why"),
    ],
    indirect=["driver"],
)
def test_absence_of_gpus_has_a_reason_and_a_remedy(
    driver: None,
    built: str | None,
    visible: str | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", refuse(AssertionError("no CUDA")))
    with pytest.raises(RuntimeError, match=rf"a worker can't use device='cuda:0': .*{why}"):
        kernels.initialize(torch.device("cuda:0"))


def test_gpu_that_is_taken_is_refused_with_the_processes_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    held = "GPU:1\nprocess       4711 uses    71234.000 MB GPU memory"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", refuse(busy))
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", [None, held].__getitem__)
    with pytest.raises(
        RuntimeError,
        match=r"'cuda:1': CUDA error: .* .*4711 uses .* EXCLUSIVE_PROCESS",
    ):
        kernels.initialize(torch.device("cuda:1"))


def refuse(error: BaseException) -> Any:
    def call(*args: Any) -> None:
        raise error

    return call


def test_code_for_gpus_is_told_by_their_names_without_initializing_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_group, "host_gpus", lambda: (H100, A10, A10))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialized"))
    told = kernel_group.toolchain.__wrapped__("cuda")
    assert told.endswith(f"cuda {torch.version.cuda} {A10.name}, {H100.name}")
