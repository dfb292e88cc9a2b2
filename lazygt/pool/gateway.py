"""Gateway of a pool: connections and requests of clients.

One thread does all of it, except waiting for workers and sending their answers: their links have
threads of their own, and so has the end of a session. Nothing here waits for a client.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lazygt.errors import PoolError, ProtocolError
from lazygt.pool import messages
from lazygt.pool.messages import (
    TO_POOL,
    AreYouThere,
    Ask,
    Doing,
    DrainAll,
    EvictOne,
    Here,
    Leave,
    Ok,
    Report,
    Status,
)
from lazygt.pool.publishing import Publishing
from lazygt.pool.report import report
from lazygt.pool.rules import Rules
from lazygt.pool.sessions import Sessions
from lazygt.pool.visitor import Visitor
from lazygt.runtime.cluster.connection import Listener
from lazygt.runtime.wire import Part, decode

#: Limit of one key.
_MOST_CONNECTIONS = 64
#: Seconds between two checks of the clients' connections.
_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class Gateway:
    """The gateway of a pool: its connections, sessions and published values.

    Args:
        administrates: returns whether the key of this name may administer.
        device: ``cpu`` or ``cuda``.
        caches: folder for compiled code, with a folder for each client.

    Attributes:
        refused: counts of refused requests: ``protocol`` (malformed, which ends the connection),
            ``administration``, ``foreign`` (for no session of the client), ``connections`` (too
            many of one key).
    """

    listener: Listener
    administrates: Callable[[str], bool]
    rules: Rules
    device: str
    caches: Path
    refused: Counter[str] = field(default_factory=Counter)
    sessions: Sessions = field(init=False)
    publishing: Publishing = field(init=False)
    _visitors: list[Visitor] = field(default_factory=list)
    _posted: deque[Callable[[], object]] = field(default_factory=deque)
    _alarm: int = field(init=False)
    _stopping: bool = False
    _look_at: float = 0.0

    def __post_init__(self) -> None:
        self.publishing = Publishing(
            self.rules,
            held=lambda client: sum(lease.memory for lease in self.sessions.policy.of(client)),
            visitors=lambda: self._visitors,
        )
        self.sessions = Sessions(
            self.rules,
            self.device,
            self.caches,
            self.publishing.values.by_client,
            self._post,
            self.refused,
        )
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # -- the loop ------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until `stop`, or until it is drained and its last session has ended."""
        try:
            while not (self._stopping or self.sessions.done):
                self.step()
                self._wait()
        finally:
            self._end_all()

    def stop(self) -> None:
        """Make `serve` end all sessions and return; for any thread, or a signal handler."""
        self._stopping = True
        os.eventfd_write(self._alarm, 1)

    def step(self) -> None:
        """Process all pending connections, messages and events."""
        while (connection := self.listener.accept()) is not None:
            self._admit(Visitor(connection))
        for visitor in list(self._visitors):
            self._attend(visitor)
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            for visitor in list(self._visitors):
                self._look_for(visitor)
        self._do_posted()
        self.sessions.step()

    def _wait(self) -> None:
        poller = select.poll()
        for fd in (self.listener.fd, self._alarm):
            poller.register(fd, select.POLLIN)
        seconds = self.sessions.seconds_to_next()
        seconds = 1.0 if seconds is None else max(min(seconds, 1.0), 0.001)
        poller.poll(1_000 * seconds)
        with suppress(BlockingIOError):  # it was something else
            os.eventfd_read(self._alarm)

    def _post(self, act: Callable[[], object]) -> None:
        """Queue a call for the gateway's thread; for any thread."""
        self._posted.append(act)
        os.eventfd_write(self._alarm, 1)

    def _do_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _end_all(self) -> None:
        """End all sessions, and wait until their workers are gone."""
        self.sessions.end_all()
        while self.sessions.hosted:
            self._wait()
            self._do_posted()
        for visitor in self._visitors:
            visitor.connection.close("the pool has ended")
        self.listener.close()
        os.close(self._alarm)

    # -- clients -------------------------------------------------------------------------

    def _admit(self, visitor: Visitor) -> None:
        """Admit a client, unless its key has too many connections: each costs time."""
        if sum(other.client == visitor.client for other in self._visitors) < _MOST_CONNECTIONS:
            self._visitors.append(visitor)
            return
        self.refused["connections"] += 1
        visitor.connection.close(
            f"{visitor.client} has {_MOST_CONNECTIONS} connections already: close some"
        )

    def _attend(self, visitor: Visitor) -> None:
        """Handle the messages of a client; ``Listener.accept`` has read those of all."""
        try:
            while visitor.connection.has_mail:
                self._hear(visitor, visitor.connection.take() or [])
            self.publishing.go_on(visitor)
        except Exception as error:  # noqa: BLE001 - it ends that session, no other
            self.sessions.drop(visitor, error)
        if visitor.connection.closed is not None:
            self._look_for(visitor)

    def _look_for(self, visitor: Visitor) -> None:
        """Check a client's connection, and report its loss or return to the sessions."""
        closed = visitor.connection.closed is not None
        if closed:
            self._visitors.remove(visitor)
        lost = closed or visitor.connection.away > 0.0
        if lost and (closed or not visitor.lost):
            self.sessions.lost(visitor, for_good=closed)
        elif visitor.lost and not lost:
            self.sessions.found(visitor)
        visitor.lost = lost

    def _hear(self, visitor: Visitor, frames: list[memoryview]) -> None:
        if not frames:
            raise ProtocolError("a message of nothing")
        if not messages.is_ours(frames[0]):
            self.refused["foreign"] += not self.sessions.put(visitor, frames)
            return
        try:
            self._act(visitor, decode(frames[:1], TO_POOL), frames[1:])
        except PoolError as error:
            visitor.fail(error)

    def _act(self, visitor: Visitor, message: Part, rest: list[memoryview]) -> None:
        match message:
            case Ask():
                self.sessions.ask(visitor, message)
            case Leave():
                self.sessions.leave(visitor)
            case AreYouThere():
                visitor.say(Here())
            case Doing():
                visitor.tell(rest)
            case Status(pages):
                self._report(visitor, pages)
            case EvictOne(session):
                if self.sessions.client_of(session) != visitor.client:
                    self._check_administrates(visitor)
                self.sessions.evict(session)
                visitor.say(Ok())
            case DrainAll():
                self._check_administrates(visitor)
                self.sessions.drain()
                visitor.say(Ok())
            case _:
                self.publishing.act(visitor, message, rest)

    def _report(self, visitor: Visitor, pages: bool) -> None:
        """Send a client the report of the pool, as far as its key may see it."""
        whose = None if self.administrates(visitor.client) else visitor.client
        told = report(self.sessions.policy, self.sessions.hosted, self.publishing.values, whose)
        if whose is None:
            told["refused"] = {**self.listener.counts, **self.refused}
        frames = []
        if pages:
            doing = self.sessions.doing([row["session"] for row in told["sessions"]])
            frames = [msgspec.msgpack.encode(doing)]
            for row in told["sessions"]:
                row["unheard"] = round(self.sessions.unheard(row["session"]), 3)
        visitor.say(Report(json.dumps(told)), frames)

    def _check_administrates(self, visitor: Visitor) -> None:
        if not self.administrates(visitor.client):
            self.refused["administration"] += 1
            raise PoolError(
                f"the key of {visitor.client!r} may not administer this pool: use the server's "
                f"own, or one made with `lazygt keys new --admin`"
            )
