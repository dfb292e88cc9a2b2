"""The gateway of a pool: takes connections, hosts sessions, and does what the policy says.

One thread does all of it but waiting for workers: their links have threads of their own, and so
has the end of a session. Nothing here waits for a client.
"""

from __future__ import annotations

import json
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lazygt.errors import LazyGTError, OverQuota, PoolError, ProtocolError
from lazygt.pool import messages
from lazygt.pool.hosted import Hosted, Terms
from lazygt.pool.messages import (
    TO_POOL,
    Admitted,
    Ask,
    DrainAll,
    EvictOne,
    Failed,
    Fetch,
    Forget,
    Leave,
    Listed,
    Names,
    Ok,
    Piece,
    Publish,
    Report,
    Status,
    Value,
    Waits,
)
from lazygt.pool.policy import (
    Asked,
    ClientBack,
    ClientGone,
    Drain,
    End,
    Event,
    Evict,
    Grant,
    Instruction,
    Load,
    Policy,
    Ran,
    Refuse,
    Released,
    Rules,
    Tick,
    Used,
)
from lazygt.pool.published import PublishedValue, PublishedValues
from lazygt.pool.report import report
from lazygt.pool.turns import Resume
from lazygt.runtime.cluster.connection import Connection, Listener
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.wire import Part, decode, encode

_log = logging.getLogger("lazygt")

#: Seconds between two looks at the memory of workers.
_WEIGH_SECONDS = 0.25


@dataclass(slots=True)
class Visitor:
    """Who is at the other end of a connection.

    Attributes:
        session: that it has asked for.
        publishing: a value of which bytes are still to come.
    """

    connection: Connection
    session: str | None = None
    publishing: PublishedValue | None = None
    lost: bool = False

    @property
    def client(self) -> str:
        """The name of its key."""
        return self.connection.peer

    def say(self, message: Part, frames: Sequence[Frame] = ()) -> None:
        """Send a message, if somebody is there."""
        if self.connection.closed is None:
            self.connection.send(encode(message, list(frames)))


