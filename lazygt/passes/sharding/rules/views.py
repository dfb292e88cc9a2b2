"""Views: permutations of dims, expand, squeeze, reshape, as_strided.

Elements keep their values, so partial placements pass through. Size arguments are replaced by the
local sizes.
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
    from lazygt.passes.sharding.lower.builder import Builder

PARTIALS = (P, PMAX, PMIN)
#: Function of a call: the result's dim for each dim of the operand; None: the dim is removed.
DimMap = Callable[[Call], Sequence[int | None]]


def _permutation_rule(dims: DimMap) -> Rule:
    """Return the rule of a view that permutes the operand's dims."""

    def strategies(call: Call) -> Sequence[Strategy]:
        result_dims = dims(call)
        strategies = [
            call.strategy(S(result_dim), self=S(dim))
            for dim in shardable_dims(call.shape("self"))
            if (result_dim := result_dims[dim]) is not None
        ]
        return strategies + [call.strategy(placement, self=placement) for placement in PARTIALS]

    return strategies


def _identity(call: Call) -> Sequence[int | None]:
    """Map each dim to itself."""
    return range(len(call.shape("self")))


def _conj(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``_conj``: conjugated copies, since sends drop the conj bit."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return (build.op("aten.conj_physical.default", operands[0]),)

    return [strategy.by(local_lowering(lower)) for strategy in _permutation_rule(_identity)(call)]


def _without_last(call: Call) -> Sequence[int | None]:
    """Map each dim to itself; the last one is removed."""
    return [*range(len(call.shape("self")) - 1), None]


def _t(call: Call) -> Sequence[int | None]:
    """Reverse the dims."""
    return range(len(call.shape("self")))[::-1]


def _transpose(call: Call) -> Sequence[int | None]:
    """Swap ``dim0`` and ``dim1``."""
    order = list(range(len(call.shape("self"))))
    if order:
        a, b = call.dim("dim0", len(order)), call.dim("dim1", len(order))
        order[a], order[b] = order[b], order[a]
    return order


def _permute(call: Call) -> Sequence[int | None]:
    """Map the dims by ``dims``."""
    rank = len(call.shape("self"))
    order = [dim % rank for dim in call["dims"]]
    return [order.index(dim) for dim in range(rank)]


def _unsqueeze(call: Call) -> Sequence[int | None]:
    """Shift the dims after the new one."""
    rank = len(call.shape("self"))
    new_dim = call.dim("dim", rank + 1)
    return [dim + (dim >= new_dim) for dim in range(rank)]


def _removed_dims(call: Call) -> set[int]:
    """Return the dims that squeeze removes: those of global size 1, not of local size 1."""
    shape, dims = call.shape("self"), call.args.get("dim")
    rank = len(shape)
    candidates = range(rank) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    return {dim % rank for dim in candidates if rank and shape[dim % rank] == 1}


def _squeeze(call: Call) -> Sequence[Strategy]:
    """Return the strategies of squeeze, lowered with explicit dims so that local size 1 stays."""
    removed = _removed_dims(call)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return (build.op("aten.squeeze.dims", operands[0], tuple(sorted(removed))),)

    strategies = [
        call.strategy(S(dim - sum(other < dim for other in removed)), self=S(dim)).by(
            local_lowering(lower)
        )
        for dim in shardable_dims(call.shape("self"))
    ]
    return strategies + [call.strategy(placement, self=placement) for placement in PARTIALS]


def sized(shape: tuple[int, ...], name: str = "size") -> LocalLowering:
    """Return the lowering that passes the local sizes of a result of global ``shape``.

    Args:
        name: name of the argument with the sizes.
    """

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, operands, **{name: build.local(shape, strategy.outputs[0])})

    return LocalLowering(program)


def _expand(call: Call) -> Sequence[Strategy]:
    """Return the strategies of expand."""
    shape, result_shape = call.shape("self"), call.result().shape
    new_dims = len(result_shape) - len(shape)
    strategies = [call.strategy(placement, self=placement) for placement in PARTIALS]
    for dim in shardable_dims(result_shape):
        dim_of_self = dim - new_dims
        placement = (
            S(dim_of_self) if dim_of_self >= 0 and shape[dim_of_self] == result_shape[dim] else R
        )
        strategies.append(call.strategy(S(dim), self=placement).by(sized(result_shape)))
    return strategies


