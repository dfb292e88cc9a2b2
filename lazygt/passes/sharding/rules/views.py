"""Views and ops that move elements along dims: permutations, reshapes, flips, rolls, pads, repeats.

Elements keep their values, so partial placements pass through. Size arguments are replaced by the
local sizes. Along a sharded dim in which elements move, ranks exchange rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from lazygt.graph.node import Node, Param, Ref
from lazygt.graph.placement import (
    Cut,
    Partial,
    StridedShard,
    group_sizes,
    outer_and_inner,
    shard_bounds,
    uneven,
)
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.lower.halo import Ranges, Rows
from lazygt.passes.sharding.rules.pointwise import add_number_once
from lazygt.passes.sharding.rules.slicing import clamped_range, exchanged_strategies
from lazygt.passes.sharding.rules.strategy import (
    PARTIALS,
    Call,
    LocalLowering,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    broadcast_placement,
    local_lowering,
    partial_by_padding,
    passing,
    shardable_dims,
    sized,
    table,
    without,
)

#: Function of a call: the result's dim for each dim of the operand; None: the dim is removed.
DimMap = Callable[[Call], Sequence[int | None]]


def _rule(dims: DimMap) -> Rule:
    """Return the rule of a view that maps the operand's dims to those of the result."""
    return lambda call: passing(call, dims(call), PARTIALS)


