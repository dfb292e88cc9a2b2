"""Positions: ints that select an element and shape no result (``graph.ops.POSITIONS``).

The first position at a program point is a constant of the step, like any other int: ``x[:, -1]``
never changes, and constants serve passes best. When another position comes to the same point, a
step that takes the position as a run-time number (``moving``) supersedes the first, for all later
ones.

In a graph such a number is a Param, and metas are those of position 1: neither the start nor all of
the memory, so that no pass takes the view for its base. A user's queries of a handle are answered
for its actual position (``ViewChain.shift``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Param, Ref
from lazygt.graph.ops import OpFacts, facts

Key = tuple[Any, ...]
#: Position that inference assumes for all.
SAMPLE = 1
#: Number of program points with remembered positions.
_MAX_POINTS = 20_000


class Moved(NamedTuple):
    """Op that gets its position at run time (the position *moves*)."""

    #: facts of the op that does it: a slice is a ``narrow``, with its length an argument
    facts: OpFacts
    key: Key  # key of its step: that of the op, with the type in place of each number
    numbers: tuple[int, ...]  # the positions, counted from the front
    tensors: int = 1  # number of its first arguments that are tensors

    def args(self, first: int) -> tuple[Arg, ...]:
        """Return the node's arguments; its run-time numbers are numbered from ``first`` on."""
        params = iter(range(first, first + len(self.numbers)))

        def arg(item: Any) -> Arg:
            if item is int:
                return Param(next(params))
            return tuple(map(arg, item)) if type(item) is tuple else item

        refs, rest = self.key[1 : 1 + self.tensors], self.key[1 + self.tensors :]
        return (*map(Ref, refs), *map(arg, rest))


class PositionsByPoint:
    """Positions seen at each program point."""

    def __init__(self) -> None:
        #: program point -> the first positions there, or None: several were
        self._seen: dict[Key, tuple[int, ...] | None] = {}

    def change(self, program_point: Key, numbers: tuple[int, ...]) -> bool:
        """Note positions at a program point; return whether several have occurred there."""
        if len(self._seen) >= _MAX_POINTS:
            self._seen.clear()
        first = self._seen.setdefault(program_point, numbers)
        if first is not None and first != numbers:
            first = self._seen[program_point] = None
        return first is None


def hoist_position(f: OpFacts, key: Key, source: TensorMeta | None) -> Moved | None:
    """Return an op in the form that takes its position as a run-time number; None if there is none.

    There is none if the position is out of range, or the only one possible.

    Args:
        key: key of the op's step with a constant position.
        source: meta of its first argument.
    """
    rule = _RULES.get(f.name)
    return None if rule is None or source is None else rule(f, key, source)


def _index(f: OpFacts, key: Key, sizes: tuple[int, ...], tensors: int) -> Moved | None:
    """Hoist the index of ``select`` and its relatives, counted from the front."""
    assert f.position is not None
    slot = f.position + 1
    dim, index = key[slot - 1 : slot + 1]
    if not -len(sizes) <= dim < len(sizes):
        return None
    size = sizes[dim]
    if size < 2 or not -size <= index < size:
        return None
    return Moved(f, (*key[:slot], int, *key[slot + 1 :]), (index % size,), tensors)


def _select(f: OpFacts, key: Key, source: TensorMeta) -> Moved | None:
    """Hoist the index of ``select``."""
    return _index(f, key, source.shape, 1)


def _select_scatter(f: OpFacts, key: Key, source: TensorMeta) -> Moved | None:
    """Hoist the index of ``select_scatter``."""
    return _index(f, key, source.shape, 2)


def _select_backward(f: OpFacts, key: Key, source: TensorMeta) -> Moved | None:
    """Hoist the index of ``select``'s backward."""
    return _index(f, key, key[2], 1)


def _slice(f: OpFacts, key: Key, source: TensorMeta) -> Moved | None:
    """Hoist the start of a slice, as a ``narrow`` of constant length."""
    dim, start, end, step = (*key[2:], *_SLICE_DEFAULTS[len(key) - 2 :])
    if step != 1 or not -len(source.shape) <= dim < len(source.shape):
        return None
    size = source.shape[dim]
    first, last, _ = slice(start, end).indices(size)
    if not 0 < last - first < size:
        return None
    return Moved(NARROW, (NARROW, key[1], dim, int, last - first), (first,))


def _narrow(f: OpFacts, key: Key, source: TensorMeta) -> Moved:
    """Hoist the start of a ``narrow``."""
    return Moved(f, (*key[:3], int, *key[4:]), (key[3],))


def _roll(f: OpFacts, key: Key, source: TensorMeta) -> Moved | None:
    """Hoist all shifts of a roll."""
    shifts = key[2]
    if not shifts:
        return None
    return Moved(f, (*key[:2], (int,) * len(shifts), *key[3:]), shifts)


#: Defaults of a slice's dim, start, end and step.
_SLICE_DEFAULTS: Key = (0, None, None, 1)
#: Recorded by lazygt only: torch dispatches ``narrow`` as a ``slice``.
NARROW = facts(torch.ops.aten.narrow.default)
_RULES: dict[str, Callable[[OpFacts, Key, TensorMeta], Moved | None]] = {
    "aten.narrow.default": _narrow,
    "aten.roll.default": _roll,
    "aten.select.int": _select,
    "aten.select_backward.default": _select_backward,
    "aten.select_scatter.default": _select_scatter,
    "aten.slice.Tensor": _slice,
}
