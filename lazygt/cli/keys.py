"""``lazygt keys``: keys of a pool's clients, and the shared secret of a session's hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lazygt.cli.script import fail
from lazygt.errors import SecurityError
from lazygt.runtime.cluster.keys import Keyring, keys_place, new_token

Directory = Annotated[
    Path | None,
    typer.Option("--keys", help="the pool's directory of keys; by default one of this user's"),
]
Name = Annotated[str, typer.Argument(help="of the client: letters, digits and .-_@")]

keys = typer.Typer(
    no_args_is_help=True,
    help="Make, revoke and list the keys of a pool's clients, and tokens for sessions.",
)


@keys.command()
def new(
    context: typer.Context,
    name: Name,
    directory: Directory = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="the client's key file; by default NAME.key")
    ] = None,
    endpoint: Annotated[
        str, typer.Option(help="where the pool listens, such as tcp://HOST:PORT")
    ] = "",
    admin: Annotated[
        bool, typer.Option("--admin", help="it may also see, drain and evict (lazygt pool)")
    ] = False,
) -> None:
    """Make a key for a client, and allow it.

    The key file is for the client alone: send it over a safe channel, and delete your copy.
    """
    path = output or Path(f"{name}.key")
    ring = _ring(context, directory)
    if path.exists():
        fail(context, f"there is a {path}: choose another file with -o")
    try:
        key = ring.new(name, endpoint, admin)
    except ValueError as error:
        fail(context, str(error))
    try:
        key.write(path)
    except OSError as error:
        ring.revoke(name)
        fail(context, str(error))
    typer.echo(f"{path}: the key of {name}, readable by you alone. It is allowed from now on.")


@keys.command()
def revoke(context: typer.Context, name: Name, directory: Directory = None) -> None:
    """Allow a client no longer. If it is connected, it is sent away within a second."""
    try:
        _ring(context, directory).revoke(name)
    except KeyError:
        fail(context, f"no client is called {name}: `lazygt keys list` names them all")
    typer.echo(f"The key of {name} is allowed no longer.")


@keys.command("list")
def list_(context: typer.Context, directory: Directory = None) -> None:
    """List the clients that are allowed."""
    for name in _ring(context, directory).names():
        typer.echo(name)


@keys.command()
def token() -> None:
    """Print a fresh token, for LAZYGT_TOKEN on all hosts of a session."""
    typer.echo(new_token())


def _ring(context: typer.Context, directory: Path | None) -> Keyring:
    try:
        return Keyring(directory or keys_place())
    except (SecurityError, OSError) as error:
        fail(context, str(error))
