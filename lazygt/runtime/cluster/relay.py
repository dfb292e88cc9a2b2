"""Relay of status pages of ranks on other hosts to the client's own file, while watched.

Their hosts are asked a few times a second, and not again before they have answered: a link that is
down queues one request. The answers come with the other messages, and are written here with times
on this host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from lazygt.errors import ProtocolError
from lazygt.runtime.cluster.remote import RemoteHost, RemotePart
from lazygt.runtime.launch.status_file import Elsewhere, StatusFile, WorkerPage, decoded
from lazygt.runtime.launch.status_reader import Page

#: Seconds for which workers report details: longer than the interval of the requests.
_LEASE_SECONDS = 3.0
#: Nanoseconds after which a request counts as not answered.
_UNHEARD_AFTER = 1_000_000_000


class Relay:
    """Writer of the pages of other hosts' ranks. For one thread.

    Args:
        file: the client's status file.
    """

    def __init__(self, file: StatusFile) -> None:
        self._file = file
        #: rank -> its last page, and the time of that
        self._told: dict[int, tuple[WorkerPage, int]] = {}

    def look(self, hosts: Sequence[RemoteHost], host_of: Mapping[int, RemoteHost]) -> None:
        """Write the pages that have arrived, and request new ones.

        Args:
            host_of: rank -> its current host: a rank of a lost host may be on another one.
        """
        for host in hosts:
            for part in list(host.parts.values()):
                here = {
                    worker: rank
                    for worker, rank in enumerate(part.ranks)
                    if host_of.get(rank) is host and not part.ended
                }
                self._show(host, part, here)
            host.look(_LEASE_SECONDS)

    def _show(self, host: RemoteHost, part: RemotePart, here: Mapping[int, int]) -> None:
        now = time.monotonic_ns()
        seen, part.seen = part.seen, None
        if host.lost:
            for rank in here.values():
                self._write(rank, Elsewhere(host.name, "", now))
        elif seen is not None:
            for worker, rank in here.items():
                page = seen[worker] if worker < len(seen) else None
                self._hear(rank, part.pids[worker], page, now)
                process = "S" if page is None else page.process
                self._write(rank, Elsewhere(host.name, process, now))
        elif part.asked and now - part.asked > _UNHEARD_AFTER:
            for rank in here.values():
                self._write(rank, Elsewhere(host.name, "S", now, part.asked))

    def _hear(self, rank: int, pid: int, page: Page | None, now: int) -> None:
        """Store a rank's page, with times converted to this host's clock."""
        self._told[rank] = WorkerPage(rank, pid, "starting"), now
        if page is None:
            return
        when = now - int(page.age * 1e9)
        ahead = when - page.when  # of this host's clock, as far as that shows
        with suppress(ProtocolError):
            message = decoded(page.message, WorkerPage)
            message = replace(
                message,
                rank=rank,
                begun=message.begun and message.begun + ahead,
                weighed=message.weighed and message.weighed + ahead,
            )
            self._told[rank] = message, when

    def _write(self, rank: int, there: Elsewhere) -> None:
        message, when = self._told.get(rank, (WorkerPage(rank, 0, "starting"), there.heard))
        self._file.write(1 + rank, replace(message, elsewhere=there), when)
