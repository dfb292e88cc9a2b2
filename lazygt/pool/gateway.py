"""Gateway of a pool: connections and requests of clients.

One thread handles all requests and never waits for a client. Other threads wait for workers and
send their answers, and end sessions.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from lazygt.errors import OverQuota, PoolError, ProtocolError
from lazygt.net.connection import Listener
from lazygt.net.keys import Keyring
from lazygt.net.mailbox import Frame
from lazygt.pool import requests
from lazygt.pool.hosted import Hosted
from lazygt.pool.policy import Lease, Policy
from lazygt.pool.published import PublishedValue, PublishedValues
from lazygt.pool.requests import (
    LONGEST,
    TO_POOL,
    AreYouThere,
    Ask,
    Doing,
    DrainAll,
    EvictOne,
    Fetch,
    Forget,
    Here,
    Leave,
    Listed,
    Names,
    Ok,
    PoolReport,
    Publish,
    Rules,
    Status,
    Value,
    ValuePiece,
)
from lazygt.pool.sessions import ClientConnection, Sessions
from lazygt.runtime.wire import Message, decode

# -- requests for published values -----------------------------------------------------------------

#: Limits of one client: published values, and characters of a name.
_MAX_NAMES, _MAX_NAME_LENGTH = 1000, 256
#: Maximum requested values that one connection has not received yet.
_MAX_FETCHES = 16
#: Maximum sent bytes that a client has not read yet.
_MAX_UNREAD_BYTES = 64 << 20


class Publishing:
    """Handler of clients' requests to publish and fetch values.

    Args:
        held: returns the bytes of the sessions of a client.
        callers: returns all connected clients.

    Attributes:
        values: the published values.
    """

    def __init__(
        self,
        rules: Rules,
        held: Callable[[str], int],
        callers: Callable[[], list[ClientConnection]],
    ) -> None:
        self.values = PublishedValues()
        self._rules, self._held, self._callers = rules, held, callers

    def handle(self, caller: ClientConnection, message: Message, rest: list[memoryview]) -> None:
        """Handle a request.

        Raises:
            PoolError: the request is refused.
            ProtocolError: the request is malformed.
        """
        match message:
            case Publish():
                self._publish(caller, message)
            case ValuePiece():
                self._append_piece(caller, rest)
            case Fetch(name):
                self._send(caller, name)
            case Names():
                seen = self.values.seen_by(caller.client)
                caller.send(Listed(tuple((v.name, v.nbytes, v.client, v.shared) for v in seen)))
            case Forget(name):
                self.values.forget(caller.client, name)
                caller.send(Ok())

    def _publish(self, caller: ClientConnection, request: Publish) -> None:
        """Begin to receive a value, if the client's quota admits its bytes."""
        value = PublishedValue(request.name, caller.client, request.rows, request.shared)
        caller.publishing = None
        if len(request.name) > _MAX_NAME_LENGTH:
            raise PoolError(f"a name of {len(request.name)} characters: {_MAX_NAME_LENGTH} at most")
        if self.values.count(caller.client, without=request.name) >= _MAX_NAMES:
            raise PoolError(f"{_MAX_NAMES} values are published with this key: forget some")
        limit = self._rules.of(caller.client).memory
        if limit is not None:
            uploads = [v.publishing for v in self._callers() if v.client == caller.client]
            used = self._held(caller.client)
            used += self.values.nbytes(caller.client, without=request.name)
            used += sum(upload.nbytes for upload in uploads if upload is not None)
            if used + value.nbytes > limit:
                raise OverQuota("memory", value.nbytes, used, limit)
        caller.publishing = value
        caller.send(Ok())
        self._finish(caller)

    def _append_piece(self, caller: ClientConnection, rest: list[memoryview]) -> None:
        if caller.publishing is None or len(rest) != 1:
            raise ProtocolError("a piece of nothing")
        caller.publishing.add(rest[0])
        self._finish(caller)

    def _finish(self, caller: ClientConnection) -> None:
        """Publish the value once all its bytes are there."""
        value = caller.publishing
        if value is not None and len(value.data) == value.nbytes:
            self.values.store(value)
            caller.publishing = None
            caller.send(Ok())

    def _send(self, caller: ClientConnection, name: str) -> None:
        """Queue a published value for sending."""
        if len(caller.sending) >= _MAX_FETCHES:
            raise PoolError(f"{_MAX_FETCHES} values are on their way already: read them first")
        caller.sending.append(_messages(self.values.of(caller.client, name)))

    def send_pending(self, caller: ClientConnection) -> None:
        """Send requested values as fast as the client reads them."""
        while caller.sending and caller.connection.pending < _MAX_UNREAD_BYTES:
            message = next(caller.sending[0], None)
            if message is None:
                caller.sending.popleft()
            else:
                caller.send(*message)


def _messages(value: PublishedValue) -> Iterator[tuple[Message, list[Frame]]]:
    """Yield the messages of a value: its metas, then its bytes in pieces."""
    yield Value(value.rows), []
    for piece in value.pieces():
        yield ValuePiece(), [piece]


