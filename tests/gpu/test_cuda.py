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


# no "lstm": cuDNN draws the dropout between its layers from a state of its own
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "bilstm", "gru"])
def test_training_follows_eager_cuda(name: str) -> None:
    data = zoo.batches(name, 5)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # its recurrent layers' own
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
        ops = {node.op for plan in s.plans() for node in plan.graph.nodes}
        assert any("flash" in op or "cudnn_attention" in op for op in ops), ops


def learn(device: str, optimizer: type[torch.optim.Optimizer], steps: int) -> list[torch.Tensor]:
    """Losses and weights of a small net with dropout, whose plan is captured on the way."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))
    model = model.to(device)
    chosen = optimizer(model.parameters(), lr=0.05)
    data = torch.rand(steps, 64, 16, device="cpu")
    losses = []
    for batch in data:
        chosen.zero_grad()
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        chosen.step()
        losses.append(loss.detach())
    return [each.detach().cpu() for each in [*losses, *model.parameters()]]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_cuda_graphs_change_no_bit(optimizer: type[torch.optim.Optimizer]) -> None:
    with lazygt.session(device="cuda", compile=lazygt.Compile("off", cuda_graphs="off")):
        plain = learn("lazygt", optimizer, 20)
    with lazygt.session(device="cuda", compile=lazygt.Compile("off", cuda_graphs="now")) as s:
        graphed = learn("lazygt", optimizer, 20)
        assert s.stats()["cuda_graphs"] > 0, lazygt.why(s)
    for ours, theirs in zip(graphed, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "lstm"])
def test_captured_training_has_the_bits_of_plain_training(name: str) -> None:
    data = zoo.batches(name, 12)
    results = []
    for setting in ("off", "now"):
        with lazygt.session(device="cuda", compile=lazygt.Compile("off", cuda_graphs=setting)) as s:
            results.append(zoo.train(name, "adamw", data, "lazygt")[0])
            captured = s.stats()["cuda_graphs"]
        assert (captured > 0) is (setting == "now")
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_an_op_that_waits_runs_between_cuda_graphs() -> None:
    with lazygt.session(device="cuda", compile=lazygt.Compile("off", cuda_graphs="now")) as s:
        x = torch.eye(4) * 2
        for _ in range(8):
            x = ((x * 0.5 + torch.eye(4)).tanh() + torch.eye(4)).inverse()
            x = ((x * 0.5).sin().tanh() + torch.eye(4)).abs()
            s.flush()
        y = torch.eye(4, device="cpu") * 2
        one = torch.eye(4, device="cpu")
        for _ in range(8):
            y = ((y * 0.5 + one).tanh() + one).inverse()
            y = ((y * 0.5).sin().tanh() + one).abs()
        torch.testing.assert_close(x.cpu(), y)
        assert s.stats()["cuda_graphs"] > 0, lazygt.why(s)
        assert not any(told.failed for _, _, told in s.cuda_graphs())


def test_measured_plans_are_captured_only_where_they_gain() -> None:
    with lazygt.session(device="cuda", compile="off") as s:
        learn("lazygt", torch.optim.SGD, 40)
        assert all(told.gain > 1 or told.error for _, _, told in s.cuda_graphs())
        assert s.cuda_graphs()
