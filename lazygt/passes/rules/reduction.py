"""Reductions: dims that stay pass through; a dim that is reduced leaves partial results.

Empty blocks give what changes nothing. What no partial label can say is in ``statistics``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lazygt.graph.label import Partial
from lazygt.graph.node import Arg, Node, Ref
from lazygt.passes.rules.base import (
    PMAX,
    PMIN,
    PPROD,
    Call,
    Lower,
    Metas,
    P,
    Row,
    Rule,
    S,
    Values,
    anywhere,
    splittable,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


def reduced_dims(call: Call, name: str = "dim") -> frozenset[int]:
    """The dims that a reduction takes away, from the front; all when its dim says none."""
    rank = len(call.shape("self"))
    dims: Arg = call.args.get(name)
    if dims is None or dims == ():
        return frozenset(range(rank))
    return frozenset(dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,)) if rank)


def passing_rows(call: Call, dims: frozenset[int]) -> list[Row]:
    """The rows that split a dim that stays."""
    keeps = bool(call.args.get("keepdim"))
    rows = []
    for dim in splittable(call.shape("self")):
        if dim not in dims:
            gone = 0 if keeps else sum(other < dim for other in dims)
            rows.append(call.row(S(dim - gone), self=S(dim)))
    return rows


def identity(dtype: torch.dtype, op: str) -> float | int | bool:
    """What changes no maximum or minimum."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def _rule(
    partial: Partial, lowered: Callable[[Call], Lower] | None = None, *, linear: bool = True
) -> Rule:
    """Of a reduction whose parts' results reduce to the whole's.

    Args:
        linear: partial elements do so too; not where an element counts or not by its value.
    """

    def rows(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
        call = Call(node, metas, parts)
        dims = reduced_dims(call)
        lower = lowered(call) if lowered else None
        split = [dim for dim in splittable(call.shape("self")) if dim in dims]
        found = passing_rows(call, dims)
        found += [call.row(partial, self=S(dim)).by(lower and anywhere(lower)) for dim in split]
        if linear and _keeps_partials(call, partial):
            found.append(call.row(partial, self=partial))
        return found

    return rows


def _keeps_partials(call: Call, partial: Partial) -> bool:
    """Whether reducing each part loses nothing: the same op in both, in the same or wider dtype."""
    have, result = call.meta("self").dtype, call.result().dtype
    exact = have != torch.bool and torch.promote_types(have, result) == result
    return partial != PPROD and exact


def _mean(call: Call) -> Lower:
    """The sum over the global count: blocks may differ in size."""
    mean = call.result()
    count = call.meta("self").numel // max(mean.numel, 1)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        over = (args["dim"], args["keepdim"]) if "dim" in args else ()
        name = "aten.sum.dim_IntList" if over else "aten.sum.default"
        total = build.op(name, args["self"], *over, dtype=mean.dtype)
        return (build.op("aten.div.Scalar", total, count),)

    return lower


def _extreme(op: str) -> Callable[[Call], Lower]:
    """A maximum or minimum, of an empty block too."""

    def lowered(call: Call) -> Lower:
        shape = call.result().shape

        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            meta = build.meta(operands[0])
            if meta.numel:
                return build.rerun(node, operands)
            return (build.full(shape, identity(meta.dtype, op), like=operands[0]),)

        return lower

    return lowered


RULES: dict[str, Rule] = {
    **table("sum.default sum.dim_IntList", _rule(P)),
    **table(
        "nansum.default count_nonzero.dim_IntList count_nonzero.default", _rule(P, linear=False)
    ),
    **table("mean.default mean.dim", _rule(P, _mean)),
    **table("amax.default max.default", _rule(PMAX, _extreme("max"))),
    **table("amin.default min.default", _rule(PMIN, _extreme("min"))),
    **table("prod.default prod.dim_int", _rule(PPROD)),
    **table("any.default any.dim any.dims", _rule(PMAX)),
    **table("all.default all.dim all.dims", _rule(PMIN)),
}
