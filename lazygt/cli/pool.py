"""``lazygt serve``, ``worker``, ``keys`` and ``pool``: workers for programs elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lazygt.cli.script import AsJson, fail, show, show_json
from lazygt.config import Config, cache_setting
from lazygt.errors import LazyGTError, SecurityError
from lazygt.host.files import cache_directory
from lazygt.host.processes import hide
from lazygt.net.keys import Keyring, keys_directory, new_token
from lazygt.pool.gateway import open_gateway
from lazygt.pool.pool_client import Pool
from lazygt.pool.requests import Quota, Rules, address, quotas
from lazygt.printing.tables import PlainTable
from lazygt.runtime.cluster import attach
from lazygt.runtime.cluster.environment import Job

Folder = Annotated[
    Path | None,
    typer.Option("--keys", help="folder of the pool's keys  [default: this user's]"),
]

# -- ``lazygt worker``: workers on this host for a program on another host -------------------------


def worker(
    context: typer.Context,
    connect: Annotated[
        str | None, typer.Option(help="address of the client: tcp://HOST:PORT")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="number of workers to start here, with --connect")
    ] = 1,
    order: Annotated[
        int, typer.Option(min=1, help="position of this host in the order of ranks, with --connect")
    ] = 1,
    timeout: Annotated[float, typer.Option(min=0, help="seconds to wait for the client")] = (
        Config().start_timeout
    ),
) -> None:
    """Start workers on this host for a program that runs elsewhere, until it ends.

    Under torchrun, srun, mpirun or a JobSet no options are needed: rank 0 runs the program, and
    this command replaces the program on all other ranks. The shared secret is in LAZYGT_TOKEN, or
    in the file that LAZYGT_TOKEN_FILE names.
    """
    if connect is not None:
        attach.join(connect, attach.secret(), workers, order, timeout)
    job = Job.from_environment(os.environ)
    if job is None:
        raise typer.BadParameter(
            "no engine has started this process as one of several; say where the client listens",
            context,
            param_hint="--connect",
        )
    if job.is_client:
        raise typer.BadParameter(
            "this is rank 0, which is to be the program itself: start `lazygt worker` on the other "
            "ranks",
            context,
        )
    attach.serve(job, timeout)


# -- ``lazygt keys``: keys of a pool's clients, and tokens of sessions -----------------------------

Name = Annotated[str, typer.Argument(help="name of the client: letters, digits and .-_@")]

keys = typer.Typer(
    no_args_is_help=True,
    help="Make, revoke and list the keys of a pool's clients, and tokens for sessions.",
)


@keys.command()
def new(
    context: typer.Context,
    name: Name,
    directory: Folder = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="key file to write; by default NAME.key")
    ] = None,
    endpoint: Annotated[
        str, typer.Option(help="address of the pool, such as tcp://HOST:PORT")
    ] = "",
    admin: Annotated[
        bool,
        typer.Option("--admin", help="allow the client to see, drain and evict, too (lazygt pool)"),
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
def revoke(context: typer.Context, name: Name, directory: Folder = None) -> None:
    """Revoke a client's key. A connected client is disconnected within a second."""
    try:
        _ring(context, directory).revoke(name)
    except KeyError:
        fail(context, f"no client is called {name}: `lazygt keys list` names them all")
    typer.echo(f"The key of {name} is allowed no longer.")


@keys.command("list")
def list_(context: typer.Context, directory: Folder = None) -> None:
    """List the clients that are allowed."""
    for name in _ring(context, directory).names():
        typer.echo(name)


@keys.command()
def token() -> None:
    """Print a new random token, for LAZYGT_TOKEN on all hosts of a session."""
    typer.echo(new_token())


def _ring(context: typer.Context, directory: Path | None) -> Keyring:
    """Open the keys of a folder, by default this user's; ends the command if they are unsafe."""
    try:
        return Keyring(directory or keys_directory())
    except (SecurityError, OSError) as error:
        fail(context, str(error))


# -- ``lazygt serve``: a pool of workers on this machine -------------------------------------------


