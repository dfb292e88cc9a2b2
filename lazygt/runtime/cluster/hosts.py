"""Interface to host allocators, for sessions that an engine did not start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lazygt.runtime.cluster.remote import RemoteHost


class HostLauncher(Protocol):
    """Launcher that starts agents on hosts, and replaces lost ones."""

    def start(self, seconds: float) -> Sequence[tuple[RemoteHost, int]]:
        """Return all hosts, each with its number of workers; ranks follow this order.

        Args:
            seconds: time limit of the whole start.

        Raises:
            LaunchError: not all hosts are there in time; nothing is left of them.
        """

    def another(self, rank: int) -> RemoteHost:
        """Return a host for a worker of a lost host; one host may get several if it has room.

        Raises:
            LaunchError: there is no host in time.
        """

    def close(self) -> None:
        """Release all hosts. Idempotent."""
