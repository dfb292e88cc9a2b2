"""Writes into a view: ``lazygt.write_back``, ``select_scatter``, ``slice_scatter``, ``index_copy``.

``write_back(base, value, chain)`` writes ``value`` into the view of ``base`` that a chain of view
ops selects. A dim of the base is sharded if no view of the chain selects from the dim or names its
size; ``value`` is then sharded accordingly. If a view selects from the sharded dim, ``value`` is
replicated, and each rank writes the rows in its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from lazygt.graph.alias import WRITE_BACK, ViewStepKey, view_step
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Node, Param, Ref, map_arg, params_in
from lazygt.graph.ops import facts, overload
from lazygt.graph.placement import Placement, Shard
from lazygt.graph.shapes.meta_run import run_on_metas
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules import slicing, views
from lazygt.passes.sharding.rules.indexing import to_local_indices, write_owned
from lazygt.passes.sharding.rules.slicing import partials
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
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

# -- index_copy along a sharded dim, as into a key/value cache -------------------------------------
# Each rank writes the rows in its block.


def _index_copy(call: Call) -> Sequence[Strategy]:
    """Return the strategy of index_copy along a sharded indexed dim."""
    shape = call.shape("self")
    dim = call.dim()
    if not shape or shape[dim] < 2:
        return ()

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, index, source = (args[name] for name in ("self", "index", "source"))
        index = build.reshape(index, (build.meta(index).numel,))
        return (write_rows(build, value, dim, shape[dim], index, source),)

    return [call.strategy(S(dim), self=S(dim)).by(lower)]


def write_rows(build: Builder, block: Ref, dim: int, size: int, index: Ref, rows: Ref) -> Ref:
    """Write rows into this rank's block at global indices; return the block's new version.

    Args:
        size: global size of ``dim``.
        index: 1-d global indices along ``dim``.
        rows: one row for each index, replicated.
    """
    shape = build.shape(block)
    count, block_size = build.meta(index).numel, shape[dim]
    local_index, outside = to_local_indices(build, index, size)
    if count == 1 and block_size:
        # write in place; a rank that does not own the row rewrites an old row
        outside = build.reshape(outside, [1] * len(shape))
        before = build.op("aten.index_select.default", block, dim, local_index)
        rows = build.op("aten.where.self", outside, before, rows)
        written: Ref = build.op("aten.index_copy_.default", block, dim, local_index, rows)
        return written
    index_and_mask = local_index, outside
    new_block = write_owned(build, "aten.index_copy_.default", block, dim, index_and_mask, rows)
    copied: Ref = build.op("aten.copy_.default", block, new_block)
    return copied


# -- write_back, select_scatter, slice_scatter -----------------------------------------------------

_VIEWS = {**slicing.RULES, **views.RULES}


def _write_back(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``lazygt.write_back(base, value, chain)``."""
    base, chain = call.metas[call.node.args[0].index], call.node.args[2]
    if base is None:
        return ()
    strategies = [
        Strategy((R, R), (R,), partial(_lower_unsharded, base)),
        Strategy((P, P), (P,), partial(_lower_unsharded, base)),
    ]
    steps = _steps(base, chain)
    covered = _covers(steps)
    if covered:
        strategies.append(Strategy((P, R), (R,), partial(_lower_unsharded, base)))
    for dim in shardable_dims(base.shape):
        placement = _propagate(steps, S(dim), call.axis_size)
        if placement is not None:
            strategies += _sharded_base(dim, placement, _lower_write, covered)
        elif (reshaped := _reshaped(steps, dim, call.axis_size)) is not None:
            strategies += _sharded_base(
                dim, reshaped.last, partial(_lower_reshaped, reshaped), covered
            )
        elif (selection := _selection(steps, dim, call.axis_size)) is not None:
            lower = (
                partial(_lower_static_selection, selection)
                if selection.start is None
                else partial(_lower_run_time_selection, selection)
            )
            strategies.append(Strategy((S(dim), R), (S(dim),), lower))
    return strategies


def _sharded_base(dim: int, value: Placement, lower: Lowering, covered: bool) -> list[Strategy]:
    """Return the strategies of a base sharded along ``dim`` and a value with placement ``value``.

    Args:
        covered: whether the write overwrites the full base, which may then be partial.
    """
    strategies = [Strategy((S(dim), value), (S(dim),), lower)]
    if covered:
        strategies.append(
            Strategy((P, value), (S(dim),), partial(_lower_block_of_partial, dim, lower))
        )
    return strategies


def _steps(base: TensorMeta, chain: Sequence[ViewStepKey]) -> list[tuple[Node, TensorMeta, int]]:
    """Convert a chain of views to steps: (node on value 0, meta of value 0, result number).

    For a view with a run-time index, metas are computed with index 1.
    """
    steps = []
    for op, position, args, kwargs, number in chain:
        operands = (*args[:position], Ref(0), *args[position + 1 :])
        static_operands = map_arg(operands, lambda arg: 1 if type(arg) is Param else arg)
        results = run_on_metas(facts(overload(op)), static_operands, kwargs, {0: base}, (), "cpu")
        assert results is not None, f"{op}: a view whose shape depends on values"
        steps.append((Node(op, operands, kwargs, results[0]), base, number))
        meta = results[0][number]
        assert meta is not None
        base = meta
    return steps


