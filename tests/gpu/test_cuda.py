"""One worker on a GPU: the same training as eager CUDA, moved by the same session code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lazygt
from tests.models import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "lstm"])
def test_training_follows_eager_cuda(name: str) -> None:
    data = zoo.batches(name, 5)
    eager, _ = zoo.train(name, "adamw", data, "cuda")
    with lazygt.session(workers=1, device="cuda"):
        lazy, _ = zoo.train(name, "adamw", data, "lazygt")
    torch.testing.assert_close(lazy, eager, rtol=1e-4, atol=1e-5)


def test_large_tensors_go_there_and_back() -> None:
    with lazygt.session(workers=1, device="cuda"):
        x = torch.arange(1 << 20, dtype=torch.float32, device="cpu")
        assert torch.equal((x.to("lazygt") * 2).cpu(), x * 2)


def test_attention_takes_a_fused_kernel() -> None:
    with lazygt.session(workers=1, device="cuda") as s:
        q = torch.randn(2, 4, 64, 32, dtype=torch.float16)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().item()
        assert any("flash" in node.op for plan in s.plans() for node in plan.graph.nodes)
