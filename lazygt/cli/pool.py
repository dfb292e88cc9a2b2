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
from lazygt.pool.pool_client import Pool
from lazygt.pool.server import server_key
from lazygt.runtime.cluster.keys import Keyring, keys_place
from lazygt.tables import plain_table

app = typer.Typer(no_args_is_help=True, help="See a pool of `lazygt serve`, drain it, evict.")

On = Annotated[str, typer.Argument(help="where it listens: tcp://HOST:PORT")]
Key = Annotated[Path | None, typer.Option(help="a key file: its own sessions; with --admin all")]
Keys = Annotated[
    Path | None, typer.Option(help="or the pool's own folder of keys  [default: this user's]")
]


@app.command()
def status(
    context: typer.Context,
    on: On,
    key: Key = None,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, for scripts")] = False,
) -> None:
    """Show the sessions of a pool: those with workers, those that wait, and their usage."""
    told = _asked(context, on, key, keys, Pool.status)
    if as_json:
        typer.echo(json.dumps(told))
        return
    console = Console()
    if not console.is_terminal:  # whole lines into a file or pipe
        console.width = 140
    _show(console, told)


@app.command()
def drain(context: typer.Context, on: On, key: Key = None, keys: Keys = None) -> None:
    """Let a pool admit no more sessions. It ends with its last session."""
    _asked(context, on, key, keys, Pool.drain)
    typer.echo("it admits nobody any more, and ends with its last session")


@app.command()
def evict(
    context: typer.Context,
    on: On,
    session: Annotated[str, typer.Argument(help="its name, as `lazygt pool status` says")],
    key: Key = None,
    keys: Keys = None,
) -> None:
    """End a session: its workers at once, and its client is told."""
    _asked(context, on, key, keys, lambda pool: pool.evict(session))
    typer.echo(f"{session} is ended")


def _asked(
    context: typer.Context,
    on: str,
    key: Path | None,
    keys: Path | None,
    ask: Callable[[Pool], Any],
) -> Any:
    """Return a pool's answer."""
    if key is not None and keys is not None:
        fail(context, "say who you are with --key FILE or with --keys FOLDER, not both")
    try:
        with Pool(on, key or server_key(Keyring(keys or keys_place()))) as pool:
            return ask(pool)
    except LazyGTError as error:
        fail(context, str(error))


def _show(console: Console, told: Mapping[str, Any]) -> None:
    workers, free = told["workers"], told["free"]
    draining = "; it is being drained" if told["draining"] else ""
    typer.echo(
        f"{workers - free} of {workers} workers are taken, {told['at_once']} run at once{draining}"
    )
    others = told["others"]
    if others["sessions"] or others["waiting"]:
        typer.echo(
            f"other keys have {others['sessions']} sessions with {others['workers']} workers, and "
            f"{others['waiting']} that wait"
        )
    if told["sessions"]:
        table = plain_table(
            "session", "key", "state", ">workers", ">run-seconds", ">MiB", ">for s", "ends in s"
        )
        for row in told["sessions"]:
            waits = row["before"]
            state = row["state"] if waits is None else f"waits, {waits} before"
            ends = "" if row["expires_in"] is None else f"{row['expires_in']:.0f}"
            table.add_row(
                row["session"], row["client"], state, str(row["workers"]),
                f"{row['run_seconds']:,.1f}", f"{row['memory'] / 2**20:,.0f}",
                f"{row['seconds']:,.0f}", ends,
            )  # fmt: skip
        console.print(table)
    if told["published"]:
        table = plain_table("published", "key", ">bytes", "for")
        for row in told["published"]:
            whom = "all keys" if row["shared"] else "its key"
            table.add_row(row["name"], row["client"], f"{row['bytes']:,}", whom)
        console.print(table)
