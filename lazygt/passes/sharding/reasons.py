"""Reasons for collectives: their cause, and the cost of the best program without them.

On demand only, since each answer solves the placements of one axis again, with infinite cost for
some choices: where parts were reduced, for making those parts; where blocks were moved, for moving
the value; where an op meets other ranks inside, for running it so. All other choices stay open, and
the op that made the parts may be done whole on every rank, which annotations rule out else.

    x in S(0), w in S(0) ── mm ── P(sum) ══ all_reduce ══ R ── add
                             without it: x and w gathered, and mm runs on whole values
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lazygt.graph.collectives import Communication, communications
from lazygt.graph.cost import family
from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph
from lazygt.graph.placement import (
    COLLECTIVES,
    Partial,
    Placement,
    Replicate,
    StridedShard,
    Unspecified,
)
from lazygt.graph.text import amount
from lazygt.machine import collective_seconds
from lazygt.passes.sharding.axis import AxisStep
from lazygt.passes.sharding.marks import PLACE, stored_by
from lazygt.passes.sharding.placement_cost import Copies, Factor, Options, reshard_kind, seconds
from lazygt.passes.sharding.problem import Question
from lazygt.passes.sharding.rules.views import RESHAPES
from lazygt.passes.sharding.solver import Infeasible, Problem, solve

# -- decisions: the placements that every value of a program got, axis by axis ---------------------

#: For each axis by name the placements that a value has, the one that it was made with first.
Decisions = Mapping[str, tuple[Placement, ...]]


def programs_of(decided: Iterable[AxisStep]) -> list[list[AxisStep]]:
    """Group the steps by program: an axis goes on with the program that the one before made."""
    groups: list[list[AxisStep]] = []
    for step in decided:
        if groups and groups[-1][-1].local.graph is step.graph:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def decisions(steps: Sequence[AxisStep]) -> list[Decisions]:
    """Return the placements that each value of the first step's graph got on every axis.

    On later axes they are those of rank 0's part of the value as it was made.
    """
    of_values: list[Decisions] = []
    for value in range(len(steps[0].graph.values)):
        placements: dict[str, tuple[Placement, ...]] = {}
        at: int | None = value
        for step in steps:
            have = step.local.values[at] if at is not None else {}
            placements[step.name] = tuple(have)
            at = next(iter(have.values()), None)
        of_values.append(placements)
    return of_values


def decisions_text(steps: Sequence[AxisStep]) -> tuple[Graph, list[str]]:
    """Return the program before the cut, and a text for each value.

    The text is ``{data: P(sum) -> R, model: S(0)}``: an arrow leads to a placement that was made of
    it for its users.
    """
    return steps[0].graph, [_text(placements) for placements in decisions(steps)]


def _text(placements: Decisions) -> str:
    shown = [f"{axis}: {' -> '.join(map(str, have))}" for axis, have in placements.items() if have]
    return f"{{{', '.join(shown)}}}" if shown else ""


# -- the best program without some collectives -----------------------------------------------------

_NAMED = 3
R = Replicate()


class Alternative(NamedTuple):
    """Another program.

    Attributes:
        exchanges: its collectives that this program lacks, in words.
        extra: additional seconds that it takes; None: there is none.
    """

    exchanges: str
    extra: float | None


def alternative(
    step: AxisStep, values: Collection[int], inside: Collection[int], cost: float
) -> Alternative:
    """Find the best program that does not move some values, with some ops free of collectives.

    Args:
        values: by number, of the program before it is cut; not moved.
        inside: nodes, by number, that run without collectives inside.
        cost: of the program as it is, in ticks.
    """
    parts = {at for value in values for at in _origins(step, value)}
    moved = {each for value in values for each in _same_data(step, value)}
    question = step.question({number for number, _ in parts} | set(inside))
    strategies = [entry.strategies for entry in question.entries]
    factors = list(question.problem.factors)
    for number, place in sorted(parts):
        partial = [isinstance(strategy.outputs[place], Partial) for strategy in strategies[number]]
        factors.append(Factor((number,), _forbidding(partial)))
    for number in sorted(inside):
        factors.append(
            Factor((number,), _forbidding([bool(strategy.comm) for strategy in strategies[number]]))
        )
    for value in sorted(moved):
        factors += _stays(step, question, value)
    try:
        solution = solve(Problem(question.problem.sizes, factors))
    except Infeasible:
        return Alternative("", None)
    other = step.other(question, solution).graph
    return Alternative(_difference(step, other), seconds(solution.cost - cost))


def placement_of(step: AxisStep, value: int) -> Placement:
    """Return the placement that a value is made with."""
    return next(iter(step.local.values[value]))


def _forbidding(flags: Sequence[object]) -> np.ndarray:
    return np.where(np.array(flags, dtype=bool), math.inf, 0.0)


def _origins(step: AxisStep, value: int) -> list[tuple[int, int]]:
    """Return the (node, result) pairs that made the parts that a value is the sum of.

    Sum stands for maximum and the like, too. None where the value has no parts. Ops that pass parts
    on are left out: there the collective would only move.
    """
    graph = step.graph
    makers = {v: (n, at) for n, (_, rs) in enumerate(graph.numbered()) for at, v in enumerate(rs)}
    ahead = [value] if _is_partial(step, value) else []
    origins = []
    for partial_value in ahead:  # grows meanwhile
        number, place = makers[partial_value]
        parts = [v for v in graph.nodes[number].refs() if v in makers and _is_partial(step, v)]
        ahead += [v for v in parts if v not in ahead]
        if not parts:
            origins.append((number, place))
    return origins


def _is_partial(step: AxisStep, value: int) -> bool:
    return isinstance(placement_of(step, value), Partial)


def _same_data(step: AxisStep, value: int) -> set[int]:
    """Return a value in no parts with its views and the value that it is a view of, where cut.

    To move one of them is to move all. Nothing for a value in parts.
    """
    if _is_partial(step, value):
        return set()
    same = {value}
    views = [
        (node.refs()[0], results)
        for node, results in step.graph.numbered()
        if node.refs() and (node.op == PLACE or family(node) == "view")
    ]
    for source, results in [*reversed(views), *views]:
        group = {v for v in (source, *results) if step.local.values[v]}
        if same & group:
            same |= {v for v in group if placement_of(step, v) != R}
    return same


def _stays(step: AxisStep, question: Question, value: int) -> Iterator[Factor]:
    """Yield infinite cost for every joint choice that moves a value between ranks."""
    variable, have = _maker(step, question, value)
    if value in question.kept:
        kept, options = question.kept[value]
        yield from _couple(variable, have, kept, tuple([option[:1] for option in options]))
        yield Factor((kept,), _forbidding([_moves(o[:1], o[1:]) for o in options]))
        variable, have = kept, options
    for number, node in enumerate(step.graph.nodes):
        places = [place for place, ref in enumerate(node.refs()) if ref == value]
        if places:
            strategies = question.entries[number].strategies
            want = tuple(
                [tuple([strategy.inputs[place] for place in places]) for strategy in strategies]
            )
            yield from _couple(variable, have, number, want)
    for output, placement in zip(step.graph.outputs, step.wanted, strict=True):
        if output == value and variable is not None:
            ends = [(placement,)] if placement is not None else [(R,), *_blocks(have)]
            flags = [all(_moves(placements, end) for end in ends) for placements in have]
            yield Factor((variable,), _forbidding(flags))


def _maker(step: AxisStep, question: Question, value: int) -> tuple[int | None, Options]:
    """Return the variable that decides a value's placement as made, and that of each choice."""
    graph = step.graph
    if value < len(graph.inputs):
        return None, ((step.axis.inputs[value].placements[step.axis.at],),)
    for number, (_, results) in enumerate(graph.numbered()):
        if value in results:
            place = results.index(value)
            strategies = question.entries[number].strategies
            return number, tuple([(strategy.outputs[place],) for strategy in strategies])
    raise ValueError(f"%{value} is no value of the graph")


