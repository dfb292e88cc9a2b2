"""Metrics, attributions, images, sparse activations, averages, differentiable optimisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def metrics(device: str) -> dict[str, Any]:
    """torchmetrics over several batches."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassConfusionMatrix,
        MulticlassF1Score,
    )

    collection = MetricCollection(
        [
            MulticlassAccuracy(4),
            MulticlassF1Score(4),
            MulticlassAUROC(4),
            MulticlassConfusionMatrix(4),
        ]
    ).to(device)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        chances = torch.randn(10, 4, generator=draw, device="cpu").softmax(-1).to(device)
        labels = torch.randint(0, 4, (10,), generator=draw, device="cpu").to(device)
        collection.update(chances, labels)
    return {name: value.cpu() for name, value in collection.compute().items()}


def attribution(device: str) -> dict[str, Any]:
    """captum's integrated gradients, which hook a module."""
    from captum.attr import IntegratedGradients, LayerGradCam

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    ).to(device)  # fmt: skip
    image = torch.randn(2, 1, 8, 8).to(device)
    shares, gap = IntegratedGradients(model).attribute(
        image, target=1, n_steps=5, return_convergence_delta=True
    )
    layer = LayerGradCam(model, model[0]).attribute(image, target=2)
    return {"shares": shares.cpu(), "gap": gap.cpu(), "layer": layer.detach().cpu()}


def images(device: str) -> dict[str, Any]:
    """kornia: random augmentation, filters and a warp with gradients."""
    import kornia

    torch.manual_seed(0)
    picture = torch.rand(2, 3, 12, 12).to(device).requires_grad_()
    augment = kornia.augmentation.AugmentationSequential(
        kornia.augmentation.RandomHorizontalFlip(p=0.5),
        kornia.augmentation.RandomAffine(degrees=20.0, p=1.0),
        kornia.augmentation.ColorJitter(0.2, 0.2, 0.2, 0.1, p=1.0),
    )
    seen = augment(picture)
    edges = kornia.filters.sobel(kornia.filters.gaussian_blur2d(seen, (3, 3), (1.0, 1.0)))
    edges.sum().backward()
    assert picture.grad is not None
    return {"seen": seen.detach().cpu(), "grad": picture.grad.cpu()}


def sparse_activation(device: str) -> dict[str, Any]:
    """entmax: autograd functions of its own, with sorting and supports."""
    from entmax import entmax15, entmax_bisect, sparsemax

    torch.manual_seed(0)
    found = {}
    for name, function in {"15": entmax15, "sparsemax": sparsemax, "bisect": entmax_bisect}.items():
        scores = torch.randn(3, 7, dtype=torch.float64).to(device).requires_grad_()
        chances = function(scores, dim=-1)
        chances.square().sum().backward()
        assert scores.grad is not None
        found[name], found[f"{name} grad"] = chances.detach().cpu(), scores.grad.cpu()
    return found


def moving_average(device: str) -> dict[str, Any]:
    """torch-ema beside an optimizer with a schedule."""
    from torch_ema import ExponentialMovingAverage

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 1)).to(device)
    average = ExponentialMovingAverage(model.parameters(), decay=0.9)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    inputs = torch.randn(8, 4).to(device)
    for _ in range(6):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update()
    with average.average_parameters():
        averaged = {f"average {n}": p.detach().clone() for n, p in model.named_parameters()}
    return {**averaged, **{n: p.detach().cpu() for n, p in model.named_parameters()}}


def meta_learning(device: str) -> dict[str, Any]:
    """torchopt: a gradient through the steps of an inner optimizer."""
    import torchopt

    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(device)
    scale = torch.tensor(1.0, device=device, requires_grad=True)
    inputs = torch.randn(5, 3).to(device)
    inner = torchopt.MetaSGD(model, lr=0.1)
    for _ in range(2):
        inner.step((model(inputs) * scale).square().mean())
    model(inputs).square().mean().backward()
    assert scale.grad is not None
    return {"grad": scale.grad.cpu()}


def tensor_notation(device: str) -> dict[str, Any]:
    """einops: rearranging, reducing and its layers."""
    from einops import einsum, pack, rearrange, reduce, repeat, unpack
    from einops.layers.torch import EinMix, Rearrange

    torch.manual_seed(0)
    image = torch.randn(2, 3, 8, 8).to(device)
    layer = nn.Sequential(
        Rearrange("b c (h i) (w j) -> b (h w) (c i j)", i=4, j=4),
        EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=48, d=5),
    ).to(device)
    patches = layer(image)
    packed, shapes = pack([patches, image.mean((2, 3))[:, :, None].expand(2, 3, 5)], "b * d")
    parts = unpack(packed, shapes, "b * d")
    total = einsum(parts[0], parts[1], "b t d, b s d -> t s").sum()
    total.backward()
    return {
        "pooled": reduce(rearrange(image, "b c h w -> b h w c"), "b h w c -> c", "max").cpu(),
        "repeated": repeat(patches.detach(), "b t d -> (b k) t d", k=2).cpu(),
        "grad": layer[1].weight.grad.cpu(),
    }
