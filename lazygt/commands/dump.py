"""``lazygt dump``: the plans of a script as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from lazygt.commands.base import Inline, Script, fail, finish, run
from lazygt.graph.alias import op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.graph.text import print_graph
from lazygt.passes import PIPELINE
from lazygt.runtime.client import PlanEntry
from lazygt.runtime.plan import Plan, Schedule
from lazygt.session import Session

#: The stages that a plan goes through.
STAGES = ("recorded", *(stage.name for stage in PIPELINE), "plan")


def dump(
    context: typer.Context,
    script: Script,
    stage: Annotated[
        str, typer.Option(help=f"print the graphs of this stage: {', '.join(STAGES)}")
    ] = "plan",
    plan: Annotated[int | None, typer.Option(help="print this plan only, counted from 0")] = None,
    inline: Inline = False,
) -> None:
    """Run an unchanged script and print every plan that its sessions built, and what they cost.

    A script that opens no session is run inside one.
    """
    if stage not in STAGES:
        fail(context, f"there is no stage {stage!r}, only {', '.join(STAGES)}")
    ran = run(context, script, inline, {"keep_stages": True} if stage != "plan" else {})
    number = 0
    for session in ran.sessions:
        number = _print_session(session, number, plan, stage)
    if not number and not ran.failed:
        typer.echo("no plan was built: the script recorded nothing on device lazygt")
    elif plan is not None and not 0 <= plan < number:
        fail(context, f"there is no plan {plan}, {_only(number)}")
    finish(ran)


def _only(number: int) -> str:
    return f"only 0 to {number - 1}" if number else "the script built none"


def _print_session(session: Session, number: int, only: int | None, stage: str) -> int:
    """Print a session's plans, counted from ``number``; returns the next number."""
    first = number
    for entry in session.entries():
        if only is None or only == number:
            _print_plan(session, entry, number, stage)
        number += 1
    if only is None and number > first:
        _print_counts(session)
    return number


def _print_plan(session: Session, entry: PlanEntry, number: int, stage: str) -> None:
    plan = entry.plan
    typer.echo(f"# plan {number}: shipped {entry.ships} time(s), {entry.size} bytes; "
               f"run {entry.runs} time(s)")  # fmt: skip
    if stage == "plan":
        graph, text = plan.graph, plan_text(plan)
    else:
        graph = dict(session.stages(plan))[stage]
        text = print_graph(graph, f"{stage} of plan {_name(plan)}", _byte_notes(graph))
    typer.echo(f"# {_sizes(graph)}")
    typer.echo(text + "\n")


def _print_counts(session: Session) -> None:
    stats = session.stats()
    flushes = ", ".join(f"{reason} {count}" for reason, count in stats["flushes"].items())
    typer.echo(f"# {stats['ops_recorded']} ops recorded; flushes: {flushes or 'none'}")
    for way in ("sent", "received"):
        typer.echo(f"# {stats[f'messages_{way}']} messages {way}, {stats[f'bytes_{way}']} bytes")


def plan_text(plan: Plan) -> str:
    """A plan as it prints, with the bytes that each node makes."""
    notes = zip(Schedule.of(plan.graph).notes(), _byte_notes(plan.graph), strict=True)
    joined = ["; ".join(filter(None, pair)) for pair in notes]
    return print_graph(plan.graph, f"plan {_name(plan)}", joined)


def _name(plan: Plan) -> str:
    return plan.digest.hex()[:12]


def _byte_notes(graph: Graph) -> list[str]:
    return [f"{made} bytes" if (made := _made(node)) else "" for node in graph.nodes]


def _made(node: Node) -> int:
    """Bytes of the results that have memory of their own."""
    facts = op_facts(node)
    return 0 if facts is not None and facts.views else _nbytes(node.fresh)


def _nbytes(metas: Iterable[TensorMeta | None]) -> int:
    return sum(meta.nbytes for meta in metas if meta is not None)


def _sizes(graph: Graph) -> str:
    values = graph.values
    outputs = _nbytes(values[number] for number in graph.outputs)
    return (
        f"{len(graph.inputs)} inputs, {_nbytes(graph.inputs)} bytes; "
        f"{len(graph.nodes)} nodes make {sum(map(_made, graph.nodes))} bytes; "
        f"{len(graph.outputs)} outputs, {outputs} bytes"
    )
