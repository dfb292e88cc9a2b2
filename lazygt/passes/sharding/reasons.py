"""Reasons for collectives: their cause, and the cost of the best program without them.

The analysis runs on request only, since each answer solves the placements of one axis again, with
infinite cost for some choices: for a reduction, the strategies that produce the partial values; for
a redistribution, the placements that move the value; for a collective inside an op, the strategy of
the op. All other choices stay open, and the op that produced the partial values may also run
replicated, which annotations rule out otherwise.

    x in S(0), w in S(0) ── mm ── P(sum) ══ all_reduce ══ R ── add
                             without it: x and w gathered, and mm runs on replicated values
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lazygt.graph.collectives import Communication, communications
from lazygt.graph.cost import family
from lazygt.graph.liveness import DefUse, def_use
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
from lazygt.passes.sharding.choose import AxisProblem, Copies, Options, reshard_kind
from lazygt.passes.sharding.choose.catalogue import seconds
from lazygt.passes.sharding.choose.solver import Factor, Infeasible, Problem, solve
from lazygt.passes.sharding.marks import PLACE, sharding_of_mark
from lazygt.passes.sharding.rules.views import RESHAPES

# -- decisions: the placements of every value of a program, axis by axis ---------------------------

#: Axis name -> the placements that a value has, the one that it was produced with first.
Decisions = Mapping[str, tuple[Placement, ...]]


def programs_of(decided: Iterable[AxisStep]) -> list[list[AxisStep]]:
    """Group the steps by program: each step of a group continues with the previous one's result."""
    groups: list[list[AxisStep]] = []
    for step in decided:
        if groups and groups[-1][-1].local.graph is step.graph:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def decisions(steps: Sequence[AxisStep]) -> list[Decisions]:
    """Return the placements of each value of the first step's graph, on every axis.

    On later axes these are the placements of rank 0's shard of the value as produced.
    """
    placements_of_values: list[Decisions] = []
    for value in range(len(steps[0].graph.values)):
        placements: dict[str, tuple[Placement, ...]] = {}
        local_value: int | None = value
        for step in steps:
            placements_on_axis = step.local.values[local_value] if local_value is not None else {}
            placements[step.name] = tuple(placements_on_axis)
            local_value = next(iter(placements_on_axis.values()), None)
        placements_of_values.append(placements)
    return placements_of_values


def decisions_text(steps: Sequence[AxisStep]) -> tuple[Graph, list[str]]:
    """Return the program before sharding, and a text for each value.

    The text is ``{data: P(sum) -> R, model: S(0)}``; an arrow leads from the produced placement to
    a converted one.
    """
    return steps[0].graph, [_text(placements) for placements in decisions(steps)]


def _text(placements: Decisions) -> str:
    """Return a node's decisions as `decisions_text` shows them; empty if there are none."""
    shown = [
        f"{axis}: {' -> '.join(map(str, on_axis))}"
        for axis, on_axis in placements.items()
        if on_axis
    ]
    return f"{{{', '.join(shown)}}}" if shown else ""


# -- the best program without some collectives -----------------------------------------------------

_NAMED = 3
R = Replicate()


class Alternative(NamedTuple):
    """Best program without some collectives."""

    exchanges: str  # its additional collectives, in words
    extra: float | None  # additional seconds that it takes; None: there is no such program


