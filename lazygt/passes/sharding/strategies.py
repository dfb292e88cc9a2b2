"""Strategies of every node with their costs, looked up once for each kind of node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lazygt.graph.cost import family, graph_costs
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.graph.placement import Cut, Placement, Replicate, Shard, StridedShard
from lazygt.machine import Machine
from lazygt.passes.base import renumbered
from lazygt.passes.sharding.def_use import DefUse
from lazygt.passes.sharding.marks import MARKS, PLACE, REDUCE_AS
from lazygt.passes.sharding.placement_cost import strategy_seconds, ticks, work_share
from lazygt.passes.sharding.rules import packed, views
from lazygt.passes.sharding.rules.strategy import Call, LocalLowering, Metas, Strategy

# -- strategies that take an operand interleaved, where they take it in S(dim) as well -------------
# An op that runs on blocks alone, and is right for every size of the blocks, computes each row of
# the cut dim by itself, or adds up over all. So any rows of a dim will do in the place of
# neighbours, if all tensors that the strategy cuts are cut alike.


def strided_strategies(
    node: Node,
    metas: Metas,
    parts: int,
    strategies: Sequence[Strategy],
    place: int,
    placement: StridedShard,
) -> list[Strategy]:
    """Return the strategies in which the operand at ``place`` is interleaved.

    Args:
        strategies: of the node, for blocks.
    """
    if node.op in views.RESHAPES:
        strategy = views.view_strategy(Call(node, metas, parts), placement)
        return [] if strategy is None else [strategy]
    if node.op in packed.TAKES_APART and packed.cut_dim(node, metas, parts) == placement.dim:
        strategy = packed.taken_apart(Call(node, metas, parts), placement)
        return [] if strategy is None else [strategy]
    if node.op in packed.HALVES and packed.cut_dim(node, metas, parts) == placement.dim:
        strategy = packed.halves(Call(node, metas, parts), placement)
        return [] if strategy is None else [strategy]
    tensors = [metas[number] for number in node.refs()]
    wanted = (strategy for strategy in strategies if strategy.inputs[place] == Shard(placement.dim))
    made = (_instead(strategy, tensors, node.results, placement) for strategy in wanted)
    return [strategy for strategy in made if strategy is not None]


def _instead(
    strategy: Strategy, operands: Metas, results: Metas, wanted: StridedShard
) -> Strategy | None:
    """Return the strategy with every cut dim interleaved as ``wanted``.

    None where the strategy needs neighbours, or cuts dims of several sizes.
    """
    if not (strategy.lower is None or isinstance(strategy.lower, LocalLowering)):
        return None
    if any(isinstance(made, StridedShard) for made in (*strategy.inputs, *strategy.outputs)):
        return None
    every = list(zip((*strategy.inputs, *strategy.outputs), (*operands, *results), strict=True))
    sizes = {
        meta.shape[placement.dim]
        for placement, meta in every
        if isinstance(placement, Shard) and meta is not None
    }
    if len(sizes) > 1:
        return None
    made = [_as(wanted, placement) for placement, _ in every]
    count = len(strategy.inputs)
    return replace(strategy, inputs=tuple(made[:count]), outputs=tuple(made[count:]))


def _as(wanted: StridedShard, placement: Placement) -> Placement:
    return replace(wanted, dim=placement.dim) if isinstance(placement, Shard) else placement


# -- strategies of every node with their costs, looked up once for each kind of node ---------------

#: The strategies of a node, with or without the one that is R everywhere.
StrategiesOf = Callable[[Node], Sequence[Strategy]]
#: For each operand of a node the interleaved placements that it may have.
Reached = tuple[tuple[StridedShard, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class StrategySet:
    """Strategies that one kind of node may be run as.

    Attributes:
        strategies: all R first, then in the order of the rule; of a placement those that keep it.
        costs: the time of each, in ticks.
        shares: the part of the node's arithmetic that a rank does, of each.
        heavy: whether the node is a matmul, a convolution or an attention.
        works: whether there is anything to do, unlike in a view.
        only_cuts_results: whether some take whole operands to blocks.
        attends: whether it is an attention, for which whole keys may weigh more than to exchange
            the blocks that there are for those of heads.
        takes_sums: whether an operand that may come as a partial sum is taken so and not otherwise.
    """

    strategies: tuple[Strategy, ...]
    costs: npt.NDArray[np.float64]
    shares: tuple[float, ...]
    heavy: bool
    works: bool
    only_cuts_results: bool
    attends: bool
    takes_sums: bool

    def keep(self, wanted: Callable[[int, Strategy], bool]) -> StrategySet:
        """Return the entry with the wanted strategies; itself where that is none or all of them."""
        kept = [
            number for number, strategy in enumerate(self.strategies) if wanted(number, strategy)
        ]
        if not kept or len(kept) == len(self.strategies):
            return self
        return replace(
            self,
            strategies=tuple([self.strategies[number] for number in kept]),
            costs=self.costs[kept],
            shares=tuple([self.shares[number] for number in kept]),
        )


class StrategyCatalogue:
    """Entries of a graph's nodes.

    Nodes of one op with equal metas and arguments have one entry; ``strategies_of`` is asked about
    the first of them.

    Args:
        metas: of every value.

    Attributes:
        entries: one a kind of node, then those that were asked for later.
        numbers: of each node, the number of its entry.
        firsts: of each kind the first node.
        parts: ranks of the axis.
    """

    def __init__(
        self,
        chains: DefUse,
        metas: Metas,
        strategies_of: StrategiesOf,
        parts: int,
        machine: Machine,
    ) -> None:
        self._metas, self.parts, self._machine = metas, parts, machine
        kinds: dict[tuple[Any, ...], int] = {}
        self.numbers: list[int] = []
        self.firsts: list[Node] = []
        ids = tuple(map(id, metas))  # equal metas are one object
        for node, refs, results in chains.nodes:
            kind = _signature(node, refs, results, ids)
            number = kinds.setdefault(kind, len(kinds))
            if number == len(self.firsts):
                self.firsts.append(node)
            self.numbers.append(number)
        self._costs = graph_costs(_apart(self.firsts, metas, chains.params))
        self.entries = [
            self._entry(number, _every(node, strategies_of(node)))
            for number, node in enumerate(self.firsts)
        ]
        self._wider: dict[tuple[int, Reached, StridedShard | None], int] = {}

    def strided(self, number: int, reached: Reached, wanted: StridedShard | None = None) -> int:
        """Return the number of an entry that also takes operands interleaved.

        Args:
            number: of the entry without such strategies.
            reached: for each operand the placements that it may have.
            wanted: the placement that a gradient is to have that the node puts among zeros.
        """
        key = number, reached, wanted
        index = self._wider.get(key)
        if index is None:
            node, strategies = self.firsts[number], self.entries[number].strategies
            more = {
                (strategy.inputs, strategy.outputs): strategy
                for place, placements in enumerate(reached)
                for placement in placements
                for strategy in strided_strategies(
                    node, self._metas, self.parts, strategies, place, placement
                )
            }
            joined = self._of_groups(node, reached, wanted)
            more |= {} if joined is None else {(joined.inputs, joined.outputs): joined}
            index = self._wider[key] = len(self.entries) if more else number
            if more:
                self.entries.append(self._entry(number, (*strategies, *more.values())))
        return index

    def _of_groups(
        self, node: Node, reached: Reached, wanted: StridedShard | None
    ) -> Strategy | None:
        """Return the strategy for an interleaved value of several operands, or of several nodes."""
        if wanted is not None:
            return packed.put_among(Call(node, self._metas, self.parts), wanted)
        if node.op == packed.CAT:
            return packed.joined_as(Call(node, self._metas, self.parts), reached)
        return None

    def _entry(self, number: int, strategies: tuple[Strategy, ...]) -> StrategySet:
        node, cost, parts = self.firsts[number], self._costs[number], self.parts
        operands = [self._metas[value] for value in node.refs()]
        seconds = [
            0.0 if node.op in MARKS
            else strategy_seconds(self._machine, cost, strategy, operands, node.results, parts)
            for strategy in strategies
        ]  # fmt: skip
        strategies, seconds = _cheapest(strategies, seconds)
        shares = [work_share(strategy, operands, node.results, parts) for strategy in strategies]
        costs = np.array(list(map(ticks, seconds)))
        if not (operands or costs.any() or _is_cut(strategies[0])):
            costs[0] = 1  # memory is had in no time, but a block of it is less
        return StrategySet(
            strategies,
            costs,
            tuple(shares),
            _is_heavy(node),
            bool(costs.any()),
            bool(operands) and any(map(_only_cuts_results, strategies)),
            "attention" in node.op,
            node.op == REDUCE_AS,
        )


def _every(node: Node, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Return all strategies, R everywhere first: by the op's rule, else by ``replicated``."""
    if node.op == PLACE:
        return tuple(strategies)
    whole = next((strategy for strategy in strategies if not _is_cut(strategy)), replicated(node))
    return (whole, *filter(_is_cut, strategies))


