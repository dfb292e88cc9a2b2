"""Choice of placements on one mesh axis, as a problem for the solver.

A variable a node: the strategy that it runs as. A variable a value with several users: the
placement that it is kept with for all of them, and one more where it is partial. A factor for every
node's time, and one for every use: the time to make the wanted placement of those at hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lazygt.graph.node import Graph
from lazygt.graph.placement import Cut, Partial, Placement, Replicate, StridedShard
from lazygt.machine import Machine
from lazygt.passes.sharding.annotations import Annotation, infer_annotations
from lazygt.passes.sharding.def_use import DefUse, Places, def_use
from lazygt.passes.sharding.placement_cost import (
    Copies,
    Options,
    ReshardingCosts,
    Scope,
    Table,
    reshard_kind,
)
from lazygt.passes.sharding.propagate import open_strategies
from lazygt.passes.sharding.rules.strategy import Metas, Strategy
from lazygt.passes.sharding.solver import Problem, Solution
from lazygt.passes.sharding.strategies import StrategiesOf, StrategyCatalogue, StrategySet

# -- factors between the variables of a choice: the time of nodes, and of moving values ------------

R = Replicate()
_WHOLE = Annotation(R)
#: Weight of a byte of a value that grew of something smaller: all of it could be made of that,
#: and made whole it leaves the links to other collectives. Only work of many ops is divided.
_DEARER = 4


class _Connected(NamedTuple):
    """Factors between a value's maker and its users; shared by values made and used alike.

    Variables are told by their places among the maker, the users and the value's own variable.

    Attributes:
        options: of the value's own variable; None: it has none.
        constant: the cost in any case.
        singles, pairs: variables, and the costs of their choices.
    """

    options: Options | None
    constant: float
    singles: Sequence[tuple[int, Table]]
    pairs: Sequence[tuple[int, int, Table]]


class _Sums:
    """Costs, added up for each variable and pair of variables; a choice of one is a constant."""

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
            had = self._singles.get(variable)
            self._singles[variable] = costs if had is None else had + costs

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
            had = self._pairs.get((a, b))
            self._pairs[a, b] = table if had is None else had + table

    def connected(self, options: Options | None) -> _Connected:
        """Return all costs, in as few tables as will do."""
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
        entries: of each node.
        grown: values that could as well be made whole by every rank.

    Attributes:
        kept: see ``Question``.
    """

    def __init__(
        self,
        chains: DefUse,
        metas: Metas,
        entries: Sequence[StrategySet],
        prices: ReshardingCosts,
        grown: Collection[int] = (),
    ) -> None:
        self.sizes = [len(entry.strategies) for entry in entries]
        self.factors: list[tuple[Scope, Table]] = []
        self.constant = 0.0
        self.kept: dict[int, tuple[int, Options]] = {}
        self._chains, self._entries, self._prices = chains, entries, prices
        self._kinds = list(map(id, entries))
        self._nbytes = [0 if meta is None else meta.nbytes for meta in metas]
        for value in grown:
            self._nbytes[value] *= _DEARER
        self._columns: dict[tuple[int, bool, Places], Options] = {}
        self._states: dict[tuple[object, ...], Options] = {}
        self._firsts: dict[int, Options] = {}
        self._connected: dict[tuple[object, ...], _Connected] = {}
        for number, (_, _, results) in enumerate(chains.nodes):
            if not results:
                self._charge(number)

    def add_all(
        self,
        annotations: Mapping[int, Annotation],
        allowed: Mapping[int, Sequence[Collection[Placement]]],
    ) -> None:
        """Connect each value's maker with its users; the first result has a node's time.

        Args:
            allowed: the sets of placements that a value must have one of, as an output.
        """
        known, kinds, nbytes = self._connected, self._kinds, self._nbytes
        makers = self._chains.makers
        for value, users in enumerate(self._chains.users):
            maker, outputs = makers[value], allowed.get(value, ())
            if not (users or outputs):
                self._add_unused(maker)
                continue
            key = (
                nbytes[value],
                maker and (kinds[maker[0]], maker[1]),
                annotations.get(value),
                outputs and tuple(map(tuple, outputs)),
                tuple([kinds[user] for user in users]),
                *users.values(),
            )
            connected = known.get(key)
            if connected is None:
                connected = self._connect(value, annotations.get(value), outputs)
                known[key] = connected
            self._add(value, connected, (maker[0] if maker else -1, *users, len(self.sizes)))

    def _add_unused(self, maker: tuple[int, int] | None) -> None:
        """Charge the time of a node if its first result is unused."""
        if maker is not None and not maker[1]:
            self._charge(maker[0])

    def _charge(self, node: int) -> None:
        entry = self._entries[node]
        if len(entry.costs) == 1:
            self.constant += entry.costs.item()
        elif entry.works:
            self.factors.append(((node,), entry.costs))

    def _add(self, value: int, connected: _Connected, variables: tuple[int, ...]) -> None:
        options, constant, singles, pairs = connected
        self.constant += constant
        for a, table in singles:
            self.factors.append(((variables[a],), table))
        for a, b, table in pairs:
            self.factors.append(((variables[a], variables[b]), table))
        if options is not None:
            self.kept[value] = variables[-1], options
            self.sizes.append(len(options))

    def _connect(
        self, value: int, annotation: Annotation | None, allowed: Sequence[Collection[Placement]]
    ) -> _Connected:
        nbytes, prices = self._nbytes[value], self._prices
        maker, users = self._chains.makers[value], self._chains.users[value]
        wants = [self._column(user, False, places) for user, places in users.items()]
        wants += [
            self._same(tuple([(placement,) for placement in placements])) for placements in allowed
        ]
        kind = "given" if annotation is None else annotation.kind
        sums, options = _Sums(), None
        variable = None if maker is None else 0
        have = self._made(maker, annotation or _WHOLE, wants)
        if maker is not None and not maker[1] and self._entries[maker[0]].works:
            sums.charge(0, self._entries[maker[0]].costs)
        if len(wants) > 1 or kind == ("free" if maker is None else "pinned"):
            pin = annotation.placement if annotation is not None and kind == "pinned" else None
            options, kept = self._options(have, pin, wants), len(users) + 1
            sums.charge(kept, prices.copies(options, nbytes))
            if maker is None and annotation is not None and kind == "free":
                # one tick: a tie-break
                unlike = [float(option[0] != annotation.placement) for option in options]
                sums.charge(kept, np.array(unlike))
            else:
                sums.couple(variable, kept, prices.table(have, self._first(options), nbytes))
            variable, have = kept, options
        for role, want in zip(range(1, len(users) + 1), wants, strict=False):
            sums.couple(variable, role, prices.table(have, want, nbytes))
        for placements in allowed:
            costs = [min(prices.make(h, (a,), nbytes) for a in placements) for h in have]
            sums.charge(variable, np.array(costs))
        return sums.connected(options)

    def _made(
        self, maker: tuple[int, int] | None, annotation: Annotation, wants: Sequence[Options]
    ) -> Options:
        """Return the placements that a value may come with."""
        if maker is not None:
            return self._column(maker[0], True, (maker[1],))
        placements = {annotation.placement}
        if annotation.kind == "free":
            every = {placement for want in wants for option in want for placement in option}
            placements |= {
                placement
                for placement in every
                if not isinstance(placement, Partial | StridedShard)
            }
        return self._same(tuple([(placement,) for placement in sorted(placements, key=str)]))

    def _first(self, options: Options) -> Options:
        """Return the placement that each option starts with."""
        firsts = self._firsts.get(id(options))
        if firsts is None:
            first = tuple([option[:1] for option in options])
            firsts = self._firsts[id(options)] = self._same(first)
        return firsts

    def _options(self, given: Options, pin: Placement | None, wants: Sequence[Options]) -> Options:
        key = id(given), pin, *map(id, wants)
        options = self._states.get(key)
        if options is None:
            kept = _kept_placements(given, wants) if pin is None else ((pin,),)
            options = self._states[key] = self._same(kept)
        return options

    def _column(self, node: int, result: bool, places: Places) -> Options:
        """Return each strategy's placements of a result, or of a node's operands at places."""
        entry = self._entries[node]
        key = id(entry), result, places
        options = self._columns.get(key)
        if options is None:
            placements = [
                strategy.outputs if result else strategy.inputs for strategy in entry.strategies
            ]
            column = [tuple(dict.fromkeys(line[at] for at in places)) for line in placements]
            options = self._columns[key] = self._same(tuple(column))
        return options

    def _same(self, options: Options) -> Options:
        """Return the one object for equal options: tables are found by identity."""
        return self._prices.options(options)