def alternative(
    step: AxisStep, values: Collection[int], inside: Collection[int], cost: float
) -> Alternative:
    """Find the best program that does not move some values, with some ops free of collectives.

    Args:
        values: numbers of values that must not be moved, in the program before sharding.
        inside: numbers of nodes that must run without collectives inside.
        cost: of the current program, in ticks.
    """
    chains = def_use(step.graph)
    sources = {source for value in values for source in _partial_sources(step, chains, value)}
    fixed_values = {alias for value in values for alias in _aliases_of(step, value)}
    axis_problem = step.axis_problem({number for number, _ in sources} | set(inside))
    strategies = [entry.strategies for entry in axis_problem.entries]
    factors = list(axis_problem.problem.factors)
    for number, result_index in sorted(sources):
        partial = [
            isinstance(strategy.outputs[result_index], Partial) for strategy in strategies[number]
        ]
        factors.append(Factor((number,), _forbidding(partial)))
    for number in sorted(inside):
        factors.append(
            Factor((number,), _forbidding([bool(strategy.comm) for strategy in strategies[number]]))
        )
    for value in sorted(fixed_values):
        factors += _forbid_moves(step, axis_problem, chains, value)
    try:
        solution = solve(Problem(axis_problem.problem.sizes, factors))
    except Infeasible:
        return Alternative("", None)
    other = step.other(axis_problem, solution).graph
    return Alternative(_added_collectives(step, other), seconds(solution.cost - cost))


def placement_of(step: AxisStep, value: int) -> Placement:
    """Return the placement that a value is produced with."""
    return next(iter(step.local.values[value]))


def _forbidding(flags: Sequence[object]) -> np.ndarray:
    """Return a cost table with infinity where a flag is true, else 0."""
    return np.where(np.array(flags, dtype=bool), math.inf, 0.0)


def _partial_sources(step: AxisStep, chains: DefUse, value: int) -> list[tuple[int, int]]:
    """Return the (node, result index) pairs that produced the partial values of a partial value.

    The search goes back through ops that map partial values to partial values, where the collective
    would only be moved. Empty for a value that is not partial.
    """
    queue = [value] if _is_partial(step, value) else []
    sources = []
    for partial_value in queue:  # grows meanwhile
        producer = chains.producers[partial_value]
        assert producer is not None
        _, refs, _ = chains.nodes[producer[0]]
        partial_operands = [ref for ref in refs if chains.producers[ref] and _is_partial(step, ref)]
        queue += [operand for operand in partial_operands if operand not in queue]
        if not partial_operands:
            sources.append(producer)
    return sources


def _is_partial(step: AxisStep, value: int) -> bool:
    return isinstance(placement_of(step, value), Partial)


def _aliases_of(step: AxisStep, value: int) -> set[int]:
    """Return a value with its views and its bases that are sharded; empty for a partial value.

    To move one of these values is to move all.
    """
    if _is_partial(step, value):
        return set()
    aliases = {value}
    views = [
        (node.refs()[0], results)
        for node, results in step.graph.numbered()
        if node.refs() and (node.op == PLACE or family(node) == "view")
    ]
    for source, results in [*reversed(views), *views]:
        group = {v for v in (source, *results) if step.local.values[v]}
        if aliases & group:
            aliases |= {v for v in group if placement_of(step, v) != R}
    return aliases


def _forbid_moves(
    step: AxisStep, axis_problem: AxisProblem, chains: DefUse, value: int
) -> Iterator[Factor]:
    """Yield infinite cost for every joint choice that moves a value between ranks."""
    variable, options = _producer_variable(step, axis_problem, chains, value)
    if value in axis_problem.provided:
        own_variable, provided_options = axis_problem.provided[value]
        yield from _forbid_joint_moves(
            variable, options, own_variable, tuple([option[:1] for option in provided_options])
        )
        yield Factor(
            (own_variable,),
            _forbidding([_needs_collective(o[:1], o[1:]) for o in provided_options]),
        )
        variable, options = own_variable, provided_options
    for number, positions in chains.users[value].items():
        wanted = tuple([
            tuple([strategy.inputs[position] for position in positions])
            for strategy in axis_problem.entries[number].strategies
        ])  # fmt: skip
        yield from _forbid_joint_moves(variable, options, number, wanted)
    for output, placement in zip(step.graph.outputs, step.wanted, strict=True):
        if output == value and variable is not None:
            allowed = (
                [(placement,)] if placement is not None else [(R,), *_free_output_options(options)]
            )
            flags = [
                all(_needs_collective(placements, output_placement) for output_placement in allowed)
                for placements in options
            ]
            yield Factor((variable,), _forbidding(flags))


