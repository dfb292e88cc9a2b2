"""Attention on a GPU: the kernel that torch chooses there, and its numbers, backward too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import lazygt
from tests.gpu.attention import CASES, attend, operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPS = {
    SDPBackend.MATH.value: None,
    SDPBackend.FLASH_ATTENTION.value: "aten._scaled_dot_product_flash_attention.default",
    SDPBackend.EFFICIENT_ATTENTION.value: "aten._scaled_dot_product_efficient_attention.default",
    SDPBackend.CUDNN_ATTENTION.value: "aten._scaled_dot_product_cudnn_attention.default",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_kernel_and_numbers_are_those_of_eager_cuda(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    tensors, mask = operands("cuda", dtype, case)
    options = {n: case[n] for n in ("is_causal", "scale", "enable_gqa") if n in case}
    expected = OPS[torch._fused_sdp_choice(*tensors, mask, **options)]
    theirs = attend("cuda", dtype, case)
    with lazygt.session(
        workers=1, device="cuda", tracing=lazygt.Tracing(default_device=False)
    ) as s:
        ours = attend("lazygt", dtype, case)
        found = {node.op for plan in s.plans() for node in plan.graph.nodes}
    fused = {op for op in OPS.values() if op in found}
    assert fused == ({expected} if expected else set())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)


def test_backward_in_later_run_has_saved_activations() -> None:
    with lazygt.session(workers=1, device="cuda"):
        q = torch.randn(2, 4, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        loss = F.scaled_dot_product_attention(q, q, q, is_causal=True).float().sum()
        assert loss.isfinite().item()
        loss.backward()
        assert q.grad is not None
        assert q.grad.isfinite().all().item()
