"""``lazygt doctor``."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from lazygt import doctor as checks
from lazygt.session import Session

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor() -> None:
    """Say what this machine has, and whether a session works on it."""
    found = checks.report(lambda: Session(workers=1))
    table = Table("part", "", "finding", "advice")
    for check in found:
        colour = _COLOURS[check.status]
        table.add_row(check.name, f"[{colour}]{check.status}[/]", check.detail, check.advice)
    Console().print(table)
    failed = [check.name for check in found if check.status == "fail"]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)
