"""Strategies that may be chosen: those that the user's annotations lead to.

A sharding of a value spreads along the strategies of the ops that it meets: to their results, and
to the other operands that such a strategy wants cut. A strategy that shards is open to the solver
when one of its operands has been reached with the placement that it takes there, or wished to be so
(see ``wishes``); a strategy that only cuts its result is open when the result was. So annotations
say *which values* are sharded on an axis, and the solver says where they are moved. ``explore``
opens every strategy.

Partial values spread forwards only. A strategy that takes only whole and partial operands is left
out where none of them may come partial: the strategy that is R everywhere does the same then, and
its result can be made partial for nothing.

Strategies that take a value interleaved are looked for, and open, only where it was reached so.

The placements that reach a value are a bit mask, with one bit a placement.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from heapq import heappop, heappush
from operator import and_, or_
from typing import NamedTuple

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.graph.placement import Partial, Placement, Replicate, StridedShard
from lazygt.passes.sharding.annotations import Annotation, takes_whole
from lazygt.passes.sharding.def_use import DefUse
from lazygt.passes.sharding.rules.strategy import Metas, Strategy
from lazygt.passes.sharding.seeds import SUMS, Bits, find_seeds, partial_bit, same_blocks, union
from lazygt.passes.sharding.strategies import StrategyCatalogue, StrategySet
from lazygt.passes.sharding.wishes import Masks, Reach, Spared, Step, Wishes, spared_values

Pins = tuple[Placement | None, ...]


class Opened(NamedTuple):
    """Strategies that the solver may choose from.

    Attributes:
        entries: of each node.
        grown: values that are cut only because smaller ones are.
    """

    entries: list[StrategySet]
    grown: Collection[int]


def open_strategies(
    chains: DefUse,
    metas: Metas,
    catalogue: StrategyCatalogue,
    annotations: Mapping[int, Annotation],
    explore: bool,
    whole: Collection[int] = (),
) -> Opened:
    """Return the entry of each node with the strategies that may be chosen for it.

    A strategy that breaks a pin is left out where another keeps it. So is a strategy that has every
    rank do all of an op, where a strategy that was reached divides it. For a matmul this holds
    always; for other ops it does not hold if the solver may ``explore``; if dividing them takes a
    collective in their middle, or interleaved operands (these were in blocks before a view, and may
    be wanted whole behind it); or if the divided value was broadcast of a smaller one, or is a view
    of a value that annotations cut. Partial values that are added to others, and views of such, may
    stay partial: then their sum is reduced, not each of them.

    Args:
        whole: nodes, by number, that every rank may do all of in any case, but for pins.
    """
    propagation = _Propagation(chains, metas, catalogue, annotations, explore)
    propagation.spread()
    entries, steps = catalogue.entries, propagation.steps()
    wishes, (grown, near) = propagation.wishes(steps), propagation.spared(steps)
    changed, of_operands, of_results = wishes.changed, wishes.of_operands, wishes.of_results
    known: dict[tuple[object, ...], StrategySet] = {}
    opened_entries = []
    for at, step in enumerate(steps):
        _, refs, results, kind, masks = step
        entry, pins = entries[kind], propagation.pins(at)
        asked = (
            masks if changed.isdisjoint(refs) else propagation.masks(at),
            of_operands(step),
            of_results(results) if entry.only_cuts_results else (),
            pins,
            not grown.isdisjoint(results),
            not (entry.works or near.isdisjoint(results)),
            tuple([value in grown for value in refs]) if entry.attends else (),
        )
        key = kind, asked
        opened = known.get(key)
        if opened is None:
            opened = known[key] = propagation.opened(entry, _Asked(*asked))
        is_free = at in whole and _keeps(entry.strategies[0], pins)
        opened_entries.append(_with_whole(opened, entry) if is_free else opened)
    return Opened(opened_entries, grown)


class _Asked(NamedTuple):
    """Masks and pins that decide which strategies are open to a node.

    Attributes:
        masks: of each operand, the placements that reached it.
        wishes: of each operand, the placements that it is wished to have; empty where there are
            none.
        results: the blocks that its results are wanted in, if strategies only cut those.
        pins: the placement that each operand must have; empty where there are none.
        grown: whether its results are cut only because smaller values are.
        is_near: whether it is a view near a value that annotations cut.
        grown_operands: of each operand, whether it may be whole before it grows; empty where the
            node is no attention.
    """

    masks: Masks
    wishes: Masks
    results: Masks
    pins: Pins
    grown: bool
    is_near: bool
    grown_operands: tuple[bool, ...]


def _with_whole(opened: StrategySet, entry: StrategySet) -> StrategySet:
    """Return the opened strategies, and the one that is R everywhere."""
    strategies = set(map(id, opened.strategies))
    return entry.keep(lambda number, strategy: number == 0 or id(strategy) in strategies)


def _keeps(strategy: Strategy, pins: Pins) -> bool:
    """Return whether a strategy keeps all pins; for a whole value it may take a partial sum."""
    return all(
        pin in (None, placement) or (pin == Replicate() and isinstance(placement, Partial))
        for pin, placement in zip(pins, strategy.inputs, strict=False)
    )


def _is_like(result: TensorMeta | None, operands: Metas, masks: Masks) -> bool:
    """Return whether a result has the shape of an operand that lies in blocks."""
    return result is not None and any(
        operand is not None and operand.shape == result.shape and mask & ~SUMS
        for operand, mask in zip(operands, masks, strict=True)
    )


def _is_interleaved(strategy: Strategy) -> bool:
    return any(
        isinstance(placement, StridedShard) for placement in (*strategy.inputs, *strategy.outputs)
    )


def _is_summed(strategy: Strategy, wishes: Masks) -> bool:
    """Return whether a strategy takes partial values where they are wanted so."""
    wanted = map(partial_bit, strategy.inputs)
    return bool(wishes) and all(map(and_, wanted, wishes))


class _Propagation:
    """Placements that reach each value."""

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
        #: nodes that put gradients among zeros -> the placement that their sum may have
        self._seeds: Mapping[int, StridedShard] = {}
        self._catalogue, self._bits = catalogue, Bits()
        self._places, self._users = chains.nodes, chains.users
        self._numbers = list(catalogue.numbers)
        self._pinned = {v: a.placement for v, a in annotations.items() if a.kind == "pinned"}
        self._stored = {v: a.placement for v, a in annotations.items() if a.kind == "stored"}
        self._placed = {*self._pinned, *self._stored}
        self._reached = [0] * len(metas)
        for value, annotation in annotations.items():
            self._reached[value] = self._bits.any(annotation.placement)
        self._cut = [value for value in annotations if self._reached[value] & ~SUMS]
        self._spreads: dict[tuple[int, Masks], Masks] = {}
        #: the operands' masks of each node when it last passed placements on
        self._seen: list[Masks | None] = [None] * len(self._places)
        self._gathered = self._gathering()

    def _gathering(self) -> dict[int, tuple[bool, ...]]:
        """Return the nodes that stored values are gathered for, with a flag for each operand."""
        gathered = {}
        for at in {at for value in self._stored for at in self._users[value]}:
            node, refs, _ = self._places[at]
            whole = tuple([v in self._stored and takes_whole(node, v, self._metas) for v in refs])
            if any(whole):
                gathered[at] = whole
        return gathered

    def spread(self) -> None:
        """Follow the strategies of all nodes until nothing more is reached.

        In rounds, each in the order of the nodes: a change for a later node is seen in the same
        round, else in the next one.
        """
        later: set[int] = set()
        for at in range(len(self._places)):
            if users := self._follow(at):
                later.update([user for user in users if user <= at])
        self._follow_on(later)
        self._follow_on(self._sow())

    def _sow(self) -> set[int]:
        """Let reached values be interleaved where seeds are; return the nodes that this reaches."""
        chains, metas, annotations = self._chains, self._metas, self._annotations
        seeds = find_seeds(chains, metas, self._catalogue, annotations, self._reached, self._bits)
        self._seeds = seeds.results
        for at in seeds.results:
            self._seen[at] = None
        for value, placements in seeds.values.items():
            self._reached[value] |= reduce(or_, map(self._bits.cut, placements))
        return {*seeds.results, *[at for value in seeds.values for at in self._users[value]]}

    def _follow_on(self, later: set[int]) -> None:
        while later:
            waiting, queued, later = sorted(later), later, set()  # a sorted list is a heap
            while waiting:
                at = heappop(waiting)
                for user in self._follow(at):
                    if user <= at:
                        later.add(user)
                    elif user not in queued:
                        queued.add(user)
                        heappush(waiting, user)

    def _follow(self, at: int) -> Sequence[int]:
        """Pass on the placements that reached a node; return the readers of changed values."""
        masks = self.masks(at)
        if masks == self._seen[at] or not (self._explore or any(masks)):
            return ()
        self._seen[at] = masks
        node, refs, results = self._places[at]
        if self._bits.interleaved or self._seeds:
            self._widen(at, masks)
        number = self._numbers[at]
        passed = self._passed(number, masks)
        if self._catalogue.entries[number].heavy:
            passed = self._laid_back(node, masks, passed)
        count = len(refs)
        if passed[:count] == masks:  # mostly: nothing more reaches the operands
            changed = self._merge(results, passed[count:])
        else:
            changed = self._merge((*refs, *results), passed)
        return [user for value in changed for user in self._users[value]] if changed else ()

    def steps(self) -> list[Step]:
        """Return the nodes, each with the placements that reached its operands."""
        nodes, refs, results = zip(*self._places, strict=True) if self._places else ((), (), ())
        masks = [
            (0,) * len(read) if seen is None else seen
            for read, seen in zip(refs, self._seen, strict=True)
        ]
        return list(map(Step, nodes, refs, results, self._numbers, masks))

    def _widen(self, at: int, masks: Masks) -> None:
        """Look for strategies of a node that take operands interleaved, as they were reached."""
        bits, wanted = self._bits, self._seeds.get(at)
        if wanted or any(mask & bits.interleaved for mask in masks):
            number, placements = self._catalogue.numbers[at], tuple(map(bits.found, masks))
            self._numbers[at] = self._catalogue.strided(number, placements, wanted)

    def _merge(self, values: Sequence[int], masks: Masks) -> list[int]:
        """Add placements to the masks of values; return the values that changed."""
        changed, reached = [], self._reached
        for value, mask in zip(values, masks, strict=True):
            if mask & ~reached[value] and value not in self._pinned:
                reached[value] |= mask
                changed.append(value)
        return changed

    def _passed(self, number: int, masks: Masks) -> Masks:
        """Return the placements that a node passes on: to each operand, then to each result."""
        passed = self._spreads.get((number, masks))
        if passed is None:
            every, cut = self._catalogue.entries[number].strategies, self._bits.cut
            strategies = [strategy for strategy in every if self._is_possible(strategy, masks)]
            # a factory can make any block, but is no reason to want one
            asked = (
                [strategy for strategy in strategies if self._is_asked(strategy, masks)]
                if masks
                else []
            )
            first = strategies[0]
            wants = union([strategy.inputs for strategy in asked], len(first.inputs), cut)
            blocks = union([strategy.outputs for strategy in asked], len(first.outputs), cut)
            makers = [strategy.outputs for strategy in (strategies if self._explore else asked)]
            sums = union(makers, len(first.outputs), partial_bit)
            passed = self._spreads[number, masks] = (*wants, *map(or_, blocks, sums))
        return passed

    def _laid_back(self, node: Node, masks: Masks, passed: Masks) -> Masks:
        """Add the operands' blocks to a node's results where it has no use for them itself.

        An attention has no use for blocks of its keys, for example: it exchanges them, and its
        results lie as the operands did. So do the gradients of keys, where they come as sums.
        """
        count = len(masks)
        operands = [self._metas[value] for value in node.refs()]
        none, attends = not any(passed[count:]), "attention" in node.op
        back = [
            mask | same_blocks(self._bits, operands, masks, result)
            if none or (attends and not mask & ~SUMS and _is_like(result, operands, masks))
            else mask
            for result, mask in zip(node.results, passed[count:], strict=True)
        ]
        return (*passed[:count], *back)

    def wishes(self, steps: Sequence[Step]) -> Wishes:
        """Return the wishes for values, once all is reached that annotations lead to."""
        reach = Reach(steps, self._reached, self._passed, self._stored.keys())
        entries, parts = self._catalogue.entries, self._catalogue.parts
        return Wishes(self._metas, entries, self._bits, reach, parts)

    def spared(self, steps: Sequence[Step]) -> Spared:
        """Return the values that may as well be whole."""
        return spared_values(steps, self._metas, self._reached, self._cut)

    def opened(self, entry: StrategySet, node: _Asked) -> StrategySet:
        """Return the strategies of an entry that may be chosen for a node asked so."""
        masks, wishes = node.masks, node.wishes
        kept = entry.keep(
            lambda _, strategy: _keeps(strategy, node.pins) and self._is_possible(strategy, masks)
        )
        if entry.takes_sums and masks[0] & SUMS:
            return kept.keep(lambda _, strategy: isinstance(strategy.inputs[0], Partial))
        divides = self._divides(kept, masks)
        granted = wishes and (not divides or entry.attends or not entry.heavy)
        asked = tuple(map(or_, masks, wishes)) if granted else masks
        if self._explore:
            kept = kept.keep(
                lambda _, strategy: not _is_interleaved(strategy) or self._is_asked(strategy, asked)
            )
        else:
            # nothing large is gathered to be cut again
            is_whole = node.grown or not any(mask & ~SUMS for mask in masks)
            results = node.results if is_whole else ()
            kept = kept.keep(
                lambda _, strategy: self._is_asked(strategy, asked, results, node.grown_operands)
            )
        may_be_whole = self._explore or node.grown or node.is_near
        if divides and (entry.heavy or not may_be_whole):
            shares = kept.shares
            kept = kept.keep(
                lambda number, strategy: shares[number] < 1 or _is_summed(strategy, wishes)
            )
        return kept

    def _divides(self, entry: StrategySet, masks: Masks) -> bool:
        """Return whether a strategy divides the work among the ranks, by the blocks at hand.

        A factory shares no work of any operand: whole is as good as in blocks.
        """
        return bool(masks) and any(
            share < 1
            and self._is_asked(strategy, masks)
            and (entry.heavy or not (strategy.comm or _is_interleaved(strategy)))
            for strategy, share in zip(entry.strategies, entry.shares, strict=True)
        )

    def _is_possible(self, strategy: Strategy, masks: Masks) -> bool:
        """Return whether a strategy takes nothing partial, or cuts, or gets a partial operand."""
        wanted = [partial_bit(placement) for placement in strategy.inputs]
        cuts = map(self._bits.cut, strategy.inputs)
        return not any(wanted) or any(map(and_, wanted, masks)) or any(cuts)

    def _is_asked(
        self,
        strategy: Strategy,
        masks: Masks,
        results: Masks = (),
        grown: tuple[bool, ...] = (),
    ) -> bool:
        """Return whether a strategy cuts nothing, or the masks of its operands lead to it.

        A strategy that cuts nothing but its results is asked for where they are wanted so.
        """
        if not masks:
            return True  # nothing leads to a factory: it makes the blocks that others ask for
        cut = self._bits.cut
        wanted = [cut(placement) for placement in strategy.inputs]
        if any(wanted):
            come = all(
                wanted[place] & masks[place]
                if wanted[place]
                else not masks[place] & ~SUMS or (grown and grown[place])
                for place in strategy.preplaced
            )
            return come and any(map(and_, wanted, masks))
        blocks = [cut(placement) for placement in strategy.outputs]
        return not any(blocks) or any(map(and_, blocks, results))

    def masks(self, at: int) -> Masks:
        """Return the mask of each operand; 0 for an operand that is gathered for the node."""
        masks = tuple(map(self._reached.__getitem__, self._places[at][1]))
        if at not in self._gathered:
            return masks
        gathered = self._gathered[at]
        return tuple([0 if all_of else mask for mask, all_of in zip(masks, gathered, strict=True)])

    def pins(self, at: int) -> Pins:
        """Return the placement that each operand must have; nothing where there are no pins."""
        refs, pinned, stored = self._places[at][1], self._pinned, self._stored
        if self._placed.isdisjoint(refs):
            return ()
        gathered = self._gathered.get(at) or (False,) * len(refs)
        return tuple([
            Replicate() if all_of else pinned.get(value) or stored.get(value)
            for value, all_of in zip(refs, gathered, strict=True)
        ])  # fmt: skip
