"""Placements that reach the values of a graph, from all their sources.

A work-list visits nodes until nothing changes. Its sources, in turn:

    annotation      the user's placement of a value, and those that follow from it
    consumers       the placement of a value is propagated through the strategies of its users: to
                    their results, and to the other operands that such a strategy shards
    packed weight   interleaved placements, where a product is split and its pieces are sharded
    gradient        the sum of gradients that slices of one value embed in zeros

Partial placements are propagated forwards only. Strategies for interleaved operands are considered
only where an interleaved placement was reached.

The set of placements of a value is a bit mask, with one bit for each placement. An *interleaved*
placement is a ``StridedShard``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from heapq import heappop, heappush
from operator import and_, or_
from typing import NamedTuple

from lazygt.graph.liveness import DefUse
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.graph.placement import (
    REDUCE_OPS,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from lazygt.passes.sharding.choose.catalogue import StrategyCatalogue
from lazygt.passes.sharding.marks import Annotation
from lazygt.passes.sharding.propagate.placement_sources import (
    find_seeds,
    gathers_operand,
)
from lazygt.passes.sharding.rules.strategy import Metas, Strategy

# -- sets of placements as bit masks ---------------------------------------------------------------
# There is one bit for each P(op), S(dim) and interleaved placement.

_FIRST = len(REDUCE_OPS)
#: The bits of all partial placements.
PARTIAL_BITS = (1 << _FIRST) - 1


def partial_bit(placement: Placement) -> int:
    """Return the bit of a partial placement; 0 for any other."""
    return 1 << REDUCE_OPS.index(placement.op) if isinstance(placement, Partial) else 0


class Bits:
    """Assignment of bits to the placements that shard a dim.

    S(dim) placements have every second bit; interleaved placements get the other bits on first use.

    Attributes:
        interleaved: the bits of all interleaved placements so far.
    """

    def __init__(self) -> None:
        self._bit_of: dict[StridedShard, int] = {}
        self.interleaved = 0

    def shard_bit(self, placement: Placement) -> int:
        """Return the bit of a placement that shards a dim; 0 for any other."""
        if isinstance(placement, Shard):
            return 1 << _FIRST + 2 * placement.dim
        return self._interleaved_bit(placement) if isinstance(placement, StridedShard) else 0

    def bit(self, placement: Placement) -> int:
        """Return the bit of a placement; 0 for ``Replicate()``."""
        return partial_bit(placement) | self.shard_bit(placement)

    def _interleaved_bit(self, placement: StridedShard) -> int:
        """Return the bit of an interleaved placement, which gets one on first use."""
        bit = self._bit_of.get(placement)
        if bit is None:
            bit = self._bit_of[placement] = 1 << _FIRST + 2 * len(self._bit_of) + 1
            self.interleaved |= bit
        return bit

    def interleaved_in(self, mask: int) -> tuple[StridedShard, ...]:
        """Return the interleaved placements of a set."""
        return tuple([placement for placement, bit in self._bit_of.items() if bit & mask])


def union(
    strategies: Sequence[Sequence[Placement]], count: int, bit: Callable[[Placement], int]
) -> list[int]:
    """Return for each position the mask of its placements over all strategies.

    Args:
        strategies: of each strategy the placements of its operands, or results.
        count: number of positions.
        bit: gives the bit of a placement.
    """
    return [
        reduce(or_, [bit(placements[position]) for placements in strategies], 0)
        for position in range(count)
    ]


def same_blocks(
    bits: Bits,
    operands: Sequence[TensorMeta | None],
    masks: Sequence[int],
    result: TensorMeta | None,
) -> int:
    """Return the mask of the operands' shards that a result can have: of dims of equal size."""
    mask = 0
    for operand, operand_mask in zip(operands, masks, strict=True):
        if operand is None or result is None:
            continue
        for dim, (size, other) in enumerate(zip(operand.shape, result.shape, strict=False)):
            if size == other:
                mask |= operand_mask & bits.shard_bit(Shard(dim))
    return mask


# -- placements that reach values ------------------------------------------------------------------

Masks = tuple[int, ...]
FixedPlacements = tuple[Placement | None, ...]


class Step(NamedTuple):
    """Node of a graph with the masks of its operands."""

    node: Node
    refs: tuple[int, ...]  # ``node.refs()``
    results: range  # the numbers of its results
    kind: int  # number of its strategy set in the catalogue
    masks: Masks  # for each operand, the placements that reached it