# -- status report of a pool -----------------------------------------------------------------------


def report(
    policy: Policy,
    hosted: Mapping[str, Hosted],
    published: PublishedValues,
    whose: str | None = None,
) -> dict[str, Any]:
    """Build the status report of a pool as plain values, for ``lazygt pool status``.

    Sessions are in the order of their requests.

    Args:
        whose: the requesting client; other clients' sessions are only counted. None: all clients
            are reported in full.
    """
    now = time.monotonic()
    leases = policy.leases.items()
    visible = {n: lease for n, lease in leases if whose in (None, lease.request.client)}
    others = [lease for name, lease in leases if name not in visible]
    values = published.all() if whose is None else published.seen_by(whose)
    return {
        "workers": policy.rules.workers,
        "free": policy.free,
        "at_once": policy.rules.at_once,
        "queue_limit": policy.rules.queue,
        "draining": policy.draining,
        "sessions": [
            _session(policy, name, lease, hosted.get(name), now) for name, lease in visible.items()
        ],
        "others": {
            "sessions": sum(bool(lease.slots) for lease in others),
            "workers": sum(len(lease.slots) for lease in others),
            "waiting": sum(not lease.slots for lease in others),
        },
        "published": [
            {"name": v.name, "client": v.client, "bytes": v.nbytes, "shared": v.shared}
            for v in values
        ],
    }


def _session(
    policy: Policy, name: str, lease: Lease, hosted: Hosted | None, now: float
) -> dict[str, Any]:
    """Return one session's entry in the report."""
    return {
        "session": name,
        "client": lease.request.client,
        "state": _state(policy, name, lease),
        "workers": lease.request.workers,
        "cores": lease.request.cores,
        "places": list(lease.slots),
        "pids": [] if hosted is None else list(hosted.pids),
        "run_seconds": round(lease.run_seconds, 3),
        "memory": lease.memory,
        "seconds": round(now - lease.granted, 1) if lease.slots else 0.0,
        "expires_in": None if lease.expires is None else round(max(lease.expires - now, 0.0), 1),
        "quota": asdict(policy.rules.of(lease.request.client)),
        "before": policy.queue.index(name) if not lease.slots else None,
    }


def _state(policy: Policy, name: str, lease: Lease) -> str:
    """Return the state of a session.

    The states: ``waits`` for workers, ``runs``, ``is held`` until its next turn, ``alone`` (without
    its client), ``ending``.
    """
    if lease.ending:
        return "ending"
    if not lease.slots:
        return "waits"
    if lease.expires is not None:
        return "alone"
    return "runs" if policy.turns.passes(name) else "is held"


# -- connections and requests of clients -----------------------------------------------------------

#: Maximum connections of one key.
_MAX_CONNECTIONS = 64
#: Seconds between two checks of the clients' connections.
_CHECK_SECONDS = 0.25


