"""``lazygt explain``, ``why``, ``profile`` and ``log``: reports on a script.

Its costs, the reasons for its flushes and plans, its timeline, its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lazygt.cli.script import (
    NO_PLAN,
    AsJson,
    Inline,
    OnMachine,
    OnMesh,
    Script,
    check_output,
    fail,
    finish,
    planned_on,
    run,
    show,
    show_json,
)
from lazygt.observe.explain import DRY, Runs, report_of, runs_of
from lazygt.observe.timeline import Timeline
from lazygt.observe.timeline import profile as profile_of
from lazygt.observe.traffic import LogSummary, Total, read_log
from lazygt.observe.why import why as why_of
from lazygt.printing.tables import PlainTable

_SLOWEST = 5
_DRY = (
    "Nothing was computed. What the script read of computed values was 0 (or False), so a branch "
    "on them may differ from a real run."
)
_FAILED = " The script failed; this is what it recorded until then."


# -- ``lazygt explain``, ``why``, ``profile`` ------------------------------------------------------


def explain(
    context: typer.Context, script: Script, mesh: OnMesh = None, machine: OnMachine = None
) -> None:
    """Record an unchanged script without computing anything, and show its costs.

    For each of its lines: flops, bytes, launches and peak memory; fused ops, and reasons for the
    others. On a mesh, which needs none of its workers: the work of one rank, the collectives, and
    the cost of alternatives. A failing script is explained up to its error, with exit code 1.
    """
    settings = planned_on(context, DRY, mesh, machine)
    script_run = run(context, script, True, settings)
    runs: list[Runs] = []
    first_plan = 0
    for session in script_run.sessions:
        runs += runs_of(session, first_plan)
        first_plan += len(session.entries())
    report = report_of(runs, alternatives=True)
    if report.plans:
        show(Text(_DRY + (_FAILED if script_run.failed else ""), style="italic"), report)
    elif not script_run.failed:
        typer.echo(NO_PLAN)
    finish(script_run)


def why(context: typer.Context, script: Script, inline: Inline = False) -> None:
    """Run an unchanged script and report the causes of its flushes and of its new plans."""
    script_run = run(context, script, inline)
    for number, session in enumerate(script_run.sessions):
        stats = session.stats()
        typer.echo(f"session {number}: {stats['ops_recorded']} ops recorded, "
                   f"{stats['plans_built']} plans built, {stats['plan_hits']} hits")  # fmt: skip
        typer.echo(why_of(session))
    finish(script_run)


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
        script_run = run(
            context,
            script,
            inline,
            on_session_opened=lambda session: profiles.enter_context(profile_of(session, timeline)),
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
    finish(script_run)


# -- ``lazygt log``: summary of an instruction log -------------------------------------------------


def log(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="log file that a script has written (LAZYGT_LOG)")],
    by: Annotated[
        str, typer.Option(help="table to print: kind, reason or line; by default all three")
    ] = "",
    most: Annotated[int, typer.Option(min=1, help="rows of a table, at most")] = 10,
    as_json: AsJson = False,
) -> None:
    """Sum the messages that a script sent and received: number, bytes, reasons, lines.

    Milliseconds are sums of the times from sending a run to its answer; runs overlap.
    """
    try:
        summary = LogSummary(read_log(file))
    except (OSError, ValueError) as error:
        fail(context, str(error))
    tables = {"kind": summary.by_kind(), "reason": summary.by_reason(), "line": summary.by_line()}
    if by and by not in tables:
        fail(context, f"--by is one of {', '.join(tables)}, not {by!r}")
    tables = {by: tables[by]} if by else tables
    if as_json:
        rows = {name: [asdict(total) for total in totals] for name, totals in tables.items()}
        show_json({
            "messages": summary.messages, "bytes": summary.nbytes, "seconds": summary.seconds,
            **rows,
        })  # fmt: skip
        return
    typer.echo(f"{summary.messages:,} messages, {summary.nbytes:,} bytes, {summary.seconds:.2f} s")
    for name, totals in tables.items():
        show(Text(), _totals_table(name, totals, most))


def _totals_table(name: str, totals: Sequence[Total], most: int) -> PlainTable:
    """Build the table of totals by a name, with ``most`` rows at most."""
    table = PlainTable(f"by {name}", ">messages", ">bytes", ">ms", ">ms each")
    for total in totals[:most]:
        mean = total.milliseconds / total.count
        milliseconds = (f"{total.milliseconds:,.1f}", f"{mean:,.2f}")
        table.add_row(
            total.name, f"{total.count:,}", f"{total.nbytes:,}",
            *(milliseconds if total.milliseconds else ("", "")),
        )  # fmt: skip
    if len(totals) > most:
        table.add_row(f"and {len(totals) - most:,} more", *[""] * 4)
    return table
