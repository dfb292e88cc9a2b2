"""Propagation of a cut through a decomposition: the strategies of its inner ops in order.

A factor is all dims that strategies of inner ops cut together. One factor is cut at a time. A
partial value that an inner op needs whole is reduced where it was made.
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

#: At most so many ways to cut operands of which one has a dim twice.
_WAYS = 4
#: The strategies of each inner node.
Options = Sequence[Sequence[Strategy]]
#: A dim of a value.
Dim = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Chain:
    """Strategies of the inner nodes.

    Attributes:
        placements: of every value, as its readers find it.
        strategies: one for each node.
        reduced: the values that are reduced where they are made.
        comm: the collectives of the strategies, and the reductions.
    """

    placements: tuple[Placement, ...]
    strategies: tuple[Strategy, ...]
    reduced: frozenset[int]
    comm: tuple[Collective, ...]


def chains(made: Decomposition, options: Options) -> Iterator[Chain]:
    """Yield a chain for each factor that can be cut and each operand that can be partial.

    A cut for which an inner op has to gather, and a partial operand that has to be reduced, give
    none.
    """
    factors = _Factors(made, options)
    cut = [
        [(strategy, factors.of(strategy, values)) for strategy in strategies]
        for values, strategies in _used(made, options)
    ]
    for placements, factor in _starts(made, factors):
        fitting = [
            [strategy for strategy, other in strategies if other in (None, factor)]
            for strategies in cut
        ]
        chain = _chain(made, fitting, placements)
        if chain is not None:
            yield chain


def _starts(
    made: Decomposition, factors: _Factors
) -> Iterator[tuple[tuple[Placement, ...], Dim | None]]:
    """Yield the placements of the operands that are worth a try, with the factor that is cut."""
    read = made.read()
    places = range(made.operands)
    dims: dict[Dim, dict[int, list[int]]] = {}
    for place in places:
        meta = made.metas[place]
        for dim in shardable_dims(meta.shape) if meta and place in read else ():
            dims.setdefault(factors.root((place, dim)), {}).setdefault(place, []).append(dim)
    for factor, cut in dims.items():
        for ways in islice(product(*cut.values()), _WAYS):
            way = dict(zip(cut, ways, strict=True))
            yield tuple([S(way[place]) if place in way else R for place in places]), factor
    for partial in read.intersection(places):
        yield tuple([P if place == partial else R for place in places]), None


class _Factors:
    """Dims of values that strategies cut together (union-find)."""

    def __init__(self, made: Decomposition, options: Options) -> None:
        self._above: dict[Dim, Dim] = {}
        for values, strategies in _used(made, options):
            for strategy in strategies:
                self._join(_dims(strategy, values))

    def root(self, dim: Dim) -> Dim:
        """Return the one dim that stands for its factor."""
        while (above := self._above.get(dim, dim)) != dim:
            dim = above
        return dim

    def of(self, strategy: Strategy, values: Iterable[int]) -> Dim | None:
        """Return the factor that a strategy cuts, if it cuts any."""
        dims = _dims(strategy, values)
        return self.root(dims[0]) if dims else None

    def _join(self, dims: Sequence[Dim]) -> None:
        for dim in dims[1:]:
            root, above = self.root(dim), self.root(dims[0])
            if root != above:
                self._above[root] = above


def _used(
    made: Decomposition, options: Options
) -> Iterator[tuple[tuple[int, ...], Sequence[Strategy]]]:
    """Yield for each node the values that it takes and gives, and its strategies."""
    for (node, results), strategies in zip(made.numbered(), options, strict=True):
        yield (*node.refs(), *results), strategies


def _dims(strategy: Strategy, values: Iterable[int]) -> list[Dim]:
    """Return the dims that a strategy cuts, of the values that its node takes and gives."""
    placements = zip(values, (*strategy.inputs, *strategy.outputs), strict=True)
    return [
        (value, placement.dim) for value, placement in placements if isinstance(placement, Shard)
    ]


def _chain(made: Decomposition, options: Options, inputs: tuple[Placement, ...]) -> Chain | None:
    """Return the chain of the best strategy of each inner node for its operands' placements."""
    reduced: frozenset[int] = frozenset()
    while True:
        chain, wanted = _attempt(made, options, inputs, reduced)
        if chain is None or wanted <= reduced:
            return chain
        reduced |= wanted
        if any(value < made.operands for value in reduced):
            return None


