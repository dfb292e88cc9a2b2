"""Training program of the tests on stubs of CUDA."""

from __future__ import annotations

import torch
from torch import nn

import lazygt


def train(session: lazygt.Session, steps: int = 4) -> None:
    """Train a small network; each loss is read."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
