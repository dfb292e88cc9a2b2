"""Report of ``explain``: costs of a graph by line, its fused groups, and reasons for the others.

All numbers are counted from graphs; nothing is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.collectives import Communication, collective_name, communications
from lazygt.graph.cost import Cost, base_name, family, member_costs
from lazygt.graph.fusion import REDUCTIONS, expand_fused, numbers_of
from lazygt.graph.liveness import alive_bytes, peak_bytes
from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph, Node
from lazygt.graph.text import count, duration
from lazygt.machine import Machine, collective_seconds, default_machine, machine_of
from lazygt.machine.extrapolation import Outside, farthest, outside
from lazygt.observe.report import (
    AlternativeRow,
    CollectiveRow,
    Fused,
    LineCost,
    PlanCost,
    Report,
    Unfused,
)
from lazygt.passes.fuse import Fuse, GroupContext, Prices, candidates, compile_gain, saved_bytes
from lazygt.printing.tables import summed
from lazygt.runtime.plan import Plan, Schedule
from lazygt.session import Session

if TYPE_CHECKING:
    from lazygt.passes.sharding.axis import AxisStep


#: Settings of a session that records and plans, and computes nothing: its values are zeros.
DRY = {"launcher": "dry", "compile": "off", "keep_stages": True}


class Runs(NamedTuple):
    """A graph with the number of its runs; on a mesh, rank 0's.

    Attributes:
        times: number of runs.
        before: the graph before the fuse pass, if known.
        collectives: collectives of one run.
        decided: decisions on the placements, if known; see ``lazygt.passes.sharding``.
        machine: the cost model.
    """

    name: str
    graph: Graph
    times: int
    machine: Machine
    before: Graph | None = None
    mesh: Mesh | None = None
    collectives: tuple[Communication, ...] = ()
    decided: tuple[AxisStep, ...] = ()


def explain(what: Graph | Plan | Session, machine: str | os.PathLike[str] | None = None) -> Report:
    """Report costs and fused groups of one run of a graph or plan.

    A session's report covers all runs so far of all plans in its cache.

    No sync point. Print the report; a notebook shows tables.

    Args:
        machine: the cost model: a name such as ``h100``, or a machine file. None: the session's
            own, by which its plans were made; for a graph or plan, a CPU's.

    Raises:
        TypeError: the argument is something else.
        MachineError: there is no such machine.
    """
    priced = None if machine is None else machine_of(machine)
    match what:
        case Graph():
            sent = communications(expand_fused(what))
            cpu = priced or default_machine("cpu")
            return report_of([Runs("graph", what, 1, cpu, collectives=sent)])
        case Plan():
            cpu = priced or default_machine("cpu")
            return report_of(
                [Runs(_name(what), what.graph, 1, cpu, None, what.mesh, what.collectives)]
            )
        case Session():
            runs = runs_of(what)
            if priced is not None:
                priced = replace(priced, shares=what.costs.shares)  # the same hosts
                runs = [of_plan._replace(machine=priced) for of_plan in runs]
            return report_of(runs)
    raise TypeError(
        f"lazygt.explain: expected a graph, a plan or a session, not {type(what).__name__}"
    )


def runs_of(session: Session, first: int = 0) -> list[Runs]:
    """List a session's plans, oldest first, except those that only use the generator.

    Args:
        first: number of the oldest plan, as in ``lazygt dump`` and ``lazygt viz``.
    """
    return [
        Runs(
            f"{number} {_name(each.plan)}",
            each.plan.graph,
            each.runs,
            session.costs,
            _before_fuse(session, each.plan),
            each.plan.mesh,
            each.plan.collectives,
            session.decided(each.plan) if session.config.keep_stages else (),
        )
        for number, each in enumerate(session.entries(), first)
        if not all(map(_is_bookkeeping, each.plan.graph.nodes))
    ]


def _before_fuse(session: Session, plan: Plan) -> Graph | None:
    """Return the input of the fuse pass; None when the session keeps no stages."""
    if not session.config.keep_stages:
        return None
    stages = session.stages(plan)
    names = [name for name, _ in stages]
    return stages[names.index(Fuse.name) - 1][1] if Fuse.name in names else None


def report_of(runs: Iterable[Runs], alternatives: bool = False) -> Report:
    """Build the report of graphs and their runs.

    Args:
        alternatives: also price the best program without each collective, by solving the
            placements again for each of them.
    """
    runs = list(runs)
    lines: dict[str, LineCost] = {}
    for of_plan in runs:
        _add_lines(lines, of_plan)
    plans = [_plan_cost(of_plan) for of_plan in runs]
    dearest = sorted(lines.values(), key=lambda line: -(line.cost.flops + line.cost.bytes))
    return Report(
        _summary_lines(plans, runs),
        dearest,
        plans,
        summed((row for of_plan in runs for row in _fused(of_plan)), "runs"),
        summed((row for of_plan in runs for row in _unfused(of_plan)), "runs"),
        summed((row for of_plan in runs for row in _collectives(of_plan)), "runs"),
        summed((row for of_plan in runs if alternatives for row in _alternatives(of_plan)), "runs"),
        farthest(row for of_plan in runs for row in _outside(of_plan)),
    )


def _name(plan: Plan) -> str:
    """Return the beginning of a plan's digest."""
    return plan.digest.hex()[:12]


