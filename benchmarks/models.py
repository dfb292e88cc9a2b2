"""The models that the benchmarks train, and one training step for each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class GPTSize:
    dim: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 128
    batch: int = 8
    vocabulary: int = 1_000


SMALL_GPT = GPTSize()
TINY_GPT = GPTSize(dim=32, batch=1)


class Block(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.qkv, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.up, self.down = nn.Linear(size.dim, 4 * size.dim), nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.dim)
        self.positions = nn.Embedding(size.length, size.dim)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def mlp_step(device: str, optimizer: str = "sgd", batch: int = 64) -> Step:
    """784-512-512-10, cross-entropy; the data stays on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        images, labels = torch.randn(batch, 784), torch.randint(10, (batch,))
    make = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-3),
    }[optimizer]()
    return lambda: update(make, F.cross_entropy(model(images), labels))


def gpt_step(device: str, size: GPTSize) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(size)
        tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> Tensor:
        logits = model(tokens[:, :-1])
        return update(optimizer, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))

    return step


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
