"""Tensor creation ops: any placement of the result, no communication.

``*_like`` and ``new_*`` ops accept any placement of their operand, since only its shape is used.
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

#: Fill value of each creation op; None: uninitialized memory.
_FILLS: dict[str, int | None] = {"zeros": 0, "ones": 1, "empty": None, "empty_strided": None}


def _sized(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of zeros, ones, full, empty."""
    call = Call(node, metas, axis_size)
    shape = call.result().shape
    return [call.strategy(S(dim)).by(sized(shape)) for dim in shardable_dims(shape)]


def _strided(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of empty_strided; blocks are row-major for any ``stride``."""
    call = Call(node, metas, axis_size)
    meta = call.result()
    return [call.strategy(S(dim)).by(_create_local(meta)) for dim in shardable_dims(meta.shape)]


def _like(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of ``*_like`` and ``new_*`` ops: any operand and result placement."""
    call = Call(node, metas, axis_size)
    meta = call.result()
    result_dims, shape = shardable_dims(meta.shape), call.shape("self")
    operand_placements: list[Placement] = [*map(S, shardable_dims(shape)), P, PMAX, PMIN]
    strategies = [
        call.strategy(R, self=placement).by(_create_local(meta)) for placement in operand_placements
    ]
    for dim in result_dims:
        strategies += [
            call.strategy(S(dim), self=placement).by(_create_local(meta))
            for placement in (R, S(dim), P, PMAX, PMIN)
            if placement != S(dim) or dim in shardable_dims(shape)
        ]
    return strategies


def _create_local(result: TensorMeta) -> LocalLowering:
    """Return the lowering that creates the local tensor of ``result`` and fills it."""

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        (placement,) = strategy.outputs
        shape = build.local(result.shape, placement)
        stride = result.stride if placement == R else contiguous_stride(shape)
        empty: Ref = build.op("aten.empty_strided.default", shape, stride, dtype=result.dtype,
                              device=DEVICE)  # fmt: skip
        fill_value = _fill_value(build.bind(node, operands), node.op)
        if fill_value is None:
            return (empty,)
        return (build.op("aten.fill_.Scalar", empty, fill_value),)

    return LocalLowering(program)


def _fill_value(args: dict[str, Arg], op: str) -> Arg:
    """Return the fill value of a creation op; None: uninitialized memory."""
    name = op.split(".")[1].removeprefix("new_").removesuffix("_like")
    return args["fill_value"] if name == "full" else _FILLS[name]


def _arange(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategy of arange for integers, where a block's start is exact."""
    call = Call(node, metas, axis_size)
    start, step = call.args.get("start", 0), call.args.get("step", 1)
    size = call.result().numel
    if size < 2 or type(start) is not int or type(step) is not int:
        return ()
    dtype = call.result().dtype

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        first, last = (start + bound * step for bound in build.bounds(size))
        return (build.op("aten.arange.start_step", first, last, step,
                         dtype=dtype, device=DEVICE),)  # fmt: skip

    return [call.strategy(S(0), out=S(0)).by(lower)]


def _random_like(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of ``rand_like``: a replicated result, any placement of the operand.

    All ranks draw the full tensor, so the numbers equal those of one device.
    """
    call = Call(node, metas, axis_size)
    meta = call.meta("self")
    operand_placements: list[Placement] = [*map(S, shardable_dims(meta.shape)), P]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        like = build.op("aten.empty_strided.default", meta.shape, meta.stride, dtype=meta.dtype,
                         device=DEVICE)  # fmt: skip
        return build.rerun(node, [like])

    return [
        call.strategy(R, self=placement).by(local_lowering(lower))
        for placement in operand_placements
    ]


def _dropout(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of dropout, with the random numbers of one device.

    Every rank applies dropout to a full tensor of ones, and multiplies its operand block by its
    block of the result.
    """
    call = Call(node, metas, axis_size)
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
    **table("rand_like.default randn_like.default randint_like.default", _random_like),
}