def _is_bookkeeping(node: Node) -> bool:
    """Return whether a node only seeds, reads or sets the random generator."""
    return node.op.startswith("lazygt.") and node.body is None and family(node) == "random"


def _summary_lines(plans: list[PlanCost], runs: list[Runs]) -> tuple[str, ...]:
    """Return the sentences above the tables."""
    run_count = sum(plan.runs for plan in plans)
    meshes = [of_plan.mesh for of_plan in runs if of_plan.mesh is not None]
    mesh_lines = [
        f"Planned for the mesh {mesh}: the numbers are those of rank 0 of {mesh.world_size}."
        for mesh in dict.fromkeys(meshes)
    ]
    machines = dict.fromkeys(str(of_plan.machine) for of_plan in runs)
    machine_lines = [f"Costs are those of the machine {name}." for name in machines]
    return (
        *mesh_lines,
        *(machine_lines if list(machines) != [str(default_machine("cpu"))] else []),
        f"{count(run_count, 'run')} of {count(len(plans), 'plan')}, counted and not timed; a fused "
        f"group counts as one launch at its first member's line.",
        "Peak: the most bytes of a plan's own values alive at once.",
    )


def _add_lines(lines: dict[str, LineCost], runs: Runs) -> None:
    """Add the ops of a graph to the costs of their source lines, in place."""
    graph = runs.graph
    alive = alive_bytes(graph, Schedule.of(graph).frees)
    for number, costs in enumerate(member_costs(graph)):
        body = graph.nodes[number].body
        if _is_bookkeeping(graph.nodes[number]):
            continue
        for member, cost in enumerate(costs):
            line = graph.line(number) if body is None else body.line(member)
            old = lines.get(line, LineCost(line, 0, Cost(), 0))
            lines[line] = LineCost(
                line, old.ops + runs.times, old.cost + _scaled(cost, runs.times),
                max(old.peak, alive[number]),
            )  # fmt: skip


def _scaled(cost: Cost, times: int) -> Cost:
    """Return a cost multiplied by a number of runs."""
    return Cost(
        cost.flops * times, cost.bytes_read * times, cost.bytes_written * times,
        cost.launches * times,
    )  # fmt: skip


def _plan_cost(runs: Runs) -> PlanCost:
    """Sum the costs of one run of a graph."""
    graph = runs.graph
    costs = [
        each
        for node, each in zip(graph.nodes, member_costs(graph), strict=True)
        if not _is_bookkeeping(node)
    ]
    return PlanCost(
        runs.name,
        runs.times,
        sum(map(len, costs)),
        sum(node.body is not None for node in graph.nodes),
        sum((cost for members in costs for cost in members), Cost()),
        sum(meta.nbytes for meta in graph.inputs),
        peak_bytes(graph, Schedule.of(graph).frees),
    )


# -- fused groups and other ops ------------------------------------------------------------------


