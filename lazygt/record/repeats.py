"""Repeats: a new step that is one of an earlier trace in other sizes.

Where the ints of one call differ from those of every call before (a smaller batch, a longer
sequence), the trie has nothing below it, though most of what follows is known: the same ops take
the same values. So a trace that has come to a new step follows the earlier one that goes on like
it. What is taken over is how ops are called; what their results look like is inferred anew, unless
all that an op takes looks as it did there: then the step is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Ref
from lazygt.graph.ops import OpFacts
from lazygt.record.tensor import graph_meta, is_lazy
from lazygt.record.trie import TrieNode

#: So many steps that follow one are looked at, to find one that differs in its ints alone: the
#: newest and the oldest ones.
_NEWEST, _OLDEST = 4, 2

Call = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]
#: Whether a step of an earlier trace is the new one but for sizes.
Fits = Callable[[TrieNode], bool]


class Repeat:
    """The earlier trace that one is in other sizes, followed step by step.

    Attributes:
        step: its step where this trace has come to; None: there is none like it.
    """

    __slots__ = ("_changed", "_here", "step")

    def __init__(self) -> None:
        self.step: TrieNode | None = None
        #: up to where this trace was followed
        self._here: TrieNode | None = None
        #: numbers of the values that look otherwise than there
        self._changed: set[int] = set()

    def op(self, parent: TrieNode, key: tuple[Any, ...], f: OpFacts) -> TrieNode | None:
        """The op that a new one below ``parent`` is in other sizes."""
        return self._next(
            parent, key, lambda step: step.facts is f and call_of(step, key) is not None
        )

    def input(self, parent: TrieNode, key: Any, meta: TensorMeta) -> TrieNode | None:
        """The input that a new one below ``parent`` is in other sizes."""
        return self._next(parent, key, lambda step: _shows_alike(step, meta))

    def internal(self, parent: TrieNode, key: Any, node: Node) -> TrieNode | None:
        """The op that one which the user did not write is in other sizes, most likely."""
        return self._next(parent, key, lambda step: _does(step, node))

    def same(self, parent: TrieNode, key: tuple[Any, ...], step: TrieNode) -> TrieNode | None:
        """The new step, where all that it takes looks as it did in ``step``; else None.

        Args:
            step: what ``op`` gave.
        """
        node = step.node
        assert node is not None
        if step.key != key or not self._changed.isdisjoint(node.refs()):
            return None
        return step.again(parent)

    def follow(self, new: TrieNode, step: TrieNode | None) -> None:
        """This trace has a new step, which is ``step`` of the earlier one in other sizes."""
        self._here = new
        if step is not None and _counts(new) != _counts(step):
            step = None
        if step is not None:
            _note_changes(new, step, self._changed)
        self.step = step

    def _next(self, parent: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
        if self._here is parent:
            if self.step is None:
                return None
            step = _below(self.step, key, fits)
            if step is not None:
                return step
        return self._anew(parent, key, fits)

    def _anew(self, parent: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
        """Look for an earlier trace that goes on like this one, where the way forked last."""
        way: list[TrieNode] = []
        fork = parent
        while fork.parent is not None and len(fork.children) <= len(way[-1:]):
            way.append(fork)
            fork = fork.parent
        way.reverse()
        for begin in _tried(fork, way[:1]):
            changed: set[int] = set()
            step = begin if not way else _along(begin, way, changed)
            if step is not None and way:
                step = _below(step, key, fits)
            elif not fits(begin):
                step = None
            if step is not None:
                self._changed = changed
                return step
        return None


def _tried(fork: TrieNode, besides: list[TrieNode]) -> Iterator[TrieNode]:
    """The newest and the oldest steps below a fork."""
    children = fork.children.values()
    some = [*islice(reversed(children), _NEWEST), *islice(children, _OLDEST)]
    return (step for step in dict.fromkeys(some) if step not in besides)


def _along(step: TrieNode, way: list[TrieNode], changed: set[int]) -> TrieNode | None:
    """The step where a way ends that begins with ``step`` and is, in other sizes, this one.

    Args:
        changed: gets the numbers of the values that look otherwise.
    """
    other: TrieNode | None = step
    for number, own in enumerate(way):
        if number:
            assert other is not None
            other = _below(other, own.key, _fits(own))
        elif not _fits(own)(step):
            return None
        if other is None or _counts(other) != _counts(own):
            return None
        _note_changes(own, other, changed)
    return other


def _below(step: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
    """The step below one that has this key, or else one that fits."""
    known = step.children.get(key)
    if known is not None:
        return known
    return next((child for child in _tried(step, []) if fits(child)), None)


def _fits(own: TrieNode) -> Fits:
    """Whether a step is, perhaps, one of another trace in other sizes."""
    node, meta = own.node, own.input
    if node is not None:
        return lambda step: _does(step, node)
    assert meta is not None
    return lambda step: _shows_alike(step, meta)


def _does(step: TrieNode, node: Node) -> bool:
    return step.node is not None and step.node.op == node.op


def _shows_alike(step: TrieNode, meta: TensorMeta) -> bool:
    shown = step.input
    return shown is not None and shown.dtype is meta.dtype and len(shown.shape) == len(meta.shape)


def _counts(step: TrieNode) -> tuple[int, int, int]:
    """How many values, numbers and inputs there are up to a step."""
    return step.values, step.params, step.inputs


def _note_changes(new: TrieNode, old: TrieNode, changed: set[int]) -> None:
    """Add the numbers of the values that look otherwise in a new step than in an old one."""
    if new.node is None:
        if new.input != old.input:
            changed.add(-new.inputs)
    elif new.node is not old.node:
        assert old.node is not None
        pairs = zip(new.node.results, old.node.results, strict=True)
        changed.update(
            [number for number, (a, b) in enumerate(pairs, new.first) if a is not b and a != b]
        )


def call_of(step: TrieNode, key: tuple[Any, ...]) -> Call | None:
    """How an op with this key is called, which a step is but for ints; None: it is another one."""
    return None if step.node is None else _call(step.node, step.key, key)


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
