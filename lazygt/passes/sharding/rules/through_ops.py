"""Sharding propagation through a decomposition: one strategy for each inner op, in order.

A factor is a set of dims that strategies of inner ops shard together (union-find). One factor is
sharded at a time. A partial value that an inner op needs in full is all-reduced by its producer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.graph.placement import Partial, Placement, Shard
from lazygt.passes.sharding.rules.decompose import Decomposition
from lazygt.passes.sharding.rules.strategy import (
    Collective,
    Metas,
    P,
    R,
    S,
    Strategy,
    shardable_dims,
)

#: Limit on the candidate shardings per factor; there are several if an operand has a factor twice.
_MAX_CANDIDATES = 4
#: The strategies of each inner node.
Options = Sequence[Sequence[Strategy]]
#: (value number, dim).
Dim = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OpChain:
    """One strategy for each inner node of a decomposition."""

    placements: tuple[Placement, ...]  # placement of every value, after its reduction
    strategies: tuple[Strategy, ...]  # strategy of each node
    reduced: frozenset[int]  # numbers of the values that their producers all-reduce
    comm: tuple[Collective, ...]  # collectives of the strategies, and the all-reduces


def chains(decomposed: Decomposition, options: Options) -> Iterator[OpChain]:
    """Yield the chain of each shardable factor and of each operand that can be partial.

    A factor gives no chain if an inner op would have to gather. A partial operand gives none if it
    would have to be reduced first.

    Args:
        options: strategies of each inner node.
    """
    factors = _Factors(decomposed, options)
    strategies_with_factors = [
        [(strategy, factors.of(strategy, values)) for strategy in strategies]
        for values, strategies in _nodes_with_strategies(decomposed, options)
    ]
    for placements, factor in _operand_placements(decomposed, factors):
        fitting = [
            [strategy for strategy, own_factor in strategies if own_factor in (None, factor)]
            for strategies in strategies_with_factors
        ]
        chain = _chain(decomposed, fitting, placements)
        if chain is not None:
            yield chain


def _operand_placements(
    decomposed: Decomposition, factors: _Factors
) -> Iterator[tuple[tuple[Placement, ...], Dim | None]]:
    """Yield candidate placements of the operands, with the sharded factor (None: partial)."""
    read = decomposed.read()
    operands = range(decomposed.operands)
    dims: dict[Dim, dict[int, list[int]]] = {}
    for operand in operands:
        meta = decomposed.metas[operand]
        for dim in shardable_dims(meta.shape) if meta and operand in read else ():
            dims.setdefault(factors.root((operand, dim)), {}).setdefault(operand, []).append(dim)
    for factor, dims_of_operand in dims.items():
        for selected_dims in islice(product(*dims_of_operand.values()), _MAX_CANDIDATES):
            sharded = dict(zip(dims_of_operand, map(S, selected_dims), strict=True))
            yield tuple([sharded.get(operand, R) for operand in operands]), factor
    for partial in read.intersection(operands):
        yield tuple([P if operand == partial else R for operand in operands]), None


class _Factors:
    """Dims of values that strategies shard together (union-find)."""

    def __init__(self, decomposed: Decomposition, options: Options) -> None:
        self._parent: dict[Dim, Dim] = {}
        for values, strategies in _nodes_with_strategies(decomposed, options):
            for strategy in strategies:
                self._join(_sharded_dims(strategy, values))

    def root(self, dim: Dim) -> Dim:
        """Return the representative dim of the factor of ``dim`` (find)."""
        while (parent := self._parent.get(dim, dim)) != dim:
            dim = parent
        return dim

    def of(self, strategy: Strategy, values: Iterable[int]) -> Dim | None:
        """Return the factor that a strategy shards; None: the strategy shards nothing."""
        dims = _sharded_dims(strategy, values)
        return self.root(dims[0]) if dims else None

    def _join(self, dims: Sequence[Dim]) -> None:
        """Merge the factors of ``dims`` (union)."""
        for dim in dims[1:]:
            root, parent = self.root(dim), self.root(dims[0])
            if root != parent:
                self._parent[root] = parent


def _nodes_with_strategies(
    decomposed: Decomposition, options: Options
) -> Iterator[tuple[tuple[int, ...], Sequence[Strategy]]]:
    """Yield for each node the numbers of its operands and results, and its strategies."""
    for (node, results), strategies in zip(decomposed.numbered(), options, strict=True):
        yield (*node.refs(), *results), strategies


def _sharded_dims(strategy: Strategy, values: Iterable[int]) -> list[Dim]:
    """Return the dims of the node's operands and results that a strategy shards."""
    placements = zip(values, (*strategy.inputs, *strategy.outputs), strict=True)
    return [
        (value, placement.dim) for value, placement in placements if isinstance(placement, Shard)
    ]


