"""Ops that make tensors of their shape alone: any placement, and no exchange.

``like`` ops take any placement of their operand, since only its shape is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.rules.strategy import (
    PMAX,
    PMIN,
    Call,
    LocalLowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    local_lowering,
    shardable_dims,
    table,
)
from lazygt.passes.sharding.rules.views import sized

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

#: The number that the tensor is filled with; None: nothing.
_FILLS: dict[str, int | None] = {"zeros": 0, "ones": 1, "empty": None, "empty_strided": None}


def _sized(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of zeros, ones, full, empty."""
    call = Call(node, metas, parts)
    shape = call.result().shape
    return [call.strategy(S(dim)).by(sized(shape)) for dim in shardable_dims(shape)]


def _strided(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of empty_strided. Blocks are row-major, with any strides given."""
    call = Call(node, metas, parts)
    meta = call.result()
    return [call.strategy(S(dim)).by(_anew(meta)) for dim in shardable_dims(meta.shape)]


def _like(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    meta = call.result()
    splits, shape = shardable_dims(meta.shape), call.shape("self")
    have: list[Placement] = [*map(S, shardable_dims(shape)), P, PMAX, PMIN]
    strategies = [call.strategy(R, self=placement).by(_anew(meta)) for placement in have]
    for dim in splits:
        strategies += [
            call.strategy(S(dim), self=placement).by(_anew(meta))
            for placement in (R, S(dim), P, PMAX, PMIN)
            if placement != S(dim) or dim in shardable_dims(shape)
        ]
    return strategies


def _anew(made: TensorMeta) -> LocalLowering:
    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        (placement,) = strategy.outputs
        shape = build.local(made.shape, placement)
        stride = made.stride if placement == R else contiguous_stride(shape)
        empty: Ref = build.op("aten.empty_strided.default", shape, stride, dtype=made.dtype,
                              device=DEVICE)  # fmt: skip
        value = _fill(build.bind(node, operands), node.op)
        if value is None:
            return (empty,)
        return (build.op("aten.fill_.Scalar", empty, value),)

    return LocalLowering(program)


def _fill(args: dict[str, Arg], op: str) -> Arg:
    name = op.split(".")[1].removeprefix("new_").removesuffix("_like")
    return args["fill_value"] if name == "full" else _FILLS[name]


def _arange(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategy of arange for whole numbers: a block's first number is then exact."""
    call = Call(node, metas, parts)
    start, step = call.args.get("start", 0), call.args.get("step", 1)
    size = call.result().numel
    if size < 2 or type(start) is not int or type(step) is not int:
        return ()
    dtype = call.result().dtype

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        a, b = build.bounds(size)
        return (build.op("aten.arange.start_step", start + a * step, start + b * step, step,
                         dtype=dtype, device=DEVICE),)  # fmt: skip

    return [call.strategy(S(0), out=S(0)).by(lower)]


def _only_shape(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of whole random tensors like an operand with any placement.

    Their numbers are those of one device.
    """
    call = Call(node, metas, parts)
    meta = call.meta("self")
    have: list[Placement] = [*map(S, shardable_dims(meta.shape)), P]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        whole = build.op("aten.empty_strided.default", meta.shape, meta.stride, dtype=meta.dtype,
                         device=DEVICE)  # fmt: skip
        return build.rerun(node, [whole])

    return [call.strategy(R, self=placement).by(local_lowering(lower)) for placement in have]


def _dropout(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of dropout: every rank drops from a whole tensor of ones.

    Each keeps its block of that.
    """
    call = Call(node, metas, parts)
    meta = call.meta("input")

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        ones = build.op("aten.ones.default", meta.shape, dtype=meta.dtype, device=DEVICE)
        scales, mask = (
            build.convert(value, meta.shape, R, strategy.inputs[0])
            for value in build.rerun(node, [ones])
            if value
        )
        return build.op("aten.mul.Tensor", operands[0], scales), mask

    return [
        call.strategy(S(dim), input=S(dim)).by(LocalLowering(program))
        for dim in shardable_dims(meta.shape)
    ]


RULES: dict[str, Rule] = {
    **table(
        "zeros.default ones.default full.default empty.memory_format",
        _sized,
    ),
    **table(
        "zeros_like.default ones_like.default full_like.default empty_like.default "
        "new_zeros.default new_ones.default new_full.default new_empty.default "
        "new_empty_strided.default",
        _like,
    ),
    **table("native_dropout.default", _dropout),
    **table("empty_strided.default", _strided),
    **table("arange.default arange.start arange.start_step arange.start_out", _arange),
    **table("rand_like.default randn_like.default randint_like.default", _only_shape),
}
