"""Every way to make a tensor without saying where goes to the open session, and only there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import FloatTensor, Tensor, full, nn
from torch import tensor as renamed
from torch.fft import fftfreq

import lazygt
from lazygt import native
from lazygt.record import factories
from tests.runtime.executors.compared import needs_native

pytestmark = pytest.mark.timeout(120)

#: As libraries keep the functions of a backend.
TABLE: dict[tuple[str, str], Callable[..., Tensor]] = {("torch", "full"): torch.full}

MAKES: dict[str, Callable[[], Tensor]] = {
    "function": lambda: torch.full((2,), 3.0),
    "imported function": lambda: full((2,), 3.0),
    "imported under another name": lambda: renamed([1.0, 2.0]),
    "imported from a submodule": lambda: fftfreq(4),
    "function in a table": lambda: TABLE["torch", "full"]((2,), 3.0),
    "Tensor of numbers": lambda: torch.Tensor([1, 2]),
    "Tensor of sizes": lambda: torch.Tensor(2, 3).zero_(),
    "imported Tensor": lambda: Tensor([1, 2]),
    "no numbers": lambda: torch.Tensor(),
    "parameter of old code": lambda: nn.Parameter(torch.Tensor(2).fill_(1)).detach(),
    "FloatTensor": lambda: torch.FloatTensor([1, 2]),
    "LongTensor": lambda: torch.LongTensor([1, 2]),
    "BoolTensor": lambda: torch.BoolTensor([True, False]),
    "imported type": lambda: FloatTensor([1, 2]),
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MAKES)
def test_factory_is_lazy_only_inside_session(name: str) -> None:
    eager = MAKES[name]()
    with lazygt.session(launcher="inline"):
        made = MAKES[name]()
        with CPU:
            assert MAKES[name]().device.type == "cpu"
        assert made.device.type == "lazygt"
        assert made.dtype == eager.dtype
        assert torch.equal(made.cpu(), eager)
    assert MAKES[name]().device.type == "cpu"


@pytest.mark.parametrize("name", MAKES)
def test_factory_is_eager_without_default_device(name: str) -> None:
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(default_device=False)):
        assert MAKES[name]().device.type == "cpu"


def test_factories_are_restored_after_session() -> None:
    before = full, renamed, FloatTensor, torch.Tensor.__new__, torch.LongTensor
    with lazygt.session(launcher="inline"):
        assert full is torch.full
        assert full is not before[0]
        assert TABLE["torch", "full"] is torch.full
    assert before == (full, renamed, FloatTensor, torch.Tensor.__new__, torch.LongTensor)
    assert TABLE["torch", "full"] is full


def test_a_function_that_was_imported_in_a_session_outlives_it() -> None:
    names: dict[str, Any] = {}
    with lazygt.session(launcher="inline"):
        exec("from torch import ones, LongTensor", names)
        assert names["ones"](2).device.type == "lazygt"
    assert names["ones"](2).device.type == "cpu"
    assert names["LongTensor"]([2]).device.type == "cpu"


def test_memory_that_is_given_stays_where_it_is() -> None:
    given = torch.ones(2)
    with lazygt.session(launcher="inline"):
        assert torch.Tensor(given).data_ptr() == given.data_ptr()
        assert torch.FloatTensor(given.untyped_storage()).data_ptr() == given.data_ptr()


def test_types_are_types_still() -> None:
    class Own(torch.Tensor):
        pass

    with lazygt.session(launcher="inline"):
        x = torch.FloatTensor([1.5])
        assert isinstance(x, torch.FloatTensor)
        assert not isinstance(x, torch.LongTensor)
        assert isinstance(torch.ones(1, device="cpu"), torch.FloatTensor)
        assert torch.ones(1, device="cpu").type(torch.LongTensor).dtype == torch.int64
        assert str(torch.LongTensor) == "<class 'torch.LongTensor'>"
        assert torch.LongTensor.dtype == torch.int64
        assert type(Own([1.0])) is Own


SET_DOUBLE: dict[str, Callable[[], None]] = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "type": lambda: torch.set_default_tensor_type(torch.DoubleTensor),
    "name of a type": lambda: torch.set_default_tensor_type("torch.DoubleTensor"),
}


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("name", SET_DOUBLE)
def test_a_default_dtype_set_meanwhile_stays(name: str) -> None:
    try:
        with lazygt.session(launcher="inline"):
            SET_DOUBLE[name]()
            assert torch.Tensor([1]).dtype == torch.float64
            assert torch.ones(1).dtype == torch.float64
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_forked_child_makes_cpu_tensors() -> None:
    with lazygt.session(launcher="inline"):
        pid = os.fork()
        if pid == 0:
            kinds = {make().device.type for make in MAKES.values()}
            os._exit(0 if kinds == {"cpu"} else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@needs_native
def test_both_searches_find_the_modules_that_hold_one() -> None:
    names = [
        vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)
    ]
    wanted = [torch, torch.randn, torch.full]
    extension = native.load().module
    assert extension is not None
    found = extension.holders(names, wanted)
    assert list(map(id, found)) == list(map(id, factories._dicts_with(names, wanted)))
    assert any(each is globals() for each in found)
