"""``lazygt pool``: status of a pool, and the end of its sessions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lazygt.cli.script import fail
from lazygt.errors import LazyGTError
from lazygt.net.keys import Keyring, keys_place
from lazygt.pool.pool_client import Pool
from lazygt.tables import plain_table

app = typer.Typer(no_args_is_help=True, help="See a pool of `lazygt serve`, drain it, evict.")

On = Annotated[str, typer.Argument(help="address of the pool: tcp://HOST:PORT")]
Key = Annotated[
    Path | None, typer.Option(help="key file: shows its own sessions; all with a key of --admin")
]
Keys = Annotated[
    Path | None,
    typer.Option(help="folder of the pool's keys, in place of --key  [default: this user's]"),
]


@app.command()
def status(
    context: typer.Context,
    on: On,
    key: Key = None,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Show the sessions of a pool, running and waiting, and their usage."""
    report = _request(context, on, key, keys, Pool.status)
    if as_json:
        typer.echo(json.dumps(report))
        return
    console = Console()
    if not console.is_terminal:  # no wrapped lines in a file or pipe
        console.width = 140
    _show(console, report)


@app.command()
def drain(context: typer.Context, on: On, key: Key = None, keys: Keys = None) -> None:
    """Let a pool admit no more sessions; the pool ends with its last session."""
    _request(context, on, key, keys, Pool.drain)
    typer.echo("it admits nobody any more, and ends with its last session")


@app.command()
def evict(
    context: typer.Context,
    on: On,
    session: Annotated[str, typer.Argument(help="name of the session, as in `lazygt pool status`")],
    key: Key = None,
    keys: Keys = None,
) -> None:
    """End a session: stop its workers at once, and notify its client."""
    _request(context, on, key, keys, lambda pool: pool.evict(session))
    typer.echo(f"{session} is ended")


def _request(
    context: typer.Context,
    on: str,
    key: Path | None,
    keys: Path | None,
    call: Callable[[Pool], Any],
) -> Any:
    """Connect to a pool with a key, and return the result of ``call``."""
    if key is not None and keys is not None:
        fail(context, "say who you are with --key FILE or with --keys FOLDER, not both")
    try:
        with Pool(on, key or Keyring(keys or keys_place()).own()) as pool:
            return call(pool)
    except LazyGTError as error:
        fail(context, str(error))


def _show(console: Console, report: Mapping[str, Any]) -> None:
    """Print a pool's workers, sessions and published values."""
    workers, free = report["workers"], report["free"]
    draining = "; it is being drained" if report["draining"] else ""
    typer.echo(
        f"{workers - free} of {workers} workers are taken, "
        f"{report['at_once']} run at once{draining}"
    )
    others = report["others"]
    if others["sessions"] or others["waiting"]:
        typer.echo(
            f"other keys have {others['sessions']} sessions with {others['workers']} workers, and "
            f"{others['waiting']} that wait"
        )
    if report["sessions"]:
        table = plain_table(
            "session", "key", "state", ">workers", ">run-seconds", ">MiB", ">for s", "ends in s"
        )
        for row in report["sessions"]:
            queued_before = row["before"]
            state = row["state"] if queued_before is None else f"waits, {queued_before} before"
            ends = "" if row["expires_in"] is None else f"{row['expires_in']:.0f}"
            table.add_row(
                row["session"], row["client"], state, str(row["workers"]),
                f"{row['run_seconds']:,.1f}", f"{row['memory'] / 2**20:,.0f}",
                f"{row['seconds']:,.0f}", ends,
            )  # fmt: skip
        console.print(table)
    if report["published"]:
        table = plain_table("published", "key", ">bytes", "for")
        for row in report["published"]:
            readers = "all keys" if row["shared"] else "its key"
            table.add_row(row["name"], row["client"], f"{row['bytes']:,}", readers)
        console.print(table)
