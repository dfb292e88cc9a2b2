"""Refused hosts of a job, reported by the client while it waits for all hosts.

A host that has proved the token and runs other versions ends the wait at once, and so does one that
reports in torchrun's store that the client has another token. Elsewhere a host with another token
can't be told from a stranger: strangers end the wait only if no true host has come by
`SHARE_FOR_TRUE_HOSTS` of its time, and there are as many of them as hosts are awaited.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lazygt.errors import LaunchError
from lazygt.runtime.cluster.environment import Job
from lazygt.runtime.cluster.listening import Listener

_log = logging.getLogger("lazygt")

#: Share of the time for all hosts that true ones have, from the first stranger on.
SHARE_FOR_TRUE_HOSTS = 0.1
_ADVICE = (
    "Give LAZYGT_TOKEN, or the file that LAZYGT_TOKEN_FILE names, the same value on all hosts, and "
    "start the job anew"
)


class Refusals:
    """Refused hosts during one wait.

    Args:
        job: job of the client.
        listener: listener of the client, to which hosts connect.
        told: returns the process that has reported another token in the job's store; "": none.
        seconds: time limit of the wait.
    """

    def __init__(
        self, job: Job, listener: Listener, told: Callable[[], str], seconds: float
    ) -> None:
        self._job, self._listener, self._told = job, listener, told
        self._share = SHARE_FOR_TRUE_HOSTS * seconds
        #: time from which strangers may end the wait; None: none has come
        self._until: float | None = None

    def check(self, has_come: bool) -> None:
        """Check for hosts that will not join.

        Args:
            has_come: True if any host has joined.

        Raises:
            LaunchError: awaited hosts were refused.
        """
        if process := self._told():
            raise LaunchError(
                "LAZYGT_TOKEN", f"is another one for {process!r} of this job than here. {_ADVICE}"
            )
        if others := dict(self._listener.other_versions):
            self._listener.other_versions.clear()  # another start may come with the right ones
            there = "; ".join(f"at {address}: {what}" for address, what in others.items())
            raise LaunchError(
                self._job.rank_variable,
                f"tells of several hosts, and one has other versions of lazygt, torch or Python, "
                f"{there}. Install the same ones on all hosts",
            )
        self._check_strangers(has_come)

    def _check_strangers(self, has_come: bool) -> None:
        strangers = self._listener.strangers.addresses
        if not any(strangers.values()):
            return
        known = [address for address, other_key in strangers.items() if address and other_key]
        addresses = known or ["an unknown address"]
        if self._until is None:
            self._until = time.monotonic() + self._share
            _log.warning(
                "refused %s: no proof of this host's LAZYGT_TOKEN; still waiting for all hosts",
                ", ".join(addresses),
            )
        if has_come or len(addresses) < self._awaited or time.monotonic() < self._until:
            return
        strangers.clear()  # for the next start
        raise LaunchError(
            "LAZYGT_TOKEN",
            f"is another one on the hosts of this job than here: {', '.join(addresses)} came with "
            f"another, and nobody with this one within {self._share:g} s. {_ADVICE}",
        )

    @property
    def _awaited(self) -> int:
        """Number of other hosts; if the engine does not set it, the largest possible."""
        job = self._job
        return job.world_size - job.local_world_size if job.hosts is None else job.hosts - 1

    def __str__(self) -> str:
        counts, strangers = self._listener.counts, self._listener.strangers.addresses
        where = ", ".join(filter(None, strangers))
        return (
            f"Connections that proved no such token: {counts['handshake']}"
            f"{where and f', from {where}'}"
        )
