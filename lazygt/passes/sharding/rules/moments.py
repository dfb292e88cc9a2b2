"""Batch norm's variance and mean of each channel, by one all-reduce of local moments.

Of its n elements a rank has the mean and the variance. n times the mean, and n times the sum of the
variance and the mean's square, add up to those of all elements: in float64, so that nothing of the
variance is lost where the mean is large beside it. Channels are few; elsewhere (a layer norm of
many tokens) two all-reduces of the values' own dtype are fewer bytes, see ``formulas``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from lazygt.graph.node import DEVICE, Node, Ref
from lazygt.passes.sharding.rules.base import (
    Call,
    Collective,
    Lowering,
    Metas,
    R,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
)
from lazygt.passes.sharding.rules.reductions import passing_strategies, reduced_dims

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

_WIDE = torch.float64
#: The kernel would round a rank's moments to these.
_NARROW = (torch.float16, torch.bfloat16)


def _var_mean(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    value, dims = call.meta("self"), reduced_dims(call)
    if not call["keepdim"] or call["correction"] != 0 or not _is_of_channels(value.shape, dims):
        return ()
    if value.dtype.is_complex or value.dtype == _WIDE:
        return ()
    comm = [Collective("all_reduce", 2 * 8 * call.result().numel)]
    split = [dim for dim in shardable_dims(value.shape) if dim in dims]
    lower = _combined(prod(value.shape[dim] for dim in dims))
    met = [call.strategy(R, self=S(dim)).by(lower, comm) for dim in split]
    return [*passing_strategies(call, dims), *met]


def _is_of_channels(shape: tuple[int, ...], dims: frozenset[int]) -> bool:
    return len(shape) > 1 and dims == frozenset(range(len(shape))) - {1}


def _combined(count: int) -> Lowering:
    """Return a lowering to the moments of all ranks' elements, ``count`` of each channel."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        sums = build.all_reduce(_sums(build, operands[0]))
        mean, square = (
            build.op("aten.select.int", build.op("aten.div.Scalar", sums, count), 0, which)
            for which in range(2)
        )
        variance = build.op("aten.sub.Tensor", square, build.op("aten.mul.Tensor", mean, mean))
        variance = build.op("aten.clamp_min.default", variance, 0)
        return [
            build.op("aten._to_copy.default", moment, dtype=meta.dtype)
            for moment, meta in zip((variance, mean), node.fresh, strict=True)
            if meta is not None
        ]

    return lower


def _sums(build: Builder, value: Ref) -> Ref:
    """Return the sums of a rank's elements, and of their squares."""
    meta = build.meta(value)
    dims = [dim for dim in range(len(meta.shape)) if dim != 1]
    count = prod(meta.shape[dim] for dim in dims)
    if not count:
        shape = [1 if dim in dims else size for dim, size in enumerate(meta.shape)]
        nothing: Ref = build.op("aten.zeros.default", (2, *shape), dtype=_WIDE, device=DEVICE)
        return nothing
    if meta.dtype in _NARROW:
        value = build.op("aten._to_copy.default", value, dtype=torch.float32)
    moments = build.op("aten.var_mean.correction", value, dims, correction=0, keepdim=True)
    variance, mean = (build.op("aten._to_copy.default", each, dtype=_WIDE) for each in moments)
    square = build.op("aten.add.Tensor", variance, build.op("aten.mul.Tensor", mean, mean))
    both = build.op("aten.stack.default", [mean, square])
    sums: Ref = build.op("aten.mul.Scalar", both, count)
    return sums


RULES: Mapping[str, Rule] = {"aten.var_mean.correction": _var_mean}
