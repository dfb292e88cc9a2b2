"""Pointwise ops: an element of the result depends on the same element of the operands only.

Any dim of the result can be sharded, with every operand that has that dim. Ops that are linear in
some operands accept partial sums of them. Monotonically increasing ops accept partial maxima and
minima.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from lazygt.graph.fusion import pure_form
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Param, Ref
from lazygt.graph.ops import facts, overload
from lazygt.graph.placement import Partial, Placement, Replicate
from lazygt.passes.sharding.builder import bound
from lazygt.passes.sharding.rules.strategy import (
    PMAX,
    PMIN,
    Call,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

#: Ops that are linear in the operands marked P; one letter per tensor operand.
_LINEAR: dict[str, tuple[str, ...]] = {
    "add.Tensor": ("PP",),
    "sub.Tensor": ("PP",),
    "rsub.Tensor": ("PP",),
    "mul.Tensor": ("P", "PR", "RP"),
    "mul.Scalar": ("P",),
    "div.Tensor": ("P", "PR"),
    "div.Scalar": ("P",),
    "neg.default": ("P",),
    "clone.default": ("P",),
    "positive.default": ("P",),
    "_to_copy.default": ("P",),
    "copy_.default": ("PP",),
    "copy.default": ("PP",),
    "where.self": ("RPP",),
    "masked_fill.Tensor": ("PRP",),
    "addcmul.default": ("PPR", "PRP"),
    "addcdiv.default": ("PPR",),
    "lerp.Scalar": ("PP",),
    "lerp.Tensor": ("PPR",),
    "zero_.default": ("P",),
}
#: Ops that add a number (the named argument) to an operand; for partial sums one rank adds it.
_ADDED_NUMBERS = {
    "add.Tensor": "other",
    "add.Scalar": "other",
    "sub.Tensor": "other",
    "sub.Scalar": "other",
    "rsub.Scalar": "other",
    "masked_fill.Scalar": "value",
}
#: Backward ops that are linear in the first operand, the gradient.
_LINEAR_BACKWARDS = frozenset(
    f"{name}_backward"
    for name in ("threshold", "gelu", "tanh", "sigmoid", "silu", "elu", "hardtanh", "hardsigmoid",
                 "hardswish", "leaky_relu", "softplus", "mish", "hardshrink", "softshrink",
                 "rrelu_with_noise", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
                 "binary_cross_entropy")
)  # fmt: skip
#: Monotonically increasing ops that are defined from -inf to inf.
_INCREASING = frozenset(
    f"{name}.default"
    for name in ("exp", "relu", "sigmoid", "tanh", "atan", "ceil", "floor", "round", "trunc", "erf",
                 "clone", "_to_copy", "clamp_min", "clamp_max", "hardtanh")
)  # fmt: skip
_EXTREMA = {"maximum.default": PMAX, "minimum.default": PMIN}


def strategies(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return one strategy per dim of the result, and the strategies with partial operands."""
    if facts(overload(node.op)).random or not node.results:
        return ()
    operands = [metas[number] for number in node.refs()]
    known = [meta for meta in operands if meta is not None]
    result = node.results[0]
    if result is None or not known or len(known) != len(operands):
        return ()
    count = len(node.results)
    strategies = [
        Strategy(tuple(aligned(meta, result.shape, dim) for meta in known), (S(dim),) * count)
        for dim in shardable_dims(result.shape)
    ]
    return [*strategies, *_partial_strategies(node, known, result)]


def aligned(meta: TensorMeta, shape: tuple[int, ...], dim: int) -> Placement:
    """Return the placement of an operand broadcast to ``shape``, whose ``dim`` is sharded."""
    own_dim = dim - (len(shape) - len(meta.shape))
    return S(own_dim) if own_dim >= 0 and meta.shape[own_dim] == shape[dim] else R


def _partial_strategies(
    node: Node, operands: list[TensorMeta], result: TensorMeta
) -> list[Strategy]:
    """Return the strategies with partial operands: linear or increasing ops."""
    functional, out_keyword = _functional_form(node.op)
    inputs_without_out = operands[: len(operands) - 1] if out_keyword else operands
    strategies: list[Strategy] = []
    for inputs, output in _partial_patterns(node, functional, inputs_without_out, result):
        placements = (*inputs, output) if out_keyword else inputs
        if not node.writes or placements[0] == output or out_keyword:
            strategies.append(Strategy(placements, (output,) * len(node.results)))
    if node.op == "aten.copy_.default":  # overwrites the old contents
        strategies += [Strategy((partial, R), (R,)) for partial in (P, PMAX)]
    return [*strategies, *_with_number(node, functional, operands, result)]


