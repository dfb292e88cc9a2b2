"""Shape-polymorphic comparison of traces: equality up to a mapping of sizes, without graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazygt.graph.meta import TensorMeta, typed_key
from lazygt.graph.node import Arg, Node, Param, Ref
from lazygt.graph.sizes import LEAST, sized, sizes_in
from lazygt.passes.guards import specialization_key
from lazygt.record.trie import TrieNode

Steps = Sequence[TrieNode]


def outline_key(steps: Steps) -> tuple[Any, ...]:
    """Return the common key of traces that may differ in sizes only: ops and input dtypes."""
    return tuple([
        step.input.dtype if step.node is None and step.input is not None else step.node.op  # type: ignore[union-attr]
        for step in steps
    ])  # fmt: skip


class Outline:
    """Planned trace, to be matched with traces that differ in sizes only."""

    def __init__(self, steps: Steps) -> None:
        self._steps = [step.input if step.node is None else step.node for step in steps]
        self._sizes = [() if step.node is None else sizes_in(step.node) for step in steps]
        self._all_sizes = [_all_sizes(step) for step in self._steps]

    def resized(self, steps: Steps) -> dict[int, int] | None:
        """Return the mapping from this trace's sizes to the other's; None: another program.

        Two sizes may map to one, if no two tensors or calls become equal by that.

        Args:
            steps: the other trace, with the same ``outline_key``.
        """
        match = _SizeMatch()
        for old, sizes, all_sizes, step in zip(
            self._steps, self._sizes, self._all_sizes, steps, strict=True
        ):
            node = step.node
            if old is node:
                matches = match.unchanged(all_sizes)
            elif type(old) is TensorMeta:
                matches = match.meta(old, step.input)
            else:
                assert isinstance(old, Node)
                matches = node is not None and match.node(old, sizes, node)
            if not matches:
                return None
        if len(set(match.sizes.values())) < len(match.sizes):
            new_steps = [step.input if step.node is None else step.node for step in steps]
            if _distinct_count(new_steps) != _distinct_count(self._steps):
                return None
        return match.sizes


def _distinct_count(steps: Sequence[TensorMeta | Node | None]) -> int:
    """Return the number of distinct metas and nodes, as ``specialization_key`` counts them."""
    nodes = [step for step in steps if isinstance(step, Node)]
    metas = [step for step in steps if isinstance(step, TensorMeta)]
    return specialization_key(metas, nodes)


def _all_sizes(step: TensorMeta | Node | None) -> frozenset[int]:
    """Return all sizes in a node's arguments and results; an empty set for an input."""
    if not isinstance(step, Node):
        return frozenset()
    metas = [meta for meta in step.results if meta is not None]
    result_sizes = [size for meta in metas for size in (*meta.shape, *meta.stride, meta.offset)]
    return frozenset([*sizes_in(step), *[size for size in result_sizes if size >= LEAST]])


class _SizeMatch:
    """Consistent mapping of old sizes to new ones, built step by step (first-order matching).

    Attributes:
        sizes: old -> new.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._metas: dict[int, TensorMeta] = {}
        #: sizes that match themselves
        self._same: set[int] = set()

    def unchanged(self, sizes: frozenset[int]) -> bool:
        """Map each of these sizes to itself; return whether the mapping stays consistent."""
        if sizes <= self._same:
            return True
        self._same |= sizes
        return all(map(self.size, sizes, sizes))

    def size(self, old: int, new: int) -> bool:
        """Map a size to another; return whether the mapping stays consistent."""
        if old < LEAST or new < LEAST:
            return old == new
        return self.sizes.setdefault(old, new) == new

    def meta(self, old: TensorMeta | None, new: TensorMeta | None) -> bool:
        """Match the sizes of two metas; return whether they agree in all else."""
        if old is None or new is None:
            return old is new
        known = self._metas.get(id(old))
        if known is not None:
            return known is new or known == new
        if (old.dtype, len(old.shape), old.conj, old.neg) != (
            new.dtype, len(new.shape), new.conj, new.neg):  # fmt: skip
            return False
        self._metas[id(old)] = new
        return (
            self.size(old.offset, new.offset)
            and all(map(self.size, old.shape, new.shape))
            and all(map(self.size, old.stride, new.stride))
        )

    def node(self, old: Node, sizes: tuple[int, ...], new: Node) -> bool:
        """Match the sizes of two nodes; return whether they agree in all else.

        Args:
            sizes: sizes in the old node's arguments.
        """
        if old.args is new.args and old.kwargs is new.kwargs:
            alike = all(map(self.size, sizes, sizes))
        else:
            alike = self._match_arguments(old, new)
        return (
            alike
            and old.op == new.op
            and old.writes == new.writes
            and old.dynamic == new.dynamic
            and len(old.fresh) == len(new.fresh)
            and len(old.written) == len(new.written)
            and all(map(self.meta, old.results, new.results))
        )

    def _match_arguments(self, old: Node, new: Node) -> bool:
        """Match the arguments of two calls; return whether they agree but for sizes."""
        if len(old.args) != len(new.args) or len(old.kwargs) != len(new.kwargs):
            return False
        size_arguments = sized(old.op)
        for position, (old_arg, new_arg) in enumerate(zip(old.args, new.args, strict=True)):
            if not self._match_argument(old_arg, new_arg, position in size_arguments):
                return False
        return all(
            name == other and self._match_argument(old_arg, new_arg, name in size_arguments)
            for (name, old_arg), (other, new_arg) in zip(old.kwargs, new.kwargs, strict=True)
        )

    def _match_argument(self, old: Arg, new: Arg, sizes: bool) -> bool:
        """Match two arguments; ``sizes``: whether ints in them are sizes."""
        kind = type(old)
        if kind is not type(new):
            return False
        if kind is Ref or kind is Param:
            return bool(old.index == new.index)
        if kind is tuple:
            return len(old) == len(new) and all(
                self._match_argument(a, b, sizes) for a, b in zip(old, new, strict=True)
            )
        if kind is int and sizes:
            return self.size(old, new)
        return bool(typed_key(old) == typed_key(new))
