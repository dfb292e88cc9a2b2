"""Writes into a part: ``lazygt.write_back``, ``select_scatter``, ``slice_scatter``.

A dim passes when every view of the chain keeps it and names none of its sizes. Along a dim that is
cut, each rank writes the part in its block of a value that all have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazygt.graph.alias import WRITE_BACK, ViewStepKey, view_step
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Node, Param, Ref, map_arg, params_in
from lazygt.graph.ops import facts, overload
from lazygt.graph.placement import Placement, Shard
from lazygt.graph.shapes.meta_run import run_on_metas
from lazygt.passes.sharding.rules import rearrange, slicing, views
from lazygt.passes.sharding.rules.indexing import to_local_indices
from lazygt.passes.sharding.rules.slicing import partials
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    local_range,
    shardable_dims,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

# -- rows put into a cut dim at run-time places, as into a cache of keys ---------------------------
# Each rank writes those that lie in its block.


def along_the_index(rules: Mapping[str, Rule]) -> Mapping[str, Rule]:
    """Return rules of index_copy with their strategy for blocks of the indexed dim."""
    return {op: _with_blocks(rule) for op, rule in rules.items()}


def _with_blocks(rule: Rule) -> Rule:
    def strategies(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
        call = Call(node, metas, axis_size)
        usual, shape = list(rule(node, metas, axis_size)), call.shape("self")
        dim = call.dim("dim", len(shape))
        if not shape or shape[dim] < 2:
            return usual

        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            args = build.bind(node, operands)
            value, index, source = (args[name] for name in ("self", "index", "source"))
            index = build.reshape(index, (build.meta(index).numel,))
            return (overwritten(build, value, dim, shape[dim], index, source),)

        return [*usual, call.strategy(S(dim), self=S(dim)).by(lower)]

    return strategies


def overwritten(build: Builder, block: Ref, dim: int, size: int, index: Ref, given: Ref) -> Ref:
    """Return a new version of this rank's block, with its rows that an index names.

    Args:
        size: of the dim, of all blocks together.
        index: flat, of the whole dim.
        given: a row for each index.
    """
    shape = build.shape(block)
    count, rows = build.meta(index).numel, shape[dim]
    local, outside = to_local_indices(build, index, size)
    if count == 1 and rows:
        # the row is written in place; where it is another rank's, by its old contents
        outside = build.reshape(outside, [1] * len(shape))
        before = build.op("aten.index_select.default", block, dim, local)
        given = build.op("aten.where.self", outside, before, given)
        written: Ref = build.op("aten.index_copy_.default", block, dim, local, given)
        return written
    # rows of others go to one more row, which is dropped
    dropped = build.op("aten.logical_and.default", outside, build.op("aten.eq.Scalar", local, 0))
    local = build.op("aten.masked_fill.Scalar", local, dropped, rows)
    spare = build.full((*shape[:dim], 1, *shape[dim + 1 :]), 0, like=block)
    wide = build.op("aten.cat.default", (block, spare), dim)
    wide = build.op("aten.index_copy_.default", wide, dim, local, given)
    kept = build.op("aten.slice.Tensor", wide, dim, 0, rows)
    copied: Ref = build.op("aten.copy_.default", block, kept)
    return copied


# -- writes into a part: ``lazygt.write_back``, ``select_scatter``, ``slice_scatter`` --------------

_VIEWS = {**slicing.RULES, **rearrange.RULES, **views.RULES}


def _strategies(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    base, chain = metas[node.args[0].index], node.args[2]
    if base is None:
        return ()
    strategies = [Strategy((R, R), (R,), _laid_out(base)), Strategy((P, P), (P,), _laid_out(base))]
    steps = _steps(base, chain)
    covered = _covers(steps)
    if covered:
        strategies.append(Strategy((P, R), (R,), _laid_out(base)))
    for dim in shardable_dims(base.shape):
        placement = _through(steps, S(dim), axis_size)
        if placement is not None:
            strategies += _by_blocks(dim, placement, _written, covered)
        elif (reshaped := _reshaped(steps, dim, axis_size)) is not None:
            strategies += _by_blocks(dim, reshaped.last, _written_reshaped(reshaped), covered)
        elif (cut := _cut(steps, dim, axis_size)) is not None:
            lower = _part_written(cut) if cut.start is None else _written_anywhere(cut)
            strategies.append(Strategy((S(dim), R), (S(dim),), lower))
    return strategies


def _by_blocks(dim: int, value: Placement, lower: Lowering, covered: bool) -> list[Strategy]:
    """Return the strategies for a base in blocks along ``dim``, and a value in blocks of it."""
    strategies = [Strategy((S(dim), value), (S(dim),), lower)]
    if covered:
        strategies.append(Strategy((P, value), (S(dim),), _written_over(dim, lower)))
    return strategies


def _steps(base: TensorMeta, chain: Sequence[ViewStepKey]) -> list[tuple[Node, TensorMeta, int]]:
    """Return each view as a node on value 0, the meta of that value, and the result's place.

    The metas of a view with a position that is given at run time are those of some position.
    """
    steps = []
    for op, position, args, kwargs, which in chain:
        operands = (*args[:position], Ref(0), *args[position + 1 :])
        somewhere = map_arg(operands, lambda arg: 1 if type(arg) is Param else arg)
        results = run_on_metas(facts(overload(op)), somewhere, kwargs, {0: base}, (), "cpu")
        assert results is not None, f"{op}: a view whose shape depends on values"
        steps.append((Node(op, operands, kwargs, results[0]), base, which))
        meta = results[0][which]
        assert meta is not None
        base = meta
    return steps


def _through(
    steps: Sequence[tuple[Node, TensorMeta, int]], placement: Placement, axis_size: int
) -> Placement | None:
    """Return the placement behind the views of a value; None when they cut the placement."""
    for node, meta, which in steps:
        rule = _VIEWS.get(node.op)
        strategies = rule(node, (meta,), axis_size) if rule else ()
        same = [
            strategy
            for strategy in strategies
            if strategy.inputs == (placement,) and strategy.lower is None
        ]
        if not same:
            return None
        placement = same[0].outputs[which]
    return placement


class _Reshaped(NamedTuple):
    """Chain of views that begins with a reshape.

    Attributes:
        shape, first: shape and placement of the reshape's result.
        last: the placement at the end of the chain.
    """

    shape: tuple[int, ...]
    first: Placement
    last: Placement


def _reshaped(
    steps: Sequence[tuple[Node, TensorMeta, int]], dim: int, axis_size: int
) -> _Reshaped | None:
    """Return a chain with a reshape that moves blocks as they are; else None.

    The gradient of a bias has one, for example.
    """
    if not steps or steps[0][0].op != "aten.view.default":
        return None
    node, meta, _ = steps[0]
    for strategy in _VIEWS[node.op](node, (meta,), axis_size):
        if strategy.inputs == (S(dim),):
            last = _through(steps[1:], strategy.outputs[0], axis_size)
            result = node.results[0]
            assert result is not None
            return None if last is None else _Reshaped(result.shape, strategy.outputs[0], last)
    return None


#: Views that show every element of their base once.
_ALL = frozenset(
    f"aten.{name}"
    for name in ("t.default", "transpose.int", "permute.default", "view.default", "detach.default",
                 "alias.default", "unsqueeze.default", "squeeze.default", "squeeze.dim",
                 "squeeze.dims")
)  # fmt: skip


def _covers(steps: Sequence[tuple[Node, TensorMeta, int]]) -> bool:
    """Return whether the whole base is overwritten, so that its old contents do not matter.

    A gradient that is added to through its transpose is: its parts are then summed once.
    """
    return all(node.op in _ALL for node, _, _ in steps)


#: Views that keep some of a dim, and which argument says where that begins.
_CUTS = {"aten.select.int": "index", "aten.slice.Tensor": "start", "aten.narrow.default": "start"}


class _Cut(NamedTuple):
    """Cut of a split dim by a chain of views: step number ``at`` keeps some of ``dim``.

    Attributes:
        first, last: the kept rows; counted from ``start``, where that is given at run time.
    """

    at: int
    dim: int
    size: int
    first: int
    last: int
    gone: bool
    start: Param | None = None


def _cut(steps: Sequence[tuple[Node, TensorMeta, int]], dim: int, axis_size: int) -> _Cut | None:
    """Return the cut of a split dim by a chain of views; None where it is of no known kind.

    Known are a select; at the end of the chain, a slice; and there either at a run-time place.
    """
    placement: Placement | None = S(dim)
    for at, step in enumerate(steps):
        assert isinstance(placement, Shard)
        passed = _through([step], placement, axis_size)
        if passed is None:
            return _cut_by(step, at, placement.dim, last=at + 1 == len(steps))
        placement = passed
    return None


def _cut_by(step: tuple[Node, TensorMeta, int], at: int, dim: int, last: bool) -> _Cut | None:
    node, meta, _ = step
    call, size = Call(node, (meta,), 1), meta.shape[dim]
    if node.op not in _CUTS or call.dim("dim", len(meta.shape)) != dim:
        return None
    if params_in(node.args):
        start, gone = call[_CUTS[node.op]], node.op == "aten.select.int"
        known = last and type(start) is Param
        return _Cut(at, dim, size, 0, 1 if gone else call["length"], gone, start) if known else None
    if node.op == "aten.select.int":
        index = call["index"] % size
        return _Cut(at, dim, size, index, index + 1, gone=True)
    if node.op == "aten.narrow.default":
        return None
    start, stop, stride = slice(call["start"], call["end"], call["step"]).indices(size)
    return _Cut(at, dim, size, start, stop, gone=False) if last and stride == 1 else None


def _part_written(cut: _Cut) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (base, value), chain = operands, node.args[2]
        a, b = local_range(build, cut.size, cut.first, cut.last)
        start = build.rank_offset(cut.size)
        if cut.gone and a < b:
            step = view_step("aten.select.int", 0, (None, cut.dim, a - start), (), 0)
            return _write(build, base, value, (*chain[: cut.at], step, *chain[cut.at + 1 :]))
        if cut.gone:  # nothing is written, into the memory of the base
            value = build.full((*_selected_shape(build, base, chain[: cut.at], cut.dim),), 0, base)
        else:
            value = build.op("aten.slice.Tensor", value, cut.dim, a - cut.first, b - cut.first)
        ends = (0, 0) if a == b else (a - start, b - start)
        step = view_step("aten.slice.Tensor", 0, (None, cut.dim, *ends), (), 0)
        return _write(build, base, value, (*chain[: cut.at], step))

    return lower


def _written_anywhere(cut: _Cut) -> Lowering:
    """Return a lowering that writes row by row, through the views before the cut."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (base, value), chain = operands, node.args[2][: cut.at]
        part = base
        for op, position, args, kwargs, which in chain:
            seen = build.node(op, (*args[:position], part, *args[position + 1 :]), kwargs)[which]
            assert seen is not None
            part = seen
        if cut.gone:
            value = build.op("aten.unsqueeze.default", value, cut.dim)
        index = build.op("aten.arange.default", cut.last, dtype=torch.int64, device=DEVICE)
        index = build.op("aten.add.Tensor", index, cut.start)
        part = overwritten(build, part, cut.dim, cut.size, index, value)
        return _write(build, base, part, chain) if chain else (part,)

    return lower


