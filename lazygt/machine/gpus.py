"""Requested GPUs, such as ``8xB200``, as a machine and a mesh."""

from __future__ import annotations

import re
from typing import NamedTuple

from lazygt.errors import MachineError
from lazygt.graph.mesh import Mesh
from lazygt.machine.find import machine_of

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
            named = _on_hosts(count, named, hosts)
        elif named is not None:
            machine_of(named)
        return Gpus(count, named)

    def mesh(self, given: str | None = None) -> str:
        """Return the mesh of these ranks: ``given``, or all ranks on the axis ``data``.

        Raises:
            ValueError: ``given`` is invalid, or has another number of ranks.
        """
        if given is None:
            return f"{_AXIS}={self.ranks}"
        mesh = Mesh.parse(given)
        if mesh.world_size != self.ranks:
            raise ValueError(
                f"the mesh {mesh} is of {mesh.world_size} ranks, and there are {self.ranks} GPUs: "
                f"its sizes have to multiply to {self.ranks}, as {_AXIS}={self.ranks} does"
            )
        return given


def _on_hosts(count: int, machine: str | None, hosts: int) -> str:
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
