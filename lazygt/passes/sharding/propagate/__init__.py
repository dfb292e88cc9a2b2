"""Propagation: the strategies that the user's annotations lead to.

A sharded strategy is open to the solver when one of its operands was reached with the placement
that the strategy needs (see ``reach``), or a hint asks for that placement; a strategy that shards
only its result is open when the result was reached. So annotations determine *which values* are
sharded on an axis, and the solver determines where they are redistributed. ``explore`` opens every
strategy.

A strategy with only replicated and partial operands is left out if no operand can be partial: the
replicated strategy is equivalent then, and its result becomes partial without communication.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

from lazygt.graph.collectives import ring_bytes
from lazygt.graph.cost import family
from lazygt.graph.liveness import DefUse
from lazygt.graph.node import Node
from lazygt.graph.ops import facts, overload
from lazygt.graph.placement import Partial, Replicate, StridedShard
from lazygt.passes.sharding.choose.catalogue import StrategyCatalogue, StrategySet
from lazygt.passes.sharding.marks import PLACE, Annotation
from lazygt.passes.sharding.propagate.placement_sources import moves_elements
from lazygt.passes.sharding.propagate.reach import (
    PARTIAL_BITS,
    FixedPlacements,
    Masks,
    Reach,
    Step,
    partial_bit,
    union,
)
from lazygt.passes.sharding.rules.strategy import Metas, Strategy

# -- strategies that are open to the solver --------------------------------------------------------


class OpenedChoice(NamedTuple):
    """Strategies that the solver may choose from."""

    entries: list[StrategySet]  # of each node
    #: values that are sharded only because they were broadcast from smaller sharded ones
    broadcast: Collection[int]


def open_strategies(
    chains: DefUse,
    metas: Metas,
    catalogue: StrategyCatalogue,
    annotations: Mapping[int, Annotation],
    explore: bool,
    may_replicate: Collection[int] = (),
) -> OpenedChoice:
    """Return for each node the strategies that the solver may choose from.

    Left out are strategies that break a fixed placement where another strategy keeps it, and
    replicated strategies where a reached strategy divides the work. A matmul never keeps the
    latter. Another op keeps them with ``explore``; if dividing the work needs a collective inside
    the op or interleaved operands (which were contiguous shards before a view); and if the result
    was broadcast from a smaller value, or is a view of an annotated value. Partial values that are
    added to others, and views of them, may stay partial: then their sum is reduced once.

    Args:
        may_replicate: nodes, by number, that may run replicated in any case, unless a fixed
            placement forbids it.
    """
    reach = Reach(chains, metas, catalogue, annotations, explore)
    steps = reach.steps()
    hints = Hints(reach, steps)
    broadcast, derived_from_annotated = replicable_values(
        steps, metas, reach.reached, reach.annotated_shards
    )
    cache: dict[tuple[int, _Request], StrategySet] = {}
    opened_entries = []
    for number, step in enumerate(steps):
        _, refs, results, kind, _ = step
        entry, fixed_placements = catalogue.entries[kind], reach.fixed_placements(number)
        request = _Request(
            reach.masks(number),  # with the partial placements of hints
            hints.of_operands(step),
            hints.of_results(results) if entry.only_shards_results else (),
            fixed_placements,
            not broadcast.isdisjoint(results),
            not (entry.takes_time or derived_from_annotated.isdisjoint(results)),
            tuple([value in broadcast for value in refs]) if entry.is_attention else (),
        )
        opened = cache.get((kind, request))
        if opened is None:
            opened = cache[kind, request] = _opened(reach, entry, request)
        may_be_replicated = number in may_replicate and _respects_fixed(
            entry.strategies[0], fixed_placements
        )
        opened_entries.append(_with_replicated(opened, entry) if may_be_replicated else opened)
    return OpenedChoice(opened_entries, broadcast)


class _Request(NamedTuple):
    """Masks and fixed placements that decide which strategies are open to a node; a cache key."""

    masks: Masks  # for each operand, the placements that reached it
    hints: Masks  # for each operand, the placements of hints; empty if there are none
    results: Masks  # for each result the wanted shards, if some strategies shard only results
    #: the required placement of each operand; empty if there are none
    fixed_placements: FixedPlacements
    #: whether the results are sharded only because they were broadcast from sharded values
    broadcast: bool
    is_annotated_view: bool  # whether the node is a view of a value that annotations shard
    #: for each operand, whether it may be replicated before a broadcast; empty unless the node is
    #: an attention
    broadcast_operands: tuple[bool, ...]


def _with_replicated(opened: StrategySet, entry: StrategySet) -> StrategySet:
    """Return the opened strategies and the replicated one."""
    strategies = set(map(id, opened.strategies))
    return entry.keep(lambda number, strategy: number == 0 or id(strategy) in strategies)


def _respects_fixed(strategy: Strategy, fixed_placements: FixedPlacements) -> bool:
    """Return whether a strategy keeps all fixed placements; a partial sum counts as R."""
    return all(
        fixed in (None, placement) or (fixed == Replicate() and isinstance(placement, Partial))
        for fixed, placement in zip(fixed_placements, strategy.inputs, strict=False)
    )


def _is_interleaved(strategy: Strategy) -> bool:
    return any(
        isinstance(placement, StridedShard) for placement in (*strategy.inputs, *strategy.outputs)
    )


def _reads_requested_partials(strategy: Strategy, hints: Masks) -> bool:
    """Return whether a strategy reads partial operands where hints ask for them."""
    wanted = map(partial_bit, strategy.inputs)
    return bool(hints) and all(map(and_, wanted, hints))


def _opened(reach: Reach, entry: StrategySet, node: _Request) -> StrategySet:
    """Return the strategies of a set that are open to a node.

    Args:
        node: masks and fixed placements of the node.
    """
    masks, hints = node.masks, node.hints
    open_set = entry.keep(
        lambda _, strategy: (
            _respects_fixed(strategy, node.fixed_placements) and reach.is_possible(strategy, masks)
        )
    )
    if entry.keeps_partial and masks[0] & PARTIAL_BITS:
        return open_set.keep(lambda _, strategy: isinstance(strategy.inputs[0], Partial))
    divides = _divides_work(reach, open_set, masks)
    uses_hints = hints and (not divides or entry.is_attention or not entry.is_heavy)
    wanted_masks = tuple(map(or_, masks, hints)) if uses_hints else masks
    if reach.explore:
        open_set = open_set.keep(
            lambda _, strategy: (
                not _is_interleaved(strategy) or reach.is_reached(strategy, wanted_masks)
            )
        )
    else:
        # no large operand is gathered only to be sharded again
        may_shard_results = node.broadcast or not any(mask & ~PARTIAL_BITS for mask in masks)
        results = node.results if may_shard_results else ()
        open_set = open_set.keep(
            lambda _, strategy: reach.is_reached(
                strategy, wanted_masks, results, node.broadcast_operands
            )
        )
    may_stay_replicated = reach.explore or node.broadcast or node.is_annotated_view
    if divides and (entry.is_heavy or not may_stay_replicated):
        shares = open_set.shares
        open_set = open_set.keep(
            lambda number, strategy: (
                shares[number] < 1 or _reads_requested_partials(strategy, hints)
            )
        )
    return open_set


def _divides_work(reach: Reach, entry: StrategySet, masks: Masks) -> bool:
    """Return whether a reached strategy divides the work among the ranks.

    False for a factory, which has no operands.
    """
    return bool(masks) and any(
        share < 1
        and reach.is_reached(strategy, masks)
        and (entry.is_heavy or not (strategy.comm or _is_interleaved(strategy)))
        for strategy, share in zip(entry.strategies, entry.shares, strict=True)
    )


# -- hints -----------------------------------------------------------------------------------------
# A value that is wanted in shards is best computed from shards, so hints are propagated backwards
# from results to operands, up to a matmul or a random draw, and then forwards to other results. An
# op that cannot use the shards of its operands, such as a sort along the sharded dim, gives hints
# for shards of its other dims, to which an all-to-all leads, which is cheaper than a gather. A hint
# opens strategies and excludes none.

#: Ops by which autograd accumulates gradients.
_ADDITIONS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})


class Hints:
    """Propagation hints: additional placements of values, besides those that reached them.

    Partial placements of results are added to those that reached.
    """

    def __init__(self, reach: Reach, steps: Sequence[Step]) -> None:
        self._reach, self._reached = reach, reach.reached
        self._entries, self._bits = reach.catalogue.entries, reach.bits
        self._hints: dict[int, int] = {}
        self._operand_hints: dict[tuple[int, Masks], Masks] = {}
        self._alternatives: dict[tuple[int, Masks], Masks] = {}
        #: values with new hints since the last backward propagation
        self._new_hints: set[int] = set()
        self._kinds = kinds_of(steps)
        for step in reversed(steps):
            kind = self._kinds[step.kind]
            if kind.adds:
                for value in step.refs:
                    self._add_hint(value, _common_sums(step.masks))
            if not kind.ends or (
                kind.divides and not any(mask & ~PARTIAL_BITS for mask in step.masks)
            ):
                self._propagate_back(step)
        self._new_hints.clear()
        for step in steps:
            self._propagate_forward(step)
        # alternative shards go back through views: keys are exchanged before they are repeated for
        # several queries
        for step in reversed(steps):
            if self._kinds[step.kind].through and not self._new_hints.isdisjoint(step.results):
                self._propagate_back(step)

    def of_operands(self, step: Step) -> Masks:
        """Return the hints for each operand of a node; empty if there are none."""
        kind, refs = self._kinds[step.kind], step.refs
        if kind.adds:
            sums = _common_sums(step.masks)
            hints = [self._hints.get(value, 0) & ~PARTIAL_BITS | sums for value in refs]
        elif self._hints.keys().isdisjoint(refs):
            return ()
        else:
            mask = -1 if kind.through else ~PARTIAL_BITS
            hints = [self._hints.get(value, 0) & mask for value in refs]
        return tuple(hints) if any(hints) else ()

    def of_results(self, results: Sequence[int]) -> Masks:
        """Return for each result the shards that reached it or that hints ask for."""
        reached, hints = self._reached, self._hints
        return tuple([(reached[value] | hints.get(value, 0)) & ~PARTIAL_BITS for value in results])

    def _propagate_back(self, step: Step) -> None:
        """Propagate hints from results to operands."""
        _, refs, results, number, _ = step
        through, wanted = self._kinds[number].through, self.of_results(results)
        if through and len(results) == 1:
            wanted = (wanted[0] | self._hints.get(results[0], 0),)
        if not any(wanted):
            return
        key = number, wanted
        if key not in self._operand_hints:
            self._operand_hints[key] = self._operand_masks(number, wanted, len(refs))
        for value, hint in zip(refs, self._operand_hints[key], strict=True):
            reached = self._reached[value]
            # a value in other shards is best computed in those, with its results redistributed
            if hint & (~reached | PARTIAL_BITS) and (
                through or not reached or reached & PARTIAL_BITS
            ):
                self._add_hint(value, hint)

    def _operand_masks(self, number: int, wanted: Masks, count: int) -> Masks:
        """Return the masks of operands with which results can have a wanted placement."""
        bit_of = (
            self._bits.bit if any(mask & PARTIAL_BITS for mask in wanted) else self._bits.shard_bit
        )
        inputs = [
            strategy.inputs
            for strategy in self._entries[number].strategies
            if not strategy.comm and any(map(and_, map(bit_of, strategy.outputs), wanted))
        ]
        return tuple(union(inputs, count, bit_of))

    def _propagate_forward(self, step: Step) -> None:
        """Propagate hints from operands to results, and to alternative shards of operands."""
        _, refs, results, number, masks = step
        kind, hints, known = self._kinds[number], self._hints, masks
        if kind.ends and not self._may_need_alternatives(step):
            return
        if kind.ends or not hints.keys().isdisjoint(refs):
            blocks = ~PARTIAL_BITS & ~self._bits.interleaved
            known = tuple([self._reached[value] | hints.get(value, 0) & blocks for value in refs])
        alternatives = self._alternative_shards(step, known)
        if not alternatives and (kind.ends or known is masks):
            return
        for value, hint in zip(refs, alternatives, strict=False):
            self._add_hint(value, hint)
        known = tuple(map(or_, known, alternatives)) if alternatives else known
        passed = self._reach.passed(number, known)
        for value, mask in zip(results, passed[len(refs) :], strict=True):
            self._add_hint(value, mask & ~PARTIAL_BITS)
            if not kind.ends:
                self._reached[value] |= mask & PARTIAL_BITS

    def _may_need_alternatives(self, step: Step) -> bool:
        """Return whether alternative shards of a node's operands may be worth their exchange.

        They may if the node cannot use the shards that reached its operands, or is an attention
        that cannot use the shards of its keys.
        """
        if not any(step.masks):
            return False
        passed = self._reach.passed(step.kind, step.masks)
        unused = any(
            mask & ~PARTIAL_BITS & ~used for mask, used in zip(step.masks, passed, strict=False)
        )
        return not any(passed) or (unused and self._entries[step.kind].is_attention)

    def _alternative_shards(self, step: Step, known: Masks) -> Masks:
        """Return alternative shards of a node's operands; empty if the known ones are of use.

        Args:
            known: for each operand, the placements that reached it or that hints ask for.
        """
        if not any(mask & ~PARTIAL_BITS for mask in known):
            return ()
        key = step.kind, known
        if key not in self._alternatives:
            entry, cut = self._entries[step.kind], self._bits.shard_bit
            is_cheap = not entry.is_attention and any(
                self._is_cheap(step.node, strategy)
                for strategy in entry.strategies
                if any(map(and_, map(cut, strategy.inputs), known))
            )
            inputs = [strategy.inputs for strategy in entry.strategies if _is_local(strategy)]
            wanted = () if is_cheap else tuple(union(inputs, len(known), cut))
            self._alternatives[key] = wanted if any(wanted) else ()
        return self._alternatives[key]

    def _is_cheap(self, node: Node, strategy: Strategy) -> bool:
        """Return whether a strategy sends at most one shard, including later reductions.

        Partial results that are larger than the operands, such as the gradient of an embedding
        table, do not count: every strategy has to reduce them.
        """
        nbytes = sum([_nbytes(self._reach.metas, value) for value in node.refs()])
        sent = sum(
            ring_bytes(collective.kind, collective.nbytes, self._reach.catalogue.axis_size)
            for collective in strategy.comm
        )
        for meta, placement in zip(node.results, strategy.outputs, strict=True):
            if isinstance(placement, Partial) and meta is not None and meta.nbytes <= nbytes:
                sent += ring_bytes("all_reduce", meta.nbytes, self._reach.catalogue.axis_size)
        return sent * self._reach.catalogue.axis_size <= nbytes

    def _add_hint(self, value: int, hint: int) -> None:
        """Add a hint for partial placements, and for shards that did not reach the value."""
        hint &= ~self._reached[value] | PARTIAL_BITS
        if hint and value not in self._reach.stored:
            self._hints[value] = self._hints.get(value, 0) | hint
            self._new_hints.add(value)


def _common_sums(masks: Masks) -> int:
    """Return the partial placements that all operands of an addition may have."""
    return reduce(and_, masks, PARTIAL_BITS) if len(masks) > 1 else 0


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
    """Return the properties of a node's kind."""
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