def serve(
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=1, help="number of worker processes, at most")],
    directory: Folder = None,
    bind: Annotated[
        str, typer.Option(help="address to listen on; port 0: a free one")
    ] = "tcp://127.0.0.1:7000",
    at_once: Annotated[
        int | None, typer.Option(min=1, help="workers that run at once, at most  [default: cores]")
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="sessions that may wait for workers")] = 64,
    grace: Annotated[
        float, typer.Option(min=0, help="seconds that a connection may be dead, at most")
    ] = 300.0,
    expiry: Annotated[
        float, typer.Option(min=0, help="seconds until a detached session expires")
    ] = 86_400.0,
    quota: Annotated[
        Path | None, typer.Option(help="TOML file with the quotas of keys")
    ] = None,
    device: Annotated[str, typer.Option(help="device of the workers: auto, cpu or cuda")] = "auto",
    hidden: Annotated[
        bool, typer.Option("--hidden", help="hide the pool's processes from one another")
    ] = False,
) -> None:  # fmt: skip
    """Serve workers here to clients with keys, fairly and each with its own processes.

    Clients write lazygt.session(pool=lazygt.PoolAccess("tcp://HOST:PORT", key=FILE)). See
    `lazygt keys` and `lazygt pool`. Ends with SIGTERM or Ctrl-C, or when it is drained; its
    sessions end with it.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        default, client_quotas = (Quota(), {}) if quota is None else quotas(quota)
        limit = at_once or (
            workers if device == "cuda" else min(workers, len(os.sched_getaffinity(0)))
        )
        rules = Rules(workers, limit, queue, grace, expiry, default, client_quotas, hidden)
        caches = cache_directory(cache_setting()) / "clients"
        if hidden:
            hide()
        ring = Keyring(directory or keys_directory())
        gateway = open_gateway(address(bind), ring, rules, device, caches)
    except (OSError, ValueError, LazyGTError) as error:
        fail(context, str(error))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    typer.echo(
        f"{workers} worker(s), {limit} of them at once, on {device}, at "
        f"{gateway.listener.address}; keys in {ring.directory}"
    )
    gateway.serve()


# -- ``lazygt pool``: status of a pool, and the end of its sessions --------------------------------

app = typer.Typer(no_args_is_help=True, help="See a pool of `lazygt serve`, drain it, evict.")

On = Annotated[str, typer.Argument(help="address of the pool: tcp://HOST:PORT")]
Key = Annotated[
    Path | None, typer.Option(help="key file: shows its own sessions; all with a key of --admin")
]


@app.command()
def status(
    context: typer.Context,
    on: On,
    key: Key = None,
    directory: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show the sessions of a pool, running and waiting, and their usage."""
    report = _request(context, on, key, directory, Pool.status)
    if as_json:
        show_json(report)
    else:
        _show(report)


@app.command()
def drain(context: typer.Context, on: On, key: Key = None, directory: Folder = None) -> None:
    """Let a pool admit no more sessions; the pool ends with its last session."""
    _request(context, on, key, directory, Pool.drain)
    typer.echo("it admits nobody any more, and ends with its last session")


@app.command()
def evict(
    context: typer.Context,
    on: On,
    session: Annotated[str, typer.Argument(help="name of the session, as in `lazygt pool status`")],
    key: Key = None,
    directory: Folder = None,
) -> None:
    """End a session: stop its workers at once, and notify its client."""
    _request(context, on, key, directory, lambda pool: pool.evict(session))
    typer.echo(f"{session} is ended")


def _request(
    context: typer.Context,
    on: str,
    key: Path | None,
    directory: Path | None,
    call: Callable[[Pool], Any],
) -> Any:
    """Connect to a pool with a key, and return the result of ``call``.

    Args:
        key: key file.
        directory: folder with this user's keys, if no key file is named.
    """
    if key is not None and directory is not None:
        fail(context, "say who you are with --key FILE or with --keys FOLDER, not both")
    try:
        with Pool(on, key or Keyring(directory or keys_directory()).own()) as pool:
            return call(pool)
    except LazyGTError as error:
        fail(context, str(error))


def _show(report: Mapping[str, Any]) -> None:
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
        table = PlainTable(
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
        show(table)
    if report["published"]:
        table = PlainTable("published", "key", ">bytes", "for")
        for row in report["published"]:
            readers = "all keys" if row["shared"] else "its key"
            table.add_row(row["name"], row["client"], f"{row['bytes']:,}", readers)
        show(table)
