"""sort, topk, cumulative sums: other dims pass through; along the dim itself ranks meet for topk
and cumsum. What is sorted, or a middle one (sort, kthvalue, median, mode), is gathered for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.label import block_size
from lazygt.graph.node import Node, Ref
from lazygt.passes.rules.base import (
    Call,
    Collective,
    Lower,
    Metas,
    P,
    R,
    Row,
    Rule,
    S,
    Values,
    splittable,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


def _other_dims(call: Call) -> tuple[int, list[Row]]:
    """The dim the op works along, and the rows that split another."""
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    keeps = call.args.get("keepdim", True)
    rows = [
        call.row(S(d - (not keeps and d > dim)), self=S(d)) for d in splittable(shape) if d != dim
    ]
    return dim, rows


def _along(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    return _other_dims(Call(node, metas, parts))[1]


def _topk(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """The best of each block's best: k a rank, when every block has as many."""
    call = Call(node, metas, parts)
    dim, found = _other_dims(call)
    shape, k = call.shape("self"), call["k"]
    size = shape[dim] if shape else 0
    if k < 1 or size < 2 or block_size(size, parts, parts - 1) < k:
        return found

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        best, places = build.rerun(node, operands)
        assert best is not None
        assert places is not None
        places = build.op("aten.add.Scalar", places, build.rank_offset(size))
        best, places = (build.all_gather(one, dim, k * parts) for one in (best, places))
        made, which = build.rerun(node, [best])
        return made, build.op("aten.gather.default", places, dim, which)

    comm = [
        Collective("all_gather", meta.nbytes * parts) for meta in (call.result(), call.result(1))
    ]
    return [*found, call.row(R, self=S(dim)).by(lower, comm)]


def _cumsum(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """A block's sums plus the totals of the blocks before it."""
    call = Call(node, metas, parts)
    dim, found = _other_dims(call)
    shape = call.shape("self")
    size = shape[dim] if shape else 0
    found.append(call.row(P, self=P))
    if size < 2:
        return found
    total = call.result().nbytes // size * parts
    row = call.row(S(dim), self=S(dim)).by(_after(dim), [Collective("all_gather", total)])
    return [*found, row]


def _after(dim: int) -> Lower:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (sums,) = build.rerun(node, operands)
        assert sums is not None
        dtype = build.meta(sums).dtype
        mine = build.op("aten.sum.dim_IntList", operands[0], (dim,), True, dtype=dtype)
        totals = build.all_gather(mine, dim, build.parts)
        before = build.op("aten.slice.Tensor", totals, dim, 0, build.index)
        before = build.op("aten.sum.dim_IntList", before, (dim,), True, dtype=dtype)
        return (build.op("aten.add.Tensor", sums, before),)

    return lower


RULES: dict[str, Rule] = {
    **table(
        "sort.default sort.stable argsort.default kthvalue.default median.dim "
        "nanmedian.dim mode.default "
        "cummax.default cummin.default cumprod.default logcumsumexp.default",
        _along,
    ),
    **table("topk.default", _topk),
    **table("cumsum.default", _cumsum),
}