def _propagate(
    steps: Sequence[tuple[Node, TensorMeta, int]], placement: Placement, axis_size: int
) -> Placement | None:
    """Propagate a placement through views; None if a view cannot run on its blocks unchanged."""
    for node, meta, number in steps:
        rule = _VIEWS.get(node.op)
        strategies = rule(Call(node, (meta,), axis_size)) if rule else ()
        unchanged = [
            strategy
            for strategy in strategies
            if strategy.inputs == (placement,) and strategy.lower is None
        ]
        if not unchanged:
            return None
        placement = unchanged[0].outputs[number]
    return placement


class _Reshaped(NamedTuple):
    """Chain of views that begins with a reshape."""

    shape: tuple[int, ...]  # shape, first: global shape and placement of the reshape's result
    first: Placement
    last: Placement  # placement of the result of the chain


def _reshaped(
    steps: Sequence[tuple[Node, TensorMeta, int]], dim: int, axis_size: int
) -> _Reshaped | None:
    """Return the chain's reshape if the chain begins with one that keeps each rank's elements.

    An example is the gradient of a bias. None for other chains.
    """
    if not steps or steps[0][0].op != "aten.view.default":
        return None
    node, meta, _ = steps[0]
    for strategy in _VIEWS[node.op](Call(node, (meta,), axis_size)):
        if strategy.inputs == (S(dim),):
            last = _propagate(steps[1:], strategy.outputs[0], axis_size)
            result = node.results[0]
            assert result is not None
            return None if last is None else _Reshaped(result.shape, strategy.outputs[0], last)
    return None


#: Views that contain every element of their base exactly once.
_COMPLETE_VIEWS = frozenset(
    f"aten.{name}"
    for name in ("t.default", "transpose.int", "permute.default", "view.default", "detach.default",
                 "alias.default", "unsqueeze.default", "squeeze.default", "squeeze.dim",
                 "squeeze.dims")
)  # fmt: skip


def _covers(steps: Sequence[tuple[Node, TensorMeta, int]]) -> bool:
    """Return whether a write through the views overwrites the full base.

    The old contents then do not matter, so a partial base needs no reduction.
    """
    return all(node.op in _COMPLETE_VIEWS for node, _, _ in steps)


#: Views that select from a dim -> the argument with the start.
_SELECTING_VIEWS = {
    "aten.select.int": "index",
    "aten.slice.Tensor": "start",
    "aten.narrow.default": "start",
}


class _Cut(NamedTuple):
    """Selection from a sharded dim by a chain of views."""

    step: int  # number of the selecting view in the chain
    dim: int  # sharded dim of that view's operand
    size: int  # global size of ``dim``
    #: first, last: selected rows ``[first, last)``; relative to ``start`` if that is not None
    first: int
    last: int
    removed: bool  # whether the view removes the dim (select)
    start: Param | None = None  # run-time start


def _selection(
    steps: Sequence[tuple[Node, TensorMeta, int]], dim: int, axis_size: int
) -> _Cut | None:
    """Return the selection from a sharded dim by a chain of views; None if unsupported.

    Supported are a select; as the last view, a slice with step 1; and as the last view a select or
    narrow with a run-time start.
    """
    placement: Placement | None = S(dim)
    for number, view in enumerate(steps):
        assert isinstance(placement, Shard)
        passed = _propagate([view], placement, axis_size)
        if passed is None:
            return _selection_by(view, number, placement.dim, last=number + 1 == len(steps))
        placement = passed
    return None


def _selection_by(
    view: tuple[Node, TensorMeta, int], number: int, dim: int, last: bool
) -> _Cut | None:
    """Return the selection of one view from ``dim``; None if unsupported."""
    node, meta, _ = view
    call, size = Call(node, (meta,), 1), meta.shape[dim]
    if node.op not in _SELECTING_VIEWS or call.dim("dim", len(meta.shape)) != dim:
        return None
    if params_in(node.args):
        start, removed = call[_SELECTING_VIEWS[node.op]], node.op == "aten.select.int"
        is_supported = last and type(start) is Param
        return (
            _Cut(number, dim, size, 0, 1 if removed else call["length"], removed, start)
            if is_supported
            else None
        )
    if node.op == "aten.select.int":
        index = call["index"] % size
        return _Cut(number, dim, size, index, index + 1, removed=True)
    if node.op == "aten.narrow.default":
        return None
    start, stop, stride = slice(call["start"], call["end"], call["step"]).indices(size)
    return _Cut(number, dim, size, start, stop, removed=False) if last and stride == 1 else None


