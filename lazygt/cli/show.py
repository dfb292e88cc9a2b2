"""``lazygt explain``, ``why``, ``profile`` and ``doctor``.

A script's costs, the reasons for its flushes and plans, its timeline; and a check of this machine.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lazygt.cli.script import (
    Inline,
    OnMachine,
    OnMesh,
    Script,
    check_output,
    fail,
    finish,
    on_machine,
    on_mesh,
    run,
)
from lazygt.observe import doctor as checks
from lazygt.observe.explain import DRY, Runs, report_of, runs_of
from lazygt.observe.report import Report
from lazygt.observe.timeline import Timeline
from lazygt.observe.timeline import profile as profile_of
from lazygt.observe.why import why as why_of
from lazygt.session import Session

_SLOWEST = 5
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_DRY = (
    "Nothing was computed. What the script read of computed values was 0 (or False), so a branch "
    "on them may differ from a real run."
)
_FAILED = " The script failed; this is what it recorded until then."


def explain(
    context: typer.Context, script: Script, mesh: OnMesh = None, machine: OnMachine = None
) -> None:
    """Record an unchanged script without computing anything, and show its costs.

    For each of its lines: flops, bytes, launches and peak memory; fused ops, and reasons for the
    others. On a mesh, which needs none of its workers: the work of one rank, the collectives, and
    the cost of alternatives. A failing script is explained up to its error, with exit code 1.
    """
    settings = on_machine(context, on_mesh(context, DRY, mesh), machine)
    ran = run(context, script, True, settings)
    runs: list[Runs] = []
    first_plan = 0
    for session in ran.sessions:
        runs += runs_of(session, first_plan)
        first_plan += len(session.entries())
    report = report_of(runs, alternatives=True)
    if report.plans:
        _show(report, _DRY + (_FAILED if ran.failed else ""))
    elif not ran.failed:
        typer.echo("no plan was built: the script recorded nothing on device lazygt")
    finish(ran)


def _show(report: Report, head: str) -> None:
    """Print a report: formatted in a terminal, in full as plain text into a file or pipe."""
    if sys.stdout.isatty():
        console = Console()
        console.print(head, style="italic")
        console.print(report)
    else:
        typer.echo(f"{head}\n{report}")


def why(context: typer.Context, script: Script, inline: Inline = False) -> None:
    """Run an unchanged script and report the causes of its flushes and of its new plans."""
    ran = run(context, script, inline)
    for number, session in enumerate(ran.sessions):
        stats = session.stats()
        typer.echo(f"session {number}: {stats['ops_recorded']} ops recorded, "
                   f"{stats['plans_built']} plans built, {stats['plan_hits']} hits")  # fmt: skip
        typer.echo(why_of(session))
    finish(ran)


def profile(
    context: typer.Context,
    script: Script,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the file to write")
    ] = Path("trace.json"),
    inline: Inline = False,
) -> None:  # fmt: skip
    """Run an unchanged script and write a timeline in Chrome's trace format.

    Workers run plans node by node for it: the timeline shows shares of time, not the real speed.
    """
    check_output(context, output)
    timeline = Timeline()
    with ExitStack() as profiles:
        ran = run(
            context,
            script,
            inline,
            opened=lambda session: profiles.enter_context(profile_of(session, timeline)),
        )
    try:
        timeline.save(output)
    except OSError as error:
        fail(context, str(error))
    typer.echo(f"{timeline.runs} runs written to {output}; open it at https://ui.perfetto.dev")
    for line, steps, seconds in timeline.by_line()[:_SLOWEST]:
        typer.echo(f"  {seconds * 1e3:10.3f} ms  {steps:6} steps  {line}")
    for row in timeline.collectives():
        share = row.exposed / (row.exposed + row.hidden)
        typer.echo(
            f"  {row.exposed * 1e3:10.3f} ms  {row.times:6} times  {row.kind} over {row.axis}: "
            f"exposed, {share:.0%} of it; {row.hidden * 1e3:.3f} ms hidden"
        )
    for activity, times, seconds in timeline.beside():
        typer.echo(f"  {seconds * 1e3:10.3f} ms  {times:6} times  {activity}")
    finish(ran)


def doctor() -> None:
    """Check this machine, and whether a session works on it."""
    findings = checks.report(lambda: Session(workers=1))
    table = Table("part", "", "finding", "advice")
    for check in findings:
        colour = _COLOURS[check.status]
        table.add_row(check.name, f"[{colour}]{check.status}[/]", check.detail, check.advice)
    Console().print(table)
    failed = [check.name for check in findings if check.status == "fail"]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)
