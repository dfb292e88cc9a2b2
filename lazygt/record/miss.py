"""Trie misses: inference of an op that the trie lacks, and its new step."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref
from lazygt.graph.ops import MASKABLE, OpFacts
from lazygt.graph.source import user_call_site
from lazygt.record.ahead import prefetch_steps
from lazygt.record.moving import existing_step, hoist_varying_position, new_step
from lazygt.record.repeats import call_of, metas_of
from lazygt.record.tensor import graph_meta, is_lazy
from lazygt.record.trace import Trace, written_tensors
from lazygt.record.trie import TrieNode

#: Types of Python numbers that become run-time numbers of a plan.
NUMBERS = frozenset({int, float, bool, complex})


def on_miss(
    trace: Trace,
    key: tuple[Any, ...],
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> TrieNode:
    """Add the step of an op that the trie lacks below the trace's current step; return the step.

    Tried in order: the step with its position as a run-time number, a copy of the step of an
    earlier trace in other sizes, inference.

    Raises:
        Exception: torch's own, when the op can't take such arguments.
    """
    hoisted = None
    if f.position is not None and not kwargs and _all_lazy(args):
        hoisted = hoist_varying_position(trace, f, key, graph_meta(args[0]))
    if hoisted is not None:
        existing = existing_step(trace, hoisted)
        if existing is not None:
            return existing
        key = hoisted.key
    counterpart = trace.repeat.op(trace.step, key, f)
    step = None if counterpart is None else trace.repeat.same(trace.step, key, counterpart)
    if step is not None:
        trace.note_miss(key, f, user_call_site(1))
    elif hoisted is not None:
        step = new_step(trace, hoisted, _metas(trace, args))
    else:
        step = _recorded_step(trace, key, f, args, kwargs, counterpart)
    step.forward = _link_backward(trace.forward_ops, step.ops - 1)
    step.backward = torch._C._current_autograd_node() is not None
    trace.repeat.follow(step, counterpart)
    if step.backward and trace.repeat.counterpart is not None:  # the forward op may be a hit
        step.forward = trace.repeat.counterpart.forward
    trace.trie.add(step, trace.bytes_alive)
    prefetch_steps(trace)
    return step


def _all_lazy(args: tuple[Any, ...]) -> bool:
    """Return whether no tensor of another device is among the arguments."""
    return all(is_lazy(a) for a in args if isinstance(a, torch.Tensor))


def _metas(trace: Trace, args: tuple[Any, ...]) -> dict[int, TensorMeta]:
    """Return the metas of the tensors among the arguments."""
    tensors = [a for a in args if is_lazy(a)]
    return {trace.index_of(t): graph_meta(t) for t in tensors}


def _recorded_step(
    trace: Trace,
    key: tuple[Any, ...],
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    counterpart: TrieNode | None,
) -> TrieNode:
    """Return a new step with inferred results; raise torch's error for bad arguments."""
    resized = (
        None if counterpart is None else _resized_node(trace, key, f, counterpart, args, kwargs)
    )
    node, numbers = resized or _node(trace, f, args, kwargs)
    trace.note_miss(key, f, user_call_site(1))
    step = TrieNode(trace.step, key, node, facts=f)
    step.numbers = numbers
    writes_first_argument = f.outputs == ("w",) and f.writes == (0,)
    step.itself = writes_first_argument and node.written == (graph_meta(args[0]),)
    if f.views:
        step.make = None
    return step


def _resized_node(
    trace: Trace,
    key: tuple[Any, ...],
    f: OpFacts,
    counterpart: TrieNode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Node, tuple[int, ...]] | None:
    """Return the result of ``_node`` from an op recorded in other sizes; None: not possible.

    Args:
        counterpart: the op's step in an earlier trace with other sizes.
    """
    old_node, call = counterpart.node, call_of(counterpart, key)
    if old_node is None or call is None:
        return None
    differs = len(old_node.args) != len(args) or len(old_node.kwargs) != len(kwargs)
    if differs or old_node.dynamic or f.dynamic or f.name in MASKABLE:
        return None
    metas = metas_of(old_node, args, kwargs)
    if metas is None:
        return None
    results = trace.inference.results(f, *call, metas, trace.params)
    if results is None:
        return None
    node = Node(f.name, *call, results.fresh, old_node.writes, results.written)
    return node, results.ints


def _node(
    trace: Trace, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Node, tuple[int, ...]]:
    """Return the op's node with its results' metas, and the ints that it returns.

    The node is dynamic if only values determine its results' shapes.
    """
    metas: dict[int, TensorMeta] = {}
    params = itertools.count(trace.step.params)

    def to_arg(a: Any, hoist: int) -> Arg:
        """Return a node's argument: a Ref, a Param, DEVICE, a tuple or the constant."""
        if isinstance(a, torch.Tensor):
            if is_lazy(a):
                index, meta = trace.index_of(a), graph_meta(a)
            else:
                index, meta = trace.uploaded[id(a)]  # when the op's key was made
            metas[index] = meta
            return Ref(index)
        if hoist == 1 and type(a) in NUMBERS:
            return Param(next(params))
        if type(a) in (list, tuple):
            return tuple(to_arg(item, 1 if hoist == 2 else 0) for item in a)
        return DEVICE if isinstance(a, torch.device) else a

    node_args = tuple(to_arg(a, hoist) for a, hoist in zip(args, f.hoist, strict=False))
    node_kwargs = tuple((name, to_arg(a, f.hoist_named.get(name, 0))) for name, a in kwargs.items())
    written = tuple([trace.index_of(t) for t in written_tensors(f, args, kwargs)])
    if not (f.dynamic or _masked_index(f, args)):
        results = trace.inference.results(f, node_args, node_kwargs, metas, trace.params)
        if results is not None:
            node = Node(f.name, node_args, node_kwargs, results.fresh, written, results.written)
            return node, results.ints
    return Node(f.name, node_args, node_kwargs, (), written, (), dynamic=True), ()


def _link_backward(forward: dict[int, int], number: int) -> int:
    """Link forward and backward ops by autograd's sequence numbers.

    Args:
        forward: autograd's sequence number -> op of the trace; a forward op is added to it.
        number: the op's number.

    Returns:
        For a backward op the number of its forward op; -1 for any other op.
    """
    autograd_node = torch._C._current_autograd_node()
    if autograd_node is None:
        if torch.is_grad_enabled():
            forward.setdefault(torch.autograd._get_sequence_nr() - 1, number)
        return -1
    return forward.get(autograd_node._sequence_nr(), -1)


def _masked_index(f: OpFacts, args: tuple[Any, ...]) -> bool:
    """Return whether an index contains a mask, so that the result's size depends on values."""
    if f.name not in MASKABLE:
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