def _lower_static_selection(
    selection: _Cut, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Write the selected rows in this rank's block."""
    (base, value), chain = operands, node.args[2]
    first, last = local_range(build, selection.size, selection.first, selection.last)
    start = build.rank_offset(selection.size)
    if selection.removed and first < last:
        step = view_step("aten.select.int", 0, (None, selection.dim, first - start), (), 0)
        return _write(
            build, base, value, (*chain[: selection.step], step, *chain[selection.step + 1 :])
        )
    if selection.removed:  # write an empty value
        value = build.full(
            (*_selected_shape(build, base, chain[: selection.step], selection.dim),), 0, base
        )
    else:
        value = build.op(
            "aten.slice.Tensor",
            value,
            selection.dim,
            first - selection.first,
            last - selection.first,
        )
    ends = (0, 0) if first == last else (first - start, last - start)
    step = view_step("aten.slice.Tensor", 0, (None, selection.dim, *ends), (), 0)
    return _write(build, base, value, (*chain[: selection.step], step))


def _lower_run_time_selection(
    selection: _Cut, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Write at a run-time start, through the views before it."""
    (base, value), chain = operands, node.args[2][: selection.step]
    view = base
    for op, position, args, kwargs, number in chain:
        result = build.node(op, (*args[:position], view, *args[position + 1 :]), kwargs)[number]
        assert result is not None
        view = result
    if selection.removed:
        value = build.op("aten.unsqueeze.default", value, selection.dim)
    index = build.op("aten.arange.default", selection.last, dtype=torch.int64, device=DEVICE)
    index = build.op("aten.add.Tensor", index, selection.start)
    view = write_rows(build, view, selection.dim, selection.size, index, value)
    return _write(build, base, view, chain) if chain else (view,)


def _selected_shape(
    build: Builder, base: Ref, chain: Sequence[ViewStepKey], dim: int
) -> tuple[int, ...]:
    """Return the shape of the view of a local base, with size 0 along ``dim``."""
    shape = build.shape(base)
    for node, _, number in _steps(build.meta(base), chain):
        result = node.results[number]
        assert result is not None
        shape = result.shape
    return (*shape[:dim], 0, *shape[dim + 1 :])


def _write(build: Builder, base: Ref, value: Ref, chain: Sequence[ViewStepKey]) -> Values:
    """Add a ``lazygt.write_back`` node."""
    return build.add(Node(WRITE_BACK, (base, value, tuple(chain)), (), (build.meta(base),)))


def _lower_write(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Write a local value through the same views."""
    base, value = operands
    return _write(build, base, value, node.args[2])


def _lower_reshaped(
    reshaped: _Reshaped, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Write through a reshape, with the local sizes.

    The base is copied to row-major memory if needed, since the reshape must be a view.
    """
    base, value = operands
    size = build.local(reshaped.shape, reshaped.first)
    step = view_step("aten.view.default", 0, (None, size), (), 0)
    return _write(build, build.contiguous(base), value, (step, *node.args[2][1:]))


def _lower_block_of_partial(
    dim: int, written: Lowering, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Take this rank's block of an unsharded (partial) base, then write."""
    base, value = operands
    return written(build, node, (build.shard(base, dim), value))


def _lower_unsharded(
    meta: TensorMeta, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Restore the recorded strides of an unsharded base, then write."""
    base, value = operands
    if build.meta(base).stride != meta.stride and meta.extent == meta.numel:
        base = build.restrided(base, meta.stride)
    return _lower_write(build, node, (base, value))


def _scatter(call: Call, removed: bool) -> Sequence[Strategy]:
    """Return the strategies of select_scatter (``removed``) or slice_scatter."""
    shape = call.shape("self")
    dim = call.dim()
    other_dims = [d for d in shardable_dims(shape) if d != dim]
    strategies = [
        call.strategy(S(d), self=S(d), src=S(d - (removed and d > dim))) for d in other_dims
    ]
    if shape[dim] > 1 and call.args.get("step", 1) == 1 and not params_in(call.node.args):
        strategies.append(
            call.strategy(S(dim), self=S(dim)).by(partial(_lower_scatter, call, dim, removed))
        )
    return strategies + [
        call.strategy(placement, self=placement, src=placement) for placement in partials(call)
    ]


def _lower_scatter(
    call: Call, dim: int, removed: bool, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run select_scatter or slice_scatter into this rank's block."""
    size = call.shape("self")[dim]
    index = call["index"] % size if removed else 0
    ends = (index, index + 1) if removed else slice(call["start"], call["end"]).indices(size)[:2]
    value, source = operands
    (first, last), start = local_range(build, size, *ends), build.rank_offset(size)
    if first == last:
        return (build.op("aten.clone.default", value),)
    if removed:
        return build.rerun(node, operands, index=first - start)
    source = build.op("aten.slice.Tensor", source, dim, first - ends[0], last - ends[0])
    return build.rerun(node, [value, source], start=first - start, end=last - start)


RULES: dict[str, Rule] = {
    WRITE_BACK: _write_back,
    **table("index_copy.default index_copy_.default", _index_copy),
    **table("select_scatter.default", partial(_scatter, removed=True)),
    **table("slice_scatter.default", partial(_scatter, removed=False)),
}
