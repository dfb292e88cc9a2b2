"""Misses: an op that the trie does not know at this place becomes a new step."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref
from lazygt.graph.ops import MASKABLE, OpFacts
from lazygt.graph.source import user_call_site
from lazygt.record.ahead import go_ahead
from lazygt.record.moving import known_step, moving, new_step
from lazygt.record.repeats import call_of, metas_of
from lazygt.record.tensor import graph_meta, is_lazy
from lazygt.record.trace import Trace, written_tensors
from lazygt.record.trie import TrieNode

#: Types of Python numbers that a plan gets when it runs.
NUMBERS = frozenset({int, float, bool, complex})


def on_miss(
    trace: Trace,
    key: tuple[Any, ...],
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> TrieNode:
    """Infer an op's results, and add a step below the one that the trace has reached.

    Raises:
        Exception: torch's own, when the op can't take such arguments.
    """
    change = None
    if f.position is not None and not kwargs and _all_lazy(args):
        change = moving(trace, f, key, graph_meta(args[0]))
    if change is not None:
        known = known_step(trace, change)
        if known is not None:
            return known
        key = change.key
    repeated = trace.repeat.op(trace.step, key, f)
    step = None if repeated is None else trace.repeat.same(trace.step, key, repeated)
    if step is not None:
        trace.note_miss(key, f, user_call_site(1))
    elif change is not None:
        step = new_step(trace, change, _metas(trace, args))
    else:
        step = _step(trace, key, f, args, kwargs, repeated)
    step.forward = _link_backward(trace.forward_ops, step.ops - 1)
    step.backward = torch._C._current_autograd_node() is not None
    trace.repeat.follow(step, repeated)
    if step.backward and trace.repeat.step is not None:  # its forward op need not have been a miss
        step.forward = trace.repeat.step.forward
    trace.trie.add(step, trace.bytes_alive)
    go_ahead(trace)
    return step


def _all_lazy(args: tuple[Any, ...]) -> bool:
    """Return whether no tensor of another device is among the arguments."""
    return all(is_lazy(a) for a in args if isinstance(a, torch.Tensor))


def _metas(trace: Trace, args: tuple[Any, ...]) -> dict[int, TensorMeta]:
    """Return the metas of the tensors among the arguments."""
    tensors = [a for a in args if is_lazy(a)]
    return {trace.index_of(t): graph_meta(t) for t in tensors}


def _step(
    trace: Trace,
    key: tuple[Any, ...],
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    repeated: TrieNode | None,
) -> TrieNode:
    again = None if repeated is None else _again(trace, key, f, repeated, args, kwargs)
    node, numbers = again or _node(trace, f, args, kwargs)
    trace.note_miss(key, f, user_call_site(1))
    step = TrieNode(trace.step, key, node, facts=f)
    step.numbers = numbers
    target = f.outputs == ("w",) and f.writes == (0,)
    step.itself = target and node.written == (graph_meta(args[0]),)
    if f.views:
        step.make = None
    return step


def _again(
    trace: Trace,
    key: tuple[Any, ...],
    f: OpFacts,
    step: TrieNode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Node, tuple[int, ...]] | None:
    """Return the same as ``_node`` for an op known in other sizes; None: it must be inferred.

    Args:
        step: the counterpart of this op in other sizes.
    """
    known, call = step.node, call_of(step, key)
    if known is None or call is None:
        return None
    other_form = len(known.args) != len(args) or len(known.kwargs) != len(kwargs)
    if other_form or known.dynamic or f.dynamic or f.name in MASKABLE:
        return None
    metas = metas_of(known, args, kwargs)
    if metas is None:
        return None
    results = trace.inference.results(f, *call, metas, trace.params)
    if results is None:
        return None
    node = Node(f.name, *call, results.fresh, known.writes, results.written)
    return node, results.ints


def _node(
    trace: Trace, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Node, tuple[int, ...]]:
    """Return the op with its results' metas, and its ints; dynamic where only values tell."""
    metas: dict[int, TensorMeta] = {}
    params = itertools.count(trace.step.params)

    def template(a: Any, hoist: int) -> Arg:
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
            return tuple(template(item, 1 if hoist == 2 else 0) for item in a)
        return DEVICE if isinstance(a, torch.device) else a

    targs = tuple(template(a, hoist) for a, hoist in zip(args, f.hoist, strict=False))
    tkwargs = tuple((name, template(a, f.hoist_named.get(name, 0))) for name, a in kwargs.items())
    targets = tuple([trace.index_of(t) for t in written_tensors(f, args, kwargs)])
    if not (f.dynamic or _masked_index(f, args)):
        results = trace.inference.results(f, targs, tkwargs, metas, trace.params)
        if results is not None:
            node = Node(f.name, targs, tkwargs, results.fresh, targets, results.written)
            return node, results.ints
    return Node(f.name, targs, tkwargs, (), targets, (), dynamic=True), ()


def _link_backward(forward: dict[int, int], number: int) -> int:
    """Tie a forward op to its autograd node, or a backward op to its forward op.

    Args:
        forward: autograd's sequence number -> op of the trace.
        number: the op's number.

    Returns:
        The forward op of a backward op, or -1.
    """
    running = torch._C._current_autograd_node()
    if running is None:
        if torch.is_grad_enabled():
            forward.setdefault(torch.autograd._get_sequence_nr() - 1, number)
        return -1
    return forward.get(running._sequence_nr(), -1)


def _masked_index(f: OpFacts, args: tuple[Any, ...]) -> bool:
    """Return whether an index contains a mask, so that the result's size depends on values."""
    if f.name not in MASKABLE:
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
