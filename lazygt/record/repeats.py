"""Traces that repeat an earlier one in other sizes, followed step by step.

Where the ints of a call differ from those of every earlier call (a smaller batch, a longer
sequence), the trie has nothing below the new step, though most of the rest is known: the same ops
take the same values. So a trace that adds a step follows an earlier trace with the same ops. The
ops' calls are copied from there; the metas of their results are inferred again, unless all operands
of an op have the same metas as in the earlier trace: then the step is copied too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Ref
from lazygt.graph.ops import OpFacts
from lazygt.record.tensor import graph_meta, is_lazy
from lazygt.record.trie import TraceTrie, TrieNode

#: Numbers of the newest and the oldest children of a step that are searched for a counterpart: a
#: step that differs only in ints.
_NEWEST, _OLDEST = 4, 2
#: Number of steps added ahead at first: twice as many whenever all were reached, and far less when
#: they were not.
_FIRST_PREFETCH = 16

Call = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]
#: Predicate of a step of an earlier trace: it equals the new one but for sizes.
Fits = Callable[[TrieNode], bool]


class Differences:
    """Differences between a trace and the earlier one that it repeats in other sizes.

    Attributes:
        values: number of each value with another meta -> its meta in this trace.
        sizes: old size -> new size in the shapes of these values; None: several new sizes.
        resized: the old sizes that have another new size, or several.
    """

    def __init__(self) -> None:
        self.values: dict[int, TensorMeta | None] = {}
        self.sizes: dict[int, int | None] = {}
        self.resized: set[int] = set()

    def note(self, new: TrieNode, old: TrieNode) -> None:
        """Add the differences between a new step and its counterpart."""
        if new.node is None:
            self._note_value(-new.inputs, new.input, old.input)
        elif new.node is not old.node:
            assert old.node is not None
            pairs = zip(new.node.results, old.node.results, strict=True)
            for number, (new_meta, old_meta) in enumerate(pairs, new.first):
                self._note_value(number, new_meta, old_meta)

    def forget_after(self, step: TrieNode) -> None:
        """Forget the differences of values that come after a step."""
        reached = range(-step.inputs, step.values)
        self.values = {value: meta for value, meta in self.values.items() if value in reached}

    def _note_value(
        self, number: int, new_meta: TensorMeta | None, old_meta: TensorMeta | None
    ) -> None:
        """Add the differences between the metas of one value in the new and the old trace."""
        if new_meta is old_meta:
            return
        self.values[number] = new_meta
        if new_meta is None or old_meta is None:
            return
        for new_size, old_size in zip(new_meta.shape, old_meta.shape, strict=False):
            if self.sizes.setdefault(old_size, new_size) != new_size:
                self.sizes[old_size] = None
            if self.sizes[old_size] != old_size:
                self.resized.add(old_size)


class Repeat:
    """Earlier trace that a new one repeats in other sizes, followed step by step.

    Attributes:
        last_step: the last step of this trace that was followed.
        counterpart: the step of the earlier trace that ``last_step`` repeats; None: there is none.
        differences: differences from the earlier trace.
        prefetched: (step, counterpart) of the step that others were prefetched after, and of these.
        prefetch_count: number of steps to prefetch.
    """

    __slots__ = (
        "_trie", "counterpart", "differences", "last_step", "prefetch_count", "prefetched",
    )  # fmt: skip

    def __init__(self, trie: TraceTrie) -> None:
        self.last_step: TrieNode | None = None
        self.counterpart: TrieNode | None = None
        self.prefetched: list[tuple[TrieNode, TrieNode]] = []
        self.prefetch_count = _FIRST_PREFETCH
        self._trie = trie
        self.differences = Differences()

    def op(self, parent: TrieNode, key: tuple[Any, ...], f: OpFacts) -> TrieNode | None:
        """Return the earlier trace's step that a new op below ``parent`` repeats, or None."""
        return self._next(
            parent, key, lambda step: step.facts is f and call_of(step, key) is not None
        )

    def input(self, parent: TrieNode, key: Any, meta: TensorMeta) -> TrieNode | None:
        """Return the earlier trace's step that a new input below ``parent`` repeats, or None."""
        return self._next(parent, key, lambda step: _has_same_rank_and_dtype(step, meta))

    def internal(self, parent: TrieNode, key: Any, node: Node) -> TrieNode | None:
        """Return the step that an op which the user did not write most likely repeats, or None."""
        return self._next(parent, key, lambda step: _has_same_op(step, node))

    def same(self, parent: TrieNode, key: tuple[Any, ...], step: TrieNode) -> TrieNode | None:
        """Return a copy of ``step`` below ``parent`` if its operands' metas are equal; else None.

        Args:
            step: the result of ``op``.
        """
        node = step.node
        assert node is not None
        if step.key != key or not self.differences.values.keys().isdisjoint(node.refs()):
            return None
        return step.copy_below(parent)

    def follow(self, new: TrieNode, step: TrieNode | None) -> None:
        """Set the last step of this trace and its counterpart, if both have equal counts."""
        if step is None or counts(new) != counts(step):
            self.last_step, self.counterpart = new, None
        else:
            self.go_on(new, step)

    def go_on(self, new: TrieNode, step: TrieNode) -> None:
        """Set the last step of this trace and its counterpart, which has equal counts."""
        self.last_step, self.counterpart = new, step
        if new.node is not step.node or new.input is not step.input:
            self.differences.note(new, step)

    def _next(self, parent: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
        """Return the counterpart of a new step, in the followed trace or in another."""
        self._trie.reached(parent)
        self._advance_to(parent)
        if self.last_step is parent:
            if self.counterpart is None:
                return None
            step = _matching_child(self.counterpart, key, fits)
            if step is not None:
                return step
        return self._search_last_fork(parent, key, fits)

    def _advance_to(self, parent: TrieNode) -> None:
        """Note that this trace has come to ``parent``, perhaps by prefetched steps.

        The number of steps to prefetch doubles if all were reached, and is quartered otherwise.
        """
        if not self.prefetched:
            return
        all_reached = self.last_step is parent
        self.prefetch_count = 2 * self.prefetch_count if all_reached else self.prefetch_count // 4
        position = parent.depth - self.prefetched[0][0].depth
        if (
            not all_reached
            and 0 <= position < len(self.prefetched)
            and self.prefetched[position][0] is parent
        ):
            self.last_step, self.counterpart = self.prefetched[position]
            self.differences.forget_after(parent)
        self.prefetched = []

    def _search_last_fork(self, parent: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
        """Search the trie's last fork for another earlier trace, and return the counterpart."""
        path: list[TrieNode] = []
        fork = parent
        while fork.parent is not None and len(fork.children) <= len(path[-1:]):
            path.append(fork)
            fork = fork.parent
        path.reverse()
        for candidate in _candidates(fork, path[:1]):
            differences = Differences()
            step = candidate if not path else _follow_path(candidate, path, differences)
            if step is not None and path:
                step = _matching_child(step, key, fits)
            elif not fits(candidate):
                step = None
            if step is not None:
                self.differences = differences
                return step
        return None


def _candidates(fork: TrieNode, excluded: list[TrieNode]) -> Iterator[TrieNode]:
    """Yield the newest and the oldest steps below a fork."""
    children = fork.children.values()
    candidates = [*islice(reversed(children), _NEWEST), *islice(children, _OLDEST)]
    return (step for step in dict.fromkeys(candidates) if step not in excluded)


def _follow_path(step: TrieNode, path: list[TrieNode], differences: Differences) -> TrieNode | None:
    """Return the end of the path from ``step`` that is ``path`` in other sizes, or None.

    Args:
        differences: receives the differences between the paths.
    """
    other: TrieNode | None = step
    for number, expected in enumerate(path):
        if number:
            assert other is not None
            other = _matching_child(other, expected.key, _counterpart_predicate(expected))
        elif not _counterpart_predicate(expected)(step):
            return None
        if other is None or counts(other) != counts(expected):
            return None
        differences.note(expected, other)
    return other


def _matching_child(step: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
    """Return the step below ``step`` with this key, else one that satisfies ``fits``, or None."""
    exact = step.children.get(key)
    if exact is not None:
        return exact
    return next((child for child in _candidates(step, []) if fits(child)), None)


def _counterpart_predicate(new: TrieNode) -> Fits:
    """Return a predicate of steps: the step may be the counterpart of ``new``."""
    node, meta = new.node, new.input
    if node is not None:
        return lambda step: _has_same_op(step, node)
    assert meta is not None
    return lambda step: _has_same_rank_and_dtype(step, meta)


def _has_same_op(step: TrieNode, node: Node) -> bool:
    """Return whether a step is a call of the node's op."""
    return step.node is not None and step.node.op == node.op


def _has_same_rank_and_dtype(step: TrieNode, meta: TensorMeta) -> bool:
    """Return whether a step is an input with the meta's number of dims and dtype."""
    input_meta = step.input
    return (
        input_meta is not None
        and input_meta.dtype is meta.dtype
        and len(input_meta.shape) == len(meta.shape)
    )


def counts(step: TrieNode) -> tuple[int, int, int]:
    """Return the numbers of values, run-time numbers and inputs up to a step."""
    return step.values, step.params, step.inputs


def call_of(step: TrieNode, key: tuple[Any, ...]) -> Call | None:
    """Return the call with this key if it differs from the step's in ints only; else None."""
    return None if step.node is None else _call(step.node, step.key, key)


def metas_of(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, TensorMeta] | None:
    """Return the metas of a node's operands; None if a CPU tensor is among the arguments."""
    metas: dict[int, TensorMeta] = {}
    for arg, value in zip(node.args, args, strict=True):
        if not _add_metas(arg, value, metas):
            return None
    for name, arg in node.kwargs:
        if not _add_metas(arg, kwargs[name], metas):
            return None
    return metas


def _add_metas(arg: Arg, value: Any, metas: dict[int, TensorMeta]) -> bool:
    """Add the metas of an argument's tensors; return False for a CPU tensor."""
    kind = type(arg)
    if kind is Ref:
        if not is_lazy(value):
            return False
        metas[arg.index] = graph_meta(value)
        return True
    if kind is not tuple:
        return True
    return all(_add_metas(item, inner, metas) for item, inner in zip(arg, value, strict=True))


def _call(node: Node, known: tuple[Any, ...], key: tuple[Any, ...]) -> Call | None:
    """Return a node's (args, kwargs) with the ints of another key; None if more than ints differs.

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
    if any(arg is _MISMATCH for arg in (*args, *dict(kwargs).values())):
        return None
    return tuple(args), tuple(kwargs)


_MISMATCH = object()


def _argument(arg: Arg, old: Any, new: Any) -> Arg:
    """Return an argument with the ints of a new key; ``_MISMATCH``: more than ints differs.

    Args:
        old, new: the argument's elements of the old and the new key.
    """
    if type(old) is type(new) and old == new:
        return arg
    kind = type(arg)
    if kind is int and type(new) is int:
        return new
    if kind is tuple and type(new) is tuple and len(arg) == len(new) and _are_ints(arg + new):
        return new
    return _MISMATCH


def _are_ints(items: tuple[Any, ...]) -> bool:
    return all(type(item) is int for item in items)
