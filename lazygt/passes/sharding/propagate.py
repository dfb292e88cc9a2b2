"""Which strategies may be chosen: those that the user's annotations lead to.

A sharding of a value spreads along the strategies of the ops that it meets: to their results, and
to the other operands that such a strategy wants cut. A strategy that shards is open to the solver
when one of its operands has been reached with the placement that it takes there. So annotations say
*what* is sharded on an axis, and the solver says where it is moved. ``explore`` opens every
strategy.

Partial values spread forwards only. A strategy that takes only whole and partial operands is left
out where none of them may come partial: the strategy that is R everywhere does the same then, and
its result can be made partial for nothing.

Strategies that take a value interleaved are looked for, and open, only where it was reached so.

What is reached is a bit mask a value, with one bit a placement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from operator import and_, or_

from lazygt.graph.node import Graph, Node
from lazygt.graph.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard, StridedShard
from lazygt.passes.sharding.annotations import Annotation, moves_elements, takes_whole
from lazygt.passes.sharding.marks import PLACE
from lazygt.passes.sharding.rules.base import Metas, Strategy
from lazygt.passes.sharding.strategies import StrategyCatalogue, StrategySet

# -- sets of placements as whole numbers: one bit for each P(op), S(dim) and interleaved placement
# ---------

_FIRST = len(REDUCE_OPS)
#: The bits of all partial placements.
SUMS = (1 << _FIRST) - 1


def partial_bit(placement: Placement) -> int:
    """The bit of a partial placement; 0 for any other."""
    return 1 << REDUCE_OPS.index(placement.op) if isinstance(placement, Partial) else 0


class Bits:
    """The bits of the placements that cut a dim.

    Dims have every second place; the others go to interleaved placements as they are met.

    Attributes:
        interleaved: the bits of all interleaved placements that were met.
    """

    def __init__(self) -> None:
        self._met: dict[StridedShard, int] = {}
        self.interleaved = 0

    def cut(self, placement: Placement) -> int:
        """The bit of a placement that cuts a dim; 0 for any other."""
        if isinstance(placement, Shard):
            return 1 << _FIRST + 2 * placement.dim
        return self._of(placement) if isinstance(placement, StridedShard) else 0

    def _of(self, placement: StridedShard) -> int:
        bit = self._met.get(placement)
        if bit is None:
            bit = self._met[placement] = 1 << _FIRST + 2 * len(self._met) + 1
            self.interleaved |= bit
        return bit

    def found(self, mask: int) -> tuple[StridedShard, ...]:
        """The interleaved placements of a set."""
        return tuple([placement for placement, bit in self._met.items() if bit & mask])


# -- which strategies may be chosen ----------------------------------------------------------------

#: How autograd adds one microbatch's gradient to another's.
_ADDITIONS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})

Masks = tuple[int, ...]
Pins = tuple[Placement | None, ...]


def open_strategies(
    graph: Graph,
    metas: Metas,
    catalogue: StrategyCatalogue,
    annotations: Mapping[int, Annotation],
    explore: bool,
    whole: Collection[int] = (),
) -> list[StrategySet]:
    """The entry of each node with the strategies that may be chosen for it.

    A strategy that breaks a pin is left out where another keeps it. So is one that has every rank
    do all of an op, where a strategy that was reached divides it: always of a matmul; of other ops
    unless the solver may ``explore``, or dividing them takes a collective in their middle, or
    operands that are interleaved: these were in blocks before a view, and may be wanted whole
    behind it. Partial values that are added to others, and views of such, may stay partial: then
    their sum is reduced, not each of them.

    Args:
        whole: nodes, by number, that every rank may do all of in any case, but for pins.
    """
    propagation = _Propagation(graph, metas, catalogue, annotations, explore)
    propagation.spread()
    entries = catalogue.entries
    known: dict[tuple[int, Masks, Masks, Pins], StrategySet] = {}
    opened_entries = []
    for at, (node, number) in enumerate(zip(graph.nodes, propagation.numbers, strict=True)):
        key = number, propagation.masks(node), propagation.wishes(node), propagation.pins(node)
        entry = known.get(key)
        if entry is None:
            entry = known[key] = propagation.opened(entries[number], *key[1:])
        is_free = at in whole and _keeps(entries[number].strategies[0], propagation.pins(node))
        opened_entries.append(_with_whole(entry, entries[number]) if is_free else entry)
    return opened_entries


def _with_whole(opened: StrategySet, entry: StrategySet) -> StrategySet:
    """The opened strategies, and the one that is R everywhere."""
    strategies = set(map(id, opened.strategies))
    return entry.keep(lambda number, strategy: number == 0 or id(strategy) in strategies)


def _keeps(strategy: Strategy, pins: Pins) -> bool:
    """Whether a strategy takes pinned values as they are; a whole one may be a partial sum."""
    return all(
        pin in (None, placement) or (pin == Replicate() and isinstance(placement, Partial))
        for pin, placement in zip(pins, strategy.inputs, strict=False)
    )


def _is_interleaved(strategy: Strategy) -> bool:
    return any(
        isinstance(placement, StridedShard) for placement in (*strategy.inputs, *strategy.outputs)
    )


def _is_summed(strategy: Strategy, wishes: Masks) -> bool:
    """Whether a strategy takes partial values where they are wanted so."""
    wanted = map(partial_bit, strategy.inputs)
    return bool(wishes) and all(map(and_, wanted, wishes))


def _union(
    strategies: Sequence[Sequence[Placement]], places: int, bit: Callable[[Placement], int]
) -> list[int]:
    """What the placements at each place are, over all strategies."""
    return [
        reduce(or_, [bit(placements[place]) for placements in strategies], 0)
        for place in range(places)
    ]


def _looks_through(node: Node) -> bool:
    """Whether blocks of a node's result are as good as made when its operand is in blocks."""
    return node.op == PLACE or moves_elements(node)


