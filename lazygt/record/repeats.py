"""Repeats: traces that do the ops of an earlier one in other sizes.

Where the ints of one call differ from those of every call before (a smaller batch, a longer
sequence), the trie has nothing below it, though most of the rest is known: the same ops take the
same values. So a trace that has come to a new step follows the earlier one that goes on like it.
The calls of ops are taken over; the metas of their results are inferred anew, unless all operands
of an op have the same metas as there: then the step is the same.
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

#: Numbers of the newest and the oldest steps below one that are searched for a step that differs in
#: its ints alone.
_NEWEST, _OLDEST = 4, 2
#: Number of steps added ahead at first: twice as many whenever all were reached, and far less when
#: they were not.
_WANTED = 16

Call = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]
#: Predicate of a step of an earlier trace: it equals the new one but for sizes.
Fits = Callable[[TrieNode], bool]


class Differences:
    """Differences between a trace and the earlier one that it repeats in other sizes.

    Attributes:
        values: numbers of the values with other metas.
        sizes: size in their shapes there -> here; None: it corresponds to several.
        resized: those of these sizes that are others here, or several.
    """

    def __init__(self) -> None:
        self.values: set[int] = set()
        self.sizes: dict[int, int | None] = {}
        self.resized: set[int] = set()

    def note(self, new: TrieNode, old: TrieNode) -> None:
        """Add the differences of a new step."""
        if new.node is None:
            self._note(-new.inputs, new.input, old.input)
        elif new.node is not old.node:
            assert old.node is not None
            pairs = zip(new.node.results, old.node.results, strict=True)
            for number, (here, there) in enumerate(pairs, new.first):
                self._note(number, here, there)

    def _note(self, number: int, here: TensorMeta | None, there: TensorMeta | None) -> None:
        if here is there or here == there:
            return
        self.values.add(number)
        if here is None or there is None:
            return
        for size, other in zip(here.shape, there.shape, strict=False):
            if self.sizes.setdefault(other, size) != size:
                self.sizes[other] = None
            if self.sizes[other] != other:
                self.resized.add(other)


class Repeat:
    """Earlier trace that a new one repeats in other sizes, followed step by step.

    Attributes:
        here: the last step of this trace that was followed.
        step: its counterpart in the earlier trace; None: there is none.
        differences: differences from the earlier trace.
        ahead: (here, step) of the step from which others were added ahead, and of these.
        wanted: number of steps to add.
    """

    __slots__ = ("_metas", "_trie", "ahead", "differences", "here", "step", "wanted")

    def __init__(self, trie: TraceTrie) -> None:
        self.here: TrieNode | None = None
        self.step: TrieNode | None = None
        self.ahead: list[tuple[TrieNode, TrieNode]] = []
        self.wanted = _WANTED
        self._trie = trie
        self.differences = Differences()
        #: metas of this trace's values, once they are needed
        self._metas: dict[int, TensorMeta | None] | None = None

    def op(self, parent: TrieNode, key: tuple[Any, ...], f: OpFacts) -> TrieNode | None:
        """Return the counterpart, in other sizes, of a new op below ``parent``."""
        return self._next(
            parent, key, lambda step: step.facts is f and call_of(step, key) is not None
        )

    def input(self, parent: TrieNode, key: Any, meta: TensorMeta) -> TrieNode | None:
        """Return the counterpart, in other sizes, of a new input below ``parent``."""
        return self._next(parent, key, lambda step: _shows_alike(step, meta))

    def internal(self, parent: TrieNode, key: Any, node: Node) -> TrieNode | None:
        """Return the likely counterpart of an op that the user did not write."""
        return self._next(parent, key, lambda step: _does(step, node))

    def same(self, parent: TrieNode, key: tuple[Any, ...], step: TrieNode) -> TrieNode | None:
        """Return the new step, if all its operands have the metas of ``step``'s; else None.

        Args:
            step: the result of ``op``.
        """
        node = step.node
        assert node is not None
        if step.key != key or not self.differences.values.isdisjoint(node.refs()):
            return None
        return step.again(parent)

    def follow(self, new: TrieNode, step: TrieNode | None) -> None:
        """Note a new step of this trace with its counterpart ``step`` in the earlier one."""
        if step is None or counts(new) != counts(step):
            self.here, self.step = new, None
        else:
            self.go_on(new, step)

    def go_on(self, new: TrieNode, step: TrieNode) -> None:
        """Do so for steps with equal counts of values, numbers and inputs."""
        self.here, self.step = new, step
        if new.node is not step.node or new.input is not step.input:
            self.differences.note(new, step)
        if self._metas is not None:
            _add_results(new, self._metas)

    def metas(self, node: Node) -> dict[int, TensorMeta] | None:
        """Return the metas of a node's operands in this trace; None: one has none."""
        if self._metas is None:
            assert self.here is not None
            self._metas = {}
            for step in self.here.path():
                _add_results(step, self._metas)
        metas = {number: self._metas.get(number) for number in node.refs()}
        if None in metas.values():
            return None
        return metas  # type: ignore[return-value]

    def _next(self, parent: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
        self._trie.reached(parent)
        self._come_to(parent)
        if self.here is parent:
            if self.step is None:
                return None
            step = _below(self.step, key, fits)
            if step is not None:
                return step
        return self._anew(parent, key, fits)

    def _come_to(self, parent: TrieNode) -> None:
        """Note that this trace has come to a step, perhaps by some that were added ahead."""
        if not self.ahead:
            return
        came_true = self.here is parent
        self.wanted = 2 * self.wanted if came_true else self.wanted // 4
        at = parent.depth - self.ahead[0][0].depth
        if not came_true and 0 <= at < len(self.ahead) and self.ahead[at][0] is parent:
            self.here, self.step = self.ahead[at]
        self.ahead = []

    def _anew(self, parent: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
        """Search, at the last fork, for an earlier trace that goes on like this one."""
        way: list[TrieNode] = []
        fork = parent
        while fork.parent is not None and len(fork.children) <= len(way[-1:]):
            way.append(fork)
            fork = fork.parent
        way.reverse()
        for begin in _tried(fork, way[:1]):
            differences = Differences()
            step = begin if not way else _along(begin, way, differences)
            if step is not None and way:
                step = _below(step, key, fits)
            elif not fits(begin):
                step = None
            if step is not None:
                self.differences, self._metas = differences, None
                return step
        return None


def _tried(fork: TrieNode, besides: list[TrieNode]) -> Iterator[TrieNode]:
    """Yield the newest and the oldest steps below a fork."""
    children = fork.children.values()
    some = [*islice(reversed(children), _NEWEST), *islice(children, _OLDEST)]
    return (step for step in dict.fromkeys(some) if step not in besides)


def _along(step: TrieNode, way: list[TrieNode], differences: Differences) -> TrieNode | None:
    """Return the end of the path that begins with ``step`` and is ``way`` in other sizes.

    Args:
        differences: filled with the differences.
    """
    other: TrieNode | None = step
    for number, own in enumerate(way):
        if number:
            assert other is not None
            other = _below(other, own.key, _fits(own))
        elif not _fits(own)(step):
            return None
        if other is None or counts(other) != counts(own):
            return None
        differences.note(own, other)
    return other


def _below(step: TrieNode, key: Any, fits: Fits) -> TrieNode | None:
    """Return the step below one that has this key, or else one that fits."""
    known = step.children.get(key)
    if known is not None:
        return known
    return next((child for child in _tried(step, []) if fits(child)), None)


def _fits(own: TrieNode) -> Fits:
    """Return a predicate: a step is, perhaps, the counterpart of ``own`` in other sizes."""
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


def counts(step: TrieNode) -> tuple[int, int, int]:
    """Return the numbers of values, run-time numbers and inputs up to a step."""
    return step.values, step.params, step.inputs


def _add_results(step: TrieNode, metas: dict[int, TensorMeta | None]) -> None:
    """Add the metas of a step's results, by number."""
    if step.node is None:
        metas[-step.inputs] = step.input
    else:
        metas.update(enumerate(step.node.results, step.first))


def call_of(step: TrieNode, key: tuple[Any, ...]) -> Call | None:
    """Return the call of an op with this key, if a step equals it but for ints; else None."""
    return None if step.node is None else _call(step.node, step.key, key)


def metas_of(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, TensorMeta] | None:
    """Return the metas of a node's operands; None if a CPU tensor is among the arguments."""
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
    """Return a node's arguments with the ints of another key; None if more differs.

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
    """Return an argument with the ints of a new key; ``_OTHER``: more than ints differs.

    Args:
        old: the argument's part of its own key.
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