def _couple(a: int | None, have: Options, b: int, want: Options) -> Iterator[Factor]:
    table = _forbidding([[_moves(h, w) for w in want] for h in have])
    if a is None:
        yield Factor((b,), table[0])
    elif a != b:
        yield Factor((a, b), table)


def _moves(have: Copies, want: Copies) -> bool:
    """Return whether any wanted placement has to be made by a collective."""
    return any(all(reshard_kind(h, w) != "" for h in have) for w in want)


def _blocks(have: Options) -> list[tuple[Placement, ...]]:
    """Return the placements that an output may have without being moved."""
    return [
        placements
        for placements in have
        if reshard_kind(R, placements[0]) == "" and not isinstance(placements[0], StridedShard)
    ]


def _difference(step: AxisStep, other: Graph) -> str:
    """Describe the collectives that another program has and this one has not."""
    mesh = step.axis.mesh
    there = Counter(map(_named, communications(other, mesh)))
    there.subtract(map(_named, communications(step.local.graph, mesh)))
    more = [(name, count) for name, count in there.items() if count > 0]
    shown = [f"{count}x {name}" if count > 1 else name for name, count in more[:_NAMED]]
    if len(more) > _NAMED:
        shown.append(f"{len(more) - _NAMED} more kinds")
    if not shown and not any(there.values()):
        return "the same, of a value before or after"
    return ", ".join(shown) or "no other collective: more is computed on every rank"


def _named(record: Communication) -> str:
    return f"{record.kind} {amount(record.nbytes, 'B')} along {record.mesh_dim}"


# -- reasons for collectives -----------------------------------------------------------------------

#: Collectives that are looked into, the dearest first.
MOST = 20


