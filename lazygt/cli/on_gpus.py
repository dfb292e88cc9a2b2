"""``--gpus 8xB200``, ``--hosts``, ``--mesh``, ``--machine``: ranks that may not exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lazygt.cli.script import fail, on_machine, on_mesh
from lazygt.config import cache_setting
from lazygt.machine import Gpus, machine_of

OnGpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="so many of a kind, such as 8xB200: that machine, and a mesh of 8 ranks (without "
        "--mesh data=8)",
    ),
]
OnHosts = Annotated[
    int | None,
    typer.Option("--hosts", help="on which the GPUs are, as many on each", min=1),
]


def on_gpus(
    context: typer.Context,
    settings: Mapping[str, Any],
    gpus: str | None,
    hosts: int | None,
    mesh: str | None,
    machine: str | None,
) -> Mapping[str, Any]:
    """Return the settings of a dry session on the given ranks, with the machine's device.

    Ends the command if the options are invalid, or contradict each other.
    """
    if gpus is None and hosts is not None:
        fail(context, "--hosts says where GPUs are: give --gpus, too, such as --gpus 8xB200")
    if gpus is not None:
        try:
            ranks = Gpus.parse(gpus, hosts, machine)
            mesh, machine = ranks.mesh(mesh), ranks.machine
        except ValueError as error:
            fail(context, f"--gpus {gpus}: {error}")
    settings = on_machine(context, on_mesh(context, settings, mesh), machine)
    if machine is None:
        return settings
    return {**settings, "device": machine_of(machine, cache_setting()).device}