@dataclass(slots=True)
class Gateway:
    """A pool.

    Args:
        administrates: whether who has the key of this name may administer.
        device: ``cpu`` or ``cuda``.
        caches: a folder for compiled code, one inside for each client.
    """

    listener: Listener
    administrates: Callable[[str], bool]
    rules: Rules
    device: str
    caches: Path
    policy: Policy = field(init=False)
    hosted: dict[str, Hosted] = field(default_factory=dict)
    published: PublishedValues = field(default_factory=PublishedValues)
    _visitors: list[Visitor] = field(default_factory=list)
    _stirred: set[str] = field(default_factory=set)
    _posted: deque[Callable[[], object]] = field(default_factory=deque)
    _alarm: int = field(init=False)
    _asked: int = 0
    _weigh_at: float = 0.0
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.policy = Policy(self.rules)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # -- the loop ------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until `stop`, or until it is drained and its last session has ended."""
        try:
            while not (self._stopping or (self.policy.draining and not self.policy.leases)):
                self.step()
                self._wait()
        finally:
            self._end_all()

    def stop(self) -> None:
        """Have `serve` end all sessions and return. From any thread, or a signal handler."""
        self._stopping = True
        os.eventfd_write(self._alarm, 1)

    def step(self) -> None:
        """Do all there is to do now."""
        while (connection := self.listener.accept()) is not None:
            self._visitors.append(Visitor(connection))
        for visitor in list(self._visitors):
            self._attend(visitor)
        while self._posted:
            self._posted.popleft()()
        now = time.monotonic()
        if now >= self._weigh_at and self.hosted:
            self._weigh_at = now + _WEIGH_SECONDS
            self._weigh()
        self._handle(Tick())
        self._settle()

    def _wait(self) -> None:
        poller = select.poll()
        agents = {
            hosted.agent.descriptors[1]: name
            for name, hosted in self.hosted.items()
            if not hosted.ending
        }
        for fd in (self.listener.fd, self._alarm, *agents):
            poller.register(fd, select.POLLIN)
        now = time.monotonic()
        waits = [self.policy.seconds_to_next(now), self._weigh_at - now if self.hosted else None]
        seconds = min((wait for wait in waits if wait is not None), default=1.0)
        ready = poller.poll(1_000 * max(min(seconds, 1.0), 0.001))
        self._stirred |= {agents[fd] for fd, _ in ready if fd in agents}
        with suppress(BlockingIOError):  # it was something else
            os.eventfd_read(self._alarm)

    def _post(self, act: Callable[[], object]) -> None:
        """Have the gateway's thread do something. From any thread."""
        self._posted.append(act)
        os.eventfd_write(self._alarm, 1)

    def _end_all(self) -> None:
        """End all sessions, and wait until their workers are gone."""
        self._handle(Drain())
        for session in list(self.policy.leases):
            self._handle(Evict(session))
        while self.hosted:
            self._wait()
            while self._posted:
                self._posted.popleft()()
        for visitor in self._visitors:
            visitor.connection.close("the pool has ended")
        self.listener.close()
        os.close(self._alarm)

    # -- clients -------------------------------------------------------------------------

    def _attend(self, visitor: Visitor) -> None:
        """Take what somebody has said, and see whether it is still there."""
        try:
            while (frames := visitor.connection.take()) is not None:
                self._hear(visitor, frames)
        except LazyGTError as error:
            _log.warning("%s broke the protocol: %s", visitor.client, error)
            self._drop(visitor, PoolError(str(error)))
        closed = visitor.connection.closed is not None
        if closed:
            self._visitors.remove(visitor)
        lost = closed or visitor.connection.away > 0.0
        if visitor.session is not None and (closed or lost != visitor.lost):
            session = visitor.session
            self._handle(ClientGone(session, closed) if lost else ClientBack(session))
        visitor.lost = lost

    def _drop(self, visitor: Visitor, error: PoolError) -> None:
        """Have nothing to do any more with who breaks the protocol."""
        visitor.say(Failed.of(error))
        visitor.connection.close()
        if visitor.session is not None:
            self._handle(Evict(visitor.session))

    def _hear(self, visitor: Visitor, frames: list[memoryview]) -> None:
        if not frames:
            raise ProtocolError("a message of nothing")
        if messages.is_ours(frames[0]):
            try:
                self._act(visitor, decode(frames[:1], TO_POOL), frames[1:])
            except PoolError as error:
                visitor.say(Failed.of(error))
            return
        hosted = None if visitor.session is None else self.hosted.get(visitor.session)
        if hosted is not None and not hosted.ending:
            hosted.gate.put(frames)
            self._stirred.add(visitor.session or "")

    def _act(self, visitor: Visitor, message: Part, rest: list[memoryview]) -> None:
        match message:
            case Ask():
                self._ask(visitor, message)
            case Leave():
                self._leave(visitor)
            case Publish():
                self._publish(visitor, message)
            case Piece():
                self._take_piece(visitor, rest)
            case Fetch(name):
                self._send_value(visitor, name)
            case Names():
                seen = self.published.seen_by(visitor.client)
                rows = tuple((v.name, v.nbytes, v.client, v.shared) for v in seen)
                visitor.say(Listed(rows))
            case Forget(name):
                self.published.forget(visitor.client, name)
                visitor.say(Ok())
            case _:
                self._administer(visitor, message)

    def _administer(self, visitor: Visitor, message: Part) -> None:
        if not self.administrates(visitor.client):
            raise PoolError(
                f"the key of {visitor.client!r} may not administer this pool: use the server's "
                f"own, or one made with `lazygt keys new --admin`"
            )
        match message:
            case Status():
                told = report(self.policy, self.hosted, self.published)
                visitor.say(Report(json.dumps(told)))
            case DrainAll():
                self._handle(Drain())
                visitor.say(Ok())
            case EvictOne(session):
                if session not in self.policy.leases:
                    there = ", ".join(self.policy.leases) or "none"
                    raise PoolError(f"there is no session {session!r} in this pool: {there}")
                self._handle(Evict(session))
                visitor.say(Ok())

    def _ask(self, visitor: Visitor, ask: Ask) -> None:
        if visitor.session is not None:
            raise PoolError("a connection has one session")
        self._asked += 1
        visitor.session = session = f"{visitor.client}-{self._asked}"
        cores = ask.cores or ask.workers
        self._handle(
            Asked(session, visitor.client, ask.workers, cores, max(ask.grace, 0.0), ask.detach)
        )
        if session in self.policy.queue:
            visitor.say(Waits(self.policy.queue.index(session)))

    def _leave(self, visitor: Visitor) -> None:
        session, visitor.session = visitor.session, None
        lease = self.policy.leases.get(session or "")
        if session is None or lease is None or lease.ending:
            visitor.say(Ok())
        elif lease.asked.detach and session in self.hosted:
            self._handle(ClientGone(session))
            visitor.say(Ok())
        elif session in self.hosted:
            self._end(session, kill=False, ended=partial(visitor.say, Ok()))
        else:
            self._handle(Released(session))
            visitor.say(Ok())

    # -- published values ----------------------------------------------------------------

    def _publish(self, visitor: Visitor, told: Publish) -> None:
        value = PublishedValue(told.name, visitor.client, told.rows, told.shared)
        visitor.publishing = None
        limit = self.rules.of(visitor.client).memory
        if limit is not None:
            held = sum(lease.memory for lease in self.policy.of(visitor.client))
            coming = [v.publishing for v in self._visitors if v.client == visitor.client]
            used = held + self.published.nbytes(visitor.client, without=told.name)
            used += sum(other.nbytes for other in coming if other is not None)
            if used + value.nbytes > limit:
                raise OverQuota("memory", value.nbytes, used, limit)
        visitor.publishing = value
        visitor.say(Ok())
        self._finish_publishing(visitor)

    def _take_piece(self, visitor: Visitor, rest: list[memoryview]) -> None:
        if visitor.publishing is None or len(rest) != 1:
            raise ProtocolError("a piece of nothing")
        visitor.publishing.add(rest[0])
        self._finish_publishing(visitor)

    def _finish_publishing(self, visitor: Visitor) -> None:
        value = visitor.publishing
        if value is not None and len(value.data) == value.nbytes:
            self.published.keep(value)
            visitor.publishing = None
            visitor.say(Ok())

    def _send_value(self, visitor: Visitor, name: str) -> None:
        value = self.published.of(visitor.client, name)
        visitor.say(Value(value.rows))
        for piece in value.pieces():
            visitor.say(Piece(), [piece])

    # -- sessions ------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for step in self.policy.handle(event, time.monotonic()):
            self._follow(step)

    def _follow(self, step: Instruction) -> None:
        visitor = self._visitor(step.session)
        match step:
            case Grant(session):
                self._host(session, visitor)
            case Refuse(_, error):
                if visitor is not None:
                    visitor.session = None
                    visitor.say(Failed.of(error))
            case End(session, error):
                if visitor is not None:
                    visitor.session = None
                    visitor.say(Failed.of(error))
                self._end(session, kill=True)
            case Resume(session):
                self._stirred.add(session)

    def _visitor(self, session: str) -> Visitor | None:
        return next((v for v in self._visitors if v.session == session), None)

    def _host(self, session: str, visitor: Visitor | None) -> None:
        if visitor is None:  # it has gone in this moment
            self._post(lambda: self._handle(Released(session)))
            return
        asked = self.policy.leases[session].asked
        cache = self.caches / asked.client
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        threads = max(asked.cores // asked.workers, 1)
        terms = Terms(asked.workers, threads, self.device, str(cache))
        self.hosted[session] = Hosted(
            visitor.connection,
            terms,
            may_pass=lambda running: self.policy.turns.may_pass(session, running, time.monotonic()),
            changed=lambda: self._stirred.add(session),
        )
        visitor.say(Admitted(session))

    def _end(self, session: str, kill: bool, ended: Callable[[], object] = lambda: None) -> None:
        """End the workers of a session.

        Args:
            kill: at once, whatever they do.
            ended: called once they are gone.
        """
        hosted = self.hosted[session]
        if hosted.ending:
            return

        def gone() -> None:
            del self.hosted[session]
            self._handle(Released(session))
            ended()

        hosted.end(lambda: self._post(gone), kill)

    def _settle(self) -> None:
        """Pass on what may be passed on, until nothing more follows from that."""
        while self._stirred:
            session = self._stirred.pop()
            hosted = self.hosted.get(session)
            if hosted is None or hosted.ending:
                continue
            try:
                hosted.agent.pump()
            except LazyGTError as error:
                visitor = self._visitor(session)
                if visitor is not None:
                    self._drop(visitor, PoolError(str(error)))
                continue
            seconds, running, held = hosted.gate.load()
            if seconds:
                self._handle(Ran(session, seconds))
            self._handle(Load(session, running, held))

    def _weigh(self) -> None:
        sessions = {name: hosted.memory() for name, hosted in self.hosted.items()}
        self._handle(Used(sessions, self.published.by_client()))
        self._stirred |= self.hosted.keys()
