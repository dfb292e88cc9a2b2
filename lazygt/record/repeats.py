"""Repeats: a new step that is one of an earlier trace in other sizes.

Where the ints of one call differ from those of every call before (a smaller batch, another slice),
the trie has nothing below it, though most of what follows is known: the same ops take the same
values. A new step remembers the step that it repeats, and what comes after it is looked up there.
What is taken over is how the op is called; what its results look like is inferred anew.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Ref
from lazygt.graph.ops import OpFacts
from lazygt.record.tensor import graph_meta, is_lazy
from lazygt.record.trie import TrieNode

#: So many steps that follow one are looked at, to find one that differs in its ints alone.
_MOST_TRIED = 4

Call = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]


def repeated_op(parent: TrieNode, key: tuple[Any, ...], f: OpFacts) -> tuple[TrieNode, Call] | None:
    """The op that a new one below ``parent`` repeats, and how the new one is called."""
    before = parent.repeats or parent
    known = before.children.get(key)
    tried = [known] if known is not None else islice(before.children.values(), _MOST_TRIED)
    for child in tried:
        step = child.repeats or child
        if step.facts is f and step.node is not None and _counts_alike(step, parent):
            call = _call(step.node, step.key, key)
            if call is not None:
                return step, call
    return None


def repeated_input(parent: TrieNode, meta: TensorMeta) -> TrieNode | None:
    """The input that a new one below ``parent`` repeats."""
    for child in islice((parent.repeats or parent).children.values(), _MOST_TRIED):
        step = child.repeats or child
        shown = step.input
        if shown is not None and shown.dtype is meta.dtype and len(shown.shape) == len(meta.shape):
            return step
    return None


def repeated_internal(parent: TrieNode, node: Node) -> TrieNode | None:
    """The op that one which the user did not write repeats, most likely."""
    for child in islice((parent.repeats or parent).children.values(), _MOST_TRIED):
        step = child.repeats or child
        if step.node is not None and step.node.op == node.op:
            return step
    return None


def metas_of(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, TensorMeta] | None:
    """The metas of the values that a node reads, as it is called; None where a CPU tensor is among
    the arguments."""
    metas: dict[int, TensorMeta] = {}
    for arg, given in zip(node.args, args, strict=True):
        if not _add_metas(arg, given, metas):
            return None
    for name, arg in node.kwargs:
        if not _add_metas(arg, kwargs[name], metas):
            return None
    return metas


def _add_metas(arg: Arg, given: Any, metas: dict[int, TensorMeta]) -> bool:
    kind = type(arg)
    if kind is Ref:
        if not is_lazy(given):
            return False
        metas[arg.index] = graph_meta(given)
        return True
    if kind is not tuple:
        return True
    return all(_add_metas(item, one, metas) for item, one in zip(arg, given, strict=True))


def _counts_alike(step: TrieNode, parent: TrieNode) -> bool:
    """Whether values, numbers and inputs have the same numbers in both traces."""
    before = step.parent
    return before is not None and (before.values, before.params, before.inputs) == (
        parent.values, parent.params, parent.inputs)  # fmt: skip


def _call(node: Node, known: tuple[Any, ...], key: tuple[Any, ...]) -> Call | None:
    """A node's arguments with the ints of another key; None where the keys differ in more.

    Args:
        known: the node's own key.
    """
    if known == key:
        return node.args, node.kwargs
    if len(known) != len(key):
        return None
    pairs = zip(known[1:], key[1:], strict=True)
    args = [_argument(arg, *next(pairs)) for arg in node.args]
    kwargs = []
    for name, arg in node.kwargs:
        if next(pairs) != (name, name):
            return None
        kwargs.append((name, _argument(arg, *next(pairs))))
    if any(arg is _OTHER for arg in (*args, *dict(kwargs).values())):
        return None
    return tuple(args), tuple(kwargs)


_OTHER = object()


def _argument(arg: Arg, old: Any, new: Any) -> Arg:
    """What a new key says in the place of an argument; ``_OTHER``: more than other ints.

    Args:
        old: what the argument's own key says.
    """
    if type(old) is type(new) and old == new:
        return arg
    kind = type(arg)
    if kind is int and type(new) is int:
        return new
    if kind is tuple and type(new) is tuple and len(arg) == len(new) and _are_ints(arg + new):
        return new
    return _OTHER


def _are_ints(items: tuple[Any, ...]) -> bool:
    return all(type(item) is int for item in items)
