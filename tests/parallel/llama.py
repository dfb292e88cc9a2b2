"""A small Llama as torch's tutorial of tensor parallelism has it, and the tutorial's tables.

The tables are pasted, with torch's imports: see "Large Scale Transformer model training with
Tensor Parallel" in pytorch.org/tutorials/intermediate/TP_tutorial.html.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotated(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        q = rotated(self.wq(x).unflatten(-1, (self.heads, -1)), freqs_cis)
        k = rotated(self.wk(x).unflatten(-1, (self.kv_heads, -1)), freqs_cis)
        v = self.wv(x).unflatten(-1, (self.kv_heads, -1))
        repeats = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(repeats, 2) if repeats > 1 else t for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, kv_heads)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        y: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return y


class Llama(nn.Module):
    freqs_cis: torch.Tensor

    def __init__(
        self,
        words: int = 40,
        dim: int = 32,
        heads: int = 4,
        kv_heads: int = 4,
        hidden: int = 64,
        depth: int = 2,
        length: int = 8,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, dim)
        blocks = (TransformerBlock(dim, heads, kv_heads, hidden) for _ in range(depth))
        self.layers = nn.ModuleList(blocks)
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, words, bias=False)
        steps = torch.arange(length).float()
        angles = torch.outer(steps, 1e4 ** (-torch.arange(0, dim // heads, 2) / (dim // heads)))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[: tokens.shape[1]]
        for layer in self.layers:
            h = layer(h, freqs_cis)
        y: torch.Tensor = self.output(self.norm(h))
        return y


def tutorial(model: Llama, tp_mesh: Any, parallelize_module: Any) -> Llama:
    """The model, laid out by the lines of the tutorial."""
    model = parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(),
                output_layouts=Shard(1),
            ),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for transformer_block in model.layers:
        layer_tp_plan = {
            # Now the input and output of SequenceParallel has Shard(1) layouts,
            # to represent the input/output tensors sharded on the sequence dimension
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), Replicate()),
                desired_input_layouts=(Replicate(), Replicate()),
            ),
            "attention.wq": ColwiseParallel(use_local_output=False),
            "attention.wk": ColwiseParallel(use_local_output=False),
            "attention.wv": ColwiseParallel(use_local_output=False),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(
            module=transformer_block,
            device_mesh=tp_mesh,
            parallelize_plan=layer_tp_plan,
        )
    return model


def first_table() -> dict[str, ParallelStyle]:
    """The tutorial's first table, without sequence parallelism, for all layers at once."""
    return {
        "layers.*.attention.wq": ColwiseParallel(use_local_output=False),
        "layers.*.attention.wk": ColwiseParallel(use_local_output=False),
        "layers.*.attention.wv": ColwiseParallel(use_local_output=False),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
    }
