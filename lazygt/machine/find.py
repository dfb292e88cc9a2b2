"""Lookup of a machine: shipped with lazygt, in a file, or calibrated on this machine."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lazygt.errors import MachineError
from lazygt.graph.mesh import Mesh, VirtualMesh
from lazygt.host.files import cache_directory
from lazygt.machine.file import FOLDER, read, shipped
from lazygt.machine.model import Machine

#: Name of the machine in ``calibrated_path``.
CALIBRATED = "calibrated"
#: Default machine by device.
_DEFAULTS = {"cpu": "cpu-generic", "cuda": "h100"}


def calibrated_path(cache_dir: str | None = None) -> Path:
    """Return the default path of the file that ``lazygt calibrate`` writes.

    Args:
        cache_dir: see ``cache_directory``.
    """
    return cache_directory(cache_dir) / "machine.toml"


def machine_of(named: str | os.PathLike[str], cache_dir: str | None = None) -> Machine:
    """Return the machine of a name or a file.

    Args:
        named: one of ``shipped()`` in any case, ``calibrated``, or a path; a suffix such as ``@4``
            sets the ranks on a host: ``b200@4``.

    Raises:
        MachineError: there is no such machine, or its file is invalid.
    """
    name = os.fspath(named)
    base, at, ranks = name.rpartition("@")
    if at and ranks.isdigit() and not Path(name).is_file():
        return _with_ranks(machine_of(base, cache_dir), int(ranks))
    if name.lower() in shipped():
        return _shipped(name.lower())
    if name.lower() == CALIBRATED:
        path = calibrated_path(cache_dir)
        if not path.is_file():
            raise MachineError(path, "", "is not there yet: run lazygt calibrate")
        return read(path)
    if Path(name).is_file():
        return read(name)
    names = ", ".join(shipped())
    raise MachineError(
        name, "", f"is no machine, and no file: expected {names}, {CALIBRATED}, or a path"
    )


def default_machine(device: str) -> Machine:
    """Return the default machine of a device, ``cpu`` or ``cuda``."""
    return _shipped(_DEFAULTS[device])


def on_hosts(machine: Machine, mesh: VirtualMesh, ranks: Sequence[int]) -> Machine:
    """Return the machine for a session with workers on several hosts, in the order of ranks.

    Axes of the mesh that cross hosts have the costs of the network.

    Args:
        mesh: mesh of the session.
        ranks: number of workers on each host, in the order of hosts.

    Raises:
        ValueError: the numbers don't add up to the workers of the mesh.
    """
    if sum(ranks) != mesh.workers.world_size:
        raise ValueError(f"hosts of {list(ranks)} workers are not those of the mesh {mesh.workers}")
    host_of = [host for host, count in enumerate(ranks) for _ in range(count)]
    shares = {}  # axis that crosses hosts -> least share of a group's ranks on one host
    for axis in mesh.ranks.names:
        groups = [
            [host_of[mesh.worker(r)] for r in group] for group in mesh.ranks.axis_groups(axis)
        ]
        share = min(max(Counter(group).values()) / len(group) for group in groups)
        if share < 1:
            shares[axis] = share
    if len(ranks) == 1:
        return machine
    return replace(_with_ranks(machine, max(ranks)), shares=shares)


def _with_ranks(machine: Machine, ranks: int) -> Machine:
    """Return a machine with another number of ranks on a host."""
    if not ranks:
        raise MachineError(f"{machine}@{ranks}", "", "has no rank on a host: expected at least 1")
    changed = machine.with_values({"collectives.ranks": ranks})
    return replace(changed, name=f"{machine.name}@{ranks}", path=machine.path)


@cache
def _shipped(name: str) -> Machine:
    """Read a machine that is shipped with lazygt, once."""
    return replace(read(FOLDER / f"{name}.toml"), path="")


# -- requested GPUs, such as ``8xB200``, as a machine and a mesh -----------------------------------

_TEXT = re.compile(r"\s*(\d+)\s*(?:[xX]\s*(\S+))?\s*")
#: Axis of the default mesh.
_AXIS = "data"


class Gpus(NamedTuple):
    """GPUs that a program should run on.

    Attributes:
        ranks: number of GPUs on all hosts.
        machine: an argument of ``machine_of``; None if none was named.
    """

    ranks: int
    machine: str | None

    @staticmethod
    def parse(text: str, hosts: int | None = None, machine: str | None = None) -> Gpus:
        """Parse ``8xB200``, or ``8`` with ``machine`` as a separate argument.

        Args:
            hosts: number of hosts, with equally many GPUs each; None: hosts are filled up to the
                capacity of the machine.

        Raises:
            ValueError: the text is invalid, the GPUs don't divide by the hosts, or two machines are
                named.
            MachineError: there is no such machine, or its hosts have fewer GPUs.
        """
        match = _TEXT.fullmatch(text)
        if match is None or not int(match[1]):
            raise ValueError(f"{text!r} is not so many GPUs of a kind, such as 8xB200")
        count, named = int(match[1]), match[2]
        if named is not None and machine is not None:
            raise ValueError(f"{text} names a machine, and {machine} is another: give one of them")
        named = named or machine
        if hosts is not None:
            named = _machine_for_hosts(count, named, hosts)
        elif named is not None:
            machine_of(named)
        return Gpus(count, named)

    def mesh(self, text: str | None = None) -> str:
        """Return the mesh of these ranks: that of the text, or all ranks on the axis ``data``.

        Raises:
            ValueError: the text is invalid, or has another number of ranks.
        """
        if text is None:
            return f"{_AXIS}={self.ranks}"
        mesh = Mesh.parse(text)
        if mesh.world_size != self.ranks:
            raise ValueError(
                f"the mesh {mesh} is of {mesh.world_size} ranks, and there are {self.ranks} GPUs: "
                f"its sizes have to multiply to {self.ranks}, as {_AXIS}={self.ranks} does"
            )
        return text


def requested(
    gpus: str | None,
    hosts: int | None,
    mesh: Mapping[str, int] | str | None,
    machine: str | os.PathLike[str] | None,
) -> tuple[str | None, str | None]:
    """Resolve the arguments of a program that should run on GPUs to its mesh and its machine.

    Args:
        gpus, hosts: see ``Gpus.parse``; None: the mesh and the machine are returned as they are.
        mesh: the mesh; None: all GPUs on one axis.
        machine: an argument of ``machine_of``.

    Raises:
        MachineError, ValueError: see ``Gpus``; or there are hosts without GPUs.
    """
    mesh_text = mesh if mesh is None or isinstance(mesh, str) else str(Mesh.of(mesh))
    machine_text = None if machine is None else os.fspath(machine)
    if gpus is not None:
        ranks = Gpus.parse(gpus, hosts, machine_text)
        return ranks.mesh(mesh_text), ranks.machine
    if hosts is not None:
        raise ValueError("hosts says where GPUs are: give gpus, too")
    return mesh_text, machine_text


def _machine_for_hosts(count: int, machine: str | None, hosts: int) -> str:
    """Return the name of the machine with ``count / hosts`` ranks on a host: ``b200@4``."""
    if machine is None:
        raise ValueError("which hosts? name their machine, as in 8xB200")
    if hosts < 1 or count % hosts:
        raise ValueError(f"{count} GPUs are not as many on each of {hosts} hosts")
    on_host, capacity = count // hosts, int(machine_of(machine).collectives.ranks)
    if on_host > capacity:
        raise MachineError(
            machine,
            "collectives.ranks",
            f"is {capacity} on a host, and {count} GPUs on {hosts} would be {on_host}: "
            "say more hosts, or name a machine file of larger ones",
        )
    return machine if on_host == capacity else f"{machine}@{on_host}"
