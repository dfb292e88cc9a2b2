"""Networks whose gradients and inputs differ in layout train with eager torch's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import lazygt
from lazygt.graph.shapes import meta_kernels

STEPS = 30
Program = Callable[[], tuple[nn.Module, torch.Tensor]]


class Inverted(nn.Module):
    """An inverted residual of MobileNetV3: expand, convolve each channel, squeeze, project."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.expand = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.Hardswish(),
        )  # fmt: skip
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.ReLU6(), nn.Conv2d(4, wide, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.project = nn.Conv2d(wide, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.expand(x)
        return x + self.project(wide * self.squeeze(wide))


class Stem(nn.Module):
    """Row-major images, scaled and shifted, before layers whose weights are channels-last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.hardswish(x * self.scale + self.shift)


class Selective(nn.Module):
    """A selective state space as mamba has it: softplus of a transposed tensor, then a scan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.steps, self.decay = nn.Linear(width, width), nn.Parameter(torch.rand(width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.inner(x).chunk(2, dim=-1)
        value = functional.silu(value)
        delta = (self.steps.weight @ value.transpose(1, 2)).transpose(1, 2)
        delta = functional.softplus(delta + self.steps.bias).unsqueeze(-1)
        kept, states = torch.exp(-delta * self.decay), []
        driven = delta * value.unsqueeze(-1)
        state = torch.zeros_like(driven[:, 0])
        for position in range(x.shape[1]):
            state = kept[:, position] * state + driven[:, position]
            states.append(state.sum(-1))
        return x + self.outer(torch.stack(states, 1) * functional.silu(gate))


def mobile_net() -> tuple[nn.Module, torch.Tensor]:
    """Row-major images for channels-last weights."""
    layers = [Stem(3), nn.Conv2d(3, 8, 3, stride=2), nn.Hardswish(), Inverted(8), Inverted(8)]
    net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    return net, torch.randn(4, 3, 17, 17)


def mamba() -> tuple[nn.Module, torch.Tensor]:
    """Sequences."""
    return nn.Sequential(Selective(16), nn.LayerNorm(16), Selective(16)), torch.randn(2, 32, 16)


def losses(program: Program) -> list[float]:
    """The loss of each step, read there and then."""
    torch.manual_seed(0)
    net, x = program()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", [mobile_net, mamba])
def test_losses_of_thirty_steps_are_eager_torchs(program: Program) -> None:
    expected = losses(program)
    with lazygt.session(launcher="inline", compile="off"):
        assert losses(program) == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", [mobile_net, mamba])
def test_losses_are_eager_torchs_although_no_table_names_an_op(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(meta_kernels._EVERYWHERE):
        if "backward" in name:
            monkeypatch.delitem(meta_kernels._EVERYWHERE, name)
    expected = losses(program)
    with lazygt.session(launcher="inline", compile="off"):
        assert losses(program) == expected
