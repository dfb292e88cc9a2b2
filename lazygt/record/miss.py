"""Misses: an op that the trie does not know yet at this place becomes a new step."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref
from lazygt.graph.ops import MASKABLE, OpFacts
from lazygt.graph.source import user_call_site
from lazygt.record.host_values import foreign
from lazygt.record.tensor import is_lazy, meta_of
from lazygt.record.trace import Trace, written_tensors
from lazygt.record.trie import TrieNode

#: Types of Python numbers that are given to a plan when it runs.
NUMBERS = frozenset({int, float, bool, complex})


def on_miss(
    trace: Trace,
    key: tuple[Any, ...],
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> TrieNode:
    """Infer an op's results, and remember it below the step that the trace has reached.

    Raises:
        Exception: torch's own, when the op can't take such arguments.
    """
    node, numbers = _node(trace, f, args, kwargs)
    trace.note_miss(key, f, user_call_site(1))
    step = TrieNode(trace.step, key, node, facts=f)
    step.numbers = numbers
    step.forward = _link_backward(trace.forward_ops, step.ops - 1)
    step.backward = torch._C._current_autograd_node() is not None
    step.itself = f.outputs == ("w",) and f.writes == (0,) and node.written == (meta_of(args[0]),)
    if f.views:
        step.make = None
    return trace.trie.add(step, trace.bytes_alive)


def _node(
    trace: Trace, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Node, tuple[int, ...]]:
    """The op with its results' metas, and the ints it returns; dynamic where only values tell."""
    metas: dict[int, TensorMeta] = {}
    params = itertools.count(trace.step.params)

    def template(a: Any, hoist: int) -> Arg:
        if isinstance(a, torch.Tensor):
            lazy = a if is_lazy(a) else foreign(trace.owner, a, f)
            index = trace.index_of(lazy)
            metas[index] = meta_of(lazy)
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
        number: of the op.

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
    """Whether an index contains a mask, so that the result's size depends on its values."""
    if f.name not in MASKABLE:
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