def _selected_shape(
    build: Builder, base: Ref, chain: Sequence[ViewStepKey], dim: int
) -> tuple[int, ...]:
    """Return the shape of no element along ``dim`` of the view of a local base."""
    shape = build.shape(base)
    for node, _, which in _steps(build.meta(base), chain):
        result = node.results[which]
        assert result is not None
        shape = result.shape
    return (*shape[:dim], 0, *shape[dim + 1 :])


def _write(build: Builder, base: Ref, value: Ref, chain: Sequence[ViewStepKey]) -> Values:
    return build.add(Node(WRITE_BACK, (base, value, tuple(chain)), (), (build.meta(base),)))


def _written(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    base, value = operands
    return _write(build, base, value, node.args[2])


def _written_reshaped(reshaped: _Reshaped) -> Lowering:
    """Return a lowering with the block's sizes for those of the reshape.

    The reshape asks for a row-major base.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        base, value = operands
        size = build.local(reshaped.shape, reshaped.first)
        step = view_step("aten.view.default", 0, (None, size), (), 0)
        return _write(build, build.contiguous(base), value, (step, *node.args[2][1:]))

    return lower


def _written_over(dim: int, written: Lowering) -> Lowering:
    """Return a lowering on a block of a base that all ranks have in its whole shape."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        base, value = operands
        return written(build, node, (build.shard(base, dim), value))

    return lower


def _laid_out(meta: TensorMeta) -> Lowering:
    """Return a lowering on a whole base with the recorded strides, which views may ask for."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        base, value = operands
        if build.meta(base).stride != meta.stride and meta.extent == meta.numel:
            base = build.restrided(base, meta.stride)
        return _written(build, node, (base, value))

    return lower


def _into(gone: bool) -> Rule:
    """Return the rule of select_scatter and slice_scatter: ``src`` in the place of a cut."""

    def strategies(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
        call = Call(node, metas, axis_size)
        shape = call.shape("self")
        dim = call.dim("dim", len(shape))
        split = [d for d in shardable_dims(shape) if d != dim]
        strategies = [call.strategy(S(d), self=S(d), src=S(d - (gone and d > dim))) for d in split]
        if shape[dim] > 1 and call.args.get("step", 1) == 1 and not params_in(node.args):
            strategies.append(call.strategy(S(dim), self=S(dim)).by(_part_put(call, dim, gone)))
        return strategies + [
            call.strategy(placement, self=placement, src=placement) for placement in partials(call)
        ]

    return strategies


def _part_put(call: Call, dim: int, gone: bool) -> Lowering:
    size = call.shape("self")[dim]
    index = call["index"] % size if gone else 0
    ends = (index, index + 1) if gone else slice(call["start"], call["end"]).indices(size)[:2]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        value, source = operands
        (a, b), start = local_range(build, size, *ends), build.rank_offset(size)
        if a == b:
            return (build.op("aten.clone.default", value),)
        if gone:
            return build.rerun(node, operands, index=a - start)
        source = build.op("aten.slice.Tensor", source, dim, a - ends[0], b - ends[0])
        return build.rerun(node, [value, source], start=a - start, end=b - start)

    return lower


RULES: dict[str, Rule] = {
    WRITE_BACK: _strategies,
    **table("select_scatter.default", _into(gone=True)),
    **table("slice_scatter.default", _into(gone=False)),
}
