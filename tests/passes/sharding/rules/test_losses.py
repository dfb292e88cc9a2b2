"""Strategies of losses of pairs of elements, and of activations beyond core aten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.sharding.rules.draws import Cases, Draw, check_strategies
from tests.passes.sharding.rules.harness import Case
from tests.support.values import Kind

Make = Callable[[Draw], Case]
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def pair(d: Draw, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A prediction and a target that the loss takes."""
    if op.startswith("binary_cross_entropy"):
        d = d.without(Kind.NAN)  # which the kernel refuses
        value = d.tensor(2)
        return value.sigmoid(), d.like(value).sigmoid()
    value = d.tensor(2)
    return value, d.like(value).sign() if "margin" in op else d.like(value)


def loss(op: str, reduction: int, *rest: Any) -> Make:
    return lambda d: Case(f"{op}.default", *pair(d, op), reduction, *rest)


def gradient(op: str, reduction: int, *rest: Any) -> Make:
    def make(d: Draw) -> Case:
        value, target = pair(d, op)
        above = d.like(value) if reduction == 0 else d.of()
        return Case(f"{op}_backward.default", above, value, target, reduction, *rest)

    return make


def broadcast(d: Draw) -> Case:
    value = d.tensor(2)
    return Case("mse_loss.default", value, d.of(value.shape[1]), 1)


def entropy(reduction: int, backward: bool) -> Make:
    """Of probabilities, with a weight for each column."""

    def make(d: Draw) -> Case:
        value, target = pair(d, "binary_cross_entropy")
        weight = d.of(value.shape[1]).abs()
        if not backward:
            return Case("binary_cross_entropy.default", value, target, weight, reduction)
        above = d.like(value) if reduction == 0 else d.of()
        return Case("binary_cross_entropy_backward.default", above, value, target,
                    weight.expand_as(value).contiguous(), reduction)  # fmt: skip

    return make


def logits(reduction: int, weighted: bool) -> Make:
    def make(d: Draw) -> Case:
        value = d.tensor(2)
        weights = (d.like(value).abs(), d.of(value.shape[1]).abs()) if weighted else (None, None)
        return Case("binary_cross_entropy_with_logits.default", value, d.like(value).sigmoid(),
                    *weights, reduction)  # fmt: skip

    return make


OPS: dict[str, tuple[Any, ...]] = {
    "mse_loss": (), "smooth_l1_loss": (0.7,), "huber_loss": (0.7,), "soft_margin_loss": (),
}  # fmt: skip
LOSSES: Cases = {
    **{f"{op} {name}": loss(op, number, *rest)
       for op, rest in OPS.items() for name, number in REDUCTIONS.items()},
    **{f"{op} backward {name}": gradient(op, number, *rest)
       for op, rest in OPS.items() for name, number in REDUCTIONS.items()},
    **{f"binary_cross_entropy {name} backward={backward}": entropy(number, backward)
       for name, number in REDUCTIONS.items() for backward in (False, True)},
    **{f"with logits {name} weighted={weighted}": logits(number, weighted)
       for name, number in REDUCTIONS.items() for weighted in (False, True)},
    "mse_loss broadcast": broadcast,
}  # fmt: skip


def glu(backward: bool) -> Make:
    def make(d: Draw) -> Case:
        shape, dim = list(d.shape(3)), d.dim(3)
        shape[dim] *= 2
        value = d.of(*shape)
        if not backward:
            return Case("glu.default", value, dim)
        return Case("glu_backward.default", d.like(value.narrow(dim, 0, shape[dim] // 2)), value,
                    dim)  # fmt: skip

    return make


def log_sigmoid(d: Draw) -> Case:
    return Case("log_sigmoid_forward.default", d.tensor(2))


def log_sigmoid_backward(d: Draw) -> Case:
    value = d.tensor(2)
    _, buffer = torch.ops.aten.log_sigmoid_forward(value)
    return Case("log_sigmoid_backward.default", d.like(value), value, buffer)


def slope(op: str, *rest: Any) -> Make:
    """The gradient of an activation: of NaN, torch's vectorised loops make another than others."""

    def make(d: Draw) -> Case:
        d = d.without(Kind.NAN)
        value = d.tensor(2)
        return Case(f"{op}_backward.default", d.like(value), value, *rest)

    return make


def elu_backward(d: Draw) -> Case:
    d = d.without(Kind.NAN)
    value = d.tensor(2)
    return Case("elu_backward.default", d.like(value), 1.0, 1.0, 1.0, False, value)


def noisy_backward(d: Draw) -> Case:
    value = d.tensor(2)
    rest = (d.like(value), 0.1, 0.3, True, False)
    return Case("rrelu_with_noise_backward.default", d.like(value), value, *rest)


ACTIVATIONS: Cases = {
    "glu": glu(backward=False), "glu backward": glu(backward=True),
    "log_sigmoid": log_sigmoid, "log_sigmoid backward": log_sigmoid_backward,
    "elu backward": elu_backward, "rrelu backward": noisy_backward,
    "hardshrink backward": slope("hardshrink", 0.5),
    "softshrink backward": slope("softshrink", 0.5),
    "hardsigmoid backward": slope("hardsigmoid"), "hardtanh backward": slope("hardtanh", -0.5, 0.5),
    "hardswish backward": slope("hardswish"),
    "leaky_relu backward": slope("leaky_relu", 0.1, False),
    "softplus backward": slope("softplus", 1, 20),
    "hardswish": lambda d: Case("hardswish.default", d.tensor(2)),
}  # fmt: skip

ALL = LOSSES | ACTIVATIONS


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ALL)
def test_rows(name: str) -> None:
    check_strategies(ALL[name], examples=12)
