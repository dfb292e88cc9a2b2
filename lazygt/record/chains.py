"""Chains of view ops from a storage to a handle: extension, and replay in a new trace."""

from __future__ import annotations

from lazygt.graph.alias import ViewStepKey, view_step
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Param, Ref
from lazygt.graph.ops import viewed_argument
from lazygt.record.ahead import prefetch_steps
from lazygt.record.moving import (
    StepTaker,
    existing_step,
    hoist_varying_position,
    new_step,
    pitch,
)
from lazygt.record.positions import SAMPLE, Key
from lazygt.record.tensor import Storage, ViewChain, ViewOp
from lazygt.record.trie import TrieNode


def view_ops(step: TrieNode) -> tuple[ViewOp, ...]:
    """Return the operand-free view ops of a step's results; computed once for each step."""
    if step.view_ops is None:
        node, f = step.node, step.facts
        assert node is not None
        assert f is not None
        position = viewed_argument(f)
        ops = []
        for which, meta in enumerate(node.fresh):
            assert meta is not None
            ops.append(
                ViewOp(f, step.key, position, node.args, node.kwargs, which, meta, step.pitch)
            )
        step.view_ops = tuple(ops)
    return step.view_ops


def extended(
    trace: StepTaker, prefix: ViewChain | None, storage: Storage, op: ViewOp, index: int
) -> ViewChain:
    """Return a view chain with one more op.

    Args:
        prefix: the chain of the op's operand; None: the storage itself.
        index: number of the op's result in the trace.
    """
    chain = ViewChain((), trace.serial, storage.index, index)
    if prefix is not None:
        chain.ops, chain.numbers = prefix.ops, prefix.numbers
        chain.params, chain.shift = prefix.params, prefix.shift
    _append(chain, op, trace, len(trace.params) - 1)
    return chain


def _append(chain: ViewChain, op: ViewOp, trace: StepTaker, param: int) -> None:
    """Append an op to a chain; run-time number ``param`` of the trace is its position, if any."""
    chain.ops = (*chain.ops, op)
    if op.pitch is not None:
        number = trace.params[param]
        chain.numbers, chain.params = (*chain.numbers, number), (*chain.params, param)
        chain.shift += (number - SAMPLE) * op.pitch
    elif op.absolute:
        chain.shift = 0


def steps(view: ViewChain) -> tuple[ViewStepKey, ...]:
    """Return the chain as arguments of a ``write_back`` node, in the trace of its last replay."""
    params = iter(view.params)

    def step(op: ViewOp) -> ViewStepKey:
        args = op.args if op.pitch is None else _with_param(op.args, Param(next(params)))
        return view_step(op.facts.name, op.position, args, op.kwargs, op.which)

    return tuple([step(op) for op in view.ops])


def _with_param(args: tuple[Arg, ...], param: Param) -> tuple[Arg, ...]:
    """Return the arguments with ``param`` in place of their run-time number."""
    return tuple([param if type(arg) is Param else arg for arg in args])


def missing_step(
    trace: StepTaker, view: ViewChain, op: ViewOp, key: Key, index: int, meta: TensorMeta
) -> TrieNode:
    """Add the step of a view op on value ``index``, which the trie lacks; return the step."""
    f, metas, hoisted = op.facts, {index: meta}, None
    if op.pitch is None and not any(earlier.facts.beginning_matters for earlier in view.ops):
        hoisted = hoist_varying_position(trace, f, key, meta)
    if hoisted is not None:
        step = existing_step(trace, hoisted)
        return step or _add_step(trace, new_step(trace, hoisted, metas))
    position, args, samples = op.position, op.args, trace.params
    if op.pitch is not None:
        args = _with_param(args, Param(len(trace.params) - 1))
        samples = [*trace.params[:-1], SAMPLE]
    args = (*args[:position], Ref(index), *args[position + 1 :])
    results = trace.inference.results(f, args, op.kwargs, metas, samples)
    assert results is not None, f"{f.name} was inferred before"
    trace.note_miss(key, f, None)
    step = TrieNode(trace.step, key, Node(f.name, args, op.kwargs, results.fresh), facts=f)
    step.moves = op.pitch is not None
    step.pitch = pitch(key, meta) if step.moves else None
    return _add_step(trace, step)


def _add_step(trace: StepTaker, step: TrieNode) -> TrieNode:
    """Add a new step to the trie, follow its counterpart, and prefetch the next steps."""
    assert step.node is not None
    trace.repeat.follow(step, trace.repeat.internal(trace.step, step.key, step.node))
    trace.trie.add(step)
    prefetch_steps(trace)
    return step


def update_chain(trace: StepTaker, view: ViewChain, new_steps: list[TrieNode], first: int) -> None:
    """Update a chain to its replayed steps; their run-time numbers begin at ``first``."""
    updated = ViewChain((), trace.serial, 0, 0)
    for op, step in zip(view.ops, new_steps, strict=True):
        _append(updated, view_ops(step)[op.which], trace, first)
        first += step.pitch is not None
    view.ops, view.numbers = updated.ops, updated.numbers
    view.params, view.shift = updated.params, updated.shift