@dataclass(slots=True)
class Gateway:
    """Gateway of a pool: its connections, sessions and published values.

    Args:
        administrates: returns whether the key of this name may administer.
        device: ``cpu`` or ``cuda``.
        caches: folder for compiled code, with a folder for each client.
    """

    listener: Listener
    administrates: Callable[[str], bool]
    rules: Rules
    device: str
    caches: Path
    #: counts of refused requests: ``protocol`` (malformed, which ends the connection),
    #: ``administration``, ``foreign`` (for a session of another client, or none), ``connections``
    #: (too many of one key)
    refused: Counter[str] = field(default_factory=Counter)
    sessions: Sessions = field(init=False)
    publishing: Publishing = field(init=False)
    _callers: list[ClientConnection] = field(default_factory=list)
    _calls: deque[Callable[[], object]] = field(default_factory=deque)
    _wake_fd: int = field(init=False)
    _stopping: bool = False
    _next_check: float = 0.0

    def __post_init__(self) -> None:
        self.publishing = Publishing(
            self.rules,
            held=lambda client: sum(lease.memory for lease in self.sessions.policy.of(client)),
            callers=lambda: self._callers,
        )
        self.sessions = Sessions(
            self.rules,
            self.device,
            self.caches,
            self.publishing.values.by_client,
            self._post,
            self.refused,
        )
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

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
        os.eventfd_write(self._wake_fd, 1)

    def step(self) -> None:
        """Process all pending connections, messages and events."""
        while (connection := self.listener.accept()) is not None:
            self._admit(ClientConnection(connection))
        for caller in list(self._callers):
            self._receive_all(caller)
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            for caller in list(self._callers):
                self._check_connection(caller)
        self._run_calls()
        self.sessions.step()

    def _wait(self) -> None:
        """Wait for messages, a call of another thread, or the next due event; 1 s at most."""
        poller = select.poll()
        for fd in (self.listener.fd, self._wake_fd):
            poller.register(fd, select.POLLIN)
        seconds = self.sessions.seconds_to_next()
        seconds = 1.0 if seconds is None else max(min(seconds, 1.0), 0.001)
        poller.poll(1_000 * seconds)
        with suppress(BlockingIOError):  # the poll ended for another reason
            os.eventfd_read(self._wake_fd)

    def _post(self, call: Callable[[], object]) -> None:
        """Queue a call for the gateway's thread; for any thread."""
        self._calls.append(call)
        os.eventfd_write(self._wake_fd, 1)

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _end_all(self) -> None:
        """End all sessions, and wait until their workers are gone."""
        self.sessions.end_all()
        while self.sessions.hosted:
            self._wait()
            self._run_calls()
        for caller in self._callers:
            caller.connection.close("the pool has ended")
        self.listener.close()
        os.close(self._wake_fd)

    # -- clients -------------------------------------------------------------------------

    def _admit(self, caller: ClientConnection) -> None:
        """Admit a client, unless its key has too many connections already."""
        if sum(other.client == caller.client for other in self._callers) < _MAX_CONNECTIONS:
            self._callers.append(caller)
            return
        self.refused["connections"] += 1
        caller.connection.close(
            f"{caller.client} has {_MAX_CONNECTIONS} connections already: close some"
        )

    def _receive_all(self, caller: ClientConnection) -> None:
        """Handle a client's messages, which ``Listener.accept`` has read from its socket."""
        try:
            while caller.connection.has_mail:
                self._receive(caller, caller.connection.take() or [])
            self.publishing.send_pending(caller)
        except Exception as error:  # noqa: BLE001 - ends this session, no other
            self.sessions.drop(caller, error)
        if caller.connection.closed is not None:
            self._check_connection(caller)

    def _check_connection(self, caller: ClientConnection) -> None:
        """Check a client's connection, and report its loss or return to the sessions."""
        closed = caller.connection.closed is not None
        if closed:
            self._callers.remove(caller)
        lost = closed or caller.connection.away > 0.0
        if lost and (closed or not caller.lost):
            self.sessions.lost(caller, for_good=closed)
        elif caller.lost and not lost:
            self.sessions.found(caller)
        caller.lost = lost

    def _receive(self, caller: ClientConnection, frames: list[memoryview]) -> None:
        """Handle one message: the pool's own, or forward it to the session's agent."""
        if not frames:
            raise ProtocolError("a message of nothing")
        if not requests.is_ours(frames[0]):
            self.refused["foreign"] += not self.sessions.put(caller, frames)
            return
        try:
            self._handle(caller, decode(frames[:1], TO_POOL), frames[1:])
        except PoolError as error:
            caller.fail(error)

    def _handle(self, caller: ClientConnection, message: Message, rest: list[memoryview]) -> None:
        """Handle a request to the pool."""
        match message:
            case Ask():
                self.sessions.ask(caller, message)
            case Leave():
                self.sessions.leave(caller)
            case AreYouThere():
                caller.send(Here())
            case Doing():
                caller.store_page(rest)
            case Status(pages):
                self._report(caller, pages)
            case EvictOne(session):
                if self.sessions.client_of(session) != caller.client:
                    self._check_administrates(caller)
                self.sessions.evict(session)
                caller.send(Ok())
            case DrainAll():
                self._check_administrates(caller)
                self.sessions.drain()
                caller.send(Ok())
            case _:
                self.publishing.handle(caller, message, rest)

    def _report(self, caller: ClientConnection, pages: bool) -> None:
        """Send a client the report of the pool, as far as its key may see it."""
        whose = None if self.administrates(caller.client) else caller.client
        status = report(self.sessions.policy, self.sessions.hosted, self.publishing.values, whose)
        if whose is None:
            status["refused"] = {**self.listener.counts, **self.refused}
        frames = []
        if pages:
            pages_by_session = self.sessions.status_pages(
                [entry["session"] for entry in status["sessions"]]
            )
            frames = [msgspec.msgpack.encode(pages_by_session)]
            for entry in status["sessions"]:
                entry["unheard"] = round(self.sessions.unheard(entry["session"]), 3)
        caller.send(PoolReport(json.dumps(status)), frames)

    def _check_administrates(self, caller: ClientConnection) -> None:
        """Raise PoolError unless the client's key may administer."""
        if not self.administrates(caller.client):
            self.refused["administration"] += 1
            raise PoolError(
                f"the key of {caller.client!r} may not administer this pool: use the server's "
                f"own, or one made with `lazygt keys new --admin`"
            )


def open_gateway(
    bind: tuple[str, int], keyring: Keyring, rules: Rules, device: str, caches: Path
) -> Gateway:
    """Open a listening gateway of a pool; `Gateway.serve` runs it.

    Args:
        bind: host and port.

    Raises:
        OSError: the address can't be listened on.
    """
    listener = Listener(
        zmq.Context.instance(), *bind, keyring.server, keyring.allows, LONGEST,
        grace=max(rules.grace, 1.0),
    )  # fmt: skip
    return Gateway(listener, keyring.administrates, rules, device, caches)