def _fused(runs: Runs) -> Iterator[Fused]:
    """Yield the fused groups of a graph, with their estimated savings."""
    prices = Prices.of(runs.machine)
    for number, node in enumerate(runs.graph.nodes):
        if node.body is not None:
            surroundings = GroupContext(node.body)
            members = range(len(node.body.nodes))
            yield Fused(
                runs.times,
                tuple(base_name(member.op) for member in node.body.nodes),
                runs.graph.line(number),
                saved_bytes(surroundings, members),
                compile_gain(surroundings, members, prices),
            )


def _unfused(runs: Runs) -> Iterator[Unfused]:
    """Yield ops that the fuse pass leaves alone, and pointwise ops that can't be members."""
    graph, prices = runs.before or runs.graph, Prices.of(runs.machine)
    rows: dict[int, Unfused] = {}
    candidate_members: set[int] = set()
    for members, gain, closed in candidates(graph, prices):
        candidate_members.update(members)
        if gain > 0 and runs.before is not None:
            continue  # it is fused
        ops = tuple(base_name(graph.nodes[number].op) for number in members)
        reason = _unfused_reason(len(members), gain, closed, prices.call)
        rows[members[0]] = Unfused(runs.times, ops, graph.line(members[0]), reason)
    for number, node in enumerate(graph.nodes):
        if number not in candidate_members and (reason := _not_candidate_reason(node)):
            rows[number] = Unfused(runs.times, (base_name(node.op),), graph.line(number), reason)
    return (rows[number] for number in sorted(rows))


def _unfused_reason(members: int, gain: float, closed: str, call: float) -> str:
    """Return the reason that a candidate group is not fused.

    Args:
        gain: seconds that fusing would save, net of the call.
        closed: reason that the group could not grow; empty if none.
        call: seconds of a call of a compiled group.
    """
    end = f"; {closed}" if closed else ""
    if members == 1:
        return f"alone{end or ': nothing follows it that could join it'}"
    if gain > 0:
        return f"would gain {duration(gain)}: the fuse pass has not run on this graph"
    return f"too small: saves {duration(gain + call)}, and a call costs {duration(call)}{end}"


def _not_candidate_reason(node: Node) -> str:
    """Return the reason that a node can't be a member; empty if it is no candidate."""
    kind = family(node)
    if node.body is not None or _is_bookkeeping(node):
        return ""
    if kind == "random":
        return "random: groups draw no numbers"
    if "_foreach_" in node.op:
        return "not the same program for each of its tensors"
    if kind == "reduction" and node.op not in REDUCTIONS:
        return "groups don't take this reduction"
    if kind in ("pointwise", "reduction"):
        number = numbers_of(node) and "groups don't take its run-time number"
        return number or "groups don't take this op, or not with these dtypes"
    return ""


# -- collectives ---------------------------------------------------------------------------------


def _collectives(runs: Runs) -> list[CollectiveRow]:
    """Build one row for each set of collectives that differ only in their bytes."""
    rows = (
        CollectiveRow(
            runs.times, 1, each.kind, each.reduce_op, each.nbytes, each.ring_bytes, each.mesh_dim,
            each.ranks, _seconds(runs.machine, each), each.source, each.why,
        )
        for each in runs.collectives
    )  # fmt: skip
    return summed(rows, "times", "nbytes", "ring", "seconds")


def _seconds(machine: Machine, collective: Communication) -> float:
    """Estimate the seconds of a collective."""
    along = machine.along(collective.mesh_dim)
    return collective_seconds(along, collective.kind, collective.nbytes, collective.ranks)


def _outside(runs: Runs) -> Iterator[Outside]:
    """Yield the ops beyond the calibrated sizes, counted over all runs."""
    for row in outside(runs.machine, runs.graph, runs.collectives):
        yield row._replace(times=row.times * runs.times)


def _alternatives(runs: Runs) -> list[AlternativeRow]:
    """Price the best program without each of the most expensive collectives."""
    if not runs.decided:
        return []
    from lazygt.passes.sharding.reasons import (
        reasons,  # why: the rules of every op take a while to load
    )

    return [
        AlternativeRow(
            runs.times, each.times,
            collective_name(each.kind, each.reduce_op),
            each.nbytes, each.axis, each.seconds, each.line, each.cause, each.instead, each.extra,
        )
        for each in reasons(runs.decided)
    ]  # fmt: skip