class MayReplicate(NamedTuple):
    """Values that may be replicated although shards reached them."""

    #: values sharded only because they were broadcast from smaller sharded values. Gathering the
    #: smaller values sends less than gathering later.
    broadcast: set[int]
    #: values computed from a single value that annotations shard; gathering that value serves all
    #: its views
    derived_from_annotated: set[int]


def replicable_values(
    steps: Sequence[Step], metas: Metas, reached: Sequence[int], annotated: Collection[int]
) -> MayReplicate:
    """Return the values that may be replicated although shards reached them.

    Args:
        reached: the mask of each value.
        annotated: the values that annotations shard.
    """
    broadcast: set[int] = set()
    sharded, derived_from_annotated = set(annotated), set(annotated)
    kinds = kinds_of(steps)
    grows: dict[int, tuple[bool, ...]] = {}
    for _, refs, results, kind, _ in steps:
        if sharded.isdisjoint(refs):
            continue
        sharded_results = [value for value in results if reached[value] & ~PARTIAL_BITS]
        if not sharded_results:
            continue
        sharded.update(sharded_results)
        if kinds[kind].ends:
            continue
        if len(refs) == 1 and refs[0] in derived_from_annotated:
            derived_from_annotated.update(sharded_results)
        if kind not in grows:  # nodes of a kind have the same metas
            nbytes = max([_nbytes(metas, value) for value in results])
            grows[kind] = tuple([2 * _nbytes(metas, value) <= nbytes for value in refs])
        for value, is_smaller in zip(refs, grows[kind], strict=True):
            if not is_smaller and value in sharded and value not in broadcast:
                break
        else:
            broadcast.update(results)
    return MayReplicate(broadcast, derived_from_annotated)


def _nbytes(metas: Metas, value: int) -> int:
    meta = metas[value]
    return 0 if meta is None else meta.nbytes