def _chain(
    decomposed: Decomposition, options: Options, inputs: tuple[Placement, ...]
) -> OpChain | None:
    """Choose the best strategy of each inner node; None if that is impossible.

    Repeats until all partial values that an inner node needs in full are reduced (fixed point).

    Args:
        inputs: placements of the op's operands.
    """
    reduced: frozenset[int] = frozenset()
    while True:
        chain, to_reduce = _choose_strategies(decomposed, options, inputs, reduced)
        if chain is None or to_reduce <= reduced:
            return chain
        reduced |= to_reduce
        if any(value < decomposed.operands for value in reduced):
            return None


def _choose_strategies(
    decomposed: Decomposition,
    options: Options,
    inputs: tuple[Placement, ...],
    reduced: frozenset[int],
) -> tuple[OpChain | None, frozenset[int]]:
    """Choose strategies in node order, with ``reduced`` as the reduced values.

    Returns:
        The chain, or None; and the values that it has to reduce.
    """
    placements, strategies = list(inputs), []
    comm: list[Collective] = []
    to_reduce, sources = set(reduced), _Sources(decomposed)
    for (node, results), candidates in zip(decomposed.numbered(), options, strict=True):
        operand_placements = tuple([placements[value] for value in node.refs()])
        strategy = _cheapest(
            candidates, operand_placements, [decomposed.metas[value] for value in node.refs()]
        )
        if strategy is None:
            return None, reduced
        for value, placement, required in zip(
            node.refs(), operand_placements, strategy.inputs, strict=True
        ):
            if isinstance(placement, Partial) and placement != required:
                to_reduce.add(sources[value])
        strategies.append(strategy)
        comm += strategy.comm
        for value, placement in zip(results, strategy.outputs, strict=True):
            if value in reduced and isinstance(placement, Partial):
                comm.append(
                    Collective("all_reduce", _nbytes(decomposed.metas[value]), placement.op)
                )
                placement = R
            placements.append(placement)
        sources.add(
            node,
            operand_placements,
            [value for value in results if isinstance(placements[value], Partial)],
        )
    return OpChain(tuple(placements), tuple(strategies), reduced, tuple(comm)), frozenset(to_reduce)


def _nbytes(meta: TensorMeta | None) -> int:
    """Return the bytes of a value; 0 if undefined."""
    return meta.nbytes if meta else 0


class _Sources:
    """Map of a partial value to the value to reduce instead: its source, if not larger."""

    def __init__(self, decomposed: Decomposition) -> None:
        self._decomposed = decomposed
        self._sources: dict[int, int] = {}

    def __getitem__(self, value: int) -> int:
        """Return the value to reduce for ``value``."""
        return self._sources.get(value, value)

    def add(self, node: Node, placements: Sequence[Placement], partial: Sequence[int]) -> None:
        """Record the sources of a node's partial results.

        Args:
            placements: placements of the node's operands.
            partial: numbers of its partial results.
        """
        operands = {
            value
            for value, placement in zip(node.refs(), placements, strict=True)
            if isinstance(placement, Partial)
        }
        for result in partial:
            nbytes = _nbytes(self._decomposed.metas[result])
            if len(operands) == 1 and _nbytes(self._decomposed.metas[min(operands)]) <= nbytes:
                self._sources[result] = self[min(operands)]


def _cheapest(
    strategies: Sequence[Strategy], placements: tuple[Placement, ...], operands: Metas
) -> Strategy | None:
    """Return the cheapest strategy for operands with these placements; None: none fits.

    A strategy without resharding and collectives comes first, then the one that sends least.
    """
    unchanged = [
        strategy for strategy in strategies if strategy.inputs == placements and not strategy.comm
    ]
    if unchanged:
        return min(unchanged, key=_num_replicated)
    reachable = [
        strategy
        for strategy in strategies
        if all(map(_converts_without_gather, placements, strategy.inputs))
    ]
    return min(reachable, key=lambda strategy: _cost(strategy, placements, operands), default=None)


def _num_replicated(strategy: Strategy) -> int:
    """Return the number of replicated results."""
    return strategy.outputs.count(R)


def _cost(
    strategy: Strategy, placements: tuple[Placement, ...], operands: Metas
) -> tuple[int, int, int, int]:
    """Return the sort key of a strategy: collectives, bytes, conversions, replicated results."""
    resharded = [
        (placement, _nbytes(meta))
        for placement, required, meta in zip(placements, strategy.inputs, operands, strict=True)
        if placement != required
    ]
    sums = [nbytes for placement, nbytes in resharded if isinstance(placement, Partial)]
    sizes = [*sums, *(collective.nbytes for collective in strategy.comm)]
    return len(sizes), sum(sizes), len(resharded), _num_replicated(strategy)


def _converts_without_gather(have: Placement, want: Placement) -> bool:
    """Return whether a value can be converted from ``have`` to ``want`` without a gather."""
    if isinstance(have, Partial):
        return want in (have, R)
    return have == want or (have == R and (isinstance(want, Shard) or want == P))
