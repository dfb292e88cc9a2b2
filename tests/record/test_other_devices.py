"""Programs for torch's own devices: the errors in a session say what to write there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazygt

pytestmark = pytest.mark.timeout(120)

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")


def here(call: Any) -> str:
    return f"{__file__}:{call.__code__.co_firstlineno}"


def refused(call: Callable[[], object], error: type[BaseException]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


WRAPPERS: dict[str, Callable[[nn.Module], object]] = {
    "DataParallel": lambda module: nn.DataParallel(module)(torch.ones(4, 3)),
    "DistributedDataParallel": lambda module: nn.parallel.DistributedDataParallel(module),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_names_the_mesh(name: str) -> None:
    wrap = WRAPPERS[name]
    with lazygt.session(launcher="inline"):
        module = nn.Linear(3, 2)
        text = refused(lambda: wrap(module), NotImplementedError)
    assert text == (
        f"{name} of a module on device 'lazygt': a session shows its workers as one device. Open "
        f"it with lazygt.session(mesh={{'data': 2}}), which starts 2 workers, write "
        f"lazygt.data_parallel(module) in place of the wrapper, and cut batches with "
        f"lazygt.distribute(batch, {{'data': lazygt.Shard(0)}})\n  at {here(wrap)}"
    )


def test_advice_of_the_wrappers_runs() -> None:
    with lazygt.session(launcher="dry", mesh={"data": 2}) as s:
        module = lazygt.data_parallel(nn.Linear(3, 2))
        batch = lazygt.distribute(torch.ones(4, 3), {"data": lazygt.Shard(0)})
        module(batch).sum().backward()
        s.flush()
        assert [one.kind for one in s.last_plan.collectives] == ["all_reduce"]  # type: ignore[union-attr]


@without_cuda
def test_wrapper_of_a_module_on_the_cpu() -> None:
    module = nn.Linear(3, 2)
    with lazygt.session(launcher="inline"):
        text = refused(lambda: nn.DataParallel(module), NotImplementedError)
        assert "lazygt.session(mesh={'data': 2})" in text, "it would move the module"
        assert module.weight.device.type == "cpu"
        with pytest.raises(ValueError, match="process group has not been initialized"):
            nn.parallel.DistributedDataParallel(module)


CUDA: dict[str, Callable[[], object]] = {
    "tensor": lambda: torch.ones(3).cuda(),
    "module": lambda: nn.Linear(3, 2).cuda(),
    "to": lambda: torch.ones(3).to("cuda"),
    "factory": lambda: torch.ones(3, device="cuda"),
    "of the CPU": lambda: torch.ones(3, device="cpu").cuda(),
}


@without_cuda
@pytest.mark.parametrize("name", CUDA)
def test_cuda_names_the_device(name: str) -> None:
    call = CUDA[name]
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        call()
    torchs = str(caught.value)
    with lazygt.session(launcher="inline"):
        torch.ones(2).sum()
        text = refused(call, caught.type)
    assert text == (
        f"{torchs}. In a lazygt session the device is 'lazygt', whatever the workers compute on: "
        f"write .to('lazygt') for .cuda() and device='lazygt' for device='cuda', or leave the "
        f"device out\n  at {here(call)}"
    )
    with pytest.raises(caught.type) as caught:
        call()
    assert str(caught.value) == torchs