class _Propagation:
    """What reaches each value.

    Attributes:
        numbers: of each node, which entry of the catalogue is its own.
    """

    def __init__(
        self,
        graph: Graph,
        metas: Metas,
        catalogue: StrategyCatalogue,
        annotations: Mapping[int, Annotation],
        explore: bool,
    ) -> None:
        self._explore = explore
        self._metas = metas
        self._graph, self._catalogue, self._bits = graph, catalogue, Bits()
        self.numbers = list(catalogue.numbers)
        self._pinned = {v: a.placement for v, a in annotations.items() if a.kind == "pinned"}
        self._stored = {v: a.placement for v, a in annotations.items() if a.kind == "stored"}
        self._reached = [0] * len(metas)
        for value, annotation in annotations.items():
            self._reached[value] = self._bit(annotation.placement)
        self._spreads: dict[tuple[int, Masks], Masks] = {}
        #: value -> the blocks that those who take a view of it would like to find there, and the
        #: partial sums that are added to others
        self._wishes: dict[int, int] = {}

    def spread(self) -> None:
        """Follow the strategies of all nodes until nothing more is reached."""
        places = list(self._graph.numbered())
        seen: list[Masks | None] = [None] * len(places)
        more = True
        while more:
            more = False
            for at, (node, results) in enumerate(places):
                masks = self.masks(node)
                if masks != seen[at] and (self._explore or any(masks)):
                    seen[at] = masks
                    self._widen(at, masks)
                    passed = self._passed(self.numbers[at], masks)
                    more |= self._merge((*node.refs(), *results), passed)

        self._look_back()

    def _widen(self, at: int, masks: Masks) -> None:
        """Look for strategies of a node that take operands interleaved, as they were reached."""
        bits = self._bits
        if bits.interleaved and any(mask & bits.interleaved for mask in masks):
            placements = tuple(map(bits.found, masks))
            self.numbers[at] = self._catalogue.strided(self._catalogue.numbers[at], placements)

    def _look_back(self) -> None:
        """Follow views and placements from their results, and additions, to their operands."""
        places = zip(self._graph.numbered(), self.numbers, strict=True)
        sources: dict[tuple[int, int], int] = {}
        for (node, results), number in reversed(list(places)):
            if node.op in _ADDITIONS:
                for value, wish in zip(node.refs(), self._summed(node), strict=True):
                    self._wish(value, wish)
            elif len(results) == 1 and _looks_through(node):
                (value,), (result,) = node.refs(), results
                wish = self._reached[result] & ~SUMS | self._wishes.get(result, 0)
                if (number, wish) not in sources:
                    sources[number, wish] = self._sources(number, wish)
                self._wish(value, sources[number, wish])

    def _sources(self, number: int, wish: int) -> int:
        """What the operand of a view has to be for its result to be any of a wish."""
        strategies = self._catalogue.entries[number].strategies
        sources = [
            strategy.inputs for strategy in strategies if self._bit(strategy.outputs[0]) & wish
        ]
        return _union(sources, 1, self._bit)[0]

    def _wish(self, value: int, wish: int) -> None:
        if wish and value not in self._stored:
            self._wishes[value] = self._wishes.get(value, 0) | wish

    def _summed(self, node: Node) -> Masks:
        """For each operand of an addition the partial sums that all of them may come as."""
        masks = self.masks(node)
        common = reduce(and_, masks, SUMS) if len(masks) > 1 else 0
        return (common,) * len(masks)

    def _merge(self, values: Sequence[int], masks: Masks) -> bool:
        """Whether a mask reaches a value that it did not reach before."""
        more = False
        for value, mask in zip(values, masks, strict=True):
            if mask & ~self._reached[value] and value not in self._pinned:
                self._reached[value] |= mask
                more = True
        return more

    def _passed(self, number: int, masks: Masks) -> Masks:
        """What a node passes on of what reached it: to each operand, then to each result."""
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
            wants = _union([strategy.inputs for strategy in asked], len(first.inputs), cut)
            blocks = _union([strategy.outputs for strategy in asked], len(first.outputs), cut)
            makers = [strategy.outputs for strategy in (strategies if self._explore else asked)]
            sums = _union(makers, len(first.outputs), partial_bit)
            passed = self._spreads[number, masks] = (*wants, *map(or_, blocks, sums))
        return passed

    def opened(self, entry: StrategySet, masks: Masks, wishes: Masks, pins: Pins) -> StrategySet:
        """The strategies of an entry that may be chosen for a node that was reached so."""
        kept = entry.keep(
            lambda _, strategy: _keeps(strategy, pins) and self._is_possible(strategy, masks)
        )
        # a factory shares no work that anybody brought: whole is as good as in blocks
        divides = bool(masks) and any(
            share < 1
            and self._is_asked(strategy, masks)
            and (entry.heavy or not (strategy.comm or _is_interleaved(strategy)))
            for strategy, share in zip(kept.strategies, kept.shares, strict=True)
        )
        asked = tuple(map(or_, masks, wishes)) if wishes else masks
        if self._explore:
            kept = kept.keep(
                lambda _, strategy: not _is_interleaved(strategy) or self._is_asked(strategy, asked)
            )
        else:
            kept = kept.keep(lambda _, strategy: self._is_asked(strategy, asked))
        if divides and (entry.heavy or not self._explore):
            shares = kept.shares
            kept = kept.keep(
                lambda number, strategy: shares[number] < 1 or _is_summed(strategy, wishes)
            )
        return kept

    def _bit(self, placement: Placement) -> int:
        return partial_bit(placement) | self._bits.cut(placement)

    def _is_possible(self, strategy: Strategy, masks: Masks) -> bool:
        """Whether it takes nothing partial, or cuts as well, or an operand may come partial."""
        wanted = [partial_bit(placement) for placement in strategy.inputs]
        cuts = map(self._bits.cut, strategy.inputs)
        return not any(wanted) or any(map(and_, wanted, masks)) or any(cuts)

    def _is_asked(self, strategy: Strategy, masks: Masks) -> bool:
        """Whether a strategy cuts nothing, or what reached its operands leads to it."""
        if not masks:
            return True  # nothing leads to a factory: it makes what others ask for
        cut = self._bits.cut
        wanted = [cut(placement) for placement in strategy.inputs]
        return any(map(and_, wanted, masks)) or not (any(wanted) or any(map(cut, strategy.outputs)))

    def masks(self, node: Node) -> Masks:
        """What reached each operand; what is gathered for the node reaches it with nothing."""
        refs, reached = node.refs(), self._reached
        if self._stored.keys().isdisjoint(refs):
            return tuple([reached[value] for value in refs])
        return tuple([0 if self._is_gathered(node, value) else reached[value] for value in refs])

    def wishes(self, node: Node) -> Masks:
        """What a view's operand, or those of an addition, are wanted as; nothing where nothing."""
        refs = node.refs()
        if node.op in _ADDITIONS:
            summed = self._summed(node)
            return summed if any(summed) else ()
        if len(refs) != 1 or refs[0] not in self._wishes or not _looks_through(node):
            return ()
        return (self._wishes[refs[0]],)

    def pins(self, node: Node) -> Pins:
        """The placement that each operand must have; nothing where none must."""
        refs, pinned, sharding = node.refs(), self._pinned, self._stored
        if pinned.keys().isdisjoint(refs) and sharding.keys().isdisjoint(refs):
            return ()
        return tuple([
            Replicate() if self._is_gathered(node, value)
            else pinned.get(value) or sharding.get(value)
            for value in refs
        ])  # fmt: skip

    def _is_gathered(self, node: Node, value: int) -> bool:
        return value in self._stored and takes_whole(node, value, self._metas)
