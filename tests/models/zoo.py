"""Models, optimizers and a training loop, written as any torch user would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.2), nn.Linear(8 * 16, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 12, batch_first=True, **options)
        self.head = nn.Linear(12 * (2 if options.get("bidirectional") else 1), 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.ln1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 20, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8, 6)),
    "cnn": (CNN, (8, 1, 8, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.1), (4, 7, 6)),
    "bilstm": (lambda: Recurrent(nn.LSTM, bidirectional=True), (4, 7, 6)),
    "gru": (lambda: Recurrent(nn.GRU), (4, 7, 6)),
    "encoder": (Encoder, (4, 7, 16)),
    "gpt": (GPT, (4, 8)),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def batches(name: str, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same CPU data for every run."""
    generator = torch.Generator(device="cpu").manual_seed(5)
    shape = MODELS[name][1]
    made = []
    for _ in range(steps):
        if name == "gpt":
            x = torch.randint(0, 20, shape, generator=generator, device="cpu")
            y = torch.randint(0, 20, shape, generator=generator, device="cpu")
        else:
            x = torch.randn(shape, generator=generator, device="cpu")
            y = torch.randint(0, 5, shape[:1], generator=generator, device="cpu")
        made.append((x, y))
    return made


def train(
    name: str, optimizer: str, data: list[tuple[torch.Tensor, torch.Tensor]], device: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses, and all weights and buffers at the end, as CPU tensors."""
    torch.manual_seed(3)
    with torch.device(device):
        model = MODELS[name][0]()
    opt = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(data))
    losses = []
    for x, y in data:
        out = model(x.to(device))
        loss = F.cross_entropy(out.flatten(0, -2), y.to(device).flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        losses.append(loss.detach())
    state = [t.detach().cpu() for t in model.state_dict().values()]
    return [loss.cpu() for loss in losses], state
