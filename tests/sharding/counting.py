"""Training steps that are planned for a mesh and never run, and what they exchange.

Counted is what each rank's program asks for, before collectives travel together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import lazygt
from lazygt.graph.collectives import communications
from lazygt.graph.node import Graph

LENGTH = 1024

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
    ),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "zero": lambda model: lazygt.shard_optimizer_state(
        torch.optim.AdamW(model.parameters(), lr=0.1)
    ),
}


class Meet(NamedTuple):
    """What is counted of a collective."""

    kind: str
    reduce_op: str | None
    nbytes: int
    mesh_dim: str


Counts = Counter[Meet]


def all_reduce(nbytes: int, mesh_dim: str, op: str = "sum") -> Meet:
    return Meet("all_reduce", op, nbytes, mesh_dim)


def all_gather(nbytes: int, mesh_dim: str) -> Meet:
    return Meet("all_gather", None, nbytes, mesh_dim)


def reduce_scatter(nbytes: int, mesh_dim: str) -> Meet:
    return Meet("reduce_scatter", "sum", nbytes, mesh_dim)


class Attention(nn.Module):
    """Rows of ``qkv`` are those of one head after another: a block of them is a block of heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    def __init__(self, vocabulary: int, dim: int, depth: int, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, 16) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


def planned(
    mesh: Mapping[str, int],
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module], torch.Tensor],
    optimizer: str = "sgd",
    steps: int = 3,
) -> tuple[Counts, Graph]:
    """The collectives of a step like the last of ``steps``, and its program of rank 0.

    Args:
        make: the model, placed.
        loss: of the model on a batch, placed.
    """
    with lazygt.session(
        launcher="dry", mesh=mesh, planning=lazygt.Planning(keep_stages=True), compile="off"
    ) as s:
        model = make()
        opt = OPTIMIZERS[optimizer](model)
        s.flush()
        for _ in range(steps):
            opt.zero_grad()
            loss(model).backward()
            opt.step()
        assert s.last_plan is not None
        graph = dict(s.stages(s.last_plan))["shard"]
    found = communications(graph)
    return Counter(Meet(c.kind, c.reduce_op, c.nbytes, c.mesh_dim) for c in found), graph


def gradients(model: nn.Module) -> list[int]:
    """The bytes of each parameter."""
    return [p.numel() * 4 for p in model.parameters()]
