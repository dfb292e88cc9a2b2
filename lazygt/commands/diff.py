"""``lazygt diff``: what differs between two dumps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Annotated

import typer

from lazygt.commands.base import fail

_HEAD = re.compile(r"# plan (\d+):")
_LINE = re.compile(r"  # [^\[]*?(?=  \[|$)")
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def diff(
    context: typer.Context,
    old: Annotated[Path, typer.Argument(help="what `lazygt dump` printed")],
    new: Annotated[Path, typer.Argument(help="what it printed another time")],
    lines: Annotated[bool, typer.Option(help="compare the user's lines, too")] = True,
) -> None:
    """Show how the plans of two dumps differ; exit code 0: they do not, 1: they do, 2: trouble.

    How often a plan was shipped and run is not compared, nor is what the scripts printed.
    """
    before, after = (_read(context, path, lines) for path in (old, new))
    same = True
    for number in sorted({*before, *after}):
        for row in unified_diff(before.get(number, []), after.get(number, []),
                                f"{old} plan {number}", f"{new} plan {number}",
                                lineterm=""):  # fmt: skip
            same = False
            typer.secho(row, fg=_COLOURS.get(row[0]))
    if not same:
        raise typer.Exit(1)


def _read(context: typer.Context, path: Path, lines: bool) -> dict[int, list[str]]:
    """The plans of a dump, by number."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(context, f"can't read {path}: {error}")
    plans = dict(read_plans(text.splitlines()))
    if not plans:
        how = f"write one with `lazygt dump --all SCRIPT > {path}`"
        fail(context, f"there is no plan in {path}; {how}")
    return plans if lines else {n: [_LINE.sub("", r) for r in rows] for n, rows in plans.items()}


def read_plans(rows: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """(number, lines of the text) of each plan in a dump."""
    number: int | None = None
    plan: list[str] = []
    for row in rows:
        head = _HEAD.match(row)
        if head is not None:
            number, plan = int(head[1]), []
        elif number is not None and not row.startswith("#"):
            plan.append(row)
            if row == "}":
                yield number, plan
                number = None