def _conj(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``_conj``: conjugated copies, since sends drop the conj bit."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return (build.op("aten.conj_physical.default", operands[0]),)

    return [
        strategy.by(local_lowering(lower)) for strategy in passing(call, range(call.rank), PARTIALS)
    ]


def _transpose(call: Call) -> Sequence[int | None]:
    """Swap ``dim0`` and ``dim1``."""
    order = list(range(call.rank))
    if order:
        a, b = call.dim("dim0"), call.dim("dim1")
        order[a], order[b] = order[b], order[a]
    return order


def _permute(call: Call) -> Sequence[int | None]:
    """Map the dims by ``dims``."""
    order = [dim % call.rank for dim in call["dims"]]
    return [order.index(dim) for dim in range(call.rank)]


def _unsqueeze(call: Call) -> Sequence[int | None]:
    """Shift the dims after the new one."""
    new_dim = call.dim("dim", call.rank + 1)
    return [dim + (dim >= new_dim) for dim in range(call.rank)]


def _squeeze(call: Call) -> Sequence[Strategy]:
    """Return the strategies of squeeze, lowered with explicit dims so that local size 1 stays."""
    dims = call.dims() if call.args.get("dim") != () else ()
    removed = {dim for dim in dims if call.shape("self")[dim] == 1}

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return (build.op("aten.squeeze.dims", operands[0], tuple(sorted(removed))),)

    dims_of_result = without(call.rank, removed, removed=True)
    return passing(call, dims_of_result, PARTIALS, local_lowering(lower))


def _expand(call: Call) -> Sequence[Strategy]:
    """Return the strategies of expand."""
    shape, result_shape = call.shape("self"), call.result().shape
    strategies = [call.strategy(placement, self=placement) for placement in PARTIALS]
    for dim in shardable_dims(result_shape):
        placement = broadcast_placement(shape, result_shape, dim)
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
    outer, inner = outer_and_inner(placement)
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
    outer, _ = outer_and_inner(placement)
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


# -- flips, rolls, pads, diagonals, triangles, repeats ---------------------------------------------


def _other_dims(
    call: Call, moved: Collection[int], partials: Sequence[Partial] = (P,)
) -> list[Strategy]:
    """Return the strategies that shard the dims along which an op moves no elements.

    Args:
        moved: dims along which elements move.
        partials: partial placements that pass through.
    """
    return passing(call, without(call.rank, moved), partials)


def _flip(call: Call) -> Sequence[Strategy]:
    """Return the strategies of flip: ranks exchange rows of the sharded dim, then flip them."""
    flipped = call.dims("dims") if call["dims"] else frozenset()
    strategies = _other_dims(call, flipped)
    for dim in flipped.intersection(shardable_dims(call.shape("self"))):
        size = call.shape("self")[dim]
        bounds = call.bounds(size)
        strategies += exchanged_strategies(
            call, dim, [((size - b, size - a),) for a, b in bounds], _lower_rerun
        )
    return strategies


def _lower_rerun(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run the same op on the exchanged rows."""
    return build.rerun(node, operands)


def _roll(call: Call) -> Sequence[Strategy]:
    """Return the strategies of roll: ranks receive the rows of their block of the result."""
    strategies = _other_dims(call, call.dims("dims"))
    shape, dims, shifts = call.shape("self"), call["dims"], call["shifts"]
    if any(type(shift) is Param for shift in shifts):
        return strategies
    rank = len(shape)
    for dim in call.dims("dims").intersection(shardable_dims(shape)) if dims else ():
        is_along_dim = [d % rank == dim for d in dims]
        shift = sum(shift for shift, matches in zip(shifts, is_along_dim, strict=True) if matches)
        other_rolls = [
            (d, s) for d, s, matches in zip(dims, shifts, is_along_dim, strict=True) if not matches
        ]
        wanted_rows = [
            _roll_sources(shape[dim], shift, *bounds) for bounds in call.bounds(shape[dim])
        ]
        strategies += exchanged_strategies(
            call, dim, wanted_rows, partial(_lower_other_rolls, other_rolls)
        )
    return strategies


def _roll_sources(size: int, shift: int, start: int, stop: int) -> Ranges:
    """Return the source rows of the rows ``[start, stop)`` of a roll by ``shift``."""
    first, count = (start - shift) % size, stop - start
    ranges = (first, min(first + count, size)), (0, first + count - size)
    return tuple([(a, b) for a, b in ranges if a < b])


def _lower_other_rolls(
    other_rolls: Sequence[tuple[int, int]], build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Roll along the other dims, (dim, shift) each."""
    if not other_rolls:
        return operands
    dims, shifts = zip(*other_rolls, strict=True)
    return build.rerun(node, operands, dims=dims, shifts=shifts)


def _padded_dims(call: Call) -> set[int]:
    """Return the dims that are padded."""
    rank, pad = call.rank, call["pad"]
    return {rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]}


def _pad(call: Call) -> Sequence[Strategy]:
    """Return the strategies of constant_pad_nd."""
    value = call["value"]
    padded = _padded_dims(call)
    along_padded = [strategy for dim in sorted(padded) for strategy in _pad_along(call, dim)]
    if value is None or (type(value) in (int, float) and value == 0):
        return [*_other_dims(call, padded), *along_padded]
    strategies = _other_dims(call, padded, partials=())
    return [
        *strategies,
        *along_padded,
        call.strategy(P, self=P).by(partial(add_number_once, "value")),
    ]


def _pad_along(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy of a constant pad along a sharded dim.

    Each rank receives the rows of its block of the result, and pads at the ends of the dim.
    """
    shape, pad = call.shape("self"), call["pad"]
    pad_index = 2 * (len(shape) - 1 - dim)
    size, padded_size, pad_before = shape[dim], call.result().shape[dim], pad[pad_index]
    if min(size, padded_size) < 2:
        return []
    bounds = call.bounds(padded_size)
    wanted_rows = [
        clamped_range(start - pad_before, stop - pad_before, size) for start, stop in bounds
    ]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        start, stop = (row - pad_before for row in bounds[build.index])
        first, last = wanted_rows[build.index]
        pads = list(pad)
        pads[pad_index : pad_index + 2] = first - start, stop - last
        return build.rerun(node, operands, pad=pads)

    return exchanged_strategies(call, dim, [(rows,) for rows in wanted_rows], lower)


def _reflection_or_replication_pad(call: Call) -> Sequence[Strategy]:
    """Return the strategies of reflection and replication pads along a sharded dim.

    Each rank receives the source rows of its block of the result.
    """
    shape, result_shape, pads = call.shape("self"), call.result().shape, call["padding"]
    strategies = []
    for number in range(len(pads) // 2):
        dim = len(result_shape) - 1 - number
        sources = [
            _source_row(row - pads[2 * number], shape[dim], "reflection" in call.node.op)
            for row in range(result_shape[dim])
        ]
        bounds = call.bounds(len(sources))
        wanted_rows = [_to_ranges(sources[start:stop]) for start, stop in bounds]
        other_pads = [0 if index // 2 == number else pad for index, pad in enumerate(pads)]
        rejects_empty = any(other_pads) and not all(wanted_rows)  # the kernel rejects empty blocks
        if shape[dim] > 1 and not rejects_empty:
            strategies += exchanged_strategies(
                call, dim, wanted_rows, partial(_lower_pads, other_pads)
            )
    return strategies


def _source_row(row: int, size: int, mirrored: bool) -> int:
    """Return the source row in [0, size) of a row of the padded image.

    Args:
        row: row relative to the unpadded image; may be negative or beyond ``size``.
        mirrored: reflection pad; else replication pad.
    """
    if mirrored:
        row = abs(row)
        return row if row < size else 2 * (size - 1) - row
    return min(max(row, 0), size - 1)


def _to_ranges(rows: Sequence[int]) -> Ranges:
    """Merge consecutive rows into ranges, in order."""
    ranges: list[Rows] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = ranges[-1][0], row + 1
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


def _lower_pads(pads: Sequence[int], build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Pad the other dims of the exchanged rows."""
    return build.rerun(node, operands, padding=pads) if any(pads) else operands


def _diag_embed(call: Call) -> Sequence[Strategy]:
    """Return the strategies of diag_embed, which turns the last dim into ``dim1`` and ``dim2``.

    The operand's other dims are the other dims of the result in order.
    """
    rank = call.rank + 1
    diagonal = {call.dim("dim1", rank), call.dim("dim2", rank)}
    return passing(call, [*(dim for dim in range(rank) if dim not in diagonal), None], (P,))


def _repeat(call: Call) -> Sequence[Strategy]:
    """Return the strategies of repeat: dims that are repeated once are sharded."""
    new_dims = len(call["repeats"]) - call.rank
    counts = enumerate(call["repeats"][new_dims:], new_dims)
    return passing(call, [dim if count == 1 else None for dim, count in counts], (P,))


def _diagonal(call: Call) -> Sequence[Strategy]:
    """Return the strategies of diagonal, which turns ``dim1`` and ``dim2`` into the last dim."""
    removed = {call.dim("dim1"), call.dim("dim2")}
    strategies = passing(call, without(call.rank, removed, removed=True))
    for dim in sorted(removed):
        strategies += partial_by_padding(call, {"self": dim})
    return strategies + passing(call, [None] * call.rank, PARTIALS)


def _triangle(call: Call) -> Sequence[Strategy]:
    """Return the strategies of tril and triu; the diagonal is shifted by a block's offset."""
    shape = call.shape("self")
    strategies = []
    for dim in shardable_dims(shape):
        sign = {len(shape) - 2: 1, len(shape) - 1: -1}.get(dim, 0)
        lower = partial(_lower_shifted_diagonal, shape[dim], sign) if sign else None
        strategies.append(call.strategy(S(dim), self=S(dim)).by(lower))
    return [*strategies, call.strategy(P, self=P)]


def _lower_shifted_diagonal(
    size: int, sign: int, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run a triangle op with its diagonal shifted by the block's offset."""
    diagonal = build.bind(node, operands)["diagonal"]
    return build.rerun(node, operands, diagonal=diagonal + sign * build.rank_offset(size))


RESHAPES: dict[str, Rule] = {
    **table("view.default _unsafe_view.default reshape.default", _view),
}
RULES: dict[str, Rule] = {
    **table(
        "detach.default alias.default lift_fresh.default lift.default detach_copy.default "
        "alias_copy.default",
        _rule(lambda call: range(call.rank)),
    ),
    **table("t.default t_copy.default", _rule(lambda call: range(call.rank)[::-1])),
    **table("transpose.int transpose_copy.int", _rule(_transpose)),
    **table("permute.default permute_copy.default", _rule(_permute)),
    **table("unsqueeze.default unsqueeze_copy.default", _rule(_unsqueeze)),
    **table("_conj.default", _conj),
    **table("view_as_real.default", _rule(lambda call: range(call.rank))),
    **table("view_as_complex.default", _rule(lambda call: [*range(call.rank - 1), None])),
    **table("squeeze.default squeeze.dim squeeze.dims", _squeeze),
    **table("expand.default expand_copy.default", _expand),
    **table("as_strided.default as_strided_copy.default view.dtype", _as_strided),
    **RESHAPES,
    **table("repeat.default", _repeat),
    **table("diagonal.default diagonal_copy.default", _diagonal),
    **table("diag_embed.default", _diag_embed),
    **table("flip.default", _flip),
    **table("rot90.default", lambda call: _other_dims(call, call.dims("dims"))),
    **table("roll.default", _roll),
    **table("constant_pad_nd.default", _pad),
    **table(
        "reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
        "replication_pad1d.default replication_pad2d.default replication_pad3d.default",
        _reflection_or_replication_pad,
    ),
    **table("tril.default triu.default tril_.default triu_.default", _triangle),
}
