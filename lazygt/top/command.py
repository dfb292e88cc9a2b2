"""``lazygt top``: what the workers of a session are doing, now."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from lazygt.errors import LazyGTError, NoSession
from lazygt.top.screen import Screen
from lazygt.top.sources import Source, open_source
from lazygt.top.status import as_json

_SETTLE_SECONDS = 2.0


def top(
    session: Annotated[
        str,
        typer.Argument(help="process that opened it, or its name; by default the only one"),
    ] = "",
    once: Annotated[bool, typer.Option(help="print it once")] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON, once")] = False,
    interval: Annotated[
        float, typer.Option(min=0.05, max=60, help="seconds between two looks")
    ] = 0.25,
    web: Annotated[bool, typer.Option(help="serve a page for a browser on this machine")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the page; 0: any")] = 0,
) -> None:
    """Watch a session of yours on this machine: which ranks are busy, waiting (for whom) or idle.

    Where the output is no terminal, it is printed once. Ctrl-C ends it.
    """
    try:
        source = open_source(session, interval)
        if web:
            # why: a terminal needs no server
            from lazygt.top.web import serve

            serve(source, port, interval, typer.echo)
        elif once or json or not sys.stdout.isatty():
            status = source.settled(_SETTLE_SECONDS)
            if json:
                typer.echo(as_json(status))
            else:
                Console().print(Screen(status))
        else:
            watch(source, interval, Console())
    except LazyGTError as error:
        typer.echo(f"lazygt top: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        return


def watch(source: Source, interval: float, console: Console) -> None:
    """Show a session until it ends.

    Raises:
        ProtocolError: its pages make no sense.
    """
    with Live(Screen(source.snapshot()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(Screen(source.snapshot()), refresh=True)
            except NoSession:
                break
    console.print("the session has ended")


def alone() -> None:
    """The command without the others."""
    app = typer.Typer(add_completion=False)
    app.command(name="top")(top)
    app(sys.argv[2:], prog_name="lazygt top")
