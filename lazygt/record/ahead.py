"""Prefetch of trie steps: a trace that repeats an earlier one gets its next steps in one go.

A trace that repeats an earlier one in other sizes (``record.repeats``) most likely continues like
it. So the steps that followed in the earlier trace are added to the trie ahead of time, with the
sizes substituted and the results inferred by the rules of ``graph.shapes``. The steps equal those
that recording would add, and each is reached only by its own key, so a wrong guess is harmless.
Steps that the trace does not reach are removed again (``TraceTrie.reached``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Protocol

from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import Arg, Node, Param
from lazygt.graph.ops import MASKABLE
from lazygt.graph.sizes import size_positions, sizes_in
from lazygt.record.infer import SAMPLES, Inference
from lazygt.record.repeats import Call, Differences, Repeat
from lazygt.record.tensor import NATIVE
from lazygt.record.trie import TraceTrie, TrieNode

#: Size in the earlier trace -> size in this one; None: it corresponds to several.
Sizes = Mapping[int, int | None]


class Recording(Protocol):
    """Interface of a trace, as far as this module needs it."""

    inference: Inference
    trie: TraceTrie

    @property
    def repeat(self) -> Repeat:
        """The earlier trace that this one repeats in other sizes."""


def prefetch_steps(trace: Recording) -> None:
    """Add the steps that followed the counterpart of the trace's last step in the earlier trace.

    The prefetch ends at a fork, at a step with uncertain results, and after
    ``prefetch_count`` steps.
    """
    repeat, trie, inference = trace.repeat, trace.trie, trace.inference
    last, counterpart = repeat.last_step, repeat.counterpart
    if last is None or counterpart is None:
        return
    prefetched = [(last, counterpart)]
    while len(prefetched) <= repeat.prefetch_count and len(counterpart.children) == 1:
        (old,) = counterpart.children.values()
        new = _next_counterpart(inference, repeat.differences, last, old)
        if new is None or not trie.add_ahead(new):
            break
        repeat.go_on(new, old)
        prefetched.append((new, old))
        last, counterpart = new, old
    if len(prefetched) > 1:
        repeat.prefetched = prefetched
        if NATIVE is not None:
            NATIVE.add_again(prefetched)


def _next_counterpart(
    inference: Inference, differences: Differences, parent: TrieNode, old: TrieNode
) -> TrieNode | None:
    """Return the copy of step ``old`` below ``parent``; None: only recording can tell."""
    node = old.node
    if old.placed:
        return None
    if node is None:
        assert old.input is not None
        if differences.resized.isdisjoint(old.input.shape):
            return old.copy_below(parent)
        meta = _resized(old.input, differences.sizes)
        return None if meta is None else TrieNode(parent, meta, input=meta)
    if node.dynamic:
        return None
    same_call = differences.resized.isdisjoint(sizes_in(node))
    if same_call and differences.values.keys().isdisjoint(node.refs()):
        new = old.copy_below(parent)
    else:
        inferred = _inferred(inference, differences, parent, old, same_call)
        if inferred is None:
            return None
        new = inferred
    new.forward, new.backward = old.forward, old.backward
    return new


def _inferred(
    inference: Inference,
    differences: Differences,
    parent: TrieNode,
    old: TrieNode,
    same_call: bool,
) -> TrieNode | None:
    """Return the copy of an op whose results may differ, inferred by rule; None: none applies."""
    node, f, before = old.node, old.facts, old.parent
    assert node is not None
    assert before is not None
    if f is None or old.moves or f.dynamic or f.name in MASKABLE:
        return None
    key, call = old.key, (node.args, node.kwargs)
    if not same_call:
        resized = _resized_call(node, key, differences.sizes)
        if resized is None:
            return None
        key, call = resized
    samples = [] if old.params == before.params else _samples(node, old.key)
    refs, values = node.refs(), differences.values
    operands = [values.get(ref, meta) for ref, meta in zip(refs, old.note_operands(), strict=True)]
    if samples is None or NoneType in map(type, operands):
        return None
    metas: dict[int, Any] = dict(zip(refs, operands, strict=True))
    results = inference.by_rule(f, *call, metas, samples)
    if results is None:
        return None
    fresh, written, numbers = results
    if len(fresh) != len(node.fresh) or len(written) != len(node.written):
        return None
    step = old.copy_below(parent)
    step.operands = tuple(operands)
    if same_call and results == (node.fresh, node.written, old.numbers):
        return step
    step.key, step.node = key, node.resized(*call, fresh, written)
    step.numbers, step.view_ops = numbers, None
    step.itself = old.itself and written == (operands[refs.index(node.writes[0])],)
    if old.make is not None:
        step.make = fresh[0]
    return step


def _resized(meta: TensorMeta, sizes: Sizes) -> TensorMeta | None:
    """Return a tensor's meta with new sizes substituted; None if a size is ambiguous."""
    shape = tuple([sizes.get(size, size) for size in meta.shape])
    if None in shape or not meta.plain:
        return None
    return intern(shape, contiguous_stride(shape), meta.dtype)  # type: ignore[arg-type]


def _resized_call(
    node: Node, key: tuple[Any, ...], sizes: Sizes
) -> tuple[tuple[Any, ...], Call] | None:
    """Return a node's (key, (args, kwargs)) with new sizes; None if a size is ambiguous.

    Args:
        key: the key of the node's step: (facts, *args, name, value, ...).
        sizes: old size -> new size.
    """
    size_arguments = size_positions(node.op)
    args, kwargs, new_key = list(node.args), list(node.kwargs), list(key)
    for position, arg in enumerate(node.args):
        new = _argument(arg, sizes) if position in size_arguments else arg
        if new is arg:
            continue
        if new is None or new_key[1 + position] != arg:
            return None
        args[position] = new_key[1 + position] = new
    for number, (name, arg) in enumerate(node.kwargs):
        new = _argument(arg, sizes) if name in size_arguments else arg
        if new is arg:
            continue
        position = 1 + len(args) + 2 * number
        if new is None or new_key[position : position + 2] != [name, arg]:
            return None
        kwargs[number], new_key[position + 1] = (name, new), new
    return tuple(new_key), (tuple(args), tuple(kwargs))


def _argument(arg: Arg, sizes: Sizes) -> Arg:
    """Return an argument with new sizes, itself if it has none; None if a size is ambiguous."""
    if type(arg) is int:
        return sizes.get(arg, arg)
    if type(arg) is not tuple or not any(type(item) is int and item in sizes for item in arg):
        return arg
    items = tuple([_argument(item, sizes) for item in arg])
    if items == arg:
        return arg
    return None if None in items and None not in arg else items


def _samples(node: Node, key: tuple[Any, ...]) -> list[Any] | None:
    """Return a sample value for each run-time number of an op; None if a type is unknown."""
    types: dict[int, Any] = {}
    key_items = iter(key[1:])
    for arg in node.args:
        _note_types(arg, next(key_items, None), types)
    for _, arg in node.kwargs:
        next(key_items, None)
        _note_types(arg, next(key_items, None), types)
    if not all(python_type in SAMPLES for python_type in types.values()):
        return None
    count = max(types, default=-1) + 1
    return [SAMPLES[types[number]] if number in types else None for number in range(count)]


def _note_types(arg: Arg, key_item: Any, types: dict[int, Any]) -> None:
    """Add the Python type of each run-time number of an argument: number -> type."""
    if type(arg) is Param:
        types[arg.index] = key_item
    elif type(arg) is tuple and type(key_item) is tuple:
        for item, inner in zip(arg, key_item, strict=False):
            _note_types(item, inner, types)
