"""Models of transformers, laid out by the plans of tensor parallelism that they bring along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import lazygt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # what a library warns of is its users' affair
    pytest.mark.filterwarnings("ignore"),
]

#: What the words of these plans stand for.
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
}
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def causal_model(family: str) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


def laid_out(model: Any) -> nn.Module:
    plan = {f"model.{name}": word for name, word in model.config.base_model_tp_plan.items()}
    plan |= type(model)._tp_plan
    table = {name: STYLES[word] for name, word in plan.items()}
    lazygt.parallelize_module(model, "tp", table)
    assert model.lm_head.weight.placements[0].is_shard(0)
    assert model.model.layers[1].mlp.down_proj.weight.placements[0].is_shard(1)
    assert model.model.norm.weight.placements[0].is_replicate()
    laid: nn.Module = model
    return laid


def train(make: Callable[[], nn.Module], device: str) -> list[torch.Tensor]:
    """Losses and weights of two steps."""
    model = make()
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    tokens = torch.arange(36, device="cpu").reshape(3, 12).to(device)
    losses = []
    for _ in range(2):
        opt.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.parameters())]


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_a_plan_of_transformers_gives_the_numbers_of_one_device(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = train(lambda: causal_model(family), "cpu")
    with lazygt.session(mesh={"tp": 2}, workers=lazygt.Workers(threads=1)):
        computed = train(lambda: laid_out(causal_model(family)), "lazygt")
    for got, want in zip(computed, expected, strict=True):
        torch.testing.assert_close(got, want)