def _with_number(
    node: Node, functional: str, operands: list[TensorMeta], result: TensorMeta
) -> list[Strategy]:
    """Return the strategy that adds a number to partial sums on one rank."""
    name = _ADDED_NUMBERS.get(functional.removeprefix("aten."))
    if name is None or len(node.results) != 1 or len(operands) > 2:
        return []
    number = bound(node)[name]
    marks: list[Replicate | Partial] = [P, *[R] * (len(operands) - 1)]
    if type(number) is Ref or type(node.args[0]) is not Ref:
        return []
    if functional.endswith(".Tensor") and len(operands) != 1:
        return []
    if not _can_be_summed(marks, operands, result):
        return []
    return [Strategy(tuple(marks), (P,)).by(add_number_once(name))]


def add_number_once(name: str) -> Lowering:
    """Return the lowering that replaces a number by 0 on all ranks but rank 0.

    Args:
        name: name of the argument with the number.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        number = bound(node)[name]
        if (type(number) is not Param and number == 0) or build.index == 0:
            return build.rerun(node, operands)
        return build.rerun(node, operands, **{name: build.zero_like(number)})

    return lower


def _partial_patterns(
    node: Node, functional: str, operands: list[TensorMeta], result: TensorMeta
) -> list[tuple[tuple[Placement, ...], Placement]]:
    """Return (placements of operands, placement of result) of the partial strategies."""
    name = functional.removeprefix("aten.")
    patterns = _LINEAR.get(name, ())
    if name.split(".")[0] in _LINEAR_BACKWARDS:
        patterns = ("P" + "R" * (len(operands) - 1),)
    matches: list[tuple[tuple[Placement, ...], Placement]] = []
    for pattern in patterns:
        marks = [P if letter == "P" else R for letter in pattern]
        if len(marks) == len(operands) and _can_be_summed(marks, operands, result):
            matches.append((tuple(marks), P))
    if name in _INCREASING and len(operands) == 1 and _widens(operands[0].dtype, result.dtype):
        matches += [((PMAX,), PMAX), ((PMIN,), PMIN)]
    if name in _EXTREMA:
        matches.append(((_EXTREMA[name],) * 2, _EXTREMA[name]))
    return matches


def _can_be_summed(
    marks: list[Replicate | Partial], operands: list[TensorMeta], result: TensorMeta
) -> bool:
    """Return whether summing partial operands loses no precision against the result's dtype."""
    partial_dtypes = [meta.dtype for mark, meta in zip(marks, operands, strict=True) if mark == P]
    return all(_widens(dtype, result.dtype) and dtype != torch.bool for dtype in partial_dtypes)


def _widens(dtype: torch.dtype, wider: torch.dtype) -> bool:
    """Return whether ``dtype`` promotes to ``wider``."""
    return torch.promote_types(dtype, wider) == wider


@lru_cache(maxsize=4096)
def _functional_form(op: str) -> tuple[str, str]:
    """Return the functional overload of an op, and the keyword that an ``out=`` overload writes."""
    try:
        return pure_form(op)
    except KeyError:
        return op, ""


@lru_cache(maxsize=4096)
def is_pointwise(op: str) -> bool:
    """Return whether torch tags an op, or its functional form, as pointwise.

    False for ops on lists (``horizontal``) and for random ops.
    """
    if op.startswith("lazygt.") or "_foreach" in op or "@" in op:
        return False
    f, pure = facts(overload(op)), facts(overload(_functional_form(op)[0]))
    return (f.pointwise or pure.pointwise) and not (f.random or f.dynamic)


#: Pointwise ops without torch's pointwise tag.
_UNTAGGED = (
    "copy_.default copy.default _to_copy.default clone.default zero_.default fill.Scalar "
    "fill.Tensor fill_.Scalar fill_.Tensor masked_fill.Scalar masked_fill_.Scalar "
    "masked_fill.Tensor masked_fill_.Tensor where.self addcmul_.default addcdiv_.default "
    "_prelu_kernel.default _prelu_kernel_backward.default complex.default polar.default "
    "elu_backward.default hardshrink_backward.default hardsigmoid_backward.default "
    "hardtanh_backward.default hardswish.default hardswish_.default hardswish_backward.default "
    "leaky_relu_backward.default softplus_backward.default softshrink_backward.default "
    "rrelu_with_noise_backward.default rsub.Tensor floor_divide.default floor_divide_.Tensor "
    "isin.Tensor_Scalar"
)
#: Losses, which are pointwise if unreduced.
_LOSSES = (
    "mse_loss.default mse_loss_backward.default smooth_l1_loss.default "
    "smooth_l1_loss_backward.default huber_loss.default huber_loss_backward.default "
    "soft_margin_loss.default soft_margin_loss_backward.default binary_cross_entropy.default "
    "binary_cross_entropy_backward.default binary_cross_entropy_with_logits.default"
)


def _unreduced(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a loss: pointwise if unreduced, else none."""
    return () if Call(node, metas, axis_size)["reduction"] else strategies(node, metas, axis_size)


RULES: dict[str, Rule] = {**table(_UNTAGGED, strategies), **table(_LOSSES, _unreduced)}
