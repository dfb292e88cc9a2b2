"""Rules of lazygt's own nodes: collectives of previously sharded axes, and stage marks.

A collective of one mesh axis can be sharded along another axis in the dims that the collective
does not move: each rank runs the same collective on its block. A stage mark is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PUT_ROWS,
    REDUCE_SCATTER,
    REPLICATE_TO_PARTIAL,
    SEND_RECV,
    SHARD,
    TAKE_ROWS,
    Partial,
    Placement,
)
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.marks import ENTER, LEAVE
from lazygt.passes.sharding.rules.strategy import (
    PARTIALS,
    PMAX,
    PMIN,
    Call,
    LocalLowering,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    local_lowering,
    shardable_dims,
    sized,
    table,
)

# -- tensor creation ops: any placement of the result, no communication ----------------------------
# ``*_like`` and ``new_*`` ops accept any placement of their operand, since only its shape is
# used.

#: Fill value of each creation op; None: uninitialized memory.
_FILLS: dict[str, int | None] = {"zeros": 0, "ones": 1, "empty": None, "empty_strided": None}


def _sized(call: Call) -> Sequence[Strategy]:
    """Return the strategies of zeros, ones, full, empty."""
    shape = call.result().shape
    return [call.strategy(S(dim)).by(sized(shape)) for dim in shardable_dims(shape)]


def _strided(call: Call) -> Sequence[Strategy]:
    """Return the strategies of empty_strided; blocks are row-major for any ``stride``."""
    meta = call.result()
    return [
        call.strategy(S(dim)).by(LocalLowering(partial(_create, meta)))
        for dim in shardable_dims(meta.shape)
    ]


def _like(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``*_like`` and ``new_*`` ops: any operand and result placement."""
    meta = call.result()
    result_dims, shape = shardable_dims(meta.shape), call.shape("self")
    operand_placements: list[Placement] = [*map(S, shardable_dims(shape)), P, PMAX, PMIN]
    strategies = [
        call.strategy(R, self=placement).by(LocalLowering(partial(_create, meta)))
        for placement in operand_placements
    ]
    for dim in result_dims:
        strategies += [
            call.strategy(S(dim), self=placement).by(LocalLowering(partial(_create, meta)))
            for placement in (R, S(dim), P, PMAX, PMIN)
            if placement != S(dim) or dim in shardable_dims(shape)
        ]
    return strategies


def _create(
    result: TensorMeta, build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]
) -> Values:
    """Create the local tensor of a ``result``, and fill it."""
    (placement,) = strategy.outputs
    shape = build.local(result.shape, placement)
    stride = result.stride if placement == R else contiguous_stride(shape)
    empty: Ref = build.op("aten.empty_strided.default", shape, stride, dtype=result.dtype,
                          device=DEVICE)  # fmt: skip
    fill_value = _fill_value(build.bind(node, operands), node.op)
    return (empty if fill_value is None else build.op("aten.fill_.Scalar", empty, fill_value),)


def _fill_value(args: dict[str, Arg], op: str) -> Arg:
    """Return the fill value of a creation op; None: uninitialized memory."""
    name = op.split(".")[1].removeprefix("new_").removesuffix("_like")
    return args["fill_value"] if name == "full" else _FILLS[name]


def _arange(call: Call) -> Sequence[Strategy]:
    """Return the strategy of arange for integers, where a block's start is exact."""
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


