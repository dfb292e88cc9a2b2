"""``lazygt top``: the command."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from lazygt.errors import LazyGTError, NoSession
from lazygt.observe.top.screen import PoolScreen, Screen
from lazygt.observe.top.sources import PoolSource, Status, StatusSource, as_json, open_source
from lazygt.observe.top.status import SessionStatus

_SETTLE_SECONDS = 2.5


def top(
    session: Annotated[
        str,
        typer.Argument(
            help="process id or name of the session, by default the only one; or a pool: "
            "tcp://HOST:PORT"
        ),
    ] = "",
    once: Annotated[bool, typer.Option(help="print the status once")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the status once, as JSON")] = False,
    interval: Annotated[
        float, typer.Option(min=0.05, max=60, help="seconds between two updates")
    ] = 0.25,
    web: Annotated[bool, typer.Option(help="serve a page for a browser on this machine")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of the page; 0: any free one")
    ] = 0,
    key: Annotated[
        Path | None,
        typer.Option(help="key file of `lazygt keys new`, for a pool  [default: the pool's own]"),
    ] = None,
) -> None:
    """Watch a session of yours on this machine, or those of a pool that a key may see: the state
    of each rank (busy, waiting, idle, ...), and the ranks that it waits for.

    Without a terminal the status is printed once. Ctrl-C ends the command.
    """
    try:
        source = _open(session, interval, key)
        if web:
            # why: a terminal needs no server
            from lazygt.observe.top.web import serve

            serve(source, port, interval, typer.echo)
        elif once or json or not sys.stdout.isatty():
            status = source.settled(_SETTLE_SECONDS)
            if json:
                typer.echo(as_json(status))
            else:
                Console().print(drawn(status))
        else:
            watch(source, interval, Console())
    except LazyGTError as error:
        typer.echo(f"lazygt top: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        return


def _open(name: str, interval: float, key: Path | None) -> StatusSource:
    """Open the status of a local session, or of the pool at a ``tcp://`` address."""
    if not name.startswith("tcp://"):
        if key is not None:
            raise NoSession("--key is for a pool: lazygt top tcp://HOST:PORT --key FILE")
        return open_source(name, interval)
    return PoolSource(name, key)


def drawn(status: Status) -> RenderableType:
    """Return the rendering of a status for a terminal."""
    return Screen(status) if isinstance(status, SessionStatus) else PoolScreen(status)


def watch(source: StatusSource, interval: float, console: Console) -> None:
    """Show a session until it ends.

    Raises:
        ProtocolError: the session's pages are invalid.
    """
    with Live(drawn(source.snapshot()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(drawn(source.snapshot()), refresh=True)
            except NoSession as error:
                ended = str(error)
                break
    console.print(ended)


def alone() -> None:
    """Run ``lazygt top`` alone, without the other commands."""
    app = typer.Typer(add_completion=False)
    app.command(name="top")(top)
    app(sys.argv[2:], prog_name="lazygt top")
