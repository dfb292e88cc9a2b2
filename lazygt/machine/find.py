"""Lookup of a machine: one that comes with lazygt, a file, or the one calibrated here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from lazygt.errors import MachineError
from lazygt.graph.mesh import VirtualMesh
from lazygt.host.files import cache_place
from lazygt.machine.file import read
from lazygt.machine.model import Machine

_PLACE = Path(__file__).parent / "machines"
#: The machine of ``calibrated_place``.
CALIBRATED = "calibrated"
#: Who serves where none is named, by the kind of device.
_DEFAULTS = {"cpu": "cpu-generic", "cuda": "h100"}


def shipped() -> tuple[str, ...]:
    """The names of the machines that come with lazygt."""
    return tuple(sorted(path.stem for path in _PLACE.glob("*.toml")))


def calibrated_place(cache_dir: str | None = None) -> Path:
    """Return the default path of the file that ``lazygt calibrate`` writes.

    Args:
        cache_dir: see ``cache_place``.
    """
    return cache_place(cache_dir) / "machine.toml"


def machine_of(named: str | os.PathLike[str], cache_dir: str | None = None) -> Machine:
    """The machine of that name, or of that file.

    Args:
        named: one of ``shipped()``, in small or capital letters; ``calibrated``; or a path. Behind
            an ``@`` may stand how many ranks are on a host: ``b200@4``.

    Raises:
        MachineError: there is none, or its file is wrong.
    """
    name = os.fspath(named)
    others, at, ranks = name.rpartition("@")
    if at and ranks.isdigit() and not Path(name).is_file():
        return _with_ranks(machine_of(others, cache_dir), int(ranks))
    if name.lower() in shipped():
        return _shipped(name.lower())
    if name.lower() == CALIBRATED:
        place = calibrated_place(cache_dir)
        if not place.is_file():
            raise MachineError(place, "", "is not there yet: run lazygt calibrate")
        return read(place)
    if Path(name).is_file():
        return read(name)
    others = ", ".join(shipped())
    raise MachineError(
        name, "", f"is no machine, and no file: expected {others}, {CALIBRATED}, or a path"
    )


def default_machine(device: str) -> Machine:
    """The machine that serves where none is named."""
    return _shipped(_DEFAULTS[device])


def on_hosts(machine: Machine, mesh: VirtualMesh, ranks: Sequence[int]) -> Machine:
    """Return the machine for a session with workers on several hosts, in the order of ranks.

    Axes of the mesh that cross hosts have the costs of the network.

    Args:
        mesh: of the session.
        ranks: number of workers on each host, in their order.

    Raises:
        ValueError: these are not all workers of the mesh.
    """
    if sum(ranks) != mesh.workers.world_size:
        raise ValueError(f"hosts of {list(ranks)} workers are not those of the mesh {mesh.workers}")
    host_of = [host for host, count in enumerate(ranks) for _ in range(count)]
    shares = {}
    for axis in mesh.ranks.names:
        lines = [[host_of[mesh.worker(r)] for r in line] for line in mesh.ranks.lines(axis)]
        share = min(max(Counter(line).values()) / len(line) for line in lines)
        if share < 1:
            shares[axis] = share
    if len(ranks) == 1:
        return machine
    return replace(_with_ranks(machine, max(ranks)), shares=shares)


def _with_ranks(machine: Machine, ranks: int) -> Machine:
    """The same machine with so many ranks on a host."""
    if not ranks:
        raise MachineError(f"{machine}@{ranks}", "", "has no rank on a host: expected at least 1")
    changed = machine.with_values({"collectives.ranks": ranks})
    return replace(changed, name=f"{machine.name}@{ranks}", path=machine.path)


@cache
def _shipped(name: str) -> Machine:
    return replace(read(_PLACE / f"{name}.toml"), path="")
