"""Rules of lazygt's own nodes: collectives of previously sharded axes, and stage marks.

A collective of one mesh axis can be sharded along another axis in the dims that the collective
does not move: each rank runs the same collective on its block. A stage mark is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazygt.graph.meta import contiguous_stride, intern
from lazygt.graph.node import Node, Ref
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
from lazygt.passes.sharding.marks import ENTER, LEAVE
from lazygt.passes.sharding.rules.strategy import (
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
)
from lazygt.passes.sharding.rules.views import PARTIALS

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


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


def _collective(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a collective: unmoved dims sharded, or commuting partials."""
    meta = metas[node.args[0].index]
    if meta is None:
        return ()
    moved_dims = _moved_dims(node)
    placements: list[Placement] = [
        S(dim) for dim in shardable_dims(meta.shape) if dim not in moved_dims
    ]
    return [
        Strategy((placement,), (placement,), _lower_collective(placement))
        for placement in (*placements, *_commuting_partials(node))
    ]


def _lower_collective(placement: Placement) -> Lowering:
    """Return the lowering that runs the same collective on blocks of a placement."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,) = operands
        (global_meta,) = node.results
        assert global_meta is not None
        shape = build.local(global_meta.shape, placement)
        meta = intern(shape, contiguous_stride(shape), global_meta.dtype)
        return build.add(Node(node.op, (value, *node.args[1:]), (), (meta,)))

    return lower


def _row_exchange(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of ``take_rows`` and ``put_rows``.

    Sharded are the dims within a row, or the indices. Rows are put into partial sums if the indices
    are sharded.
    """
    value, index = (metas[value] for value in node.refs()[:2])
    if value is None or index is None:
        return ()
    is_take = node.op == TAKE_ROWS
    is_sum = is_take or node.args[-2]
    summable = is_sum and value.dtype != torch.bool
    placements: list[Placement] = [S(dim) for dim in shardable_dims(value.shape) if dim > 0]
    placements += [P] if summable else []
    strategies = [
        Strategy(
            (placement, R) if is_take else (placement, R, placement),
            (placement,),
            _lower_row_exchange(placement),
        )
        for placement in placements
    ]
    if index.numel > 1 and is_take:
        strategies.append(Strategy((R, S(0)), (S(0),), _lower_row_exchange(S(0))))
    elif index.numel > 1 and summable:
        strategies.append(Strategy((P, S(0), S(0)), (P,), _lower_row_exchange(P)))
    return strategies


def _lower_row_exchange(placement: Placement) -> Lowering:
    """Return the lowering that runs the same row exchange, with a result of a placement."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (global_meta,) = node.results
        assert global_meta is not None
        shape = build.local(global_meta.shape, placement)
        meta = intern(shape, contiguous_stride(shape), global_meta.dtype)
        return build.add(Node(node.op, (*operands, *node.args[len(operands) :]), (), (meta,)))

    return lower


def _mark_placements(node: Node, metas: Metas) -> Sequence[Placement]:
    """Return all placements of a mark's operand."""
    meta = metas[node.args[0].index]
    return () if meta is None else (R, *map(S, shardable_dims(meta.shape)), *PARTIALS)


def _enter(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of an enter mark: any placement passes through."""
    return [
        Strategy((placement,), (placement,), _lower_mark)
        for placement in _mark_placements(node, metas)
    ]


def _leave(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a leave mark, for any placements of its two operands.

    The second operand only identifies the stage.
    """
    placements = _mark_placements(node, metas)
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
    **dict.fromkeys(
        (
            ALL_REDUCE,
            ALL_GATHER,
            REDUCE_SCATTER,
            ALL_TO_ALL,
            SEND_RECV,
            SHARD,
            REPLICATE_TO_PARTIAL,
        ),
        _collective,
    ),
    TAKE_ROWS: _row_exchange,
    PUT_ROWS: _row_exchange,
    ENTER: _enter,
    LEAVE: _leave,
}