def _cheapest(
    strategies: tuple[Strategy, ...], seconds: list[float]
) -> tuple[tuple[Strategy, ...], list[float]]:
    """Keep of several strategies with the same placements the one that takes the least time."""
    if all(strategy.share is None for strategy in strategies):
        return strategies, seconds
    best: dict[tuple[object, ...], int] = {}
    for number, strategy in enumerate(strategies):
        placements = strategy.inputs, strategy.outputs
        if seconds[number] < seconds[best.setdefault(placements, number)]:
            best[placements] = number
    kept = sorted(best.values())
    return tuple([strategies[number] for number in kept]), [seconds[number] for number in kept]


def _signature(
    node: Node, refs: tuple[int, ...], results: range, metas: tuple[int, ...]
) -> tuple[Any, ...]:
    """Return a key that is equal for nodes with the same op, metas and arguments.

    The values that they read may differ.

    Args:
        metas: a number for the meta of each value.
    """
    repeats = () if len(refs) < 2 or len(set(refs)) == len(refs) else tuple(map(refs.index, refs))
    return (
        node.op,
        _structure(node.args),
        node.kwargs and tuple([(name, _structure((arg,))) for name, arg in node.kwargs]),
        tuple([metas[value] for value in refs]),
        metas[results.start : results.stop],
        repeats,
        node.writes and tuple(map(refs.index, node.writes)),
        id(node.body),
    )


