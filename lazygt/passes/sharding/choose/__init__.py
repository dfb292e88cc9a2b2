"""Choice of placements on one mesh axis, as a min-sum problem for the solver.

Variables: the strategy of each node; for each value with several users the placement provided for
all of them (for a partial value there may be a second one). Factors: the time of each node, and for
each use of a value the time of the redistribution to the wanted placement:

    S -> R       all-gather           P -> R    all-reduce
    P -> S       reduce-scatter       S -> S'   all-to-all
    R -> S, R -> P    nothing is sent

An interleaved value is gathered and scattered as S is. A conversion to another sharding of its dim
is a halo exchange, or where that has many pieces two all-to-alls through another dim.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lazygt.graph.liveness import DefUse, Positions
from lazygt.graph.placement import (
    Cut,
    Partial,
    Placement,
    Replicate,
    StridedShard,
    outer_and_inner,
    whole_groups,
)
from lazygt.machine import Machine, collective_seconds
from lazygt.passes.sharding.choose.catalogue import StrategySet, ticks
from lazygt.passes.sharding.choose.solver import Problem, Scope, Solution, Table
from lazygt.passes.sharding.lower.halo import rows_between
from lazygt.passes.sharding.marks import Annotation
from lazygt.passes.sharding.rules.strategy import Metas, Strategy

# -- cost of redistribution ------------------------------------------------------------------------

#: Reductions for which a replicated value becomes partial without communication.
_FREE_PARTIAL = ("sum", "max", "min")


def reshard_kind(source: Placement, target: Placement) -> str | None:
    """Return the kind of the collective from one placement to another.

    ``""`` if nothing is sent; None if no collective exists.
    """
    if source == target or (isinstance(source, Replicate) and _is_free(target)):
        return ""
    if isinstance(target, Partial) or isinstance(source, Replicate):
        return None
    if isinstance(source, Partial):
        return "all_reduce" if isinstance(target, Replicate) else "reduce_scatter"
    if isinstance(target, Replicate):
        return "all_gather"
    return "all_to_all"


def _is_free(target: Placement) -> bool:
    return not isinstance(target, Partial) or target.op in _FREE_PARTIAL


def payload(kind: str, nbytes: int, axis_size: int) -> int:
    """Return the payload per rank of a collective on a value of global size ``nbytes``."""
    return -(-nbytes // axis_size) if kind == "all_to_all" else nbytes


def reshard_seconds(
    machine: Machine, source: Placement, target: Placement, nbytes: int, axis_size: int
) -> float:
    """Return the time to redistribute a value of global size ``nbytes``.

    Infinity if no collective exists.
    """
    kind = reshard_kind(source, target)
    if kind is None:
        return math.inf
    if not kind:
        return 0.0
    count = max(map(_group_count, (source, target)))
    group_bytes = -(-payload(kind, nbytes, axis_size) // count)
    total = count * collective_seconds(machine, kind, group_bytes, axis_size)
    if not (kind == "all_to_all" and isinstance(source, Cut) and isinstance(target, Cut)):
        return total
    if _is_one_all_to_all(source, target, axis_size):
        return total
    sent_share = rows_sent(source, target, axis_size)
    if sent_share is None:
        return 2 * total  # two all-to-alls, through another dim
    return collective_seconds(machine, "send_recv", math.ceil(sent_share * nbytes), axis_size)


def _group_count(placement: Placement) -> int:
    """Return the number of collectives of a conversion: one for each group if sizes differ."""
    return len(placement.widths) or 1 if isinstance(placement, StridedShard) else 1


def _is_one_all_to_all(source: Cut, target: Cut, axis_size: int) -> bool:
    """Return whether one all-to-all converts between two sharded placements."""
    strided = [placement for placement in (source, target) if isinstance(placement, StridedShard)]
    if not strided or (len(strided) == 1 and source.dim != target.dim):
        return True
    return len(strided) == 1 and whole_groups(strided[0], axis_size)


@lru_cache(maxsize=1024)
def rows_sent(source: Cut, target: Cut, axis_size: int) -> float | None:
    """Return the fraction of a value that a rank sends in the halo exchange between two placements.

    None: the conversion goes through another dim.
    """
    if source.dim != target.dim:
        return None
    group_counts = [outer_and_inner(placement) for placement in (source, target)]
    size = (
        math.lcm(*[outer for outer, _ in group_counts])
        * axis_size
        * max(inner for _, inner in group_counts)
    )
    move = rows_between(source, target, size, axis_size)
    return None if move is None else move.most_rows_sent / size


#: Placements in which one value is available, or wanted, at the same time.
Copies = tuple[Placement, ...]
#: For each choice of a variable the available, or wanted, placements of a value.
Options = tuple[Copies, ...]


class ReshardingCosts:
    """Cached redistribution costs on one axis, in ticks; equal tables are one array.

    Args:
        axis_size: number of ranks of the axis.
    """

    def __init__(self, machine: Machine, axis_size: int) -> None:
        self._machine, self._axis_size = machine, axis_size
        self._direct_costs: dict[tuple[Placement, Placement, int], float] = {}
        self._total_costs: dict[tuple[Copies, Copies, int], float] = {}
        self._interned_options: dict[Options, Options] = {}
        self._tables: dict[tuple[int, int, int], Table | None] = {}
        self._copies: dict[tuple[int, int], Table | None] = {}

    def options(self, options: Options) -> Options:
        """Intern options; ``table`` and ``copies`` take interned options only."""
        return self._interned_options.setdefault(options, options)

    def direct_cost(self, source: Placement, target: Placement, nbytes: int) -> float:
        """Return the cost of redistributing a value of ``nbytes``."""
        key = source, target, nbytes
        cost = self._direct_costs.get(key)
        if cost is None:
            duration = reshard_seconds(self._machine, source, target, nbytes, self._axis_size)
            cost = self._direct_costs[key] = ticks(duration)
        return cost

    def total_cost(self, available: Copies, wanted: Copies, nbytes: int) -> float:
        """Return the cost of all wanted placements, converted from the available ones.

        One intermediate placement is used if that is cheaper.
        """
        key = available, wanted, nbytes
        cost = self._total_costs.get(key)
        if cost is None:
            cost = self._one_step_cost(available, wanted, nbytes)
            if len(wanted) > 1 or math.isinf(cost):  # several wanted, or no direct conversion
                for intermediate in (Replicate(), *wanted):
                    first = self._one_step_cost(available, (intermediate,), nbytes)
                    rest = self._one_step_cost((*available, intermediate), wanted, nbytes)
                    cost = min(cost, first + rest)
            self._total_costs[key] = cost
        return cost

    def _one_step_cost(self, available: Copies, wanted: Copies, nbytes: int) -> float:
        """Return the cost of all wanted placements, each converted directly from the cheapest."""
        return sum(
            min(self.direct_cost(source, target, nbytes) for source in available)
            for target in wanted
        )

    def table(self, have: Options, want: Options, nbytes: int) -> Table | None:
        """Return the costs: one row for each choice of ``have``, one column for each of ``want``.

        None if all costs are 0.
        """
        key = id(have), id(want), nbytes
        if key not in self._tables:
            costs = np.array([[self.total_cost(h, w, nbytes) for w in want] for h in have])
            self._tables[key] = costs if costs.any() else None
        return self._tables[key]

    def copies(self, have: Options, nbytes: int) -> Table | None:
        """Return for each choice the cost of making its other placements from its first one.

        None if all costs are 0.
        """
        key = id(have), nbytes
        if key not in self._copies:
            costs = np.array([self.total_cost(h[:1], h[1:], nbytes) for h in have], dtype=float)
            self._copies[key] = costs if costs.any() else None
        return self._copies[key]


# -- factors: the time of nodes, and of redistributions --------------------------------------------

R = Replicate()
_REPLICATED = Annotation(R)
#: Weight of a byte of a value that was broadcast from a smaller one. Such a value can be computed
#: replicated without communication; sharding it pays only if much work is divided.
_BROADCAST_WEIGHT = 4


class _Connected(NamedTuple):
    """Factors between a value's producer and its users; shared by equally connected values.

    Variables are numbered locally: 0 is the producer, then the users, then the value's own one.
    """

    options: Options | None  # of the value's own variable; None if there is none
    constant: float  # cost that does not depend on choices
    #: singles, pairs: local variables, with the cost table of their choices
    singles: Sequence[tuple[int, Table]]
    pairs: Sequence[tuple[int, int, Table]]


class _Sums:
    """Accumulated cost tables of variables and pairs of variables.

    Costs of a variable with one choice go to the constant.
    """

    def __init__(self) -> None:
        self._constant = 0.0
        self._singles: dict[int, Table] = {}
        self._pairs: dict[tuple[int, int], Table] = {}

    def charge(self, variable: int | None, costs: Table | None) -> None:
        """Add the cost of each choice of a variable."""
        if costs is None:
            return
        if variable is None or len(costs) == 1:
            self._constant += costs.item()
        else:
            total = self._singles.get(variable)
            self._singles[variable] = costs if total is None else total + costs

    def couple(self, a: int | None, b: int, table: Table | None) -> None:
        """Add the costs of the joint choices of two variables."""
        if table is None:
            return
        rows, columns = table.shape
        if a is None or rows == 1:
            self.charge(b, table[0])
        elif columns == 1:
            self.charge(a, table[:, 0])
        else:
            total = self._pairs.get((a, b))
            self._pairs[a, b] = table if total is None else total + table

    def connected(self, options: Options | None) -> _Connected:
        """Return all costs; tables of single variables are merged into tables of pairs."""
        singles, pairs = [], self._pairs
        for variable, costs in self._singles.items():
            pair = next((pair for pair in pairs if variable in pair), None)
            if pair is None:
                singles.append((variable, costs))
            else:
                pairs[pair] = pairs[pair] + (costs[:, None] if variable == pair[0] else costs)
        tables = [(a, b, table) for (a, b), table in pairs.items()]
        return _Connected(options, self._constant, singles, tables)


class Connections:
    """Variables and factors of a graph, value by value.

    Args:
        metas: of every value.
        entries: the strategies of each node.
        prices: costs of redistributions.
        broadcast: values that every rank could compute replicated without communication.

    Attributes:
        provided: see ``AxisProblem``.
    """

    def __init__(
        self,
        chains: DefUse,
        metas: Metas,
        entries: Sequence[StrategySet],
        prices: ReshardingCosts,
        broadcast: Collection[int] = (),
    ) -> None:
        self.sizes = [len(entry.strategies) for entry in entries]
        self.factors: list[tuple[Scope, Table]] = []
        self.constant = 0.0
        self.provided: dict[int, tuple[int, Options]] = {}
        self._chains, self._entries, self._prices = chains, entries, prices
        self._kinds = list(map(id, entries))
        self._nbytes = [0 if meta is None else meta.nbytes for meta in metas]
        for value in broadcast:
            self._nbytes[value] *= _BROADCAST_WEIGHT
        self._placement_columns: dict[tuple[int, bool, Positions], Options] = {}
        self._options_cache: dict[tuple[object, ...], Options] = {}
        self._first_options: dict[int, Options] = {}
        self._connected: dict[tuple[object, ...], _Connected] = {}
        for number, (_, _, results) in enumerate(chains.nodes):
            if not results:
                self._add_node_cost(number)

    def add_all(
        self,
        annotations: Mapping[int, Annotation],
        allowed: Mapping[int, Sequence[Collection[Placement]]],
    ) -> None:
        """Add the factors of every value; a node's own time is added with its first result.

        Args:
            annotations: value -> its annotation.
            allowed: output value -> sets of placements; the value must have one of each set.
        """
        cache, kinds, nbytes = self._connected, self._kinds, self._nbytes
        producers = self._chains.producers
        for value, users in enumerate(self._chains.users):
            producer, outputs = producers[value], allowed.get(value, ())
            if not (users or outputs):
                self._add_unused(producer)
                continue
            key = (
                nbytes[value],
                producer and (kinds[producer[0]], producer[1]),
                annotations.get(value),
                outputs and tuple(map(tuple, outputs)),
                tuple([kinds[user] for user in users]),
                *users.values(),
            )
            connected = cache.get(key)
            if connected is None:
                connected = self._connect(value, annotations.get(value), outputs)
                cache[key] = connected
            self._add(value, connected, (producer[0] if producer else -1, *users, len(self.sizes)))

    def _add_unused(self, producer: tuple[int, int] | None) -> None:
        """Add the time of a node if its first result is unused."""
        if producer is not None and not producer[1]:
            self._add_node_cost(producer[0])

    def _add_node_cost(self, node: int) -> None:
        """Add the time of a node as a factor."""
        entry = self._entries[node]
        if len(entry.costs) == 1:
            self.constant += entry.costs.item()
        elif entry.takes_time:
            self.factors.append(((node,), entry.costs))

    def _add(self, value: int, connected: _Connected, variables: tuple[int, ...]) -> None:
        """Add a value's factors, with local variables replaced by ``variables``."""
        options, constant, singles, pairs = connected
        self.constant += constant
        for a, table in singles:
            self.factors.append(((variables[a],), table))
        for a, b, table in pairs:
            self.factors.append(((variables[a], variables[b]), table))
        if options is not None:
            self.provided[value] = variables[-1], options
            self.sizes.append(len(options))

    def _connect(
        self, value: int, annotation: Annotation | None, allowed: Sequence[Collection[Placement]]
    ) -> _Connected:
        """Build the factors of a value; see ``_Connected``."""
        nbytes, prices = self._nbytes[value], self._prices
        producer, users = self._chains.producers[value], self._chains.users[value]
        wants = [
            self._placement_column(user, False, positions) for user, positions in users.items()
        ]
        wants += [
            self._interned(tuple([(placement,) for placement in placements]))
            for placements in allowed
        ]
        kind = "given" if annotation is None else annotation.kind
        sums, options = _Sums(), None
        variable = None if producer is None else 0
        available = self._produced_options(producer, annotation or _REPLICATED, wants)
        if producer is not None and not producer[1] and self._entries[producer[0]].takes_time:
            sums.charge(0, self._entries[producer[0]].costs)
        # With several users, the placements that the value is provided in are a variable of their
        # own: the conversion to them is paid once. So they are for an input whose placement is
        # free, and for a computed value with a fixed one.
        if len(wants) > 1 or kind == ("free" if producer is None else "fixed"):
            fixed = annotation.placement if annotation is not None and kind == "fixed" else None
            options, own_variable = self._options(available, fixed, wants), len(users) + 1
            sums.charge(own_variable, prices.copies(options, nbytes))
            if producer is None and annotation is not None and kind == "free":
                # one tick: a tie-break
                is_other = [float(option[0] != annotation.placement) for option in options]
                sums.charge(own_variable, np.array(is_other))
            else:
                sums.couple(
                    variable,
                    own_variable,
                    prices.table(available, self._first_placements(options), nbytes),
                )
            variable, available = own_variable, options
        for user_variable, wanted in zip(range(1, len(users) + 1), wants, strict=False):
            sums.couple(variable, user_variable, prices.table(available, wanted, nbytes))
        for placements in allowed:
            costs = [
                min(
                    prices.total_cost(placements_at_hand, (placement,), nbytes)
                    for placement in placements
                )
                for placements_at_hand in available
            ]
            sums.charge(variable, np.array(costs))
        return sums.connected(options)

    def _produced_options(
        self, producer: tuple[int, int] | None, annotation: Annotation, wants: Sequence[Options]
    ) -> Options:
        """Return the placements with which a value may be produced."""
        if producer is not None:
            return self._placement_column(producer[0], True, (producer[1],))
        placements = {annotation.placement}
        if annotation.kind == "free":
            wanted = {placement for want in wants for option in want for placement in option}
            placements |= {
                placement
                for placement in wanted
                if not isinstance(placement, Partial | StridedShard)
            }
        return self._interned(tuple([(placement,) for placement in sorted(placements, key=str)]))

    def _first_placements(self, options: Options) -> Options:
        """Return the first placement of each option."""
        firsts = self._first_options.get(id(options))
        if firsts is None:
            first = tuple([option[:1] for option in options])
            firsts = self._first_options[id(options)] = self._interned(first)
        return firsts

    def _options(
        self, produced: Options, fixed: Placement | None, wants: Sequence[Options]
    ) -> Options:
        """Return the placements in which a value may be provided: only the fixed one, if any."""
        key = id(produced), fixed, *map(id, wants)
        options = self._options_cache.get(key)
        if options is None:
            provided = _provided_placements(produced, wants) if fixed is None else ((fixed,),)
            options = self._options_cache[key] = self._interned(provided)
        return options

    def _placement_column(self, node: int, result: bool, positions: Positions) -> Options:
        """Return for each strategy of a node the placements of a result, or of some operands.

        Args:
            result: ``positions`` is the position of a result, else they are positions of operands.
        """
        entry = self._entries[node]
        key = id(entry), result, positions
        options = self._placement_columns.get(key)
        if options is None:
            placements = [
                strategy.outputs if result else strategy.inputs for strategy in entry.strategies
            ]
            column = [
                tuple(dict.fromkeys(of_strategy[position] for position in positions))
                for of_strategy in placements
            ]
            options = self._placement_columns[key] = self._interned(tuple(column))
        return options

    def _interned(self, options: Options) -> Options:
        """Intern options: cost tables are cached by identity."""
        return self._prices.options(options)


