"""Client's side of the chain broadcast of uploads to several hosts: order and progress.

The hosts form a chain in the order of their ranks. The client sends to the first host, and each
other host follows the nearest predecessor that can be followed: `upload_relay` is the hosts' side.
A host that can't reach its predecessor, or loses it, gets the missing pieces from the client. When
a host is lost, its followers follow the host before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from lazygt.net.channel import new_token
from lazygt.runtime.arenas import Arena
from lazygt.runtime.cluster.protocol import Alone, Begin, Follow, Has, Listens, Mirror
from lazygt.runtime.cluster.remote import RemoteHost, pieces
from lazygt.runtime.cluster.upload_relay import UPLOAD_BYTES

_log = logging.getLogger("lazygt")

#: Seconds after which an agent that has not sent its endpoint counts as having none.
_ANSWER_SECONDS = 10.0
#: Numbers of sessions, which agents and late answers outlive.
_SESSIONS = count(1)


@dataclass(slots=True, eq=False)
class HostProgress:
    """Host in the chain."""

    host: RemoteHost
    has: int  # number of the last piece that the host is known to have
    #: endpoint of its agent for followers; "": none, None: not known yet
    endpoint: str | None = None
    #: predecessor from which it receives pieces; itself: the client; None: not decided
    source: HostProgress | None = None
    #: number of the last piece that the client has sent it; None: the client sends it none
    fed: int | None = None
    turn: int = 0  # number of `Follow` messages sent to it
    avoids: HostProgress | None = None  # predecessor that it could not follow
    begun: float = field(default_factory=time.monotonic)

    @property
    def silent(self) -> bool:
        """True if the host may still send its endpoint."""
        return self.endpoint is None and time.monotonic() < self.begun + _ANSWER_SECONDS


class Chain:
    """Chain broadcast of uploads to all hosts but the client's own. For any thread.

    Args:
        arena: arena of the uploads; None: there are none.
        first: size of its first segment in bytes.
        token: the session's secret; None: a new one.

    Attributes:
        number: number of the last piece sent, which hosts must have before any later message; 0
            with a single host, since its connection keeps the order.
    """

    def __init__(self, arena: Arena | None, first: int, token: bytes | None) -> None:
        self._arena, self._first, self._token = arena, first, token or new_token()
        self._lock = threading.RLock()
        self._nodes: list[HostProgress] = []
        #: number, offset and bytes of pieces that a host may lack
        self._pieces: deque[tuple[int, int, int]] = deque()
        self._relay = 0  # number of the running relay; 0: none
        self.number = 0
        self._warned = False

    def add(self, host: RemoteHost) -> None:
        """Add a host, and send it all uploads so far."""
        if self._arena is None:
            return
        with self._lock:
            for offset, piece in pieces(self._arena):
                host.mirror(Mirror(self._first, offset), piece)
            self._nodes.append(HostProgress(host, self.number))
            if self._relay:
                self._begin(self._nodes[-1])
            elif len(self._nodes) > 1:
                self._relay = next(_SESSIONS)
                for node in self._nodes:
                    self._begin(node)
            if self._relay:
                self._assign_sources()

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Send uploads, (offset, bytes) each, to every host. Does not wait."""
        with self._lock:
            self.pump()
            for offset, nbytes in slots:
                for begin in range(offset, offset + nbytes, UPLOAD_BYTES):
                    self._mirror(begin, min(UPLOAD_BYTES, offset + nbytes - begin))

    def pump(self) -> None:
        """Handle the hosts' messages, and drop lost hosts."""
        if not self._relay:
            return
        with self._lock:
            changed = False
            for node in self._nodes:
                changed = (
                    changed
                    or bool(node.host.upload_events)
                    or node.host.lost
                    or node.endpoint is None
                )
                while node.host.upload_events:
                    self._handle(node, node.host.upload_events.popleft())
            if changed:
                self._nodes = [node for node in self._nodes if not node.host.lost]
                self._assign_sources()
                self._drop_complete()

    def close(self) -> None:
        """Stop the relay of uploads on all hosts, if there is one."""
        with self._lock:
            # a `Begin` without a token ends the relay
            for node in self._nodes if self._relay else ():
                node.host.say(Begin(self._relay))
            self._relay = 0

    # -- pieces --------------------------------------------------------------------------

    def _mirror(self, offset: int, nbytes: int) -> None:
        """Send one piece of the arena, to a single host directly or into the chain."""
        if not self._relay:
            for node in self._nodes:
                node.host.mirror(Mirror(self._first, offset), self._bytes(offset, nbytes))
            return
        self._pieces.append((self.number + 1, offset, nbytes))
        self.number += 1
        for node in self._nodes:
            self._send_missing(node)

    def _send_missing(self, node: HostProgress) -> None:
        """Send a host the pieces that it lacks, if the client is its source."""
        if node.fed is None or node.fed >= self.number:
            return
        done = self._pieces[0][0] - 1
        for number, offset, nbytes in islice(self._pieces, node.fed - done, None):
            header = Mirror(self._first, offset, number, done)
            node.host.mirror(header, self._bytes(offset, nbytes))
            node.fed = number

    def _bytes(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the upload arena."""
        assert self._arena is not None
        return memoryview(self._arena.view(offset, nbytes).numpy().data)

    def _drop_complete(self) -> None:
        """Drop the records of pieces that all hosts have."""
        done = min((node.has for node in self._nodes), default=self.number)
        while self._pieces and self._pieces[0][0] <= done:
            self._pieces.popleft()

    # -- order of the chain --------------------------------------------------------------

    def _begin(self, node: HostProgress) -> None:
        """Send a host the order to count and relay pieces."""
        node.begun = time.monotonic()
        node.host.say(Begin(self._relay, self.number, self._token.hex()))

    def _handle(self, node: HostProgress, event: Listens | Has | Alone) -> None:
        """Handle a host's report, unless it is of an earlier session."""
        if event.session != self._relay:
            return
        match event:
            case Listens(_, endpoint):
                node.endpoint = endpoint
            case Has(_, number):
                node.has = max(node.has, number)
            case Alone(_, turn, number, met, why) if turn == node.turn:
                self._take_over(node, number, met, why)

    def _take_over(self, node: HostProgress, number: int, met: bool, reason: str) -> None:
        """Make the client the source of a host's remaining pieces, after a failure or by order.

        Args:
            number: number of the last piece that the host has.
            met: True if the host had reached its source.
            reason: the error.
        """
        source, node.source = node.source, node
        node.has, node.fed = number, number
        if source is not None and source is not node:
            node.avoids = source
            if not met and not self._warned and not source.host.lost:
                self._warned = True
                _log.warning(
                    "host %s can't reach host %s (%s): the client sends uploads to each such host "
                    "itself, where one would pass them on to the next. Does a firewall let TCP "
                    "through between them?",
                    node.host.name,
                    source.host.name,
                    reason,
                )
        self._send_missing(node)

    def _assign_sources(self) -> None:
        """Assign each host its source, after a change of the chain."""
        for index, node in enumerate(self._nodes):
            if node.avoids is not None and not node.avoids.host.lost:
                continue
            source = self._source_for(node, self._nodes[:index])
            if source is not None and source is not node.source:
                self._assign_source(node, source)

    def _source_for(
        self, node: HostProgress, predecessors: Sequence[HostProgress]
    ) -> HostProgress | None:
        """Find the nearest predecessor of a host that can be followed.

        Returns:
            The host itself if the client must be its source; None if that is not known yet.
        """
        if not predecessors:
            return node
        if node.silent:
            return None
        for candidate in reversed(predecessors if node.endpoint else ()):
            if candidate.silent:
                return None
            if candidate.endpoint:
                return candidate
        return node

    def _assign_source(self, node: HostProgress, source: HostProgress) -> None:
        """Order a host to receive its pieces from a new source."""
        previous, node.source = node.source, source
        if source is node and previous is None:  # it has received no piece yet
            node.fed = node.has
            self._send_missing(node)
            return
        node.turn, node.fed = node.turn + 1, None
        # it reports its last piece by itself if the client is to be its source
        node.host.say(Follow(node.turn, "" if source is node else source.endpoint or ""))