class CostReason(NamedTuple):
    """Collectives of one kind at one of the user's lines.

    Attributes:
        times, nbytes, seconds: their number, and the payload and estimated time of all together, as
            it was when their axis was decided; later axes may cut the moved values.
        cause: the annotation that leads there, or ``""``.
        instead: the collectives of the best program without them, in their place.
        extra: additional seconds that that would take (negative where the annotations ask for more
            than would be best); None: there is no such program.
    """

    kind: str
    reduce_op: str | None
    axis: str
    line: str
    why: str
    times: int
    nbytes: int
    seconds: float
    cause: str
    instead: str
    extra: float | None


class _Met(NamedTuple):
    """Collective of rank 0's program, with the value that it moves, or the node around it."""

    record: Communication
    value: int | None
    node: int | None


def reasons(decided: Iterable[AxisStep]) -> list[CostReason]:
    """Explain the dearest collectives of a program, at most ``MOST``, in order of their time."""
    groups = [(step, group) for step in decided for group in _groups(step)]
    groups.sort(key=lambda met: -_seconds(met[0], [one.record for one in met[1]]))
    costs: dict[int, float] = {}
    answers = []
    for step, group in groups[:MOST]:
        if id(step) not in costs:
            costs[id(step)] = solve(step.question().problem).cost
        answers.append(_reason(step, group, costs[id(step)]))
    return answers


def _reason(step: AxisStep, group: Sequence[_Met], cost: float) -> CostReason:
    first = group[0].record
    values = {met.value for met in group if met.value is not None}
    inside = {met.node for met in group if met.node is not None}
    instead, extra = alternative(step, values, inside, cost)
    records = [met.record for met in group]
    return CostReason(
        first.kind, first.reduce_op, step.name, first.source, first.why, len(group),
        sum(record.nbytes for record in records), _seconds(step, records), _cause(step, group[0]),
        instead, extra,
    )  # fmt: skip


def _seconds(step: AxisStep, records: Iterable[Communication]) -> float:
    machine, parts = step.axis.machine, step.axis.parts
    return sum(collective_seconds(machine, each.kind, each.nbytes, parts) for each in records)


# -- collectives of a program ---------------------------------------------------------------------


def _groups(step: AxisStep) -> list[list[_Met]]:
    """Return the collectives of one axis, grouped by kind and line."""
    groups: defaultdict[tuple[str, str | None, str], list[_Met]] = defaultdict(list)
    for met in _met(step):
        groups[met.record.kind, met.record.reduce_op, met.record.source].append(met)
    return list(groups.values())


def _met(step: AxisStep) -> Iterator[_Met]:
    values = step.local.values
    moved = {at: value for value, have in enumerate(values) for at in list(have.values())[1:]}
    ends = _ends(step)
    # an interleaved value is moved in another shape
    shown = {node.refs()[0]: results[0] for node, results in step.local.graph.numbered()
             if node.op in RESHAPES}  # fmt: skip
    collectives = [
        (node, results[0])
        for node, results in step.local.graph.numbered()
        if node.op in COLLECTIVES
    ]  # fmt: skip
    for (node, result), record in zip(collectives, _records(step, step.local.graph), strict=True):
        if node.args[-1] != step.name:
            continue  # of an earlier axis
        inside = next((number for end, number in ends if end > result), None)
        value = moved.get(result, moved.get(shown.get(result, result)))
        yield _Met(record, value, inside if value is None else None)


def _ends(step: AxisStep) -> list[tuple[int, int]]:
    """Return for each node the number of its last local result, and its own; in their order."""
    ends = []
    for number, (_, results) in enumerate(step.graph.numbered()):
        values = [
            next(iter(step.local.values[v].values())) for v in results if step.local.values[v]
        ]
        if values:
            ends.append((max(values), number))
    return ends


def _records(step: AxisStep, graph: Graph) -> tuple[Communication, ...]:
    mesh: Mesh = step.axis.mesh
    return communications(graph, mesh)


def _cause(step: AxisStep, met: _Met) -> str:
    """Describe the nearest annotation that led to a collective, through values that are cut.

    Values that are whole lead nowhere.
    """
    graph, values = step.graph, step.local.values
    makers = {value: n for n, (_, results) in enumerate(graph.numbered()) for value in results}
    ahead = list(graph.nodes[met.node].refs()) if met.node is not None else [met.value]
    seen = set(ahead)
    for value in ahead:  # grows meanwhile: nearest first
        if value is None or all(placement == R for placement in values[value]):
            continue
        if value not in makers:
            if (placement := placement_of(step, value)) != R:
                return f"input {graph.values[value]} stored {placement}"
            continue
        node = graph.nodes[makers[value]]
        placement = stored_by(node).placements[step.axis.at] if node.op == PLACE else R
        if placement not in (R, Unspecified()):
            return f"placed {placement} at {graph.line(makers[value])}"
        fresh = [ref for ref in node.refs() if ref not in seen]
        seen.update(fresh)
        ahead += fresh
    return ""
