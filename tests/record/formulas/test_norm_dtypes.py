"""Norms of inputs and weights of different dtypes against eager torch on a CPU: values, dtypes and
strides of results and gradients, or the same refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lazygt
from tests.support.bits import assert_same_bits

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

HALVES = (torch.bfloat16, torch.float16)
#: of the input, and of the weights
DTYPES = (
    *[(half, torch.float32) for half in HALVES],
    *[(torch.float32, half) for half in HALVES],
    (torch.float64, torch.float32),
)
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def running(weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(weight), torch.ones_like(weight)


NORMS: dict[str, Norm] = {
    "layer": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "rms": lambda x, w, b: F.rms_norm(x, (4,), w) + 0 * b.sum(),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "batch": lambda x, w, b: F.batch_norm(x, *running(w.detach()), w, b, True),
    "batch_eval": lambda x, w, b: F.batch_norm(x, *running(w.detach()), w, b, False),
    "batch_no_stats": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "instance_stats": lambda x, w, b: F.instance_norm(x, *running(w.detach()), w, b),
}


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with lazygt.session(
        launcher="inline",
        compile="off",
        workers=lazygt.Workers(threads=1),
        tracing=lazygt.Tracing(default_device=False),
    ):
        yield


def outcome(
    norm: Norm, data: Tensor, weight: torch.dtype, device: str, autocast: bool
) -> list[tuple[Tensor, tuple[int, ...]]] | str:
    """The result and the gradients with their strides, or what the op is refused with."""
    x = data.clone().to(device).requires_grad_()
    w, b = [(torch.arange(4.0) / 3 + 1).to(weight).to(device).detach() for _ in range(2)]
    leaves = [x, w.requires_grad_(), b.requires_grad_()]
    try:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            y = norm(*leaves)
        slope = torch.arange(4.0).to(device).to(y.dtype)
        results = [y.detach(), *torch.autograd.grad((y * slope).sum(), leaves)]
        return [(result.cpu(), result.stride()) for result in results]
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norm_of_mixed_dtypes_equals_eager(
    name: str, autocast: bool, layout: torch.memory_format
) -> None:
    for of_input, of_weight in DTYPES:
        torch.manual_seed(0)
        data = torch.randn(2, 4, 3, 4).to(of_input).contiguous(memory_format=layout)
        expected = outcome(NORMS[name], data, of_weight, "cpu", autocast)
        result = outcome(NORMS[name], data, of_weight, "lazygt", autocast)
        where = f"{of_input} under {of_weight}: {expected} and {result}"
        if isinstance(expected, str) or isinstance(result, str):
            assert isinstance(expected, str), where
            assert isinstance(result, str), where
            continue
        for (ours, strides), (eager, eager_strides) in zip(result, expected, strict=True):
            assert strides == eager_strides, where
            assert_same_bits(ours, eager)


@pytest.mark.parametrize("dtype", HALVES)
def test_group_norm_keeps_float32_statistics_of_half_precision_input(dtype: torch.dtype) -> None:
    x = torch.randn(1, 4, 3).to(dtype)
    weight = torch.ones(4)
    arguments = (1, 4, 3, 2, 1e-5)
    expected = torch.ops.aten.native_group_norm(x, weight, weight, *arguments)
    lazy = weight.to("lazygt")
    results = torch.ops.aten.native_group_norm(x.to("lazygt"), lazy, lazy, *arguments)
    assert [result.dtype for result in results] == [dtype, torch.float32, torch.float32]
    for ours, eager in zip(results, expected, strict=True):
        assert_same_bits(ours.cpu(), eager)