def _kept_placements(maker_options: Options, wants: Sequence[Options]) -> Options:
    """Return the placements to keep a value with: one, or one and a copy for several users.

    A whole value serves all, since blocks (and mostly partial sums) come of it for nothing: so only
    a partial value needs a copy besides. A block that the maker does not give is only worth having
    for two users, and one that no user takes is not: it costs no less to make the first one's
    placement and go on from there.
    """
    given = {placement for (placement,) in maker_options}
    if given == {R}:
        return ((R,),)
    takers = Counter(
        placement
        for want in wants
        for placement in {placement for option in want for placement in option}
    )
    blocks = [
        placement
        for placement in sorted(takers, key=str)
        if isinstance(placement, Cut) and takers[placement] > (placement not in given)
    ]
    shared = [placement for placement in blocks if takers[placement] > 1]
    sums = [
        placement
        for placement in sorted(given, key=str)
        if isinstance(placement, Partial) and takers[placement]
    ]
    options: list[Copies] = [(R,), *[(block,) for block in blocks]]
    for part in sums:
        copies: list[Placement] = [*shared] if reshard_kind(R, part) == "" else [R, *shared]
        options += [(part,), *[(part, copy) for copy in copies]]
    return tuple(options)


# -- choice of placements on one mesh axis, as a problem for the solver ----------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """Problem, with the meaning of its variables.

    Attributes:
        problem: costs are in ticks (picoseconds).
        entries: the strategies of each node; variable ``n`` chooses one for node ``n``.
        kept: value -> (its variable, the placements that its users find by each choice, in the
            order to make them). A value that is not here is used as it was made.
    """

    problem: Problem
    entries: Sequence[StrategySet]
    kept: Mapping[int, tuple[int, Options]]

    def strategies(self, solution: Solution) -> list[Strategy]:
        """Return the strategy of each node."""
        chosen = zip(self.entries, solution.choices, strict=False)
        return [entry.strategies[choice] for entry, choice in chosen]

    def placements(self, solution: Solution) -> dict[int, Copies]:
        """Return the placements of each value in ``kept``."""
        return {v: options[solution.choices[at]] for v, (at, options) in self.kept.items()}


def build_problem(
    graph: Graph,
    strategies_of: StrategiesOf,
    parts: int,
    machine: Machine,
    annotations: Mapping[int, Annotation] | None = None,
    outputs: Sequence[Collection[Placement] | None] = (),
    explore: bool = False,
    whole: Collection[int] = (),
) -> Question:
    """Build the problem of placing a graph's values on an axis of ``parts`` ranks.

    Args:
        strategies_of: the strategies of a node; asked once for each kind of node.
        annotations: by number of the value; an input without one is given whole.
        outputs: for each output the placements that it may have; None, and for all when there is
            nothing: any.
        explore: shard also values that no annotation leads to.
        whole: nodes, by number, that every rank may do all of in any case, but for pins.

    Raises:
        ValueError: an annotation for a value that is not there, or placements for another number of
            outputs.
    """
    annotations = annotations or {}
    metas = graph.values
    _check(graph, len(metas), annotations, outputs)
    chains = def_use(graph)
    catalogue = StrategyCatalogue(chains, metas, strategies_of, parts, machine)
    annotations = infer_annotations(
        chains, metas, catalogue.entries, catalogue.numbers, annotations
    )
    entries, grown = open_strategies(chains, metas, catalogue, annotations, explore, whole)
    connections = Connections(chains, metas, entries, ReshardingCosts(machine, parts), grown)
    connections.add_all(annotations, _allowed(graph, outputs))
    factors = [((), np.array(connections.constant)), *connections.factors]
    return Question(Problem(connections.sizes, factors), entries, connections.kept)


def _check(
    graph: Graph,
    count: int,
    annotations: Mapping[int, Annotation],
    outputs: Sequence[Collection[Placement] | None],
) -> None:
    for value in annotations:
        if not 0 <= value < count:
            raise ValueError(f"an annotation for %{value}, but the graph has %0 to %{count - 1}")
    if outputs and len(outputs) != len(graph.outputs):
        raise ValueError(
            f"placements for {len(outputs)} outputs, but the graph has {len(graph.outputs)}"
        )


def _allowed(
    graph: Graph, outputs: Sequence[Collection[Placement] | None]
) -> dict[int, list[Collection[Placement]]]:
    """Return the sets of placements that each value must have one of, as an output."""
    allowed: dict[int, list[Collection[Placement]]] = {}
    for value, placements in zip(graph.outputs, outputs, strict=False):
        if placements is not None and placements not in allowed.setdefault(value, []):
            allowed[value].append(placements)
    return allowed
