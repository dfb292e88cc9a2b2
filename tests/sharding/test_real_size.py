"""A model of real size over eight ranks, of which nothing is allocated: one plan a step."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard

import lazygt

RANKS, WIDTH, HIDDEN, HEADS, TOKENS = 8, 8192, 28672, 64, 2048


class Block(nn.Module):
    """A decoder layer as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        inner = self.after(x)
        return x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))


def test_a_step_of_two_billion_parameters_is_one_stretch() -> None:
    with lazygt.session(launcher="dry", mesh={"data": RANKS}) as s:
        model = nn.Sequential(Block(), Block())
        assert sum(p.numel() for p in model.parameters()) > 1.9e9
        lazygt.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        s.flush()
        for _ in range(4):
            x = lazygt.distribute(torch.randn(RANKS, TOKENS, WIDTH), {"data": Shard(0)})
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = s.stats()
        assert stats["flushes"] == {"flush()": 1, "optimizer step": 4}
        # the weights, the first step, which makes the optimizer's state, and the others
        assert stats["plans_built"] == 3
        assert stats["plan_hits"] == 2
