"""``lazygt serve``: a pool of workers on this machine."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import torch
import typer

from lazygt.cache import cache_place
from lazygt.cli.script import fail
from lazygt.config import cache_setting
from lazygt.errors import LazyGTError
from lazygt.pool.rules import Quota, Rules
from lazygt.pool.server import address, cores_here, open_gateway, quotas
from lazygt.runtime.cluster.keys import Keyring, keys_place
from lazygt.runtime.launch.hidden import hide


def serve(
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=1, help="worker processes that there may be")],
    keys: Annotated[
        Path | None, typer.Option(help="the folder of the pool's keys  [default: this user's]")
    ] = None,
    bind: Annotated[
        str, typer.Option(help="where to listen; port 0: a free one")
    ] = "tcp://127.0.0.1:7000",
    at_once: Annotated[
        int | None, typer.Option(min=1, help="workers that may run at once  [default: the cores]")
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="sessions that may wait for workers")] = 64,
    grace: Annotated[
        float, typer.Option(min=0, help="seconds for which a connection may be dead, at most")
    ] = 300.0,
    expiry: Annotated[
        float, typer.Option(min=0, help="seconds that a session lives whose client has detached")
    ] = 86_400.0,
    quota: Annotated[
        Path | None, typer.Option(help="a TOML file: what each key may have")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    hidden: Annotated[
        bool, typer.Option("--hidden", help="keep its processes from looking into one another")
    ] = False,
) -> None:  # fmt: skip
    """Serve workers here to clients with keys, fairly and each with its own processes.

    Clients write lazygt.session(on="tcp://HOST:PORT", key=FILE). See `lazygt keys` and
    `lazygt pool`. Ends with SIGTERM or Ctrl-C, or when it is drained; its sessions end with it.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        default, of_clients = (Quota(), {}) if quota is None else quotas(quota)
        limit = at_once or (workers if device == "cuda" else min(workers, cores_here()))
        rules = Rules(workers, limit, queue, grace, expiry, default, of_clients, hidden)
        caches = cache_place(cache_setting()) / "clients"
        if hidden:
            hide()
        ring = Keyring(keys or keys_place())
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
