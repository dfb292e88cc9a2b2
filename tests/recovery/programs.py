"""Training steps of all kinds of sessions, and what they come to as SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lazygt
from lazygt.settings import grouped

WIDTH, BATCH = 16, 8


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of values and layouts."""
    told = hashlib.sha256()
    for t in tensors:
        told.update(repr((t.shape, t.stride(), t.dtype)).encode())
        told.update(t.detach().cpu().contiguous().numpy().tobytes())
    return told.hexdigest()


class MLP(nn.Module):
    """Two layers with dropout between them, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def data_parallel(model: MLP) -> None:
    lazygt.data_parallel(model, mesh_dim="ranks")


def fully_sharded(model: MLP) -> None:
    lazygt.fully_shard(model, mesh_dim="ranks")


def tensor_parallel(model: MLP) -> None:
    styles = {"*.0": ColwiseParallel(), "*.3": RowwiseParallel()}
    lazygt.parallelize_module(model, "ranks", styles)


def staged(model: MLP) -> None:
    lazygt.stage([model.first], 0)
    lazygt.stage([model.second], 1)


def alone(model: MLP) -> None:
    model.to("lazygt")


class Layout(NamedTuple):
    """A kind of session, and how a model is laid out in it."""

    settings: dict[str, Any]
    lay: Callable[[MLP], object]
    cut: bool = False


def chaotic(x: torch.Tensor) -> torch.Tensor:
    """A pointwise group that amplifies the last bits, in which its compiled code differs."""
    for _ in range(3):
        y = (x * 3.0 + 0.25).tanh().abs()
        x = y * 3.9 * (1.0 - y)
    return x


def _on(ranks: int, axis: str = "ranks", **more: Any) -> dict[str, Any]:
    return {"mesh": {axis: ranks}, "threads": 1, "compile": "off", **more}


LAYOUTS = {
    "one worker": Layout(_on(1), alone),
    "replicated": Layout(_on(2), alone),
    "data parallel": Layout(_on(2), data_parallel, True),
    "fully sharded": Layout(_on(2), fully_sharded, True),
    "tensor parallel": Layout(_on(2), tensor_parallel),
    "pipeline": Layout(_on(2, "pipe"), staged),
    "invariant": Layout(_on(2, invariant=2), data_parallel, True),
}


def train(
    layout: Layout, steps: int, between: Callable[[int], object] = lambda step: None
) -> list[torch.Tensor]:
    """Losses, weights, the optimizer's state and the generator after some steps.

    Args:
        between: called in the midst of each step.
    """
    model = MLP()
    layout.lay(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(BATCH, WIDTH, device="cpu").to("lazygt")
        y = torch.randint(0, WIDTH, (BATCH,), device="cpu").to("lazygt")
        if layout.cut:
            x, y = (lazygt.distribute(t, {"ranks": Shard(0)}) for t in (x, y))
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        between(step)
        loss.backward()
        opt.step()
        if step % 2:
            losses.append(torch.tensor(loss.item(), device="cpu"))
    state = [v for each in opt.state.values() for v in each.values()]
    return [*losses, *model.parameters(), *state, torch.get_rng_state()]


def outcome(
    name: str, steps: int = 8, disturb: Callable[[lazygt.Session, int], object] | None = None,
    **more: Any,
) -> tuple[str, list[Any]]:  # fmt: skip
    """What a session of this kind comes to, and its recoveries."""
    layout = LAYOUTS[name]
    torch.manual_seed(7)
    with lazygt.session(**grouped({**layout.settings, **more})) as s:
        told = digest(train(layout, steps, lambda step: disturb and disturb(s, step)))
    return told, s.recoveries