def _provided_placements(produced_options: Options, wants: Sequence[Options]) -> Options:
    """Return the options to provide a value in: one placement, or two for several users.

    A replicated value serves all users, since shards (and most partial values) are made of it
    without communication, so only a partial value needs a second placement. A shard that the
    producer does not offer is an option only if two users want it.
    """
    produced = {placement for (placement,) in produced_options}
    if produced == {R}:
        return ((R,),)
    demand = Counter(
        placement
        for want in wants
        for placement in {placement for option in want for placement in option}
    )
    blocks = [
        placement
        for placement in sorted(demand, key=str)
        if isinstance(placement, Cut) and demand[placement] > (placement not in produced)
    ]
    shared = [placement for placement in blocks if demand[placement] > 1]
    partials = [
        placement
        for placement in sorted(produced, key=str)
        if isinstance(placement, Partial) and demand[placement]
    ]
    options: list[Copies] = [(R,), *[(block,) for block in blocks]]
    for partial in partials:
        second_placements: list[Placement] = (
            [*shared] if reshard_kind(R, partial) == "" else [R, *shared]
        )
        options += [(partial,), *[(partial, second) for second in second_placements]]
    return tuple(options)


# -- the problem of one mesh axis ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AxisProblem:
    """Problem of one axis, with the meaning of its variables."""

    problem: Problem  # costs are in ticks (picoseconds)
    #: the strategies of each node; variable ``n`` chooses one for node ``n``
    entries: Sequence[StrategySet]
    #: value -> (its variable, for each choice the placements provided for its users, in order of
    #: conversion). Any other value is used as produced.
    provided: Mapping[int, tuple[int, Options]]

    def strategies(self, solution: Solution) -> list[Strategy]:
        """Return the strategy of each node."""
        chosen = zip(self.entries, solution.choices, strict=False)
        return [entry.strategies[choice] for entry, choice in chosen]

    def placements(self, solution: Solution) -> dict[int, Copies]:
        """Return the placements of each value in ``provided``."""
        return {
            v: options[solution.choices[variable]]
            for v, (variable, options) in self.provided.items()
        }
