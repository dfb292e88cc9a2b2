"""The models that the benchmarks train, and one training step for each."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Tensor]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


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


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``wrap`` is for everybody but torch.compile."""
    return function


def mlp(width: int = 512, hidden: int = 2) -> nn.Module:
    widths = [784, *[width] * hidden]
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers), nn.Linear(width, 10))


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    parameters = model.parameters()
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-3)
    return torch.optim.AdamW(parameters, lr=3e-4)


def mlp_step(
    device: str,
    optimizer: str = "sgd",
    batch: int = 64,
    width: int = 512,
    hidden: int = 2,
    wrap: Wrap = as_it_is,
) -> Step:
    """784-512-512-10, cross-entropy; the data stays on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = mlp(width, hidden)
        images, labels = torch.randn(batch, 784), torch.randint(10, (batch,))
    made = optimizer_of(model, optimizer)
    forward, advance = wrap(lambda x, y: F.cross_entropy(model(x), y)), wrap(made.step)
    return lambda: update(made, forward(images, labels), advance)


def varying_step(device: str, wrap: Wrap = as_it_is) -> Step:
    """The MLP with SGD on another number of images, from 8 to 64, at every step."""
    torch.manual_seed(0)
    with torch.device(device):
        model = mlp()
        images, labels = torch.randn(64, 784), torch.randint(10, (64,))
    made, sizes = optimizer_of(model, "sgd"), random.Random(0)
    forward, advance = wrap(lambda x, y: F.cross_entropy(model(x), y)), wrap(made.step)

    def step() -> Tensor:
        size = sizes.randint(8, 64)
        return update(made, forward(images[:size], labels[:size]), advance)

    return step


def gpt_step(device: str, size: GPTSize, wrap: Wrap = as_it_is) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(size)
        tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1))
    made = optimizer_of(model, "adamw")

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    forward, advance = wrap(loss_of), wrap(made.step)
    return lambda: update(made, forward(tokens), advance)


def chain_step(device: str, ops: int = 1_000, wrap: Wrap = as_it_is) -> Step:
    """A chain of multiplications and additions on four floats."""
    a, b = torch.full((4,), 0.999, device=device), torch.full((4,), 0.001, device=device)
    x = torch.ones(4, device=device)

    def chain(result: Tensor) -> Tensor:
        for _ in range(ops // 2):
            result = result * a + b
        return result

    wrapped = wrap(chain)
    return lambda: wrapped(x)


def pointwise_step(device: str, elements: int = 8 << 20, wrap: Wrap = as_it_is) -> Step:
    """Twelve pointwise ops on one large tensor."""
    x = torch.linspace(-2, 2, elements, device=device)

    def pointwise(x: Tensor) -> Tensor:
        x = torch.tanh(x * 1.5 + 0.25)
        x = torch.sigmoid(x * x + 0.5)
        x = torch.relu(x * 2.0 + -0.75)
        return torch.exp(x * 0.5 + 0.125)

    wrapped = wrap(pointwise)
    return lambda: wrapped(x)


def update(
    optimizer: torch.optim.Optimizer, loss: Tensor, advance: Callable[[], object] | None = None
) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    (advance or optimizer.step)()
    return loss.detach()