#: Placeholders in a signature for all values, and for all run-time numbers.
_ANY = {Ref: Ref, Param: Param}


def _structure(args: tuple[Arg, ...]) -> tuple[Any, ...]:
    kinds = tuple(map(type, args))
    if kinds.count(Ref) == len(kinds):
        return kinds
    if tuple in kinds:
        return tuple([
            _structure(arg) if type(arg) is tuple else _ANY.get(type(arg), arg) for arg in args
        ])  # fmt: skip
    return tuple([
        kind if kind is Ref or kind is Param else arg
        for kind, arg in zip(kinds, args, strict=True)
    ])  # fmt: skip


def _apart(nodes: Sequence[Node], metas: Metas, params: tuple[str, ...]) -> Graph:
    """Return a graph of these nodes alone, each with inputs of its own."""
    inputs: list[TensorMeta] = []
    moved: list[Mapping[int, int]] = []
    for node in nodes:
        places: dict[int, int] = {}
        for value in node.refs():
            meta = metas[value]
            if value not in places and meta is not None:
                places[value] = len(inputs)
                inputs.append(meta)
        moved.append(places)
    alone = tuple([renumbered(node, places) for node, places in zip(nodes, moved, strict=True)])
    return Graph(tuple(inputs), params, alone, ())


def replicated(node: Node) -> Strategy:
    """Return the strategy that is R everywhere."""
    return Strategy((Replicate(),) * len(node.refs()), (Replicate(),) * len(node.results))


def _is_cut(strategy: Strategy) -> bool:
    return any(placement != Replicate() for placement in (*strategy.inputs, *strategy.outputs))


def _only_cuts_results(strategy: Strategy) -> bool:
    is_cut = [isinstance(placement, Cut) for placement in strategy.inputs]
    return not any(is_cut) and any(isinstance(made, Cut) for made in strategy.outputs)


def _is_heavy(node: Node) -> bool:
    return family(node) == "matmul"
