"""The layers, activations and losses of torch.nn, each with inputs whose first dim is samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 16384
Inputs = Callable[[], tuple[Any, ...]]
Example = tuple[Callable[[], nn.Module], Inputs]
Examples = Mapping[str, Example]


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)


class Unpooled(nn.Module):
    """What is pooled put back where it was."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{dims}d")(2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.unpool(*self.pool(x))
        return made


def real(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape)


def chances(*shape: int) -> Tensor:
    return torch.rand(SAMPLES, *shape)


def classes(count: int, *shape: int) -> Tensor:
    return torch.randint(0, count, (SAMPLES, *shape))


def signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, (SAMPLES, *shape)) * 2.0 - 1


def on(shape: tuple[int, ...], name: str, *args: Any, **kwargs: Any) -> Example:
    """A module of torch.nn on one input of real numbers."""
    return lambda: getattr(nn, name)(*args, **kwargs), lambda: (real(*shape),)


def call(inputs: Inputs, function: Callable[..., Any]) -> Example:
    return lambda: Calls(function), inputs


_PLAIN = """
CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU
RReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Dropout AlphaDropout
"""
ACTIVATIONS: Examples = {
    **{name: on((8,), name) for name in _PLAIN.split()},
    "Threshold": on((8,), "Threshold", 0.1, 0.2),
    **{name: on((8,), name, 1) for name in ("Softmin", "Softmax", "LogSoftmax")},
    "Softmax2d": on((3, 4, 4), "Softmax2d"),
    "FeatureAlphaDropout": on((8, 3), "FeatureAlphaDropout"),
}


def spatial(dims: int) -> Examples:
    """What torch.nn has for 1, 2 and 3 dims."""
    space = {1: (8,), 2: (6, 6), 3: (4, 4, 4)}[dims]

    def one(name: str, *args: Any, **kwargs: Any) -> dict[str, Example]:
        return {f"{name}{dims}d": on((4, *space), f"{name}{dims}d", *args, **kwargs)}

    return {
        **one("Conv", 4, 4, 3), **one("ConvTranspose", 4, 4, 3),
        **one("MaxPool", 2), **one("AvgPool", 2), **one("LPPool", 2, 2),
        **one("AdaptiveMaxPool", 2), **one("AdaptiveAvgPool", 2),
        **one("ReflectionPad", 1), **one("ReplicationPad", 1), **one("ZeroPad", 1),
        **one("CircularPad", 1), **one("ConstantPad", 1, 2.0),
        **one("BatchNorm", 4), **one("InstanceNorm", 4, affine=True), **one("Dropout"),
        f"MaxUnpool{dims}d": (lambda: Unpooled(dims), lambda: (real(4, *space),)),
    }  # fmt: skip


def resized(mode: str, *space: int, **how: Any) -> Example:
    return on((2, *space), "Upsample", mode=mode, **(how or {"scale_factor": 2}))


