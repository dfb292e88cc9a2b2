"""The choice of placements on one mesh axis, as a problem for the solver.

A variable a node: which strategy it runs as. A variable a value with several users: the placement
that it is kept with for all of them, and one more where it is partial. A factor for every node's
time, and one for every use: the time to make what the user takes of what there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lazygt.graph.node import Graph
from lazygt.graph.placement import Cut, Partial, Placement, Replicate, StridedShard
from lazygt.passes.sharding.annotations import Annotation, infer_annotations
from lazygt.passes.sharding.cost import Copies, Machine, Options, ReshardingCosts, reshard_kind
from lazygt.passes.sharding.cost_tables import Factor, Table
from lazygt.passes.sharding.propagate import open_strategies
from lazygt.passes.sharding.rules.base import Metas, Strategy
from lazygt.passes.sharding.solver import Problem, Solution
from lazygt.passes.sharding.strategies import StrategiesOf, StrategyCatalogue, StrategySet

R = Replicate()
_WHOLE = Annotation(R)
#: How much more a byte counts of what grew of something smaller: all of it could be made of that,
#: and made whole it leaves to others what carries collectives. Only work of many ops is divided.
_DEARER = 4
#: Which operands of a node.
Places = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A problem with what its variables stand for.

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
        """The strategy of each node."""
        chosen = zip(self.entries, solution.choices, strict=False)
        return [entry.strategies[choice] for entry, choice in chosen]

    def placements(self, solution: Solution) -> dict[int, Copies]:
        """The placements of each value in ``kept``."""
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
    """The placements of a graph's values on an axis of ``parts`` ranks, to be solved.

    Args:
        strategies_of: the strategies of a node; asked once for each kind of node.
        annotations: by number of the value; an input without one is given whole.
        outputs: for each output the placements that it may have; None, and for all when there is
            nothing: any.
        explore: shard also what no annotation leads to.
        whole: nodes, by number, that every rank may do all of in any case, but for pins.

    Raises:
        ValueError: an annotation for a value that is not there, or placements for another number of
            outputs.
    """
    annotations = annotations or {}
    metas = graph.values
    _check(graph, len(metas), annotations, outputs)
    catalogue = StrategyCatalogue(graph, metas, strategies_of, parts, machine)
    annotations = infer_annotations(graph, metas, catalogue.entries, catalogue.numbers, annotations)
    users = _users(graph, len(metas))
    entries, grown = open_strategies(graph, metas, users, catalogue, annotations, explore, whole)
    build = _Build(graph, metas, entries, ReshardingCosts(machine, parts))
    build.weigh(grown)
    allowed = _allowed(graph, outputs)
    for value, of_value in enumerate(users):
        if of_value or value in allowed:
            build.value(value, of_value, annotations.get(value), allowed.get(value, ()))
    constant = Factor((), np.array(build.constant))
    return Question(Problem(build.sizes, [constant, *build.factors]), entries, build.kept)


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


def _users(graph: Graph, count: int) -> list[dict[int, Places]]:
    """For each value, the nodes that read it and in which of their operands."""
    users: list[dict[int, Places]] = [{} for _ in range(count)]
    for number, node in enumerate(graph.nodes):
        for place, value in enumerate(node.refs()):
            operands = users[value]
            operands[number] = (*operands[number], place) if number in operands else (place,)
    return users


def _allowed(
    graph: Graph, outputs: Sequence[Collection[Placement] | None]
) -> dict[int, list[Collection[Placement]]]:
    """The sets of placements that each value must have one of, as an output."""
    allowed: dict[int, list[Collection[Placement]]] = {}
    for value, placements in zip(graph.outputs, outputs, strict=False):
        if placements is not None and placements not in allowed.setdefault(value, []):
            allowed[value].append(placements)
    return allowed


class _Connected(NamedTuple):
    """What connects a value's maker with its users: the same for all that are made and used alike.

    Attributes:
        options: of the value's own variable; None: it has none.
        constant: what it costs in any case.
        factors: their scopes are places among the maker, the users and the value's own variable.
    """

    options: Options | None
    constant: float
    factors: Sequence[Factor]


class _Build:
    """Variables and factors, node by node and value by value."""

    def __init__(
        self, graph: Graph, metas: Metas, entries: Sequence[StrategySet], prices: ReshardingCosts
    ) -> None:
        self.sizes = [len(entry.strategies) for entry in entries]
        self.factors: list[Factor] = []
        self.constant = 0.0
        self.kept: dict[int, tuple[int, Options]] = {}
        self._entries, self._prices = entries, prices
        self._nbytes = [0 if meta is None else meta.nbytes for meta in metas]
        self._makers: list[tuple[int, int] | None] = [None] * len(graph.inputs)
        for number, node in enumerate(graph.nodes):
            self._makers += [(number, place) for place in range(len(node.results))]
        self._columns: dict[tuple[int, bool, Places], Options] = {}
        self._states: dict[tuple[object, ...], Options] = {}
        self._firsts: dict[int, Options] = {}
        self._connected: dict[tuple[object, ...], _Connected] = {}
        works = {id(entry) for entry in {id(entry): entry for entry in entries}.values()
                 if entry.costs.any()}  # fmt: skip
        for number, entry in enumerate(entries):
            self._charge(number, entry.costs if id(entry) in works else None)

    def weigh(self, grown: Collection[int]) -> None:
        """Count what is moved of values that could as well be made whole by every rank."""
        for value in grown:
            self._nbytes[value] *= _DEARER

    def value(
        self,
        value: int,
        users: Mapping[int, Places],
        annotation: Annotation | None,
        allowed: Sequence[Collection[Placement]],
    ) -> None:
        """Connect whoever makes a value with all who use it."""
        maker, entries = self._makers[value], self._entries
        key = (
            self._nbytes[value],
            maker and (id(entries[maker[0]]), maker[1]),
            annotation,
            allowed and tuple(map(tuple, allowed)),
            *[(id(entries[user]), places) for user, places in users.items()],
        )
        roles = (-1 if maker is None else maker[0], *users, len(self.sizes))
        known = self._connected.get(key)
        if known is None:
            count, constant = len(self.factors), self.constant
            self._connect(value, users, annotation, allowed)
            _, options = self.kept.get(value, (0, None))
            factors = [
                Factor(tuple(map(roles.index, scope)), table)
                for scope, table in self.factors[count:]
            ]
            self._connected[key] = _Connected(options, self.constant - constant, factors)
            return
        self.constant += known.constant
        self.factors += [
            Factor(tuple([roles[role] for role in scope]), table) for scope, table in known.factors
        ]
        if known.options is not None:
            self.kept[value] = roles[-1], known.options
            self.sizes.append(len(known.options))

    def _connect(
        self,
        value: int,
        users: Mapping[int, Places],
        annotation: Annotation | None,
        allowed: Sequence[Collection[Placement]],
    ) -> None:
        nbytes, maker = self._nbytes[value], self._makers[value]
        wants = [self._column(user, False, places) for user, places in users.items()]
        wants += [
            self._same(tuple([(placement,) for placement in placements])) for placements in allowed
        ]
        kind = "given" if annotation is None else annotation.kind
        variable = None if maker is None else maker[0]
        have = self._made(maker, annotation or _WHOLE, wants)
        if len(wants) > 1 or kind == ("free" if maker is None else "pinned"):
            pin = annotation.placement if annotation is not None and kind == "pinned" else None
            options = self._options(have, pin, wants)
            kept = self._keep(value, options)
            if maker is None and annotation is not None and kind == "free":
                # one tick: it decides between what else costs the same
                unlike = [float(option[0] != annotation.placement) for option in options]
                self._charge(kept, np.array(unlike))
            else:
                self._couple(variable, have, kept, self._first(options), nbytes)
            variable, have = kept, options
        for user, want in zip(users, wants, strict=False):
            self._couple(variable, have, user, want, nbytes)
        for placements in allowed:
            costs = [min(self._prices.make(h, (a,), nbytes) for a in placements) for h in have]
            self._charge(variable, np.array(costs))

    def _keep(self, value: int, options: Options) -> int:
        """A new variable for the placements that a value is kept with."""
        variable = len(self.sizes)
        self.sizes.append(len(options))
        self.kept[value] = variable, options
        self._charge(variable, self._prices.copies(options, self._nbytes[value]))
        return variable

    def _made(
        self, maker: tuple[int, int] | None, annotation: Annotation, wants: Sequence[Options]
    ) -> Options:
        """The placements that a value may come with."""
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

    def _charge(self, variable: int | None, costs: Table | None) -> None:
        if costs is None:
            return
        if variable is None or len(costs) == 1:
            self.constant += costs.item()
        else:
            self.factors.append(Factor((variable,), costs))

    def _couple(self, a: int | None, have: Options, b: int, want: Options, nbytes: int) -> None:
        table = self._prices.table(have, want, nbytes)
        if table is not None and a is None:
            self._charge(b, table[0])
        elif table is not None and a is not None:
            self.factors.append(Factor((a, b), table))

    def _first(self, options: Options) -> Options:
        """The placement that each option starts with."""
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
        """What each strategy of a node gives for a result, or wants of an operand at places."""
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
        """The one object for equal options: tables are found by identity."""
        return self._prices.options(options)


def _kept_placements(maker_options: Options, wants: Sequence[Options]) -> Options:
    """The placements to keep a value with: one, or one and a copy that serves several users.

    What is whole serves all, since blocks (and mostly partial sums) come of it for nothing: so
    only a partial value needs a copy besides. A block that the maker does not give is only worth
    having for two users, and one that no user takes is not: it costs no less to make the first
    one's placement and go on from there.
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
