"""Catalogue of the sharding strategies of every node with their costs, by kind of node.

The speeds are those of a machine (``lazygt.machine``). Seconds are rounded to whole picoseconds
(``ticks``), so that sums are exact in any order and every rank makes the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lazygt.graph.cost import Cost, family, graph_costs
from lazygt.graph.liveness import DefUse
from lazygt.graph.meta import TensorMeta, short_dtype
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.graph.placement import Cut, Placement, Replicate, Shard, StridedShard, local_size
from lazygt.machine import Machine, collective_seconds
from lazygt.passes.base import renumbered
from lazygt.passes.sharding.marks import MARKS, PLACE, REDUCE_AS
from lazygt.passes.sharding.rules import slicing, views
from lazygt.passes.sharding.rules.strategy import Call, LocalLowering, Metas, Strategy

# -- time of a node with a strategy ---------------------------------------------------------------

_TICKS = 1e12


def share(meta: TensorMeta | None, placement: Placement, axis_size: int) -> float:
    """Return the fraction of a value, from 0 to 1, in the largest shard: that of the first rank."""
    if meta is None or not isinstance(placement, Cut):
        return 1.0
    size = meta.shape[placement.dim]
    return local_size(placement, size, axis_size, 0) / size if size else 1.0


def work_share(strategy: Strategy, operands: Metas, results: Metas, axis_size: int) -> float:
    """Return the fraction of a node's arithmetic on the busiest rank: 1 if nothing is sharded."""
    if strategy.share is not None:
        return strategy.share
    return min(
        (share(meta, placement, axis_size)
         for metas, placements in ((operands, strategy.inputs), (results, strategy.outputs))
         for meta, placement in zip(metas, placements, strict=True)),
        default=1.0,
    )  # fmt: skip


def strategy_seconds(
    machine: Machine,
    cost: Cost,
    strategy: Strategy,
    operands: Metas,
    results: Metas,
    axis_size: int,
) -> float:
    """Return the time of a node with a strategy, including the collectives inside (roofline model).

    Args:
        cost: of the unsharded node on one device.
    """
    comm = _comm_seconds(machine, strategy, axis_size)
    flops = cost.flops * work_share(strategy, operands, results, axis_size)
    local_bytes = cost.bytes * _byte_share(strategy, operands, results, axis_size)
    work = max(flops / _rate(machine, operands, results), local_bytes / machine.memory.bandwidth)
    total = max(comm, work) if strategy.overlapped_turns else comm + work
    return total + cost.launches * machine.host.launch


def _comm_seconds(machine: Machine, strategy: Strategy, axis_size: int) -> float:
    """Return the time of the collectives inside a strategy.

    Collectives run one after another. With ``strategy.overlapped_turns`` they run in
    that many rounds, and the collectives of a round run at once and share the links.
    """
    times = [collective_seconds(machine, c.kind, c.nbytes, axis_size) for c in strategy.comm]
    if not (times and strategy.overlapped_turns):
        return sum(times)
    latencies = [collective_seconds(machine, c.kind, 0, axis_size) for c in strategy.comm]
    return sum(times) - sum(latencies) + strategy.overlapped_turns * max(latencies)


def _rate(machine: Machine, operands: Metas, results: Metas) -> float:
    """Return the machine's operations per second in the dtype of a node."""
    meta = next((meta for meta in (*results, *operands) if meta is not None), None)
    return machine.matmul.rate_of("f32" if meta is None else short_dtype(meta.dtype))


def _byte_share(strategy: Strategy, operands: Metas, results: Metas, axis_size: int) -> float:
    """Return the fraction of a node's memory traffic on the rank with the largest shards."""
    total = local = 0.0
    for metas, placements in ((operands, strategy.inputs), (results, strategy.outputs)):
        for meta, placement in zip(metas, placements, strict=True):
            nbytes = 0 if meta is None else meta.nbytes
            total += nbytes
            local += nbytes * share(meta, placement, axis_size)
    return local / total if total else 1.0


def ticks(seconds: float) -> float:
    """Round seconds to whole picoseconds, as a float; infinity stays."""
    return seconds if math.isinf(seconds) else float(round(seconds * _TICKS))


def seconds(cost: float) -> float:
    """Convert a cost in ticks to seconds."""
    return cost / _TICKS


# -- strategies for interleaved operands, derived from those for S(dim) ----------------------------
# An op that runs on shards without communication, for every shard size, computes each row of the
# sharded dim independently, or reduces over all rows. So the rows of a shard need not be adjacent,
# if all tensors that the strategy shards have the same rows.


#: Ops that take a tensor apart along a dim, with the function that gives their strategy.
_IN_PIECES = ((slicing.TAKES_APART, slicing.taken_apart), (slicing.HALVES, slicing.halves))