LAYERS: Examples = {
    **spatial(1), **spatial(2), **spatial(3),
    "FractionalMaxPool2d": on((4, 6, 6), "FractionalMaxPool2d", 2, output_size=3),
    "GroupNorm": on((4, 6, 6), "GroupNorm", 2, 4), "LayerNorm": on((8,), "LayerNorm", 8),
    "RMSNorm": on((8,), "RMSNorm", 8), "LocalResponseNorm": on((4, 6, 6), "LocalResponseNorm", 2),
    "Linear": on((8,), "Linear", 8, 4),
    "Bilinear": (lambda: nn.Bilinear(8, 4, 3), lambda: (real(8), real(4))),
    "Embedding": (lambda: nn.Embedding(20, 8), lambda: (classes(20, 3),)),
    "Embedding of a norm": (lambda: nn.Embedding(20, 8, max_norm=1.0), lambda: (classes(20, 3),)),
    "Embedding by frequency": (lambda: nn.Embedding(20, 8, scale_grad_by_freq=True),
                               lambda: (classes(20, 3),)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(20, 8), lambda: (classes(20, 3),)),
    "CosineSimilarity": (nn.CosineSimilarity, lambda: (real(8), real(8))),
    "PairwiseDistance": (nn.PairwiseDistance, lambda: (real(8), real(8))),
    "PixelShuffle": on((4, 3, 3), "PixelShuffle", 2),
    "PixelUnshuffle": on((4, 4, 4), "PixelUnshuffle", 2),
    "ChannelShuffle": on((4, 3, 3), "ChannelShuffle", 2),
    "Unfold": on((4, 3, 3), "Unfold", 2), "Fold": on((8, 9), "Fold", (4, 4), 2),
    "Flatten": on((4, 3), "Flatten"), "Unflatten": on((8,), "Unflatten", 1, (2, 4)),
    "Upsample nearest 1d": resized("nearest", 3), "Upsample nearest 2d": resized("nearest", 3, 3),
    "Upsample nearest 3d": resized("nearest", 3, 3, 3),
    "Upsample nearest-exact 1d": resized("nearest-exact", 3),
    "Upsample nearest-exact 2d": resized("nearest-exact", 3, 3),
    "Upsample nearest-exact 3d": resized("nearest-exact", 3, 3, 3),
    "Upsample linear": resized("linear", 3), "Upsample bilinear": resized("bilinear", 3, 3),
    "Upsample bicubic": resized("bicubic", 3, 3),
    "Upsample trilinear": resized("trilinear", 3, 3, 3),
    "Upsample to a size": resized("bilinear", 3, 3, size=(5, 5)),
    "UpsamplingNearest2d": on((2, 3, 3), "UpsamplingNearest2d", scale_factor=2),
    "UpsamplingBilinear2d": on((2, 3, 3), "UpsamplingBilinear2d", scale_factor=2),
    "interpolate, antialiased": call(
        lambda: (real(2, 4, 4),),
        lambda x: F.interpolate(x, size=(2, 2), mode="bilinear", antialias=True)),
    "grid_sample": call(lambda: (real(2, 4, 4), real(3, 3, 2)),
                        lambda x, grid: F.grid_sample(x, grid, align_corners=False)),
    "affine_grid": call(lambda: (real(2, 3),),
                        lambda t: F.affine_grid(t, [SAMPLES, 2, 3, 3], align_corners=False)),
    **{name: on((5, 8), name, 8, 4, batch_first=True) for name in ("RNN", "GRU", "LSTM")},
    "LSTM both ways": on((5, 8), "LSTM", 8, 4, 2, bidirectional=True, batch_first=True),
    "LSTM projected": on((5, 8), "LSTM", 8, 4, proj_size=2, batch_first=True),
    **{f"{name}Cell": on((8,), f"{name}Cell", 8, 4) for name in ("RNN", "GRU", "LSTM")},
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True),
                           lambda: (real(5, 8),) * 3),
    "TransformerEncoderLayer": on((5, 8), "TransformerEncoderLayer", 8, 2, 16, batch_first=True),
}  # fmt: skip


def losses(reduction: str) -> Examples:
    how = {"reduction": reduction}

    def one(name: str, inputs: Inputs, **rest: Any) -> Example:
        return lambda: getattr(nn, name)(**how, **rest), inputs

    pair: Inputs = lambda: (real(8), chances(8))  # noqa: E731
    classified: Inputs = lambda: (real(8), classes(8))  # noqa: E731
    three: Inputs = lambda: (real(8), real(8), real(8))  # noqa: E731
    found = {
        **{name: one(name, pair) for name in (
            "L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "BCEWithLogitsLoss",
            "PoissonNLLLoss", "KLDivLoss", "CrossEntropyLoss", "MultiLabelSoftMarginLoss")},
        **{name: one(name, classified) for name in ("NLLLoss", "CrossEntropyLoss")},
        **{name: one(name, three) for name in (
            "TripletMarginLoss", "TripletMarginWithDistanceLoss")},
        "BCELoss": one("BCELoss", lambda: (torch.sigmoid(real(8)), chances(8))),
        "NLLLoss of pictures": one("NLLLoss", lambda: (real(8, 3, 3), classes(8, 3, 3))),
        "CrossEntropyLoss of chances": one("CrossEntropyLoss", pair),
        "CrossEntropyLoss smoothed": one("CrossEntropyLoss", classified, label_smoothing=0.1),
        "SoftMarginLoss": one("SoftMarginLoss", lambda: (real(8), signs(8))),
        "HingeEmbeddingLoss": one("HingeEmbeddingLoss", lambda: (real(8), signs(8))),
        "GaussianNLLLoss": one("GaussianNLLLoss", lambda: (real(8), real(8), chances(8) + 0.1)),
        "MarginRankingLoss": one("MarginRankingLoss", lambda: (real(), real(), signs())),
        "CosineEmbeddingLoss": one("CosineEmbeddingLoss", lambda: (real(8), real(8), signs())),
    }  # fmt: skip
    return {f"{name}, {reduction}": example for name, example in found.items()}


LOSSES: Examples = {**losses("mean"), **losses("sum"), **losses("none")}
EXAMPLES: Examples = {**ACTIVATIONS, **LAYERS, **LOSSES}
