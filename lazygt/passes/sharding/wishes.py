"""Wishes: the blocks in which a value would be of use, though no annotation leads there.

A value that is wanted in blocks is as well made of blocks, so a wish goes back from a result to
operands, until a matmul or a random draw. It goes ahead, too: all other results of a value may take
the blocks that are there. An op that has no use for the blocks that it is given, such as a sort
along the cut dim, wishes for blocks of its other dims: these are exchanged, not gathered.

A wish opens strategies and rules out none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

from lazygt.graph.collectives import ring_bytes
from lazygt.graph.cost import family
from lazygt.graph.node import Node
from lazygt.graph.ops import facts, overload
from lazygt.graph.placement import Partial
from lazygt.passes.sharding.annotations import moves_elements
from lazygt.passes.sharding.marks import PLACE
from lazygt.passes.sharding.rules.strategy import Metas, Strategy
from lazygt.passes.sharding.seeds import SUMS, Bits, union
from lazygt.passes.sharding.strategies import StrategySet

#: Ops by which autograd adds one microbatch's gradient to another's.
_ADDITIONS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})

Masks = tuple[int, ...]


class Step(NamedTuple):
    """Node of a graph with the masks of its operands.

    Attributes:
        refs: ``node.refs()``.
        results: the numbers of its results.
        kind: the number of its entry in the catalogue.
        masks: of each operand, the placements that reached it.
    """

    node: Node
    refs: tuple[int, ...]
    results: range
    kind: int
    masks: Masks


class Reach(NamedTuple):
    """Placements that annotations lead to, for ``Wishes``.

    Attributes:
        steps: the nodes in order.
        values: the mask of each value; partial sums that wishes lead to are added.
        passed: (kind, masks of operands) -> the masks that such a node passes on: to each operand,
            then to each result.
        whole: values that are gathered for most of their users.
    """

    steps: Sequence[Step]
    values: list[int]
    passed: Callable[[int, Masks], Masks]
    whole: Collection[int]


class Wishes:
    """Placements that each value is wished to have, besides those that reached it.

    Args:
        entries: the strategies of each kind of node.
        parts: ranks of the axis.

    Attributes:
        changed: values that may come as partial sums where wishes are granted.
    """

    def __init__(
        self, metas: Metas, entries: Sequence[StrategySet], bits: Bits, reach: Reach, parts: int
    ) -> None:
        self._metas, self._entries, self._bits, self._parts = metas, entries, bits, parts
        self._values, self._passed, self._whole = reach.values, reach.passed, reach.whole
        self._masks: dict[int, int] = {}
        self._sources: dict[tuple[int, Masks], Masks] = {}
        self._others: dict[tuple[int, Masks], Masks | None] = {}
        self.changed: set[int] = set()
        #: values wished for since the last look back
        self._late: set[int] = set()
        self._kinds = kinds_of(reach.steps)
        for step in reversed(reach.steps):
            ends, adds, through, divides = self._kinds[step.kind]
            if adds and (sums := _common_sums(step.masks)):
                for value in step.refs:
                    self._wish(value, sums)
            if not ends or (divides and not any(mask & ~SUMS for mask in step.masks)):
                self._look_back(step, through)
        self._late.clear()
        for step in reach.steps:
            if not self._kinds[step.kind].ends:
                self._look_ahead(step)
            elif any(step.masks) and self._is_detour(step):
                self._look_aside(step)
        self._look_behind(reach.steps)

    def of_operands(self, step: Step) -> Masks:
        """Return the wishes for each operand of a node; nothing where there are none."""
        kind, refs = self._kinds[step.kind], step.refs
        if kind.adds:
            sums = _common_sums(step.masks)
            wishes = [self._masks.get(value, 0) & ~SUMS | sums for value in refs]
        elif self._masks.keys().isdisjoint(refs):
            return ()
        else:
            kept = -1 if kind.through else ~SUMS
            wishes = [self._masks.get(value, 0) & kept for value in refs]
        return tuple(wishes) if any(wishes) else ()

    def of_results(self, results: Sequence[int]) -> Masks:
        """Return the blocks of each result that reached it, or that it is wished to have."""
        reached, wishes = self._values, self._masks
        return tuple([(reached[value] | wishes.get(value, 0)) & ~SUMS for value in results])

    def _look_back(self, step: Step, through: bool) -> None:
        """Take wishes from results to operands.

        Args:
            through: see ``Kind``.
        """
        _, refs, results, number, _ = step
        wanted = self.of_results(results)
        if through and len(results) == 1:
            wanted = (wanted[0] | self._masks.get(results[0], 0),)
        if not any(wanted):
            return
        key = number, wanted
        sources = self._sources.get(key)
        if sources is None:
            sources = self._sources[key] = self._makers(number, wanted, len(refs))
        if not any(sources):
            return
        for value, wish in zip(refs, sources, strict=True):
            reached = self._values[value]
            # a value in other blocks is best computed there, and its results moved
            if wish & (~reached | SUMS) and (through or not reached or reached & SUMS):
                self._wish(value, wish)

    def _makers(self, number: int, wanted: Masks, places: int) -> Masks:
        """Return the masks that operands must have for results to have any wanted placement."""
        through = self._bits.any if any(mask & SUMS for mask in wanted) else self._bits.cut
        makers = [
            strategy.inputs
            for strategy in self._entries[number].strategies
            if not strategy.comm and any(map(and_, map(through, strategy.outputs), wanted))
        ]
        return tuple(union(makers, places, through))

    def _look_behind(self, steps: Sequence[Step]) -> None:
        """Take wishes for other blocks of operands back through views.

        So keys are exchanged before they are repeated for several queries.
        """
        if not self._late:
            return
        for step in reversed(steps):
            if self._kinds[step.kind].through and not self._late.isdisjoint(step.results):
                self._look_back(step, through=True)

    def _is_detour(self, step: Step) -> bool:
        """Return whether other blocks of a node's operands may be worth their exchange.

        They may where the node has no use for the blocks at hand, or is an attention that has none
        for the blocks of its keys.
        """
        passed = self._passed(step.kind, step.masks)
        if not any(passed):
            return True
        unused = any(mask & ~SUMS & ~used for mask, used in zip(step.masks, passed, strict=False))
        return unused and self._entries[step.kind].attends

    def _look_aside(self, step: Step) -> None:
        """Wish for other blocks of operands, at a node that has no use for those at hand."""
        blocks = ~SUMS & ~self._bits.interleaved
        refs = step.refs
        asked = tuple([self._values[v] | self._masks.get(v, 0) & blocks for v in refs])
        others = self._detours(step, asked)
        if others is None:
            return
        for value, wish in zip(refs, others, strict=True):
            self._wish(value, wish)
        passed = self._passed(step.kind, tuple(map(or_, asked, others)))
        for value, mask in zip(step.results, passed[len(refs) :], strict=True):
            self._wish(value, mask & ~SUMS)

    def _look_ahead(self, step: Step) -> None:
        """Take wishes from operands to results, and to other blocks of operands."""
        _, refs, results, number, asked = step
        wishes = self._masks
        wished = not wishes.keys().isdisjoint(refs)
        if wished or not self.changed.isdisjoint(refs):
            blocks = ~SUMS & ~self._bits.interleaved
            masks = [self._values[value] | wishes.get(value, 0) & blocks for value in refs]
            asked = tuple(masks) if wished else asked
        elif not any(asked):
            return
        others = self._detours(step, asked)
        if asked is step.masks and others is None:
            return
        if others is not None:
            asked = tuple(map(or_, asked, others))
            for value, wish in zip(refs, others, strict=True):
                self._wish(value, wish)
        passed = self._passed(number, asked)
        for value, mask in zip(results, passed[len(refs) :], strict=True):
            self._wish(value, mask & ~SUMS)
            if mask & SUMS & ~self._values[value]:
                self._values[value] |= mask & SUMS
                self.changed.add(value)

    def _detours(self, step: Step, asked: Masks) -> Masks | None:
        """Return other blocks of the operands of a node that does little with those at hand."""
        key = step.kind, asked
        if key not in self._others:
            strategies, cut = self._entries[step.kind].strategies, self._bits.cut
            taken = [
                strategy
                for strategy in strategies
                if any(map(and_, map(cut, strategy.inputs), asked))
            ]
            others: Masks | None = None
            is_cheap = not self._entries[step.kind].attends and any(
                self._is_cheap(step.node, strategy) for strategy in taken
            )
            if any(mask & ~SUMS for mask in asked) and not is_cheap:
                makers = [strategy.inputs for strategy in strategies if _keeps_blocks(strategy)]
                wanted = tuple(union(makers, len(asked), cut))
                others = wanted if any(wanted) else None
            self._others[key] = others
        return self._others[key]

    def _is_cheap(self, node: Node, strategy: Strategy) -> bool:
        """Return whether a strategy exchanges, or leaves to be reduced, at most a block.

        Sums that are larger than the operands, such as the gradient of a table, do not count: they
        are reduced anyhow.
        """
        nbytes = sum([_nbytes(self._metas, value) for value in node.refs()])
        sent = sum(ring_bytes(one.kind, one.nbytes, self._parts) for one in strategy.comm)
        for meta, placement in zip(node.results, strategy.outputs, strict=True):
            if isinstance(placement, Partial) and meta is not None and meta.nbytes <= nbytes:
                sent += ring_bytes("all_reduce", meta.nbytes, self._parts)
        return sent * self._parts <= nbytes

    def _wish(self, value: int, wish: int) -> None:
        """Add a wish for sums, and for blocks that did not reach the value."""
        wish &= ~self._values[value] | SUMS
        if wish and value not in self._whole:
            self._masks[value] = self._masks.get(value, 0) | wish
            self._late.add(value)


def _common_sums(masks: Masks) -> int:
    """Return the partial sums that all operands of an addition may come as."""
    return reduce(and_, masks, SUMS) if len(masks) > 1 else 0


def _keeps_blocks(strategy: Strategy) -> bool:
    """Return whether a strategy takes blocks to blocks without a collective."""
    partial = any(isinstance(placement, Partial) for placement in strategy.outputs)
    return not strategy.comm and not partial


class Kind(NamedTuple):
    """Properties of a kind of node that matter to wishes.

    Attributes:
        ends: whether wishes end there: at nodes without operands, matmuls and random draws.
        adds: whether it adds one value to another.
        through: whether blocks of the result are as good as made when the operand is in blocks.
        divides: whether a wish may pass although it ends there, where no operand is in blocks: a
            matmul.
    """

    ends: bool
    adds: bool
    through: bool
    divides: bool


def kinds_of(steps: Sequence[Step]) -> dict[int, Kind]:
    """Return the kinds of the nodes, by their entries in the catalogue."""
    return {kind: _kind(node) for kind, node in {step.kind: step.node for step in steps}.items()}


def _kind(node: Node) -> Kind:
    ends = (
        not node.refs()
        or node.dynamic
        or node.body is not None
        or family(node) == "matmul"
        or (not node.op.startswith("lazygt.") and facts(overload(node.op)).random)
    )
    through = node.op == PLACE or moves_elements(node)
    divides = family(node) == "matmul" and not node.dynamic and node.body is None
    return Kind(ends, node.op in _ADDITIONS, through, divides)


class Spared(NamedTuple):
    """Values that may as well be whole, though blocks led to them.

    Attributes:
        grown: cut only because the smaller values are that they were broadcast of. To have those
            whole, and all values that are made of them, sends less than to gather later.
        near: made of one value that annotations cut, and of nothing else; gathered there, it serves
            all its views.
    """

    grown: set[int]
    near: set[int]


def spared_values(
    steps: Sequence[Step], metas: Metas, reached: Sequence[int], given: Collection[int]
) -> Spared:
    """Return the values that may be whole.

    Args:
        reached: the mask of each value.
        given: the values that annotations cut.
    """
    grown: set[int] = set()
    cut, near = set(given), set(given)
    kinds = kinds_of(steps)
    grows: dict[int, tuple[bool, ...]] = {}
    for _, refs, results, kind, _ in steps:
        if cut.isdisjoint(refs):
            continue
        blocks = [value for value in results if reached[value] & ~SUMS]
        if not blocks:
            continue
        cut.update(blocks)
        if kinds[kind].ends:
            continue
        if len(refs) == 1 and refs[0] in near:
            near.update(blocks)
        if kind not in grows:  # nodes of a kind have the same metas
            nbytes = max([_nbytes(metas, value) for value in results])
            grows[kind] = tuple([2 * _nbytes(metas, value) <= nbytes for value in refs])
        for value, smaller in zip(refs, grows[kind], strict=True):
            if not smaller and value in cut and value not in grown:
                break
        else:
            grown.update(results)
    return Spared(grown, near)


def _nbytes(metas: Metas, value: int) -> int:
    meta = metas[value]
    return 0 if meta is None else meta.nbytes
