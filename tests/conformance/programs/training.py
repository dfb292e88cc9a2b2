"""Thirty steps of training: the form of the programs of single layers, losses and optimizers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STEPS = 30


@dataclass(frozen=True)
class Training:
    """A model in training: one step, which gives its loss, and the state to compare at the end."""

    step: Callable[[], torch.Tensor]
    state: Callable[[], dict[str, Any]]


def fit(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[], object] = lambda: None,
) -> Training:
    """Train a module as most programs do; ``after`` is called after every step of the optimizer."""
    chosen = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        chosen.zero_grad()
        value = loss()
        value.backward()
        chosen.step()
        after()
        return value

    return Training(step, lambda: weights(model))


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def steps_of(make: Callable[[str], Training]) -> Callable[[str], dict[str, Any]]:
    """Return a program of 30 steps that reads every loss, and ends with the model's state."""

    def run(device: str) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)  # some libraries draw from Python's numbers
        training = make(device)
        losses = [training.step().item() for _ in range(STEPS)]
        return {"losses": losses, **training.state()}

    return run


def normal(device: str, *shape: int, seed: int = 1) -> torch.Tensor:
    """Draw standard normal numbers on the CPU, the same for every device."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, device="cpu").to(device)


def integers(device: str, high: int, *shape: int, seed: int = 2) -> torch.Tensor:
    """Draw integers in [0, high) on the CPU, the same for every device."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=draw, device="cpu").to(device)


def network(device: str, features: int = 8, results: int = 3) -> nn.Sequential:
    layers = (nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, results))
    return nn.Sequential(*layers).to(device)
