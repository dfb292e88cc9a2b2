"""Sharding propagation: the strategies that the user's annotations lead to.

The placement of a value is propagated through the strategies of its users: to their results, and to
the other operands that such a strategy shards. A sharded strategy is open to the solver when one of
its operands was reached with the placement that the strategy needs, or a hint asks for that
placement (see ``wishes``); a strategy that shards only its result is open when the result was
reached. So annotations determine *which values* are sharded on an axis, and the solver determines
where they are redistributed. ``explore`` opens every strategy.

Partial placements are propagated forwards only. A strategy with only replicated and partial
operands is left out if no operand can be partial: the replicated strategy is equivalent then, and
its result becomes partial without communication.

Strategies for interleaved operands are considered only where an interleaved placement was reached.

The set of placements that reach a value is a bit mask, with one bit for each placement.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from heapq import heappop, heappush
from operator import and_, or_
from typing import NamedTuple

from lazygt.graph.liveness import DefUse
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.graph.placement import Partial, Placement, Replicate, StridedShard
from lazygt.passes.sharding.choose.catalogue import StrategyCatalogue, StrategySet
from lazygt.passes.sharding.marks import Annotation
from lazygt.passes.sharding.propagate.hints import Masks, Reach, Spared, Step, Wishes, spared_values
from lazygt.passes.sharding.propagate.placement_sources import (
    SUMS,
    Bits,
    find_seeds,
    gathers_operand,
    partial_bit,
    same_blocks,
    union,
)
from lazygt.passes.sharding.rules.strategy import Metas, Strategy

FixedPlacements = tuple[Placement | None, ...]


class OpenedChoice(NamedTuple):
    """Strategies that the solver may choose from."""

    entries: list[StrategySet]  # of each node
    #: values that are sharded only because they were broadcast from smaller sharded ones
    grown: Collection[int]


def open_strategies(
    chains: DefUse,
    metas: Metas,
    catalogue: StrategyCatalogue,
    annotations: Mapping[int, Annotation],
    explore: bool,
    whole: Collection[int] = (),
) -> OpenedChoice:
    """Return for each node the strategies that the solver may choose from.

    Left out are strategies that break a fixed where another strategy keeps it, and replicated
    strategies where a reached strategy divides the work. For a matmul the latter holds always. For
    other ops it does not hold with ``explore``; if dividing the work needs a collective inside the
    op or interleaved operands (which were contiguous shards before a view); or if the result was
    broadcast from a smaller value, or is a view of an annotated value. Partial values that are
    added to others, and views of them, may stay partial: then their sum is reduced once.

    Args:
        whole: nodes, by number, that may run replicated in any case, unless a fixed forbids it.
    """
    propagation = _Propagation(chains, metas, catalogue, annotations, explore)
    propagation.spread()
    entries, steps = catalogue.entries, propagation.steps()
    hints, (grown, near) = propagation.wishes(steps), propagation.spared(steps)
    changed, of_operands, of_results = hints.changed, hints.of_operands, hints.of_results
    cache: dict[tuple[object, ...], StrategySet] = {}
    opened_entries = []
    for number, step in enumerate(steps):
        _, refs, results, kind, masks = step
        entry, fixed_placements = entries[kind], propagation.fixed_placements(number)
        masks_and_pins = (
            masks if changed.isdisjoint(refs) else propagation.masks(number),
            of_operands(step),
            of_results(results) if entry.only_cuts_results else (),
            fixed_placements,
            not grown.isdisjoint(results),
            not (entry.works or near.isdisjoint(results)),
            tuple([value in grown for value in refs]) if entry.attends else (),
        )
        key = kind, masks_and_pins
        opened = cache.get(key)
        if opened is None:
            opened = cache[key] = propagation.opened(entry, _Asked(*masks_and_pins))
        may_be_replicated = number in whole and _respects_fixed(
            entry.strategies[0], fixed_placements
        )
        opened_entries.append(_with_replicated(opened, entry) if may_be_replicated else opened)
    return OpenedChoice(opened_entries, grown)


class _Asked(NamedTuple):
    """Masks and fixed placements that decide which strategies are open to a node; a cache key."""

    masks: Masks  # for each operand, the placements that reached it
    wishes: Masks  # for each operand, the placements of hints; empty if there are none
    results: Masks  # for each result the wanted shards, if some strategies shard only results
    #: the required placement of each operand; empty if there are none
    fixed_placements: FixedPlacements
    #: whether the results are sharded only because they were broadcast from sharded values
    grown: bool
    is_near: bool  # whether the node is a view of a value that annotations shard
    #: for each operand, whether it may be replicated before a broadcast; empty unless the node is
    #: an attention
    grown_operands: tuple[bool, ...]


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


def _has_shape_of_sharded_operand(result: TensorMeta | None, operands: Metas, masks: Masks) -> bool:
    """Return whether a result has the shape of a sharded operand."""
    return result is not None and any(
        operand is not None and operand.shape == result.shape and mask & ~SUMS
        for operand, mask in zip(operands, masks, strict=True)
    )


def _is_interleaved(strategy: Strategy) -> bool:
    return any(
        isinstance(placement, StridedShard) for placement in (*strategy.inputs, *strategy.outputs)
    )


def _reads_requested_partials(strategy: Strategy, hints: Masks) -> bool:
    """Return whether a strategy reads partial operands where hints ask for them."""
    wanted = map(partial_bit, strategy.inputs)
    return bool(hints) and all(map(and_, wanted, hints))


class _Propagation:
    """Sharding propagation: a fixpoint iteration over the placements that reach each value."""

    def __init__(
        self,
        chains: DefUse,
        metas: Metas,
        catalogue: StrategyCatalogue,
        annotations: Mapping[int, Annotation],
        explore: bool,
    ) -> None:
        self._explore = explore
        self._chains, self._metas, self._annotations = chains, metas, annotations
        #: nodes that embed gradients in zeros -> the placement of the sum of their results
        self._seeds: Mapping[int, StridedShard] = {}
        self._catalogue, self._bits = catalogue, Bits()
        self._nodes, self._users = chains.nodes, chains.users
        self._numbers = list(catalogue.numbers)
        self._fixed = {v: a.placement for v, a in annotations.items() if a.kind == "fixed"}
        self._stored = {v: a.placement for v, a in annotations.items() if a.kind == "stored"}
        self._fixed_or_stored = {*self._fixed, *self._stored}
        self._reached = [0] * len(metas)
        for value, annotation in annotations.items():
            self._reached[value] = self._bits.any(annotation.placement)
        self._annotated_shards = [value for value in annotations if self._reached[value] & ~SUMS]
        self._passed_cache: dict[tuple[int, Masks], Masks] = {}
        #: for each node the masks of its operands at the last propagation
        self._seen: list[Masks | None] = [None] * len(self._nodes)
        self._gathered = self._find_gathered()

    def _find_gathered(self) -> dict[int, tuple[bool, ...]]:
        """Return the nodes for which stored values are gathered, with a flag for each operand."""
        gathered = {}
        for number in {number for value in self._stored for number in self._users[value]}:
            node, refs, _ = self._nodes[number]
            is_gathered = tuple(
                [v in self._stored and gathers_operand(node, v, self._metas) for v in refs]
            )
            if any(is_gathered):
                gathered[number] = is_gathered
        return gathered

    def spread(self) -> None:
        """Propagate placements through all nodes until the fixpoint.

        Each round visits nodes in order: a change for a later node is propagated in the same round,
        any other change in the next round.
        """
        next_round: set[int] = set()
        for number in range(len(self._nodes)):
            if users := self._propagate_node(number):
                next_round.update([user for user in users if user <= number])
        self._run_rounds(next_round)
        self._run_rounds(self._add_seeds())

    def _add_seeds(self) -> set[int]:
        """Add the interleaved placements of seeds; return the nodes to visit again."""
        chains, metas, annotations = self._chains, self._metas, self._annotations
        seeds = find_seeds(chains, metas, self._catalogue, annotations, self._reached, self._bits)
        self._seeds = seeds.results
        for number in seeds.results:
            self._seen[number] = None
        for value, placements in seeds.values.items():
            self._reached[value] |= reduce(or_, map(self._bits.cut, placements))
        return {
            *seeds.results,
            *[number for value in seeds.values for number in self._users[value]],
        }

    def _run_rounds(self, next_round: set[int]) -> None:
        """Visit nodes in rounds until nothing changes.

        Args:
            next_round: the nodes of the first round.
        """
        while next_round:
            waiting, queued, next_round = (
                sorted(next_round),
                next_round,
                set(),
            )  # a sorted list is a heap
            while waiting:
                number = heappop(waiting)
                for user in self._propagate_node(number):
                    if user <= number:
                        next_round.add(user)
                    elif user not in queued:
                        queued.add(user)
                        heappush(waiting, user)

    def _propagate_node(self, node_number: int) -> Sequence[int]:
        """Propagate placements through a node; return the readers of changed values."""
        masks = self.masks(node_number)
        if masks == self._seen[node_number] or not (self._explore or any(masks)):
            return ()
        self._seen[node_number] = masks
        node, refs, results = self._nodes[node_number]
        if self._bits.interleaved or self._seeds:
            self._add_interleaved(node_number, masks)
        kind = self._numbers[node_number]
        passed = self._passed_placements(kind, masks)
        if self._catalogue.entries[kind].heavy:
            passed = self._with_operand_shards(node, masks, passed)
        count = len(refs)
        if passed[:count] == masks:  # the common case: no change of the operands
            changed = self._merge(results, passed[count:])
        else:
            changed = self._merge((*refs, *results), passed)
        return [user for value in changed for user in self._users[value]] if changed else ()

    def steps(self) -> list[Step]:
        """Return the nodes with the placements that reached their operands."""
        nodes, refs, results = zip(*self._nodes, strict=True) if self._nodes else ((), (), ())
        masks = [
            (0,) * len(read) if masks_seen is None else masks_seen
            for read, masks_seen in zip(refs, self._seen, strict=True)
        ]
        return list(map(Step, nodes, refs, results, self._numbers, masks))

    def _add_interleaved(self, node_number: int, masks: Masks) -> None:
        """Add a node's strategies for operands that were reached interleaved."""
        bits, wanted = self._bits, self._seeds.get(node_number)
        if wanted or any(mask & bits.interleaved for mask in masks):
            kind, placements = self._catalogue.numbers[node_number], tuple(map(bits.found, masks))
            self._numbers[node_number] = self._catalogue.strided(kind, placements, wanted)

    def _merge(self, values: Sequence[int], masks: Masks) -> list[int]:
        """Add placements to the masks of values; return the values that changed."""
        changed, reached = [], self._reached
        for value, mask in zip(values, masks, strict=True):
            if mask & ~reached[value] and value not in self._fixed:
                reached[value] |= mask
                changed.append(value)
        return changed

    def _passed_placements(self, kind: int, masks: Masks) -> Masks:
        """Return the placements that a node propagates to each operand, then to each result."""
        passed = self._passed_cache.get((kind, masks))
        if passed is None:
            all_strategies, cut = self._catalogue.entries[kind].strategies, self._bits.cut
            strategies = [
                strategy for strategy in all_strategies if self._is_possible(strategy, masks)
            ]
            # a factory can produce any shard, but is no reason to want one
            reached = (
                [strategy for strategy in strategies if self._is_reached(strategy, masks)]
                if masks
                else []
            )
            first = strategies[0]
            to_operands = union([strategy.inputs for strategy in reached], len(first.inputs), cut)
            result_shards = union(
                [strategy.outputs for strategy in reached], len(first.outputs), cut
            )
            producers = [
                strategy.outputs for strategy in (strategies if self._explore else reached)
            ]
            result_partials = union(producers, len(first.outputs), partial_bit)
            passed = self._passed_cache[kind, masks] = (
                *to_operands,
                *map(or_, result_shards, result_partials),
            )
        return passed

    def _with_operand_shards(self, node: Node, masks: Masks, passed: Masks) -> Masks:
        """Add the operands' shards to a node's results where no strategy of the node uses them.

        For example, an attention converts shards of its keys, and its results are wanted in the
        operands' placements. The same holds for partial gradients of keys.
        """
        count = len(masks)
        operands = [self._metas[value] for value in node.refs()]
        is_unused, attends = not any(passed[count:]), "attention" in node.op
        extended = [
            mask | same_blocks(self._bits, operands, masks, result)
            if is_unused
            or (
                attends
                and not mask & ~SUMS
                and _has_shape_of_sharded_operand(result, operands, masks)
            )
            else mask
            for result, mask in zip(node.results, passed[count:], strict=True)
        ]
        return (*passed[:count], *extended)

    def wishes(self, steps: Sequence[Step]) -> Wishes:
        """Return the hints for values; requires the fixpoint of ``spread``."""
        reach = Reach(steps, self._reached, self._passed_placements, self._stored.keys())
        entries, parts = self._catalogue.entries, self._catalogue.parts
        return Wishes(self._metas, entries, self._bits, reach, parts)

    def spared(self, steps: Sequence[Step]) -> Spared:
        """Return the values that may be replicated although shards reached them."""
        return spared_values(steps, self._metas, self._reached, self._annotated_shards)

    def opened(self, entry: StrategySet, node: _Asked) -> StrategySet:
        """Return the strategies of a set that are open to a node.

        Args:
            node: masks and fixed_placements of the node.
        """
        masks, hints = node.masks, node.wishes
        open_set = entry.keep(
            lambda _, strategy: (
                _respects_fixed(strategy, node.fixed_placements)
                and self._is_possible(strategy, masks)
            )
        )
        if entry.takes_sums and masks[0] & SUMS:
            return open_set.keep(lambda _, strategy: isinstance(strategy.inputs[0], Partial))
        divides = self._divides_work(open_set, masks)
        uses_hints = hints and (not divides or entry.attends or not entry.heavy)
        wanted_masks = tuple(map(or_, masks, hints)) if uses_hints else masks
        if self._explore:
            open_set = open_set.keep(
                lambda _, strategy: (
                    not _is_interleaved(strategy) or self._is_reached(strategy, wanted_masks)
                )
            )
        else:
            # no large operand is gathered only to be sharded again
            may_shard_results = node.grown or not any(mask & ~SUMS for mask in masks)
            results = node.results if may_shard_results else ()
            open_set = open_set.keep(
                lambda _, strategy: self._is_reached(
                    strategy, wanted_masks, results, node.grown_operands
                )
            )
        may_be_whole = self._explore or node.grown or node.is_near
        if divides and (entry.heavy or not may_be_whole):
            shares = open_set.shares
            open_set = open_set.keep(
                lambda number, strategy: (
                    shares[number] < 1 or _reads_requested_partials(strategy, hints)
                )
            )
        return open_set

    def _divides_work(self, entry: StrategySet, masks: Masks) -> bool:
        """Return whether a reached strategy divides the work among the ranks.

        False for a factory, which has no operands.
        """
        return bool(masks) and any(
            share < 1
            and self._is_reached(strategy, masks)
            and (entry.heavy or not (strategy.comm or _is_interleaved(strategy)))
            for strategy, share in zip(entry.strategies, entry.shares, strict=True)
        )

    def _is_possible(self, strategy: Strategy, masks: Masks) -> bool:
        """Return whether a strategy needs no partial operand, shards one, or gets a partial one."""
        wanted = [partial_bit(placement) for placement in strategy.inputs]
        shards = map(self._bits.cut, strategy.inputs)
        return not any(wanted) or any(map(and_, wanted, masks)) or any(shards)

    def _is_reached(
        self,
        strategy: Strategy,
        masks: Masks,
        results: Masks = (),
        grown: tuple[bool, ...] = (),
    ) -> bool:
        """Return whether a strategy shards nothing, or is reached by the masks of its operands.

        A strategy that shards only its results is reached where ``results`` contains the shards.

        Args:
            masks: for each operand, the placements that reached it.
            results: for each result, the wanted shards.
            grown: for each operand, whether it may be replicated before a broadcast.
        """
        if not masks:
            return True  # a factory produces the shards that its users want
        shard_bit = self._bits.cut
        wanted = [shard_bit(placement) for placement in strategy.inputs]
        if any(wanted):
            is_consistent = all(
                wanted[position] & masks[position]
                if wanted[position]
                else not masks[position] & ~SUMS or (grown and grown[position])
                for position in strategy.preplaced
            )
            return is_consistent and any(map(and_, wanted, masks))
        result_shards = [shard_bit(placement) for placement in strategy.outputs]
        return not any(result_shards) or any(map(and_, result_shards, results))

    def masks(self, number: int) -> Masks:
        """Return the mask of each operand of a node; 0 for an operand gathered for the node."""
        masks = tuple(map(self._reached.__getitem__, self._nodes[number][1]))
        if number not in self._gathered:
            return masks
        gathered = self._gathered[number]
        return tuple(
            [0 if is_gathered else mask for mask, is_gathered in zip(masks, gathered, strict=True)]
        )

    def fixed_placements(self, number: int) -> FixedPlacements:
        """Return the required placement of each operand; empty if there are none."""
        refs, fixed, stored = self._nodes[number][1], self._fixed, self._stored
        if self._fixed_or_stored.isdisjoint(refs):
            return ()
        gathered = self._gathered.get(number) or (False,) * len(refs)
        return tuple([
            Replicate() if is_gathered else fixed.get(value) or stored.get(value)
            for value, is_gathered in zip(refs, gathered, strict=True)
        ])  # fmt: skip
