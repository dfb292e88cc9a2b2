"""Wishes: propagation hints, placements of values to which no annotation leads.

A value that is wanted in shards is best computed from shards, so hints are propagated backwards
from results to operands, up to a matmul or a random draw, and then forwards to other results. An op
that cannot use the shards of its operands, such as a sort along the sharded dim, gives hints for
shards of its other dims, to which an all-to-all leads, which is cheaper than a gather.

A hint opens strategies and excludes none.
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
from lazygt.passes.sharding.choose.catalogue import StrategySet
from lazygt.passes.sharding.marks import PLACE
from lazygt.passes.sharding.propagate.placement_sources import SUMS, Bits, moves_elements, union
from lazygt.passes.sharding.rules.strategy import Metas, Strategy

#: Ops by which autograd accumulates gradients.
_ADDITIONS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})

Masks = tuple[int, ...]


class Step(NamedTuple):
    """Node of a graph with the masks of its operands."""

    node: Node
    refs: tuple[int, ...]  # ``node.refs()``
    results: range  # the numbers of its results
    kind: int  # number of its strategy set in the catalogue
    masks: Masks  # for each operand, the placements that reached it


class Reach(NamedTuple):
    """Result of sharding propagation, the input of ``Wishes``."""

    steps: Sequence[Step]  # the nodes in order
    values: list[int]  # the mask of each value; ``Wishes`` adds partial placements
    #: (kind, masks of operands) -> the masks that a node of that kind propagates to each operand,
    #: then to each result
    passed: Callable[[int, Masks], Masks]
    whole: Collection[int]  # values that are gathered for most of their users


class Wishes:
    """Propagation hints: additional placements of values, besides those that reached them.

    Args:
        entries: the strategies of each kind of node.
        parts: number of ranks of the axis.

    Attributes:
        changed: values that may be partial because of hints.
    """

    def __init__(
        self, metas: Metas, entries: Sequence[StrategySet], bits: Bits, reach: Reach, parts: int
    ) -> None:
        self._metas, self._entries, self._bits, self._parts = metas, entries, bits, parts
        self._values, self._propagated, self._whole = reach.values, reach.passed, reach.whole
        self._hints: dict[int, int] = {}
        self._operand_hints: dict[tuple[int, Masks], Masks] = {}
        self._alternatives: dict[tuple[int, Masks], Masks | None] = {}
        self.changed: set[int] = set()
        #: values with new hints since the last backward propagation
        self._new_hints: set[int] = set()
        self._kinds = kinds_of(reach.steps)
        for step in reversed(reach.steps):
            ends, adds, through, divides = self._kinds[step.kind]
            if adds and (sums := _common_sums(step.masks)):
                for value in step.refs:
                    self._add_hint(value, sums)
            if not ends or (divides and not any(mask & ~SUMS for mask in step.masks)):
                self._propagate_back(step, through)
        self._new_hints.clear()
        for step in reach.steps:
            if not self._kinds[step.kind].ends:
                self._propagate_forward(step)
            elif any(step.masks) and self._may_need_alternatives(step):
                self._hint_alternatives(step)
        self._propagate_new_through_views(reach.steps)

    def of_operands(self, step: Step) -> Masks:
        """Return the hints for each operand of a node; empty if there are none."""
        kind, refs = self._kinds[step.kind], step.refs
        if kind.adds:
            sums = _common_sums(step.masks)
            hints = [self._hints.get(value, 0) & ~SUMS | sums for value in refs]
        elif self._hints.keys().isdisjoint(refs):
            return ()
        else:
            mask = -1 if kind.through else ~SUMS
            hints = [self._hints.get(value, 0) & mask for value in refs]
        return tuple(hints) if any(hints) else ()

    def of_results(self, results: Sequence[int]) -> Masks:
        """Return for each result the shards that reached it or that hints ask for."""
        reached, hints = self._values, self._hints
        return tuple([(reached[value] | hints.get(value, 0)) & ~SUMS for value in results])

    def _propagate_back(self, step: Step, through: bool) -> None:
        """Propagate hints from results to operands.

        Args:
            through: see ``Kind``.
        """
        _, refs, results, number, _ = step
        wanted = self.of_results(results)
        if through and len(results) == 1:
            wanted = (wanted[0] | self._hints.get(results[0], 0),)
        if not any(wanted):
            return
        key = number, wanted
        sources = self._operand_hints.get(key)
        if sources is None:
            sources = self._operand_hints[key] = self._operand_masks(number, wanted, len(refs))
        if not any(sources):
            return
        for value, hint in zip(refs, sources, strict=True):
            reached = self._values[value]
            # a value in other shards is best computed in those, with its results redistributed
            if hint & (~reached | SUMS) and (through or not reached or reached & SUMS):
                self._add_hint(value, hint)

    def _operand_masks(self, number: int, wanted: Masks, count: int) -> Masks:
        """Return the masks of operands with which results can have a wanted placement."""
        bit_of = self._bits.any if any(mask & SUMS for mask in wanted) else self._bits.cut
        inputs = [
            strategy.inputs
            for strategy in self._entries[number].strategies
            if not strategy.comm and any(map(and_, map(bit_of, strategy.outputs), wanted))
        ]
        return tuple(union(inputs, count, bit_of))

    def _propagate_new_through_views(self, steps: Sequence[Step]) -> None:
        """Propagate the hints for alternative shards of operands back through views.

        As a result keys are exchanged before they are repeated for several queries.
        """
        if not self._new_hints:
            return
        for step in reversed(steps):
            if self._kinds[step.kind].through and not self._new_hints.isdisjoint(step.results):
                self._propagate_back(step, through=True)

    def _may_need_alternatives(self, step: Step) -> bool:
        """Return whether alternative shards of a node's operands may be worth their exchange.

        They may if the node cannot use the shards that reached its operands, or is an attention
        that cannot use the shards of its keys.
        """
        passed = self._propagated(step.kind, step.masks)
        if not any(passed):
            return True
        unused = any(mask & ~SUMS & ~used for mask, used in zip(step.masks, passed, strict=False))
        return unused and self._entries[step.kind].attends

    def _hint_alternatives(self, step: Step) -> None:
        """Add hints for alternative shards of the operands of a node."""
        blocks = ~SUMS & ~self._bits.interleaved
        refs = step.refs
        known_masks = tuple([self._values[v] | self._hints.get(v, 0) & blocks for v in refs])
        alternatives = self._alternative_shards(step, known_masks)
        if alternatives is None:
            return
        for value, hint in zip(refs, alternatives, strict=True):
            self._add_hint(value, hint)
        passed = self._propagated(step.kind, tuple(map(or_, known_masks, alternatives)))
        for value, mask in zip(step.results, passed[len(refs) :], strict=True):
            self._add_hint(value, mask & ~SUMS)

    def _propagate_forward(self, step: Step) -> None:
        """Propagate hints from operands to results, and to alternative shards of operands."""
        _, refs, results, number, known_masks = step
        hints = self._hints
        has_hints = not hints.keys().isdisjoint(refs)
        if has_hints or not self.changed.isdisjoint(refs):
            blocks = ~SUMS & ~self._bits.interleaved
            masks = [self._values[value] | hints.get(value, 0) & blocks for value in refs]
            known_masks = tuple(masks) if has_hints else known_masks
        elif not any(known_masks):
            return
        alternatives = self._alternative_shards(step, known_masks)
        if known_masks is step.masks and alternatives is None:
            return
        if alternatives is not None:
            known_masks = tuple(map(or_, known_masks, alternatives))
            for value, hint in zip(refs, alternatives, strict=True):
                self._add_hint(value, hint)
        passed = self._propagated(number, known_masks)
        for value, mask in zip(results, passed[len(refs) :], strict=True):
            self._add_hint(value, mask & ~SUMS)
            if mask & SUMS & ~self._values[value]:
                self._values[value] |= mask & SUMS
                self.changed.add(value)

    def _alternative_shards(self, step: Step, known_masks: Masks) -> Masks | None:
        """Return alternative shards of a node's operands if the known ones are of little use.

        Args:
            known_masks: for each operand, the placements that reached it or that hints ask for.
        """
        key = step.kind, known_masks
        if key not in self._alternatives:
            strategies, cut = self._entries[step.kind].strategies, self._bits.cut
            usable = [
                strategy
                for strategy in strategies
                if any(map(and_, map(cut, strategy.inputs), known_masks))
            ]
            alternatives: Masks | None = None
            is_cheap = not self._entries[step.kind].attends and any(
                self._is_cheap(step.node, strategy) for strategy in usable
            )
            if any(mask & ~SUMS for mask in known_masks) and not is_cheap:
                inputs = [strategy.inputs for strategy in strategies if _is_local(strategy)]
                wanted = tuple(union(inputs, len(known_masks), cut))
                alternatives = wanted if any(wanted) else None
            self._alternatives[key] = alternatives
        return self._alternatives[key]

    def _is_cheap(self, node: Node, strategy: Strategy) -> bool:
        """Return whether a strategy sends at most one shard, including later reductions.

        Partial results that are larger than the operands, such as the gradient of an embedding
        table, do not count: every strategy has to reduce them.
        """
        nbytes = sum([_nbytes(self._metas, value) for value in node.refs()])
        sent = sum(
            ring_bytes(collective.kind, collective.nbytes, self._parts)
            for collective in strategy.comm
        )
        for meta, placement in zip(node.results, strategy.outputs, strict=True):
            if isinstance(placement, Partial) and meta is not None and meta.nbytes <= nbytes:
                sent += ring_bytes("all_reduce", meta.nbytes, self._parts)
        return sent * self._parts <= nbytes

    def _add_hint(self, value: int, hint: int) -> None:
        """Add a hint for partial placements, and for shards that did not reach the value."""
        hint &= ~self._values[value] | SUMS
        if hint and value not in self._whole:
            self._hints[value] = self._hints.get(value, 0) | hint
            self._new_hints.add(value)


def _common_sums(masks: Masks) -> int:
    """Return the partial placements that all operands of an addition may have."""
    return reduce(and_, masks, SUMS) if len(masks) > 1 else 0


def _is_local(strategy: Strategy) -> bool:
    """Return whether a strategy has no collective inside and no partial result."""
    partial = any(isinstance(placement, Partial) for placement in strategy.outputs)
    return not strategy.comm and not partial


class Kind(NamedTuple):
    """Properties of a kind of node that control the propagation of hints."""

    ends: bool  # whether propagation stops: at nodes without operands, matmuls and random draws
    adds: bool  # whether the node adds one value to another
    #: whether the node is a view or the like, so that a sharded operand gives a sharded result
    through: bool
    divides: bool  # whether hints pass a node with ``ends`` if no operand is sharded: a matmul


def kinds_of(steps: Sequence[Step]) -> dict[int, Kind]:
    """Return the properties of the kinds of nodes, by their numbers in the catalogue."""
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
    """Values that may be replicated although shards reached them."""

    #: values sharded only because they were broadcast from smaller sharded values. Gathering the
    #: smaller values sends less than gathering later.
    grown: set[int]
    #: values computed from a single value that annotations shard; gathering that value serves all
    #: its views
    near: set[int]


def spared_values(
    steps: Sequence[Step], metas: Metas, reached: Sequence[int], annotated: Collection[int]
) -> Spared:
    """Return the values that may be replicated although shards reached them.

    Args:
        reached: the mask of each value.
        annotated: the values that annotations shard.
    """
    grown: set[int] = set()
    sharded, near = set(annotated), set(annotated)
    kinds = kinds_of(steps)
    grows: dict[int, tuple[bool, ...]] = {}
    for _, refs, results, kind, _ in steps:
        if sharded.isdisjoint(refs):
            continue
        sharded_results = [value for value in results if reached[value] & ~SUMS]
        if not sharded_results:
            continue
        sharded.update(sharded_results)
        if kinds[kind].ends:
            continue
        if len(refs) == 1 and refs[0] in near:
            near.update(sharded_results)
        if kind not in grows:  # nodes of a kind have the same metas
            nbytes = max([_nbytes(metas, value) for value in results])
            grows[kind] = tuple([2 * _nbytes(metas, value) <= nbytes for value in refs])
        for value, is_smaller in zip(refs, grows[kind], strict=True):
            if not is_smaller and value in sharded and value not in grown:
                break
        else:
            grown.update(results)
    return Spared(grown, near)


def _nbytes(metas: Metas, value: int) -> int:
    meta = metas[value]
    return 0 if meta is None else meta.nbytes