def _random_like(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``rand_like``: a replicated result, any placement of the operand.

    All ranks draw the full tensor, so the numbers equal those of one device.
    """
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


def _dropout(call: Call) -> Sequence[Strategy]:
    """Return the strategies of dropout, with the random numbers of one device.

    Every rank applies dropout to a full tensor of ones, and multiplies its operand block by its
    block of the result.
    """
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


# -- rules of lazygt's own nodes: collectives of previously sharded axes, and stage marks ----------

_WITHOUT_DIM = (ALL_REDUCE, REPLICATE_TO_PARTIAL)


def _moved_dims(node: Node) -> tuple[int, ...]:
    """Return the dims that the collective itself splits or concatenates."""
    if node.op in _WITHOUT_DIM:
        return ()
    return tuple(node.args[1:3]) if node.op == ALL_TO_ALL else (node.args[1],)


def _commuting_partials(node: Node) -> Sequence[Partial]:
    """Return the partial placements that commute with the collective.

    A reducing collective commutes with partials of the same reduction only.
    """
    if node.op == REPLICATE_TO_PARTIAL:
        return (Partial("sum"),)
    if node.op in (ALL_REDUCE, REDUCE_SCATTER):
        op = node.args[2 if node.op == REDUCE_SCATTER else 1]
        return tuple(placement for placement in PARTIALS if placement.op == op)
    return PARTIALS


def _collective(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a collective: unmoved dims sharded, or commuting partials."""
    meta = call.metas[call.node.args[0].index]
    if meta is None:
        return ()
    moved_dims = _moved_dims(call.node)
    placements: list[Placement] = [
        S(dim) for dim in shardable_dims(meta.shape) if dim not in moved_dims
    ]
    return [
        Strategy((placement,), (placement,), partial(_lower_collective, placement))
        for placement in (*placements, *_commuting_partials(call.node))
    ]


def _lower_collective(
    placement: Placement, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run the same collective on blocks, with a result of a placement."""
    (global_meta,) = node.results
    assert global_meta is not None
    shape = build.local(global_meta.shape, placement)
    meta = intern(shape, contiguous_stride(shape), global_meta.dtype)
    return build.add(Node(node.op, (*operands, *node.args[len(operands) :]), (), (meta,)))


def _row_exchange(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``take_rows`` and ``put_rows``.

    Sharded are the dims within a row, or the indices. Rows are put into partial sums if the indices
    are sharded.
    """
    value, index = (call.metas[value] for value in call.node.refs()[:2])
    if value is None or index is None:
        return ()
    is_take = call.node.op == TAKE_ROWS
    is_sum = is_take or call.node.args[-2]
    summable = is_sum and value.dtype != torch.bool
    placements: list[Placement] = [S(dim) for dim in shardable_dims(value.shape) if dim > 0]
    placements += [P] if summable else []
    strategies = [
        Strategy(
            (placement, R) if is_take else (placement, R, placement),
            (placement,),
            partial(_lower_collective, placement),
        )
        for placement in placements
    ]
    if index.numel > 1 and is_take:
        strategies.append(Strategy((R, S(0)), (S(0),), partial(_lower_collective, S(0))))
    elif index.numel > 1 and summable:
        strategies.append(Strategy((P, S(0), S(0)), (P,), partial(_lower_collective, P)))
    return strategies


def _mark_placements(call: Call) -> Sequence[Placement]:
    """Return all placements of a mark's operand."""
    meta = call.metas[call.node.args[0].index]
    return () if meta is None else (R, *map(S, shardable_dims(meta.shape)), *PARTIALS)


def _enter(call: Call) -> Sequence[Strategy]:
    """Return the strategies of an enter mark: any placement passes through."""
    return [
        Strategy((placement,), (placement,), _lower_mark) for placement in _mark_placements(call)
    ]


def _leave(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a leave mark, for any placements of its two operands.

    The second operand only identifies the stage.
    """
    placements = _mark_placements(call)
    return [
        Strategy((placement, value), (placement,), _lower_mark)
        for placement in placements
        for value in placements
    ]


def _lower_mark(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Add the same mark on local operands."""
    refs = node.refs()
    args = (*operands, *node.args[len(refs) :])
    return build.add(Node(node.op, args, (), (build.meta(operands[0]),)))


RULES: dict[str, Rule] = {
    **dict.fromkeys((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL), _collective),
    **dict.fromkeys((SEND_RECV, SHARD, REPLICATE_TO_PARTIAL), _collective),
    TAKE_ROWS: _row_exchange,
    PUT_ROWS: _row_exchange,
    ENTER: _enter,
    LEAVE: _leave,
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
