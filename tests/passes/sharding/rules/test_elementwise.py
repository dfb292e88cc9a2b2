"""Strategies of pointwise ops, contractions, reductions and softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lazygt.graph.node import Param
from tests.passes.sharding.rules.draws import Cases, Draw, check_strategies
from tests.passes.sharding.rules.harness import Case


def unary(op: str):
    return lambda d: Case(op, d.tensor(2))


def binary(op: str):
    """With a second operand that is broadcast."""

    def make(d: Draw) -> Case:
        a = d.tensor(3)
        return Case(op, a, d.of(1 if d.flag() else a.shape[1], a.shape[2]))

    return make


def same(op: str, count: int, *rest, **kwargs):
    """Several operands of one shape."""

    def make(d: Draw) -> Case:
        a = d.tensor(2)
        return Case(op, a, *(d.like(a) for _ in range(count - 1)), *rest, **kwargs)

    return make


def masked(op: str, value):
    def make(d: Draw) -> Case:
        a = d.tensor(2)
        return Case(op, a, d.like(a) > 0, value)

    return make


def where(d: Draw) -> Case:
    a = d.tensor(2)
    return Case("where.self", a > 0, a, d.of(a.shape[1]))


POINTWISE: Cases = {
    **{name: unary(f"{name}.default") for name in (
        "relu", "exp", "sigmoid", "sigmoid_", "tanh", "tanh_", "neg", "clone", "sqrt", "abs",
        "reciprocal", "gelu", "zero_", "erf", "floor")},
    **{name: binary(name) for name in (
        "add.Tensor", "add_.Tensor", "sub.Tensor", "mul.Tensor", "mul_.Tensor", "div.Tensor",
        "div_.Tensor", "maximum.default", "minimum.default", "copy_.default", "eq.Tensor")},
    "mul by a number": lambda d: Case("mul.Tensor", d.tensor(2), 2.0),
    "mul by a run-time number": lambda d: Case("mul.Tensor", d.tensor(2), Param(0), params=[3.0]),
    "add a number": lambda d: Case("add.Tensor", d.tensor(2), 2.0),
    "add with alpha": same("add.Tensor", 2, alpha=0.5),
    "div by a number": lambda d: Case("div_.Scalar", d.tensor(2), 2.0),
    "whole numbers": lambda d: Case("mul.Tensor", d.indices(9, 5, 3), d.indices(9, 3)),
    "where": where,
    "masked_fill with 0": masked("masked_fill.Scalar", 0),
    "masked_fill with 1": masked("masked_fill_.Scalar", 1.0),
    "gelu_backward": same("gelu_backward.default", 2),
    "tanh_backward": same("tanh_backward.default", 2),
    "sigmoid_backward": same("sigmoid_backward.default", 2),
    "threshold_backward": same("threshold_backward.default", 2, 0),
    "addcdiv_": same("addcdiv_.default", 3, value=0.1),
    "addcmul": same("addcmul.default", 3),
    "lerp_": same("lerp_.Scalar", 2, 0.1),
    "lerp": same("lerp.Tensor", 3),
    "clamp": lambda d: Case("clamp.default", d.tensor(2), None, 1.0),
    "to a wider dtype": lambda d: Case(
        "_to_copy.default", d.tensor(2).float(), dtype=torch.float64),
    "to a narrower dtype": lambda d: Case("_to_copy.default", d.tensor(2), dtype=torch.float32),
    "eq.Scalar": lambda d: Case("eq.Scalar", d.tensor(2), 1),
}  # fmt: skip


def mm(d: Draw) -> Case:
    i, k, j = d.shape(3)
    return Case("mm.default", d.of(i, k), d.of(k, j))


def bmm(d: Draw) -> Case:
    b, i, k, j = d.shape(4)
    return Case("bmm.default", d.of(b, i, k), d.of(b, k, j))


def addmm(op: str, bias):
    def make(d: Draw) -> Case:
        i, k, j = d.shape(3)
        return Case(op, d.of(*bias(i, j)), d.of(i, k), d.of(k, j), beta=0.5)

    return make


def baddbmm(d: Draw) -> Case:
    b, i, k, j = d.shape(4)
    return Case("baddbmm.default", d.of(i, 1), d.of(b, i, k), d.of(b, k, j))


def vector(op: str):
    def make(d: Draw) -> Case:
        i, k = d.shape(2)
        return Case(op, d.of(i, k) if op.startswith("mv") else d.of(k), d.of(k))

    return make


def cdist(d: Draw) -> Case:
    b, i, j, k = d.shape(4)
    return Case("_cdist_forward.default", d.of(b, i, k), d.of(b, j, k), 2.0, None)


MATMUL: Cases = {
    "mm": mm, "bmm": bmm, "baddbmm": baddbmm, "mv": vector("mv.default"),
    "dot": vector("dot.default"), "cdist": cdist,
    "addmm with a row": addmm("addmm.default", lambda i, j: (j,)),
    "addmm with a column": addmm("addmm.default", lambda i, j: (i, 1)),
    "addmm with a number": addmm("addmm.default", lambda i, j: ()),
    "addmm_": addmm("addmm_.default", lambda i, j: (i, j)),
}  # fmt: skip


def over(op: str, listed: bool = True):
    def make(d: Draw) -> Case:
        value, dim, keep = d.tensor(3), d.dim(3), d.flag()
        return Case(op, value, [dim] if listed else dim, keep)

    return make


def over_two(op: str, **kwargs):
    def make(d: Draw) -> Case:
        return Case(op, d.tensor(3), [0, -1], keepdim=d.flag(), **kwargs)

    return make


def norm(order: Any, params: Sequence[float] = ()) -> Callable[[Draw], Case]:
    """With zeros among the numbers, and over the first dim or all."""

    def make(d: Draw) -> Case:
        value = d.tensor(2).clamp_min(0) + 0.5 * d.flag()
        dims = [0] if d.flag() else None
        return Case("linalg_vector_norm.default", value, order, dims, params=params)

    return make


REDUCTIONS: Cases = {
    **{name: unary(f"{name}.default") for name in (
        "sum", "mean", "max", "min", "any", "all", "prod", "amax", "amin", "linalg_vector_norm")},
    **{name: over(name) for name in (
        "sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "any.dims", "all.dims",
        "logsumexp.default")},
    **{name: over(name, listed=False) for name in (
        "max.dim", "min.dim", "argmax.default", "argmin.default", "prod.dim_int", "any.dim")},
    **{name: over_two(name) for name in ("sum.dim_IntList", "mean.dim", "logsumexp.default")},
    **{f"{name} of two dims": over_two(f"{name}.correction", correction=0)
       for name in ("var", "std", "var_mean", "std_mean")},
    "var of a run-time correction": over_two("var.correction", correction=Param(0), params=[0.5]),
    "var of the default correction": over_two("var.correction"),
    "sum of whole numbers": lambda d: Case("sum.dim_IntList", d.indices(9, *d.shape(2)), [0]),
    "sum of bools": lambda d: Case("sum.default", d.tensor(2) > 0),
    "amax of whole numbers": lambda d: Case("amax.default", d.indices(9, *d.shape(2)), [0]),
    "argmax with ties": lambda d: Case("argmax.default", d.indices(2, *d.shape(2)), d.dim(2)),
    "norm of order 3": lambda d: Case("linalg_vector_norm.default", d.tensor(2), 3.0, [0], True),
    **{f"norm of order {order}": norm(order)
       for order in (0.0, float("inf"), float("-inf"), -1.0)},
    **{f"norm of run-time order {order}": norm(Param(0), params=[order])
       for order in (0.0, 0.5, 2.0, float("inf"), float("-inf"), -1.0)},
}  # fmt: skip


def softmax(op: str):
    return lambda d: Case(op, d.tensor(3), d.dim(3), False)


def softmax_backward(op: str):
    def make(d: Draw) -> Case:
        value, dim = d.tensor(3), d.dim(3)
        out = value.softmax(dim) if op[1] == "s" else value.log_softmax(dim)
        return Case(op, d.like(value), out, dim, torch.float64)

    return make


def safe_softmax(d: Draw) -> Case:
    """With a row of -inf alone, and parts of others."""
    value, dim = d.tensor(2), d.dim(2)
    value[d.like(value) > 0.5] = float("-inf")
    value.select(1 - dim % 2, 0).fill_(float("-inf"))
    return Case("_safe_softmax.default", value, dim)


SOFTMAX: Cases = {
    "safe_softmax": safe_softmax,
    "softmax": softmax("_softmax.default"),
    "log_softmax": softmax("_log_softmax.default"),
    "softmax_backward": softmax_backward("_softmax_backward_data.default"),
    "log_softmax_backward": softmax_backward("_log_softmax_backward_data.default"),
}

ALL = POINTWISE | MATMUL | REDUCTIONS | SOFTMAX


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALL)
def test_rows(name: str) -> None:
    check_strategies(ALL[name])


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
@pytest.mark.parametrize("order", [0.5, 2.0, -1.0, torch.inf])
def test_norm_of_run_time_order_stays_infinite_or_nan(order: float, number: float) -> None:
    value = torch.ones(5, 2, dtype=torch.float64)
    value[3, 0] = number
    case = Case("linalg_vector_norm.default", value, Param(0), [0], params=[order])
    for strategy in case.strategies(3):
        case.check(3, strategy)
