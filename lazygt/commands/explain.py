"""``lazygt explain``: what a script would compute, before anything runs."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from lazygt.commands.base import OnMesh, Script, finish, on_mesh, run
from lazygt.explain import DRY, Runs, report_of, runs_of
from lazygt.report import Report

_DRY = (
    "Nothing was computed. What the script read of computed values was 0 (or False), so a branch "
    "on them may differ from a real run."
)
_FAILED = " The script failed; this is what it recorded until then."


def explain(context: typer.Context, script: Script, mesh: OnMesh = None) -> None:
    """Record an unchanged script without computing anything, and say what it would cost.

    For each of its lines: flops, bytes, launches and peak memory; what is fused, and why the rest
    is not. On a mesh, which needs none of its workers: what one rank of it does, the collectives,
    and what would be dearer. A script that fails on the way is explained up to there, with exit
    code 1.
    """
    ran = run(context, script, True, on_mesh(context, DRY, mesh))
    runs: list[Runs] = []
    first = 0
    for session in ran.sessions:
        runs += runs_of(session, first)
        first += len(session.entries())
    report = report_of(runs, alternatives=True)
    if report.plans:
        _show(report, _DRY + (_FAILED if ran.failed else ""))
    elif not ran.failed:
        typer.echo("no plan was built: the script recorded nothing on device lazygt")
    finish(ran)


def _show(report: Report, head: str) -> None:
    """In the terminal's width and colours; everything, as plain text, into a file or pipe."""
    if sys.stdout.isatty():
        console = Console()
        console.print(head, style="italic")
        console.print(report)
    else:
        typer.echo(f"{head}\n{report}")
