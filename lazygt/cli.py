"""The command line: ``lazygt dump`` and ``lazygt doctor``."""

from __future__ import annotations

import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lazygt import doctor as checks
from lazygt.opened import current_session
from lazygt.session import Session

app = typer.Typer(add_completion=False, no_args_is_help=True)
#: A script that imports lazygt opens its sessions itself.
_IMPORT = re.compile(r"^\s*(import|from)\s+lazygt\b", re.MULTILINE)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@app.callback()
def _commands() -> None:
    """Look into lazygt, and into what a script records."""


@app.command()
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
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True,
                               "allow_interspersed_args": False})  # fmt: skip
def dump(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="the script; what follows are its arguments")],
    plan: Annotated[int | None, typer.Option(help="print this plan only, counted from 0")] = None,
    inline: Annotated[bool, typer.Option(help="where the script opens no session of its own, "
                                         "run it in this process")] = False,
) -> None:  # fmt: skip
    """Run an unchanged script and print every plan that its sessions built, and what they cost.

    A script that opens no session is run inside one.
    """
    if not script.is_file():
        print(f"lazygt dump: there is no file {script}", file=sys.stderr)
        raise typer.Exit(2)
    with _watched() as sessions:
        failed = _run(script, context.args, inline)
    number = 0
    for session in sessions:
        number = _print_session(session, number, plan)
    if not number and not failed:
        print("no plan was built: the script recorded nothing on device lazygt")
    elif plan is not None and not 0 <= plan < number:
        print(f"lazygt dump: there is no plan {plan}, only 0 to {number - 1}", file=sys.stderr)
        raise typer.Exit(2)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _watched() -> Iterator[list[Session]]:
    """The sessions that are opened meanwhile."""
    sessions: list[Session] = []
    set_up = Session.__init__

    def init(self: Session, **settings: object) -> None:
        set_up(self, **settings)
        sessions.append(self)

    Session.__init__ = init  # type: ignore[method-assign]
    try:
        yield sessions
    finally:
        Session.__init__ = set_up  # type: ignore[method-assign]


def _run(script: Path, args: list[str], inline: bool) -> bool:
    """Run the script as ``python script args`` would; whether it failed."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    own = _IMPORT.search(script.read_text(errors="replace"))
    around = nullcontext() if own else Session(executor="inline" if inline else None)
    try:
        with around:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code not in (None, 0)
    except Exception as error:  # noqa: BLE001 - any error of the script is shown as its own
        traceback.print_exception(type(error), error, _of_script(error.__traceback__, script))
        return True
    finally:
        sys.argv, sys.path[:] = argv, path
    return False


def _of_script(trace: TracebackType | None, script: Path) -> TracebackType | None:
    """The traceback from the script's first frame on; all of it when it never got there."""
    here = trace
    while here is not None and here.tb_frame.f_code.co_filename != str(script):
        here = here.tb_next
    return here or trace


def _print_session(session: Session, number: int, only: int | None) -> int:
    """Print a session's plans, counted from ``number``; returns the next number."""
    stats = session.stats()
    for entry in session.entries():
        if only is None or only == number:
            print(f"# plan {number}: shipped {entry.ships} time(s), {entry.size} bytes; "
                  f"run {entry.runs} time(s)")  # fmt: skip
            print(entry.plan)
            print()
        number += 1
    if only is None and number:
        flushes = ", ".join(f"{reason} {count}" for reason, count in stats["flushes"].items())
        print(f"# {stats['ops_recorded']} ops recorded; flushes: {flushes or 'none'}")
        print(f"# {stats['messages_sent']} messages sent, {stats['bytes_sent']} bytes")
        print(f"# {stats['messages_received']} messages received, {stats['bytes_received']} bytes")
    return number


def main() -> None:
    """The console script."""
    if current_session() is not None:
        raise RuntimeError("the lazygt command opens sessions of its own")
    app()


if __name__ == "__main__":
    main()
