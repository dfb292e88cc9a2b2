"""What gives a session hosts, where an engine is asked for them and did not start the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lazygt.runtime.cluster.remote import RemoteHost


class HostLauncher(Protocol):
    """Has agents started on hosts, and others in the place of those that are lost."""

    def start(self, seconds: float) -> Sequence[tuple[RemoteHost, int]]:
        """All hosts, each with how many workers it is to have; ranks go by this order.

        Args:
            seconds: that all of it may take.

        Raises:
            LaunchError: not all are there in time; nothing is left of them.
        """

    def another(self, rank: int) -> RemoteHost:
        """A host for a worker whose own is lost; the same one for several where it has room.

        Raises:
            LaunchError: there is none in time.
        """

    def close(self) -> None:
        """Give all hosts back. Idempotent."""
