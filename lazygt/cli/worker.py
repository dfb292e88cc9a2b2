"""``lazygt worker``: this host's workers for a program with its client on another host."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from lazygt.config import Config
from lazygt.runtime.cluster import attach
from lazygt.runtime.cluster.environment import Job


def worker(
    context: typer.Context,
    connect: Annotated[
        str | None, typer.Option(help="tcp://HOST:PORT where the client listens")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="to start here, with --connect")] = 1,
    order: Annotated[
        int, typer.Option(min=1, help="hosts' ranks follow one another by it, with --connect")
    ] = 1,
    timeout: Annotated[float, typer.Option(min=0, help="seconds to wait for the client")] = (
        Config().start_timeout
    ),
) -> None:
    """Start workers on this host for a program that runs elsewhere, until it ends.

    Under torchrun, srun, mpirun or a JobSet nothing needs to be said: rank 0 runs the program, and
    this command takes the place of the program on all other ranks. The secret that both must know
    is in LAZYGT_TOKEN, or in the file that LAZYGT_TOKEN_FILE names.
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
