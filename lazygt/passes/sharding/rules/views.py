"""Views that only move dims about, and views that group them anew.

Elements keep their values, so partial results pass through. Sizes among the arguments become those
of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import (
    Cut,
    StridedShard,
    around,
    group_sizes,
    shard_bounds,
    uneven,
)
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

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

PARTIALS = (P, PMAX, PMIN)
#: The place of each dim of the operand in the result; None: it is gone.
DimMap = Callable[[Call], Sequence[int | None]]


def _mapped(dims: DimMap) -> Rule:
    """Return the rule of a view that has the operand's dims in other places."""

    def strategies(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
        call = Call(node, metas, axis_size)
        places = dims(call)
        strategies = [
            call.strategy(S(place), self=S(dim))
            for dim in shardable_dims(call.shape("self"))
            if (place := places[dim]) is not None
        ]
        return strategies + [call.strategy(placement, self=placement) for placement in PARTIALS]

    return strategies


def _same(call: Call) -> Sequence[int | None]:
    return range(len(call.shape("self")))


def _conj(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of ``_conj``, which conjugate in memory: sends drop the conj bit."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return (build.op("aten.conj_physical.default", operands[0]),)

    return [
        strategy.by(local_lowering(lower)) for strategy in _mapped(_same)(node, metas, axis_size)
    ]


def _but_last(call: Call) -> Sequence[int | None]:
    return [*range(len(call.shape("self")) - 1), None]


def _t(call: Call) -> Sequence[int | None]:
    return range(len(call.shape("self")))[::-1]


def _transpose(call: Call) -> Sequence[int | None]:
    places = list(range(len(call.shape("self"))))
    if places:
        a, b = call.dim("dim0", len(places)), call.dim("dim1", len(places))
        places[a], places[b] = places[b], places[a]
    return places


def _permute(call: Call) -> Sequence[int | None]:
    rank = len(call.shape("self"))
    order = [dim % rank for dim in call["dims"]]
    return [order.index(dim) for dim in range(rank)]


def _unsqueeze(call: Call) -> Sequence[int | None]:
    rank = len(call.shape("self"))
    at = call.dim("dim", rank + 1)
    return [dim + (dim >= at) for dim in range(rank)]


def _squeezed(call: Call) -> set[int]:
    """Return the dims that go: those of global size 1; a block of size 1 stays."""
    shape, dims = call.shape("self"), call.args.get("dim")
    rank = len(shape)
    given = range(rank) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    return {dim % rank for dim in given if rank and shape[dim % rank] == 1}


def _squeeze(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies with the dims that go by name, since blocks of size 1 must stay."""
    call = Call(node, metas, axis_size)
    gone = _squeezed(call)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return (build.op("aten.squeeze.dims", operands[0], tuple(sorted(gone))),)

    strategies = [
        call.strategy(S(dim - sum(other < dim for other in gone)), self=S(dim)).by(
            local_lowering(lower)
        )
        for dim in shardable_dims(call.shape("self"))
    ]
    return strategies + [call.strategy(placement, self=placement) for placement in PARTIALS]


def sized(shape: tuple[int, ...], name: str = "size") -> LocalLowering:
    """Return a lowering that gives the op its block's sizes of a result of ``shape``.

    Args:
        name: the argument with the sizes.
    """

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, operands, **{name: build.local(shape, strategy.outputs[0])})

    return LocalLowering(program)


def _expand(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    have, wide = call.shape("self"), call.result().shape
    new = len(wide) - len(have)
    strategies = [call.strategy(placement, self=placement) for placement in PARTIALS]
    for dim in shardable_dims(wide):
        dim_of_self = dim - new
        placement = S(dim_of_self) if dim_of_self >= 0 and have[dim_of_self] == wide[dim] else R
        strategies.append(call.strategy(S(dim), self=placement).by(sized(wide)))
    return strategies


def _view(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    cuts = (view_row(call, S(dim)) for dim in shardable_dims(call.shape("self")))
    anyhow = [
        call.strategy(placement, self=placement).by(_reshaped) for placement in (R, *PARTIALS)
    ]
    return [*(strategy for strategy in cuts if strategy is not None), *anyhow]


def view_row(call: Call, placement: Cut) -> Strategy | None:
    """Return the strategy of a reshape of an operand with a cut.

    None where a block is no block of the result.
    """
    made = viewed(placement, call.shape("self"), call.result().shape, call.axis_size)
    return None if made is None else call.strategy(made, self=placement).by(_reshaped)


def _reshape(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
    (made,) = node.results
    assert made is not None
    return (build.reshape(operands[0], build.local(made.shape, strategy.outputs[0])),)


_reshaped = LocalLowering(_reshape)


def _as_strided(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of ops that depend on strides: on memory laid out as recorded.

    Items of a batch, each viewed in itself alone, may be split.
    """
    call = Call(node, metas, axis_size)
    wanted = [metas[number] for number in node.refs()]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        kept = [
            build.restrided(value, meta.stride)
            if meta is not None
            and build.meta(value).stride != meta.stride
            and meta.extent == meta.numel
            else value
            for value, meta in zip(operands, wanted, strict=True)
        ]
        return build.rerun(node, kept)

    strategies = [call.strategy(R).by(lower)]
    if node.op == "aten.as_strided.default" and _sees_items(call):
        strategies.append(call.strategy(S(0), self=S(0)).by(_seen_items(call.result().shape)))
    return strategies


def _sees_items(call: Call) -> bool:
    """Return whether the items of a batch are viewed one by one.

    The first dim is that of a row-major operand, and no item reaches into the next.
    """
    meta, view = call.meta("self"), call.result()
    if not meta.plain or not view.numel or call["storage_offset"] is not None:
        return False
    (count, *inner), (step, *strides) = (view.shape or (1,)), (view.stride or (0,))
    reach = sum((size - 1) * stride for size, stride in zip(inner, strides, strict=True))
    return 1 < count == meta.shape[0] and step == meta.stride[0] > reach


def _seen_items(shape: tuple[int, ...]) -> LocalLowering:
    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        size = build.local(shape, strategy.outputs[0])
        return build.rerun(node, [build.contiguous(operands[0])], size=size)

    return LocalLowering(program)


def viewed(
    placement: Cut, have: tuple[int, ...], made: tuple[int, ...], axis_size: int
) -> Cut | None:
    """Return the placement that keeps each rank's elements through a reshape, or None.

    A placement cuts ``[before, size, inside]`` elements along ``size``. So does another one with
    the same three, and with other ones where the blocks hold the same.
    """
    if uneven(placement):
        return _viewed_uneven(placement, have, made, axis_size)
    outer, inner = around(placement)
    before, inside = prod(have[: placement.dim]) * outer, inner * prod(have[placement.dim + 1 :])
    size = have[placement.dim] // (outer * inner)
    dims = [
        (dim, _times(before, prod(made[:dim])), prod(made[dim + 1 :]))
        for dim in shardable_dims(made)
    ]
    for dim, outer, behind in dims:
        rest = made[dim] // outer if outer and made[dim] % outer == 0 else 0
        if rest > 1 and _same_blocks(size, inside, rest, behind, axis_size):
            return S(dim) if outer == 1 else StridedShard(dim, outer)
    for dim, outer, behind in dims:
        inner = _times(inside, behind)
        if outer * size * inner == made[dim]:
            return StridedShard(dim, outer, inner)
    return None


def _viewed_uneven(
    placement: Cut, have: tuple[int, ...], seen: tuple[int, ...], axis_size: int
) -> Cut | None:
    """Do as ``viewed`` for groups of several sizes.

    The dim begins where the cut one did, and has as many elements in all.
    """
    before, inside = prod(have[: placement.dim]), prod(have[placement.dim + 1 :])
    outer, _ = around(placement)
    for dim in shardable_dims(seen):
        if prod(seen[:dim]) != before or seen[dim] % outer:
            continue
        sizes = [group_sizes(replace(placement, dim=at), shape[at])
                 for at, shape in ((placement.dim, have), (dim, seen))]  # fmt: skip
        behind = prod(seen[dim + 1 :])
        if all(_same_blocks(a, inside, b, behind, axis_size) for a, b in zip(*sizes, strict=True)):
            return replace(placement, dim=dim)
    return None


def _times(large: int, small: int) -> int:
    """Return ``large / small``; 0 where it is not a whole number."""
    if large == small:
        return 1
    return large // small if small and large % small == 0 else 0


def _same_blocks(a: int, inside_a: int, b: int, inside_b: int, axis_size: int) -> bool:
    return all(
        x * inside_a == y * inside_b
        for rank in range(axis_size)
        for x, y in zip(
            shard_bounds(a, axis_size, rank), shard_bounds(b, axis_size, rank), strict=True
        )
    )


RESHAPES: dict[str, Rule] = {
    **table("view.default _unsafe_view.default reshape.default", _view),
}
RULES: dict[str, Rule] = {
    **table(
        "detach.default alias.default lift_fresh.default lift.default detach_copy.default "
        "alias_copy.default",
        _mapped(_same),
    ),
    **table("t.default t_copy.default", _mapped(_t)),
    **table("transpose.int transpose_copy.int", _mapped(_transpose)),
    **table("permute.default permute_copy.default", _mapped(_permute)),
    **table("unsqueeze.default unsqueeze_copy.default", _mapped(_unsqueeze)),
    **table("_conj.default", _conj),
    **table("view_as_real.default", _mapped(_same)),
    **table("view_as_complex.default", _mapped(_but_last)),
    **table("squeeze.default squeeze.dim squeeze.dims", _squeeze),
    **table("expand.default expand_copy.default", _expand),
    **table("as_strided.default as_strided_copy.default view.dtype", _as_strided),
    **RESHAPES,
}