def _producer_variable(
    step: AxisStep, axis_problem: AxisProblem, chains: DefUse, value: int
) -> tuple[int | None, Options]:
    """Return the solver's variable that decides the placement in which a value is produced.

    Returns:
        The variable, which is the number of the producing node (its choices are the node's
        strategies; None: a graph's input, nothing to decide), and for each choice the placements
        at hand, here one.
    """
    producer = chains.producers[value]
    if producer is None:
        return None, ((step.axis.inputs[value].placements[step.axis.at],),)
    number, result_index = producer
    strategies = axis_problem.entries[number].strategies
    return number, tuple([(strategy.outputs[result_index],) for strategy in strategies])


def _forbid_joint_moves(a: int | None, have: Options, b: int, want: Options) -> Iterator[Factor]:
    """Yield infinite cost for the joint choices of two variables that need a collective."""
    table = _forbidding(
        [[_needs_collective(available, wanted) for wanted in want] for available in have]
    )
    if a is None:
        yield Factor((b,), table[0])
    elif a != b:
        yield Factor((a, b), table)


def _needs_collective(have: Copies, want: Copies) -> bool:
    """Return whether a wanted placement needs a collective from all placements at hand."""
    return any(all(reshard_kind(available, wanted) != "" for available in have) for wanted in want)


def _free_output_options(have: Options) -> list[tuple[Placement, ...]]:
    """Return the produced placements that an output may keep without a collective."""
    return [
        placements
        for placements in have
        if reshard_kind(R, placements[0]) == "" and not isinstance(placements[0], StridedShard)
    ]


def _added_collectives(step: AxisStep, other: Graph) -> str:
    """Describe the collectives that another program has in addition."""
    mesh = step.axis.mesh
    difference = Counter(map(_collective_name, communications(other, mesh)))
    difference.subtract(map(_collective_name, communications(step.local.graph, mesh)))
    added = [(name, count) for name, count in difference.items() if count > 0]
    described = [f"{count}x {name}" if count > 1 else name for name, count in added[:_NAMED]]
    if len(added) > _NAMED:
        described.append(f"{len(added) - _NAMED} more kinds")
    if not described and not any(difference.values()):
        return "the same, of a value before or after"
    return ", ".join(described) or "no other collective: more is computed on every rank"


def _collective_name(record: Communication) -> str:
    return f"{record.kind} {amount(record.nbytes, 'B')} along {record.mesh_dim}"


# -- reasons for collectives -----------------------------------------------------------------------

#: Most groups of collectives that are analysed, the most expensive first.
MAX_REASONS = 20


class CostReason(NamedTuple):
    """Collectives of one kind at one of the user's lines."""

    kind: str
    reduce_op: str | None
    axis: str
    line: str
    why: str
    #: times, nbytes, seconds: number of collectives, total payload and total estimated time, at the
    #: decision of their axis; later axes may shard the moved values
    times: int
    nbytes: int
    seconds: float
    cause: str  # the annotation that leads to the collectives, or ``""``
    instead: str  # the additional collectives of the best program without these
    #: additional seconds of that program (negative where the annotations are not optimal); None:
    #: there is no such program
    extra: float | None


class _LocatedCollective(NamedTuple):
    """Collective of rank 0's program, and its place in the program before sharding."""

    record: Communication
    value: int | None  # the value that it redistributes; None: it is inside an op
    node: int | None  # the node with the collective inside; None: it redistributes a value


def reasons(decided: Iterable[AxisStep]) -> list[CostReason]:
    """Explain the most expensive collectives of a program, at most ``MAX_REASONS`` groups."""
    groups = [(step, group) for step in decided for group in _groups(step)]
    groups.sort(key=lambda pair: -_seconds(pair[0], [collective.record for collective in pair[1]]))
    cost_of_step: dict[int, float] = {}
    explained = []
    for step, group in groups[:MAX_REASONS]:
        if id(step) not in cost_of_step:
            cost_of_step[id(step)] = solve(step.axis_problem().problem).cost
        explained.append(_reason(step, group, cost_of_step[id(step)]))
    return explained