def strided_strategies(
    node: Node,
    metas: Metas,
    axis_size: int,
    strategies: Sequence[Strategy],
    position: int,
    placement: StridedShard,
) -> list[Strategy]:
    """Return the strategies in which the operand at position ``position`` is interleaved.

    Args:
        strategies: of the node, for contiguous shards.
        position: position of the operand.
        placement: of the operand.
    """
    call = Call(node, metas, axis_size)
    if node.op in views.RESHAPES:
        return _listed(views.view_strategy(call, placement))
    for ops, strategy_of in _IN_PIECES:
        if node.op in ops and slicing.cut_dim(call) == placement.dim:
            return _listed(strategy_of(call, placement))
    tensors = [metas[number] for number in node.refs()]
    candidates = (
        strategy for strategy in strategies if strategy.inputs[position] == Shard(placement.dim)
    )
    interleaved = (
        _interleaved_strategy(strategy, tensors, node.results, placement) for strategy in candidates
    )
    return [strategy for strategy in interleaved if strategy is not None]


def _listed(strategy: Strategy | None) -> list[Strategy]:
    return [] if strategy is None else [strategy]


def _interleaved_strategy(
    strategy: Strategy, operands: Metas, results: Metas, wanted: StridedShard
) -> Strategy | None:
    """Return the strategy with every sharded dim interleaved as ``wanted``.

    None where the strategy needs adjacent rows, or shards dims of several sizes.
    """
    if not (strategy.lower is None or isinstance(strategy.lower, LocalLowering)):
        return None
    if any(
        isinstance(placements, StridedShard) for placements in (*strategy.inputs, *strategy.outputs)
    ):
        return None
    pairs = list(zip((*strategy.inputs, *strategy.outputs), (*operands, *results), strict=True))
    sizes = {
        meta.shape[placement.dim]
        for placement, meta in pairs
        if isinstance(placement, Shard) and meta is not None
    }
    if len(sizes) > 1:
        return None
    placements = [_interleaved_placement(wanted, placement) for placement, _ in pairs]
    count = len(strategy.inputs)
    return replace(strategy, inputs=tuple(placements[:count]), outputs=tuple(placements[count:]))


def _interleaved_placement(wanted: StridedShard, placement: Placement) -> Placement:
    return replace(wanted, dim=placement.dim) if isinstance(placement, Shard) else placement


# -- catalogue of strategies with their costs ------------------------------------------------------