def _attempt(
    made: Decomposition, options: Options, inputs: tuple[Placement, ...], reduced: frozenset[int]
) -> tuple[Chain | None, frozenset[int]]:
    """Return the chain that reduces these values, and all those that it has to reduce."""
    placements, strategies = list(inputs), []
    comm: list[Collective] = []
    wanted, sources = set(reduced), _Sources(made)
    for (node, results), choice in zip(made.numbered(), options, strict=True):
        have = tuple([placements[value] for value in node.refs()])
        strategy = _best(choice, have, [made.metas[value] for value in node.refs()])
        if strategy is None:
            return None, reduced
        for value, placement, want in zip(node.refs(), have, strategy.inputs, strict=True):
            if isinstance(placement, Partial) and placement != want:
                wanted.add(sources[value])
        strategies.append(strategy)
        comm += strategy.comm
        for value, placement in zip(results, strategy.outputs, strict=True):
            if value in reduced and isinstance(placement, Partial):
                comm.append(Collective("all_reduce", _nbytes(made.metas[value]), placement.op))
                placement = R
            placements.append(placement)
        sources.add(
            node, have, [value for value in results if isinstance(placements[value], Partial)]
        )
    return Chain(tuple(placements), tuple(strategies), reduced, tuple(comm)), frozenset(wanted)


def _nbytes(meta: TensorMeta | None) -> int:
    return meta.nbytes if meta else 0


class _Sources:
    """Values to reduce for a partial value: its source, if that is no larger."""

    def __init__(self, made: Decomposition) -> None:
        self._made = made
        self._sources: dict[int, int] = {}

    def __getitem__(self, value: int) -> int:
        return self._sources.get(value, value)

    def add(self, node: Node, have: Sequence[Placement], partial: Sequence[int]) -> None:
        """Note a node's partial results, with its operands' placements."""
        operands = {
            value
            for value, placement in zip(node.refs(), have, strict=True)
            if isinstance(placement, Partial)
        }
        for result in partial:
            nbytes = _nbytes(self._made.metas[result])
            if len(operands) == 1 and _nbytes(self._made.metas[min(operands)]) <= nbytes:
                self._sources[result] = self[min(operands)]


def _best(
    strategies: Sequence[Strategy], have: tuple[Placement, ...], operands: Metas
) -> Strategy | None:
    """Return the strategy that exchanges least; of those, one that keeps most as it is."""
    as_it_is = [
        strategy for strategy in strategies if strategy.inputs == have and not strategy.comm
    ]
    if as_it_is:
        return min(as_it_is, key=_whole_results)
    leading = [strategy for strategy in strategies if all(map(_leads, have, strategy.inputs))]
    return min(leading, key=lambda strategy: _price(strategy, have, operands), default=None)


def _whole_results(strategy: Strategy) -> int:
    return strategy.outputs.count(R)


def _price(
    strategy: Strategy, have: tuple[Placement, ...], operands: Metas
) -> tuple[int, int, int, int]:
    moved = [
        (placement, _nbytes(meta))
        for placement, want, meta in zip(have, strategy.inputs, operands, strict=True)
        if placement != want
    ]
    sums = [nbytes for placement, nbytes in moved if isinstance(placement, Partial)]
    sizes = [*sums, *(collective.nbytes for collective in strategy.comm)]
    return len(sizes), sum(sizes), len(moved), _whole_results(strategy)


def _leads(have: Placement, want: Placement) -> bool:
    """Return whether a value gets from the one placement to the other without a gather."""
    if isinstance(have, Partial):
        return want in (have, R)
    return have == want or (have == R and (isinstance(want, Shard) or want == P))
