"""lazygt's own nodes: collectives of axes that were sharded before, and stage marks.

On another axis the other dims of a collective may be cut: each rank of this axis moves its block of
the rows that the collective moves between ranks of its own axis. A mark is the identity.
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


_KEEP_DIMS = (ALL_REDUCE, REPLICATE_TO_PARTIAL)


def _moved_dims(node: Node) -> tuple[int, ...]:
    """Return the dims that the collective itself cuts or puts together."""
    if node.op in _KEEP_DIMS:
        return ()
    return tuple(node.args[1:3]) if node.op == ALL_TO_ALL else (node.args[1],)


def _partials(node: Node) -> Sequence[Partial]:
    """Return the placements of parts of parts: the two reductions must be the same one."""
    if node.op == REPLICATE_TO_PARTIAL:
        return (Partial("sum"),)
    if node.op in (ALL_REDUCE, REDUCE_SCATTER):
        op = node.args[2 if node.op == REDUCE_SCATTER else 1]
        return tuple(placement for placement in PARTIALS if placement.op == op)
    return PARTIALS


def _collective(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    meta = metas[node.args[0].index]
    if meta is None:
        return ()
    moved = _moved_dims(node)
    placements: list[Placement] = [S(dim) for dim in shardable_dims(meta.shape) if dim not in moved]
    return [
        Strategy((placement,), (placement,), _again(placement))
        for placement in (*placements, *_partials(node))
    ]


def _again(placement: Placement) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,) = operands
        (whole,) = node.results
        assert whole is not None
        shape = build.local(whole.shape, placement)
        meta = intern(shape, contiguous_stride(shape), whole.dtype)
        return build.add(Node(node.op, (value, *node.args[1:]), (), (meta,)))

    return lower


def _rows(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of an exchange of rows: by parts of every row, or by some rows.

    They are taken, or added to partial sums.
    """
    value, index = (metas[value] for value in node.refs()[:2])
    if value is None or index is None:
        return ()
    taken = node.op == TAKE_ROWS
    added = taken or node.args[-2]
    summable = added and value.dtype != torch.bool
    lie: list[Placement] = [S(dim) for dim in shardable_dims(value.shape) if dim > 0]
    lie += [P] if summable else []
    strategies = [
        Strategy((each, R) if taken else (each, R, each), (each,), _rows_again(each))
        for each in lie
    ]
    if index.numel > 1 and taken:
        strategies.append(Strategy((R, S(0)), (S(0),), _rows_again(S(0))))
    elif index.numel > 1 and summable:
        strategies.append(Strategy((P, S(0), S(0)), (P,), _rows_again(P)))
    return strategies


def _rows_again(placement: Placement) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (whole,) = node.results
        assert whole is not None
        shape = build.local(whole.shape, placement)
        meta = intern(shape, contiguous_stride(shape), whole.dtype)
        return build.add(Node(node.op, (*operands, *node.args[len(operands) :]), (), (meta,)))

    return lower


def _mark_placements(node: Node, metas: Metas) -> Sequence[Placement]:
    meta = metas[node.args[0].index]
    return () if meta is None else (R, *map(S, shardable_dims(meta.shape)), *PARTIALS)


def _enter(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    return [
        Strategy((placement,), (placement,), _marked) for placement in _mark_placements(node, metas)
    ]


def _leave(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of a leave mark, for any placement of its value.

    The value only says which stage it is on.
    """
    placements = _mark_placements(node, metas)
    return [
        Strategy((placement, value), (placement,), _marked)
        for placement in placements
        for value in placements
    ]


def _marked(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    marked = node.refs()
    args = (*operands, *node.args[len(marked) :])
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
    TAKE_ROWS: _rows,
    PUT_ROWS: _rows,
    ENTER: _enter,
    LEAVE: _leave,
}