def _reason(step: AxisStep, group: Sequence[_LocatedCollective], cost: float) -> CostReason:
    """Explain a group of collectives.

    Args:
        cost: of the current program, in ticks.
    """
    first = group[0].record
    values = {collective.value for collective in group if collective.value is not None}
    inside = {collective.node for collective in group if collective.node is not None}
    instead, extra = alternative(step, values, inside, cost)
    records = [collective.record for collective in group]
    return CostReason(
        first.kind, first.reduce_op, step.name, first.source, first.why, len(group),
        sum(record.nbytes for record in records), _seconds(step, records), _cause(step, group[0]),
        instead, extra,
    )  # fmt: skip


def _seconds(step: AxisStep, records: Iterable[Communication]) -> float:
    machine, axis_size = step.axis.machine, step.axis.axis_size
    return sum(
        collective_seconds(machine, record.kind, record.nbytes, axis_size) for record in records
    )


# -- collectives of a program ---------------------------------------------------------------------


def _groups(step: AxisStep) -> list[list[_LocatedCollective]]:
    """Return the collectives of one axis, grouped by kind and source line."""
    groups: defaultdict[tuple[str, str | None, str], list[_LocatedCollective]] = defaultdict(list)
    for collective in _collectives_of(step):
        groups[
            collective.record.kind, collective.record.reduce_op, collective.record.source
        ].append(collective)
    return list(groups.values())


def _collectives_of(step: AxisStep) -> Iterator[_LocatedCollective]:
    """Yield the collectives of rank 0's program on the axis of a step."""
    values = step.local.values
    value_of_local = {
        local: value
        for value, placements in enumerate(values)
        for local in list(placements.values())[1:]
    }
    last_results = _last_results(step)
    # an interleaved value is reshaped before the collective
    reshaped = {node.refs()[0]: results[0] for node, results in step.local.graph.numbered()
             if node.op in RESHAPES}  # fmt: skip
    numbered = step.local.graph.numbered()
    collectives = [(node, results[0]) for node, results in numbered if node.op in COLLECTIVES]
    records = communications(step.local.graph, step.axis.mesh)
    for (node, result), record in zip(collectives, records, strict=True):
        if node.args[-1] != step.name:
            continue  # of an earlier axis
        node_number = next(
            (number for last_result, number in last_results if last_result > result), None
        )
        value = value_of_local.get(result, value_of_local.get(reshaped.get(result, result)))
        yield _LocatedCollective(record, value, node_number if value is None else None)


def _last_results(step: AxisStep) -> list[tuple[int, int]]:
    """Return (number of the last local result, number of the node) for each node, in order."""
    pairs = []
    for number, (_, results) in enumerate(step.graph.numbered()):
        values = [
            next(iter(step.local.values[v].values())) for v in results if step.local.values[v]
        ]
        if values:
            pairs.append((max(values), number))
    return pairs


def _cause(step: AxisStep, met: _LocatedCollective) -> str:
    """Describe the nearest annotation that led to a collective (breadth-first search backwards).

    The search goes through sharded and partial values; replicated ones are not followed.
    """
    graph, values, producers = step.graph, step.local.values, def_use(step.graph).producers
    queue = list(graph.nodes[met.node].refs()) if met.node is not None else [met.value]
    seen = set(queue)
    for value in queue:  # grows meanwhile: nearest first
        if value is None or all(placement == R for placement in values[value]):
            continue
        producer = producers[value]
        if producer is None:
            if (placement := placement_of(step, value)) != R:
                return f"input {graph.values[value]} stored {placement}"
            continue
        node = graph.nodes[producer[0]]
        placement = sharding_of_mark(node).placements[step.axis.at] if node.op == PLACE else R
        if placement not in (R, Unspecified()):
            return f"placed {placement} at {graph.line(producer[0])}"
        unseen = [ref for ref in node.refs() if ref not in seen]
        seen.update(unseen)
        queue += unseen
    return ""