class Reach:
    """Placements that reach the values of a graph: a fixpoint iteration over its nodes.

    Args:
        explore: every strategy is open, also where no annotation leads.

    Attributes:
        reached: the mask of each value; hints add partial placements.
        stored: value -> the placement in which it is stored, though it is gathered for most users.
    """

    def __init__(
        self,
        chains: DefUse,
        metas: Metas,
        catalogue: StrategyCatalogue,
        annotations: Mapping[int, Annotation],
        explore: bool,
    ) -> None:
        self.metas, self.catalogue, self.explore, self.bits = metas, catalogue, explore, Bits()
        self._chains, self._annotations = chains, annotations
        self._nodes, self._users = chains.nodes, chains.users
        self._numbers = list(catalogue.numbers)
        self._fixed = {v: a.placement for v, a in annotations.items() if a.kind == "fixed"}
        self.stored = {v: a.placement for v, a in annotations.items() if a.kind == "stored"}
        self.reached = [0] * len(metas)
        for value, annotation in annotations.items():
            self.reached[value] = self.bits.bit(annotation.placement)
        self.annotated_shards = [v for v in annotations if self.reached[v] & ~PARTIAL_BITS]
        self._passed_cache: dict[tuple[int, Masks], Masks] = {}
        #: for each node the masks of its operands at the last visit
        self._seen: list[Masks | None] = [None] * len(self._nodes)
        #: node that embeds a gradient in zeros -> the placement of the sum of such results
        self._embedded: Mapping[int, StridedShard] = {}
        self._gathered = self._find_gathered()
        self._run(set(range(len(self._nodes))))
        self._run(self._add_seeds())

    def _find_gathered(self) -> dict[int, tuple[bool, ...]]:
        """Return the nodes for which stored values are gathered, with a flag for each operand."""
        gathered = {}
        for number in {number for value in self.stored for number in self._users[value]}:
            node, refs, _ = self._nodes[number]
            is_gathered = tuple(
                [v in self.stored and gathers_operand(node, v, self.metas) for v in refs]
            )
            if any(is_gathered):
                gathered[number] = is_gathered
        return gathered

    def steps(self) -> list[Step]:
        """Return the nodes with the placements that reached their operands."""
        return [
            Step(*node, kind, self.masks(number))
            for number, (node, kind) in enumerate(zip(self._nodes, self._numbers, strict=True))
        ]

    def masks(self, number: int) -> Masks:
        """Return the mask of each operand of a node; 0 for an operand gathered for the node."""
        masks = tuple(map(self.reached.__getitem__, self._nodes[number][1]))
        if number not in self._gathered:
            return masks
        gathered = self._gathered[number]
        return tuple(
            [0 if is_gathered else mask for mask, is_gathered in zip(masks, gathered, strict=True)]
        )

    def fixed_placements(self, number: int) -> FixedPlacements:
        """Return the required placement of each operand; empty if there are none."""
        refs, fixed, stored = self._nodes[number][1], self._fixed, self.stored
        if fixed.keys().isdisjoint(refs) and stored.keys().isdisjoint(refs):
            return ()
        gathered = self._gathered.get(number) or (False,) * len(refs)
        return tuple([
            Replicate() if is_gathered else fixed.get(value) or stored.get(value)
            for value, is_gathered in zip(refs, gathered, strict=True)
        ])  # fmt: skip

    # -- work-list -----------------------------------------------------------------------

    def _run(self, next_round: set[int]) -> None:
        """Visit nodes in rounds until nothing changes.

        Each round visits nodes in order: a change for a later node is propagated in the same round,
        any other change in the next round.

        Args:
            next_round: the nodes of the first round.
        """
        while next_round:
            waiting, queued = sorted(next_round), next_round  # a sorted list is a heap
            next_round = set()
            while waiting:
                number = heappop(waiting)
                for user in self._visit(number):
                    if user <= number:
                        next_round.add(user)
                    elif user not in queued:
                        queued.add(user)
                        heappush(waiting, user)

    def _add_seeds(self) -> set[int]:
        """Add the interleaved placements of packed weights; return the nodes to visit again."""

        def is_sharded_otherwise(value: int, dim: int) -> bool:
            return bool(self.reached[value] & ~PARTIAL_BITS & ~self.bits.shard_bit(Shard(dim)))

        values, self._embedded = find_seeds(
            self._chains, self.metas, self.catalogue, self._annotations, is_sharded_otherwise
        )
        for number in self._embedded:
            self._seen[number] = None
        for value, placements in values.items():
            self.reached[value] |= reduce(or_, map(self.bits.shard_bit, placements))
        return {*self._embedded, *[number for value in values for number in self._users[value]]}

    def _visit(self, number: int) -> Sequence[int]:
        """Propagate placements through a node; return the readers of changed values."""
        masks = self.masks(number)
        if masks == self._seen[number] or not (self.explore or any(masks)):
            return ()
        self._seen[number] = masks
        node, refs, results = self._nodes[number]
        if self.bits.interleaved or self._embedded:
            self._add_interleaved(number, masks)
        kind = self._numbers[number]
        passed = self.passed(kind, masks)
        if self.catalogue.entries[kind].is_heavy:
            passed = self._with_operand_shards(node, masks, passed)
        count = len(refs)
        if passed[:count] == masks:  # the common case: no change of the operands
            changed = self._merge(results, passed[count:])
        else:
            changed = self._merge((*refs, *results), passed)
        return [user for value in changed for user in self._users[value]] if changed else ()

    def _add_interleaved(self, number: int, masks: Masks) -> None:
        """Add a node's strategies for operands that were reached interleaved."""
        bits, wanted = self.bits, self._embedded.get(number)
        if wanted or any(mask & bits.interleaved for mask in masks):
            kind, placements = (
                self.catalogue.numbers[number],
                tuple(map(bits.interleaved_in, masks)),
            )
            self._numbers[number] = self.catalogue.strided(kind, placements, wanted)

    def _merge(self, values: Sequence[int], masks: Masks) -> list[int]:
        """Add placements to the masks of values; return the values that changed."""
        changed, reached = [], self.reached
        for value, mask in zip(values, masks, strict=True):
            if mask & ~reached[value] and value not in self._fixed:
                reached[value] |= mask
                changed.append(value)
        return changed

    # -- placements through one node -----------------------------------------------------

    def passed(self, kind: int, masks: Masks) -> Masks:
        """Return the placements that a node propagates to each operand, then to each result.

        They are those of its strategies that the operands' placements reach.

        Args:
            kind: number of the node's strategy set in the catalogue.
            masks: the placements reached so far of each operand.
        """
        passed = self._passed_cache.get((kind, masks))
        if passed is None:
            strategies = [
                strategy
                for strategy in self.catalogue.entries[kind].strategies
                if self.is_possible(strategy, masks)
            ]
            # a factory can produce any shard, but is no reason to want one
            reached = (
                [strategy for strategy in strategies if self.is_reached(strategy, masks)]
                if masks
                else []
            )
            inputs = [strategy.inputs for strategy in reached]
            outputs = [strategy.outputs for strategy in reached]
            producers = [strategy.outputs for strategy in strategies] if self.explore else outputs
            count = len(strategies[0].outputs)
            passed = self._passed_cache[kind, masks] = (
                *union(inputs, len(masks), self.bits.shard_bit),
                *map(
                    or_,
                    union(outputs, count, self.bits.shard_bit),
                    union(producers, count, partial_bit),
                ),
            )
        return passed

    def _with_operand_shards(self, node: Node, masks: Masks, passed: Masks) -> Masks:
        """Add the operands' shards to a node's results where no strategy of the node uses them.

        For example, an attention converts shards of its keys, and its results are wanted in the
        operands' placements. The same holds for partial gradients of keys.
        """
        count = len(masks)
        operands = [self.metas[value] for value in node.refs()]
        is_unused, is_attention = not any(passed[count:]), "attention" in node.op
        extended = [
            mask | same_blocks(self.bits, operands, masks, result)
            if is_unused
            or (
                is_attention
                and not mask & ~PARTIAL_BITS
                and _has_shape_of_sharded_operand(result, operands, masks)
            )
            else mask
            for result, mask in zip(node.results, passed[count:], strict=True)
        ]
        return (*passed[:count], *extended)

    def is_possible(self, strategy: Strategy, masks: Masks) -> bool:
        """Return whether a strategy needs no partial operand, shards one, or gets a partial one."""
        wanted = [partial_bit(placement) for placement in strategy.inputs]
        shards = map(self.bits.shard_bit, strategy.inputs)
        return not any(wanted) or any(map(and_, wanted, masks)) or any(shards)

    def is_reached(
        self,
        strategy: Strategy,
        masks: Masks,
        results: Masks = (),
        broadcast: tuple[bool, ...] = (),
    ) -> bool:
        """Return whether a strategy shards nothing, or is reached by the masks of its operands.

        A strategy that shards only its results is reached where ``results`` contains the shards.

        Args:
            masks: for each operand, the placements that reached it.
            results: for each result, the wanted shards.
            broadcast: for each operand, whether it may be replicated before a broadcast.
        """
        if not masks:
            return True  # a factory produces the shards that its users want
        shard_bit = self.bits.shard_bit
        wanted = [shard_bit(placement) for placement in strategy.inputs]
        if any(wanted):
            is_consistent = all(
                wanted[position] & masks[position]
                if wanted[position]
                else not masks[position] & ~PARTIAL_BITS or (broadcast and broadcast[position])
                for position in strategy.preplaced
            )
            return is_consistent and any(map(and_, wanted, masks))
        result_shards = [shard_bit(placement) for placement in strategy.outputs]
        return not any(result_shards) or any(map(and_, result_shards, results))


def _has_shape_of_sharded_operand(result: TensorMeta | None, operands: Metas, masks: Masks) -> bool:
    """Return whether a result has the shape of a sharded operand."""
    return result is not None and any(
        operand is not None and operand.shape == result.shape and mask & ~PARTIAL_BITS
        for operand, mask in zip(operands, masks, strict=True)
    )
