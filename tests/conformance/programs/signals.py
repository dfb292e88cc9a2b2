"""Metric losses, transforms of signals, spikes, symmetries and poses of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.conformance.programs.training import Training, fit, integers, network, normal


def metric_learning(device: str) -> Training:
    """pytorch-metric-learning: pairs that a miner chooses, and the triplet loss."""
    from pytorch_metric_learning import losses, miners

    model = network(device, results=6)
    inputs, labels = normal(device, 12, 8), integers(device, 3, 12)
    miner, criterion = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

    def loss() -> torch.Tensor:
        embeddings = model(inputs)
        return criterion(embeddings, labels, miner(embeddings, labels))

    return fit(model, loss)


def similarity(device: str) -> Training:
    """pytorch-msssim: an image restored by structural similarity."""
    from pytorch_msssim import SSIM

    model = nn.Conv2d(1, 1, 3, padding=1).to(device)
    criterion = SSIM(data_range=1.0, win_size=5, channel=1)
    clean = normal(device, 2, 1, 16, 16).sigmoid()
    noisy = clean + 0.1 * normal(device, 2, 1, 16, 16, seed=3)
    return fit(model, lambda: 1 - criterion(model(noisy).sigmoid(), clean))


def wavelets(device: str) -> Training:
    """ptwt: thresholds in the domain of wavelets."""
    import ptwt

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thresholds = nn.Parameter(torch.full((3,), 0.1))

        def forward(self, signal: torch.Tensor) -> torch.Tensor:
            coarse, *details = ptwt.wavedec(signal, "db2", level=3)
            pairs = zip(details, self.thresholds.unbind(), strict=True)
            shrunk = [part.sign() * (part.abs() - least).relu() for part, least in pairs]
            return ptwt.waverec([coarse, *shrunk], "db2")

    model, signal = Denoiser().to(device), normal(device, 2, 32)
    target = torch.sin(torch.arange(32, device=device) / 3)
    return fit(model, lambda: (model(signal) - target).square().mean())


def cosine_transform(device: str) -> Training:
    """torch-dct: a filter over the cosine transform of signals."""
    import torch_dct

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.Parameter(torch.ones(16))

        def forward(self, signal: torch.Tensor) -> torch.Tensor:
            return torch_dct.idct(torch_dct.dct(signal) * self.gains)

    model, signal = Filter().to(device), normal(device, 3, 16)
    return fit(model, lambda: (model(signal) - signal.cumsum(-1)).square().mean())


def spikes(device: str) -> Training:
    """snntorch: leaky neurons with surrogate gradients over time."""
    import snntorch
    from snntorch import spikegen, surrogate

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            slope = surrogate.fast_sigmoid(slope=25)
            self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 3)
            self.inner = snntorch.Leaky(beta=0.9, spike_grad=slope, learn_beta=True)
            self.outer = snntorch.Leaky(beta=0.9, spike_grad=slope)

        def forward(self, series: torch.Tensor) -> torch.Tensor:
            inner, outer = self.inner.init_leaky(), self.outer.init_leaky()
            counts = []
            for seen in series:
                spikes, inner = self.inner(self.first(seen), inner)
                spikes, outer = self.outer(self.second(spikes), outer)
                counts.append(spikes)
            return torch.stack(counts).sum(0)

    model, rates = Spiking().to(device), normal(device, 6, 8).sigmoid()
    labels = integers(device, 3, 6)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(spikegen.rate(rates, num_steps=5)), labels)

    return fit(model, loss)


def equivariance(device: str) -> Training:
    """e3nn: a tensor product of spherical harmonics and features, made by generated code."""
    from e3nn import o3

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.directions = o3.Irreps.spherical_harmonics(2)
            self.product = o3.FullyConnectedTensorProduct("4x0e", self.directions, "4x0e + 2x1o")
            self.linear = o3.Linear("4x0e + 2x1o", "2x0e + 1x1o")

        def forward(self, features: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
            waves = o3.spherical_harmonics(self.directions, points, normalize=True)
            return self.linear(self.product(features, waves))

    model = Layer().to(device)
    features, points = normal(device, 6, 4), normal(device, 6, 3, seed=3)
    return fit(model, lambda: (model(features, points) - 1).square().mean())


def poses(device: str) -> Training:
    """pypose: rigid motions, which are a subclass of tensors, inverted by gradients."""
    import pypose

    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pose = pypose.Parameter(pypose.identity_SE3(2))

        def forward(self, motions: Any) -> torch.Tensor:
            return (self.pose @ motions).Log().tensor()

    model = Inverse().to(device)
    motions = pypose.se3(0.5 * normal(device, 2, 6)).Exp()
    return fit(model, lambda: model(motions).square().sum())


def rotations(device: str) -> Training:
    """roma: a rotation found by its six numbers."""
    import roma

    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frame = nn.Parameter(torch.randn(2, 3, 2))

        def forward(self, points: torch.Tensor) -> torch.Tensor:
            return points @ roma.special_gramschmidt(self.frame).transpose(1, 2)

    model, points = Rotation().to(device), normal(device, 2, 7, 3)
    turn = roma.rotvec_to_rotmat(normal(device, 2, 3, seed=3))
    return fit(model, lambda: (model(points) - points @ turn.transpose(1, 2)).square().mean())