def _view(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a reshape."""
    sharded = (view_strategy(call, S(dim)) for dim in shardable_dims(call.shape("self")))
    unsharded = [
        call.strategy(placement, self=placement).by(_LOCAL_RESHAPE) for placement in (R, *PARTIALS)
    ]
    return [*(strategy for strategy in sharded if strategy is not None), *unsharded]


def view_strategy(call: Call, placement: Cut) -> Strategy | None:
    """Return the strategy of a reshape of a sharded operand.

    None if no placement of the result has the same elements on each rank.
    """
    result_placement = viewed(placement, call.shape("self"), call.result().shape, call.axis_size)
    return (
        None
        if result_placement is None
        else call.strategy(result_placement, self=placement).by(_LOCAL_RESHAPE)
    )


def _reshape(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
    """Reshape the local tensor to the local shape of the result."""
    (result,) = node.results
    assert result is not None
    return (build.reshape(operands[0], build.local(result.shape, strategy.outputs[0])),)


_LOCAL_RESHAPE = LocalLowering(_reshape)


def _as_strided(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ops that depend on strides.

    A replicated operand is first copied to its recorded strides. A batch is sharded along dim 0 if
    every item is viewed separately.
    """
    recorded = [call.metas[number] for number in call.node.refs()]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        restrided = [
            build.restrided(value, meta.stride)
            if meta is not None
            and build.meta(value).stride != meta.stride
            and meta.extent == meta.numel
            else value
            for value, meta in zip(operands, recorded, strict=True)
        ]
        return build.rerun(node, restrided)

    strategies = [call.strategy(R).by(lower)]
    if call.node.op == "aten.as_strided.default" and _views_items_separately(call):
        strategies.append(call.strategy(S(0), self=S(0)).by(_lower_item_views(call.result().shape)))
    return strategies


def _views_items_separately(call: Call) -> bool:
    """Return whether an as_strided view keeps dim 0 of a row-major operand.

    No item of the view may reach into the memory of the next item.
    """
    meta, view = call.meta("self"), call.result()
    if not meta.plain or not view.numel or call["storage_offset"] is not None:
        return False
    (count, *inner), (step, *strides) = (view.shape or (1,)), (view.stride or (0,))
    reach = sum((size - 1) * stride for size, stride in zip(inner, strides, strict=True))
    return 1 < count == meta.shape[0] and step == meta.stride[0] > reach


def _lower_item_views(shape: tuple[int, ...]) -> LocalLowering:
    """Return the lowering of as_strided on a batch sharded along dim 0, with the local ``size``."""

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        size = build.local(shape, strategy.outputs[0])
        return build.rerun(node, [build.contiguous(operands[0])], size=size)

    return LocalLowering(program)


def viewed(
    placement: Cut, old_shape: tuple[int, ...], new_shape: tuple[int, ...], axis_size: int
) -> Cut | None:
    """Return the placement of a reshape's result with the same elements on each rank, or None.

    A placement views the tensor as ``[before, size, inside]`` and shards ``size``. A placement of
    the result is equivalent if these three numbers, or the elements of all blocks, are the same.

    Args:
        old_shape, new_shape: global shapes before and after the reshape.
    """
    if uneven(placement):
        return _viewed_uneven(placement, old_shape, new_shape, axis_size)
    outer, inner = around(placement)
    before, inside = (
        prod(old_shape[: placement.dim]) * outer,
        inner * prod(old_shape[placement.dim + 1 :]),
    )
    size = old_shape[placement.dim] // (outer * inner)
    dims = [
        (dim, _exact_quotient(before, prod(new_shape[:dim])), prod(new_shape[dim + 1 :]))
        for dim in shardable_dims(new_shape)
    ]
    for dim, outer, after in dims:
        group_size = new_shape[dim] // outer if outer and new_shape[dim] % outer == 0 else 0
        if group_size > 1 and _same_blocks(size, inside, group_size, after, axis_size):
            return S(dim) if outer == 1 else StridedShard(dim, outer)
    for dim, outer, after in dims:
        inner = _exact_quotient(inside, after)
        if outer * size * inner == new_shape[dim]:
            return StridedShard(dim, outer, inner)
    return None


def _viewed_uneven(
    placement: Cut, old_shape: tuple[int, ...], new_shape: tuple[int, ...], axis_size: int
) -> Cut | None:
    """Return the placement after a reshape for a strided placement with groups of unequal sizes.

    The result's dim must begin where the sharded dim begins, and have as many elements in total.
    """
    before, inside = prod(old_shape[: placement.dim]), prod(old_shape[placement.dim + 1 :])
    outer, _ = around(placement)
    for dim in shardable_dims(new_shape):
        if prod(new_shape[:dim]) != before or new_shape[dim] % outer:
            continue
        sizes = [group_sizes(replace(placement, dim=old_dim), shape[old_dim])
                 for old_dim, shape in ((placement.dim, old_shape), (dim, new_shape))]  # fmt: skip
        after = prod(new_shape[dim + 1 :])
        if all(_same_blocks(a, inside, b, after, axis_size) for a, b in zip(*sizes, strict=True)):
            return replace(placement, dim=dim)
    return None


def _exact_quotient(large: int, small: int) -> int:
    """Return ``large / small``; 0 if it is not an integer."""
    if large == small:
        return 1
    return large // small if small and large % small == 0 else 0


def _same_blocks(a: int, inside_a: int, b: int, inside_b: int, axis_size: int) -> bool:
    """Return whether the blocks of dims ``a`` and ``b``, in elements, are the same on each rank."""
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
        _permutation_rule(_identity),
    ),
    **table("t.default t_copy.default", _permutation_rule(_t)),
    **table("transpose.int transpose_copy.int", _permutation_rule(_transpose)),
    **table("permute.default permute_copy.default", _permutation_rule(_permute)),
    **table("unsqueeze.default unsqueeze_copy.default", _permutation_rule(_unsqueeze)),
    **table("_conj.default", _conj),
    **table("view_as_real.default", _permutation_rule(_identity)),
    **table("view_as_complex.default", _permutation_rule(_without_last)),
    **table("squeeze.default squeeze.dim squeeze.dims", _squeeze),
    **table("expand.default expand_copy.default", _expand),
    **table("as_strided.default as_strided_copy.default view.dtype", _as_strided),
    **RESHAPES,
}