#: Returns the strategies of a node, with or without the replicated one.
StrategiesOf = Callable[[Node], Sequence[Strategy]]
#: For each operand of a node the interleaved placements that may reach it.
Reached = tuple[tuple[StridedShard, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class StrategySet:
    """Strategies of one kind of node, with their costs."""

    strategies: tuple[Strategy, ...]  # the replicated one first, then in the order of the op's rule
    costs: npt.NDArray[np.float64]  # the time of each strategy, in ticks
    shares: tuple[float, ...]  # for each strategy the fraction of the node's arithmetic on one rank
    is_heavy: bool  # whether the node is a matmul, a convolution or an attention
    takes_time: bool  # whether the node takes time, unlike a view
    only_shards_results: bool  # whether a strategy maps replicated operands to sharded results
    #: whether the node is an attention, for which gathering keys may cost more than converting
    #: their shards to shards of heads
    is_attention: bool
    keeps_partial: bool  # whether the node must read a partial operand as such (``reduce_as``)

    def keep(self, wanted: Callable[[int, Strategy], bool]) -> StrategySet:
        """Return the set filtered by a predicate; the set itself if none or all would remain."""
        retained = [
            number for number, strategy in enumerate(self.strategies) if wanted(number, strategy)
        ]
        if not retained or len(retained) == len(self.strategies):
            return self
        return replace(
            self,
            strategies=tuple([self.strategies[number] for number in retained]),
            costs=self.costs[retained],
            shares=tuple([self.shares[number] for number in retained]),
        )


class StrategyCatalogue:
    """Strategy sets of a graph's nodes, one for each kind of node.

    Nodes of one op with equal metas and arguments are of one kind; ``strategies_of`` is called for
    the first of them.

    Args:
        metas: of every value.

    Attributes:
        entries: the set of each kind of node, then sets extended by interleaved placements.
        numbers: for each node, the number of its set.
        firsts: the first node of each kind.
        axis_size: number of ranks of the axis.
    """

    def __init__(
        self,
        chains: DefUse,
        metas: Metas,
        strategies_of: StrategiesOf,
        axis_size: int,
        machine: Machine,
    ) -> None:
        self._metas, self.axis_size, self._machine = metas, axis_size, machine
        kinds: dict[tuple[Any, ...], int] = {}
        self.numbers: list[int] = []
        self.firsts: list[Node] = []
        meta_ids = tuple(map(id, metas))  # equal metas are one object
        for node, refs, results in chains.nodes:
            kind = _signature(node, refs, results, meta_ids)
            number = kinds.setdefault(kind, len(kinds))
            if number == len(self.firsts):
                self.firsts.append(node)
            self.numbers.append(number)
        self._costs = graph_costs(_isolated_graph(self.firsts, metas, chains.params))
        self.entries = [
            self._entry(number, _all_strategies(node, strategies_of(node)))
            for number, node in enumerate(self.firsts)
        ]
        self._extended_sets: dict[tuple[int, Reached, StridedShard | None], int] = {}

    def strided(self, number: int, reached: Reached, wanted: StridedShard | None = None) -> int:
        """Return the number of a set that also has strategies for interleaved operands.

        Args:
            number: of the set without such strategies.
            reached: for each operand the interleaved placements that may reach it.
            wanted: placement of the result, for a gradient that the node embeds in zeros.
        """
        key = number, reached, wanted
        index = self._extended_sets.get(key)
        if index is None:
            node, strategies = self.firsts[number], self.entries[number].strategies
            additional = {
                (strategy.inputs, strategy.outputs): strategy
                for position, placements in enumerate(reached)
                for placement in placements
                for strategy in strided_strategies(
                    node, self._metas, self.axis_size, strategies, position, placement
                )
            }
            for strategy in _listed(self._group_strategy(node, reached, wanted)):
                additional[strategy.inputs, strategy.outputs] = strategy
            index = self._extended_sets[key] = len(self.entries) if additional else number
            if additional:
                self.entries.append(self._entry(number, (*strategies, *additional.values())))
        return index

    def _group_strategy(
        self, node: Node, reached: Reached, wanted: StridedShard | None
    ) -> Strategy | None:
        """Return the strategy for an interleaved result of ``cat``, or of a slice's backward."""
        if wanted is not None:
            return slicing.put_among(Call(node, self._metas, self.axis_size), wanted)
        if node.op == slicing.CAT:
            return slicing.joined_as(Call(node, self._metas, self.axis_size), reached)
        return None

    def _entry(self, number: int, strategies: tuple[Strategy, ...]) -> StrategySet:
        """Return the strategy set of kind ``number``, with costs."""
        node, cost, axis_size = self.firsts[number], self._costs[number], self.axis_size
        operands = [self._metas[value] for value in node.refs()]
        seconds = [
            0.0 if node.op in MARKS
            else strategy_seconds(self._machine, cost, strategy, operands, node.results, axis_size)
            for strategy in strategies
        ]  # fmt: skip
        strategies, seconds = _cheapest(strategies, seconds)
        shares = [
            work_share(strategy, operands, node.results, axis_size) for strategy in strategies
        ]
        costs = np.array(list(map(ticks, seconds)))
        if not (operands or costs.any() or _is_sharded(strategies[0])):
            costs[0] = 1  # allocation takes no time, but a shard needs less memory
        return StrategySet(
            strategies,
            costs,
            tuple(shares),
            _is_heavy(node),
            bool(costs.any()),
            bool(operands) and any(map(_only_shards_results, strategies)),
            "attention" in node.op,
            node.op == REDUCE_AS,
        )


def _all_strategies(node: Node, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Return all strategies, the replicated one first."""
    if node.op == PLACE:
        return tuple(strategies)
    all_replicated = next(
        (strategy for strategy in strategies if not _is_sharded(strategy)), replicated(node)
    )
    return (all_replicated, *filter(_is_sharded, strategies))


def _cheapest(
    strategies: tuple[Strategy, ...], seconds: list[float]
) -> tuple[tuple[Strategy, ...], list[float]]:
    """Keep the fastest of several strategies with the same placements."""
    if all(strategy.share is None for strategy in strategies):
        return strategies, seconds
    best: dict[tuple[object, ...], int] = {}
    for number, strategy in enumerate(strategies):
        placements = strategy.inputs, strategy.outputs
        if seconds[number] < seconds[best.setdefault(placements, number)]:
            best[placements] = number
    retained = sorted(best.values())
    return tuple([strategies[number] for number in retained]), [
        seconds[number] for number in retained
    ]


def _signature(
    node: Node, refs: tuple[int, ...], results: range, metas: tuple[int, ...]
) -> tuple[Any, ...]:
    """Return a hashable key that is equal for nodes with the same op, metas and arguments.

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
    """Return arguments with placeholders for values and run-time numbers."""
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


def _isolated_graph(nodes: Sequence[Node], metas: Metas, params: tuple[str, ...]) -> Graph:
    """Return a graph of these nodes without dependences; each node has its own inputs."""
    inputs: list[TensorMeta] = []
    renumberings: list[Mapping[int, int]] = []
    for node in nodes:
        numbers: dict[int, int] = {}
        for value in node.refs():
            meta = metas[value]
            if value not in numbers and meta is not None:
                numbers[value] = len(inputs)
                inputs.append(meta)
        renumberings.append(numbers)
    isolated = tuple(
        [renumbered(node, numbers) for node, numbers in zip(nodes, renumberings, strict=True)]
    )
    return Graph(tuple(inputs), params, isolated, ())


def replicated(node: Node) -> Strategy:
    """Return the strategy with all operands and results replicated."""
    return Strategy((Replicate(),) * len(node.refs()), (Replicate(),) * len(node.results))


def _is_sharded(strategy: Strategy) -> bool:
    return any(placement != Replicate() for placement in (*strategy.inputs, *strategy.outputs))


def _only_shards_results(strategy: Strategy) -> bool:
    is_cut = [isinstance(placement, Cut) for placement in strategy.inputs]
    return not any(is_cut) and any(isinstance(placement, Cut) for placement in strategy.outputs)


def _is_heavy(node: Node) -> bool:
    return family(node) == "matmul"
