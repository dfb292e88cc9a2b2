"""``lazygt log``: summary of an instruction log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lazygt.cli.script import fail
from lazygt.observe.message_log import LogSummary, Total, read_log


def log(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="what LAZYGT_LOG named while a script ran")],
    by: Annotated[
        str, typer.Option(help="kind, reason or line; by default all three")
    ] = "",
    most: Annotated[int, typer.Option(min=1, help="rows of a table")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="everything, for scripts")] = False,
) -> None:  # fmt: skip
    """Sum up the messages that a script sent and received: number, bytes, reasons, lines.

    Milliseconds run from the sending of a run to its answer, summed; runs overlap.
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
        whole = {"messages": summary.messages, "bytes": summary.nbytes, "seconds": summary.seconds}
        rows = {name: [asdict(total) for total in totals] for name, totals in tables.items()}
        typer.echo(json.dumps({**whole, **rows}))
        return
    typer.echo(f"{summary.messages:,} messages, {summary.nbytes:,} bytes, {summary.seconds:.2f} s")
    for name, totals in tables.items():
        _show(name, totals, most)


def _show(name: str, totals: Sequence[Total], most: int) -> None:
    table = Table("by " + name)
    for column in ("messages", "bytes", "ms", "ms each"):
        table.add_column(column, justify="right")
    for total in totals[:most]:
        mean = total.milliseconds / total.count
        took = (f"{total.milliseconds:,.1f}", f"{mean:,.2f}") if total.milliseconds else ("", "")
        table.add_row(total.name, f"{total.count:,}", f"{total.nbytes:,}", *took)
    if len(totals) > most:
        table.add_row(f"and {len(totals) - most:,} more")
    console = Console()
    if not console.is_terminal:  # whole lines into a file or pipe
        console.width = 140
    console.print(table)
