"""Sessions of a pool: execution of the policy's instructions."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from lazygt.errors import LazyGTError, PoolError, ProtocolError
from lazygt.host.files import make_folder
from lazygt.net.connection import Connection
from lazygt.net.mailbox import Frame
from lazygt.net.status_file import CAPACITY, ClientPage, Page, Pages, decoded
from lazygt.pool.hosted import Hosted, Terms
from lazygt.pool.policy import EndSession, Grant, Instruction, Policy, Refuse, SessionRequest
from lazygt.pool.published import PublishedValue
from lazygt.pool.requests import Admitted, Ask, Ok, RequestFailed, Rules, Waits, Watched
from lazygt.pool.scheduler import Resume
from lazygt.runtime.wire import Message, encode

# -- client connection of a pool -------------------------------------------------------------------

#: Seconds for which a client's status page is valid without a new request.
_STALE_SECONDS = 2.0


@dataclass(slots=True)
class ClientConnection:
    """A connected client with an allowed key.

    Attributes:
        session: name of the client's session, if it has requested one.
        publishing: incomplete value that the client is uploading.
        lost: True while the connection is dead.
    """

    connection: Connection
    session: str | None = None
    publishing: PublishedValue | None = None
    lost: bool = False
    #: messages of requested published values
    sending: deque[Iterator[tuple[Message, list[Frame]]]] = field(default_factory=deque)
    #: last status page of the client, its time, and the time of an unanswered request for the next
    _page: Page | None = None
    _page_time: float = 0.0
    _requested_at: float | None = None

    @property
    def client(self) -> str:
        """Name of the client's key."""
        return self.connection.peer

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Send a message, unless the connection has ended."""
        if self.connection.closed is None:
            self.connection.send(encode(message, list(frames)))

    def latest_page(self) -> Page | None:
        """Return the client's last status page, and request the next.

        None: no recent page has arrived.
        """
        now = time.monotonic()
        if self._requested_at is None:
            if now - self._page_time > _STALE_SECONDS:
                self._page = None
            self._requested_at = now
            self.send(Watched())
        page = self._page
        return page and replace(page, age=page.age + now - self._page_time)

    @property
    def unheard(self) -> float:
        """Seconds since the unanswered request for a status page; 0: none is pending."""
        return 0.0 if self._requested_at is None else time.monotonic() - self._requested_at

    def store_page(self, frames: Sequence[Frame]) -> None:
        """Store a received status page.

        Raises:
            ProtocolError: the page is malformed, or the client has no session.
        """
        if self.session is None or len(frames) != 1 or len(frames[0]) > 2 * CAPACITY:
            raise ProtocolError("a status page of nobody's")
        page = decoded(frames[0], Page)
        decoded(page.message, ClientPage)
        self._page, self._page_time, self._requested_at = page, time.monotonic(), None

    def fail(self, error: PoolError) -> None:
        """Send an error to the client."""
        self.send(RequestFailed.of(error))


# -- sessions of a pool: execution of the policy's instructions ------------------------------------

_log = logging.getLogger("lazygt")

#: Seconds between two measurements of the workers' memory.
_MEASURE_SECONDS = 0.25


class Sessions:
    """Sessions with workers or waiting for them; used by the gateway's thread alone.

    Args:
        device: ``cpu`` or ``cuda``.
        caches: folder for compiled code, with a folder for each client.
        published: returns the bytes that each client has published.
        post: queues a call for the gateway's thread; for any thread.

    Attributes:
        hosted: sessions with workers.
        active: sessions with messages to forward.
        refused: counts of refused requests; see `Gateway`.
    """

    def __init__(
        self,
        rules: Rules,
        device: str,
        caches: Path,
        published: Callable[[], dict[str, int]],
        post: Callable[[Callable[[], object]], None],
        refused: Counter[str],
    ) -> None:
        self.policy = Policy(rules)
        self.hosted: dict[str, Hosted] = {}
        self.active: set[str] = set()
        self.refused = refused
        self._device, self._caches = device, caches
        self._published, self._post = published, post
        self._callers: dict[str, ClientConnection] = {}
        self._session_count = 0
        self._next_measurement = 0.0

    # -- for the gateway's loop ----------------------------------------------------------

    @property
    def done(self) -> bool:
        """True if no more sessions are admitted, and the last one has ended."""
        return self.policy.draining and not self.policy.leases

    def seconds_to_next(self) -> float | None:
        """Return the seconds until `step` is due without an event; None: not at all."""
        now = time.monotonic()
        until_measurement = self._next_measurement - now if self.hosted else None
        waits = (self.policy.seconds_to_next(now), until_measurement)
        return min((wait for wait in waits if wait is not None), default=None)

    def step(self) -> None:
        """Handle due events, and forward all messages that may pass."""
        now = time.monotonic()
        if now >= self._next_measurement and self.hosted:
            self._next_measurement = now + _MEASURE_SECONDS
            self._measure_memory()
        self._follow(self.policy.tick(now))
        self._forward_messages()

    def end_all(self) -> None:
        """Begin to end all sessions; all have ended when `hosted` is empty."""
        self._follow(self.policy.drain())
        for session in list(self.policy.leases):
            self._follow(self.policy.evict(session, time.monotonic()))

    # -- for clients ---------------------------------------------------------------------

    def ask(self, caller: ClientConnection, ask: Ask) -> None:
        """Request a session for a client.

        Raises:
            PoolError: the connection has a session already.
        """
        if caller.session is not None:
            raise PoolError("a connection has one session")
        self._session_count += 1
        caller.session = session = f"{caller.client}-{self._session_count}"
        self._callers[session] = caller
        cores = ask.cores or ask.workers
        grace = ask.grace if ask.grace > 0.0 else 0.0  # also for NaN
        request = SessionRequest(session, caller.client, ask.workers, cores, grace, ask.detach)
        self._follow(self.policy.request(request, time.monotonic()))
        if session in self.policy.queue:
            caller.send(Waits(self.policy.queue.index(session)))

    def put(self, caller: ClientConnection, frames: list[memoryview]) -> bool:
        """Pass a client's message to the agent of its session; return False if it has none."""
        hosted = self.hosted.get(caller.session or "")
        if hosted is None:
            return False
        if not hosted.ending:
            hosted.gate.put(frames)
            self.active.add(caller.session or "")
        return True

    def leave(self, caller: ClientConnection) -> None:
        """End a client's session, unless it is detached; the client gets `Ok` after that."""
        session = caller.session
        self._detach(caller)
        lease = self.policy.leases.get(session or "")
        if session is None or lease is None or lease.ending:
            caller.send(Ok())
        elif lease.request.detach and session in self.hosted:
            self._follow(self.policy.client_gone(session, False, time.monotonic()))
            caller.send(Ok())
        elif session in self.hosted:
            self._end(session, kill=False, ended=partial(caller.send, Ok()))
        else:
            self._follow(self.policy.release(session, time.monotonic()))
            caller.send(Ok())

    def lost(self, caller: ClientConnection, for_good: bool) -> None:
        """Handle a client's dead connection; ``for_good``: the client will not come back."""
        if caller.session is not None:
            self._follow(self.policy.client_gone(caller.session, for_good, time.monotonic()))
        if for_good:
            self._detach(caller)

    def found(self, caller: ClientConnection) -> None:
        """Handle a client's reconnection."""
        if caller.session is not None:
            self.policy.client_back(caller.session)

    def drop(self, caller: ClientConnection, error: Exception) -> None:
        """Disconnect a client that breaks the protocol."""
        expected = isinstance(error, LazyGTError)
        _log.warning("%s broke the protocol: %s", caller.client, error, exc_info=not expected)
        self.refused["protocol"] += 1
        caller.fail(PoolError(str(error)))
        caller.connection.close()
        if caller.session is not None:
            self._follow(self.policy.evict(caller.session, time.monotonic()))

    def client_of(self, session: str) -> str | None:
        """Return the client of a session; None: there is no session of that name."""
        lease = self.policy.leases.get(session)
        return None if lease is None else lease.request.client

    def evict(self, session: str) -> None:
        """End a session.

        Raises:
            PoolError: there is no session of that name.
        """
        if session not in self.policy.leases:
            names = ", ".join(self.policy.leases) or "none"
            raise PoolError(f"there is no session {session!r} in this pool: {names}")
        self._follow(self.policy.evict(session, time.monotonic()))

    def unheard(self, session: str) -> float:
        """Return the seconds since the unanswered request for a client's status page."""
        caller = self._callers.get(session)
        return 0.0 if caller is None else caller.unheard

    def status_pages(self, sessions: Iterable[str]) -> dict[str, Pages]:
        """Return the status pages of sessions that have workers."""
        pages = {}
        for session in sessions:
            hosted, caller = self.hosted.get(session), self._callers.get(session)
            if hosted is not None and not hosted.ending:
                client = None if caller is None else caller.latest_page()
                pages[session] = Pages(client, hosted.status_pages())
        return pages

    def drain(self) -> None:
        """Stop admitting sessions."""
        self._follow(self.policy.drain())

    # -- instructions of the policy ------------------------------------------------------

    def _follow(self, instructions: Iterable[Instruction]) -> None:
        """Execute instructions of the policy."""
        for instruction in instructions:
            match instruction:
                case Grant(session):
                    self._start(session)
                case Refuse(session, error):
                    self._notify_end(session, error)
                case EndSession(session, error):
                    self._notify_end(session, error)
                    self._end(session, kill=True)
                case Resume(session):
                    self.active.add(session)

    def _notify_end(self, session: str, error: PoolError) -> None:
        """Send a client the error that ends its session."""
        caller = self._callers.get(session)
        if caller is not None:
            self._detach(caller)
            caller.fail(error)

    def _detach(self, caller: ClientConnection) -> None:
        """Separate a client from its session."""
        self._callers.pop(caller.session or "", None)
        caller.session = None

    def _start(self, session: str) -> None:
        """Host a session within its lease, and notify its client."""
        caller = self._callers[session]
        lease = self.policy.leases[session]
        request = lease.request
        cache = self._caches / request.client
        make_folder(cache)
        threads = min(max(request.cores // request.workers, 1), len(os.sched_getaffinity(0)))
        hidden = self.policy.rules.hidden
        terms = Terms(request.workers, threads, self._device, str(cache), lease.slots, hidden)
        self.hosted[session] = Hosted(
            caller.connection,
            terms,
            may_pass=lambda running: self.policy.turns.may_pass(session, running, time.monotonic()),
            changed=lambda: self._post(partial(self.active.add, session)),
        )
        caller.send(Admitted(session, self._device))

    def _end(self, session: str, kill: bool, ended: Callable[[], object] = lambda: None) -> None:
        """End the workers of a session.

        Args:
            kill: kill the workers at once.
            ended: called once the workers are gone.
        """
        hosted = self.hosted[session]
        if hosted.ending:
            return

        def gone() -> None:
            del self.hosted[session]
            self._follow(self.policy.release(session, time.monotonic()))
            ended()

        hosted.end(lambda: self._post(gone), kill)

    # -- messages of sessions ------------------------------------------------------------

    def _forward_messages(self) -> None:
        """Forward all messages that may pass, and report the load of each session."""
        while self.active:
            session = self.active.pop()
            hosted = self.hosted.get(session)
            if hosted is None or hosted.ending:
                continue
            try:
                hosted.agent.pump()
            except Exception as error:  # noqa: BLE001 - ends this session, no other
                caller = self._callers.get(session)
                if caller is None:
                    self._follow(self.policy.evict(session, time.monotonic()))
                else:
                    self.drop(caller, error)
                continue
            seconds, running, queued = hosted.gate.load()
            if seconds:
                self._follow(self.policy.ran(session, seconds, time.monotonic()))
            self._follow(self.policy.load(session, running, queued, time.monotonic()))

    def _measure_memory(self) -> None:
        """Measure the memory of all hosted sessions, and report it to the policy."""
        living = {name: hosted for name, hosted in self.hosted.items() if not hosted.ending}
        sizes = {name: hosted.memory() for name, hosted in living.items()}
        self._follow(self.policy.memory_used(sizes, self._published(), time.monotonic()))
        self.active |= self.hosted.keys()
