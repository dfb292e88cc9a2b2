"""Admission policy of a pool as a pure state machine: gang scheduling with a fair queue.

Each event is a call, with the time at which it was seen (seconds, any monotonic origin), and
returns instructions in order. Clock, sockets and threads are in `gateway`. `scheduler` schedules
the runs of admitted sessions.

A session gets all requested slots for worker processes at once, or none, and owns them until its
processes are gone (`Policy.release`), so two processes never share a slot.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from lazygt.errors import (
    GangTooLarge,
    OverQuota,
    PoolDraining,
    PoolError,
    PoolFull,
    SessionEnded,
)
from lazygt.pool.requests import Rules
from lazygt.pool.scheduler import Pause, Resume, Turns

# -- instructions ------------------------------------------------------------------------------


class Grant(Struct, frozen=True):
    """Instruction to start a session's workers in these worker slots."""

    session: str
    slots: tuple[int, ...]


class Refuse(Struct, frozen=True):
    """Instruction to refuse a client's session."""

    session: str
    error: PoolError


class EndSession(Struct, frozen=True):
    """Instruction to end a session's processes, and notify its client.

    `Policy.release` follows when the processes are gone.
    """

    session: str
    error: PoolError


Instruction = Grant | Refuse | EndSession | Pause | Resume


# -- state -------------------------------------------------------------------------------------


class SessionRequest(Struct, frozen=True):
    """A client's request for a session."""

    session: str
    client: str
    workers: int
    cores: int  # torch threads of all its workers
    grace: float = 0.0  # seconds for which its connection may be dead
    detach: bool = False  # True if the session outlives its client, until it is ended or expires


@dataclass(slots=True)
class Lease:
    """Session with worker slots, or waiting for them."""

    request: SessionRequest
    slots: tuple[int, ...] = ()  # the session's worker slots; empty while it waits
    granted: float = 0.0  # time of the grant
    #: time of the session's end without its client; None: the client is connected
    expires: float | None = None
    ending: bool = False
    run_seconds: float = 0.0  # run time in seconds, times the number of workers
    memory: int = 0  # bytes of the workers at the last measurement


class Policy:
    """State of a pool: leases, free slots, and queue.

    Attributes:
        leases: lease of each session, in the order of the requests.
        draining: True if no more sessions are admitted.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.leases: dict[str, Lease] = {}
        self.draining = False
        self.turns = Turns(rules.at_once)
        self._free = list(range(rules.workers))
        #: client -> its waiting sessions; in round-robin order
        self._queue: OrderedDict[str, deque[str]] = OrderedDict()

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def queue(self) -> list[str]:
        """The waiting sessions, in the order of admission."""
        by_client = [list(waiting) for waiting in self._queue.values()]
        longest = max(map(len, by_client), default=0)
        return [
            sessions[round_]
            for round_ in range(longest)
            for sessions in by_client
            if round_ < len(sessions)
        ]

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until the next `tick` is due; None: not before another event."""
        expiries = [
            max(lease.expires - now, 0.0)
            for lease in self.leases.values()
            if lease.expires is not None and not lease.ending
        ]
        turn = self.turns.seconds_to_next(now)
        return min([*expiries, *([] if turn is None else [turn])], default=None)

    # -- admission -----------------------------------------------------------------------

    def request(self, request: SessionRequest, now: float) -> list[Instruction]:
        """Queue a session and admit as many as fit; refuse one if the queue is too long."""
        error = self._objection(request)
        if error is not None:
            return [Refuse(request.session, error)]
        self.leases[request.session] = Lease(request)
        self._queue.setdefault(request.client, deque()).append(request.session)
        steps = self._admit(now)
        waiting = len(self.queue)
        if waiting > self.rules.queue:
            victim = self._victim(request.client)
            self._drop_waiting(victim)
            steps.append(Refuse(victim, PoolFull(waiting - 1, self.rules.workers)))
        return steps

    def _victim(self, newcomer: str) -> str:
        """Return the session to drop from a full queue: the last of the client with most.

        No client can therefore block the others. On a tie the newcomer's own session is dropped.
        """
        client = max(self._queue, key=lambda name: (len(self._queue[name]), name == newcomer))
        return self._queue[client][-1]

    def _objection(self, request: SessionRequest) -> PoolError | None:
        """Return the reason to refuse a session, or None."""
        if request.session in self.leases:
            return PoolError(f"there is a session {request.session!r} already")
        if self.draining:
            return PoolDraining()
        if not 1 <= request.workers <= self.rules.workers:
            return GangTooLarge(request.workers, self.rules.workers)
        quota, own_leases = self.rules.of(request.client), self.of(request.client)
        counts = (
            ("sessions", quota.sessions, 1, len(own_leases)),
            ("workers", quota.workers, request.workers, sum(x.request.workers for x in own_leases)),
            ("cores", quota.cores, request.cores, sum(x.request.cores for x in own_leases)),
        )
        for resource, limit, requested, used in counts:
            if limit is not None and requested + used > limit:
                return OverQuota(resource, requested, used, limit)
        return None

    def of(self, client: str) -> list[Lease]:
        """Return a client's sessions."""
        return [lease for lease in self.leases.values() if lease.request.client == client]

    def _admit(self, now: float) -> list[Instruction]:
        """Grant slots to the waiting clients round-robin; no session overtakes another."""
        steps: list[Instruction] = []
        while self._queue:
            client, waiting = next(iter(self._queue.items()))
            lease = self.leases[waiting[0]]
            request = lease.request
            if request.workers > len(self._free):
                break
            lease.slots, lease.granted = tuple(self._free[: request.workers]), now
            del self._free[: request.workers]
            self._queue.move_to_end(client)
            self._dequeue(request)
            steps.append(Grant(request.session, lease.slots))
            steps += self.turns.add(request.session, client, request.workers, now)
        return steps

    def _dequeue(self, request: SessionRequest) -> None:
        """Remove a session from the queue."""
        waiting = self._queue[request.client]
        waiting.remove(request.session)
        if not waiting:
            del self._queue[request.client]

    def _drop_waiting(self, session: str) -> None:
        """Remove a waiting session and its lease."""
        self._dequeue(self.leases.pop(session).request)

    def release(self, session: str, now: float) -> list[Instruction]:
        """Free the slots of a session that has ended or left the queue; admit waiting sessions."""
        lease = self.leases.get(session)
        if lease is None:
            return []
        if not lease.slots:
            self._drop_waiting(session)
            return self._admit(now)
        del self.leases[session]
        self._free = sorted([*self._free, *lease.slots])
        return [*self.turns.remove(session, now), *self._admit(now)]

    def drain(self) -> list[Instruction]:
        """Admit no more sessions, and refuse the waiting ones."""
        self.draining = True
        waiting = self.queue
        for session in waiting:
            self._drop_waiting(session)
        return [Refuse(session, PoolDraining()) for session in waiting]

    # -- running sessions ----------------------------------------------------------------

    def load(self, session: str, running: int, queued: int, now: float) -> list[Instruction]:
        """Record the numbers of a session's running runs, and of those waiting for a turn."""
        return [*self.turns.load(session, running, queued, now)]

    def ran(self, session: str, seconds: float, now: float) -> list[Instruction]:
        """Charge a session for seconds that its workers have run."""
        lease = self.leases.get(session)
        if lease is None:
            return []
        lease.run_seconds += seconds * lease.request.workers
        return [*self.turns.charge(session, seconds, now)]

    def client_gone(self, session: str, for_good: bool, now: float) -> list[Instruction]:
        """Set the time at which a session without its client expires.

        Args:
            for_good: True if the client will not come back: its process has ended or left.
        """
        lease = self.leases.get(session)
        if lease is None:
            return []
        request, rules = lease.request, self.rules
        if for_good and not lease.slots:
            return self.release(session, now)
        grace = 0.0 if for_good else min(request.grace, rules.grace)
        lease.expires = now + (rules.expiry if request.detach and lease.slots else grace)
        return self.tick(now)

    def client_back(self, session: str) -> None:
        """Record the return of a session's client."""
        if session in self.leases:
            self.leases[session].expires = None

    def tick(self, now: float) -> list[Instruction]:
        """End expired sessions, and let the scheduler pass the turns on."""
        steps: list[Instruction] = []
        for session, lease in list(self.leases.items()):
            if lease.expires is not None and lease.expires <= now:
                steps += self._end(session, "its client did not come back in time", now)
        return [*steps, *self.turns.share(now)]

    def evict(self, session: str, now: float) -> list[Instruction]:
        """End a session on request."""
        return self._end(session, "it was evicted (lazygt pool evict)", now)

    def _end(self, session: str, why: str, now: float) -> list[Instruction]:
        return self._end_with(session, SessionEnded(session, why), now)

    def _end_with(self, session: str, error: PoolError, now: float) -> list[Instruction]:
        """End a session with an error for its client; refuse it if it waits."""
        lease = self.leases.get(session)
        if lease is None or lease.ending:
            return []
        if not lease.slots:
            self._drop_waiting(session)
            return [Refuse(session, error), *self._admit(now)]
        lease.ending = True
        return [EndSession(session, error), *self.turns.remove(session, now)]

    def memory_used(
        self, sessions: Mapping[str, int], published: Mapping[str, int], now: float
    ) -> list[Instruction]:
        """Record the memory, and end the largest session of each client above its quota.

        Args:
            sessions: bytes of each session's workers.
            published: bytes of each client's published values.
        """
        for session, nbytes in sessions.items():
            if session in self.leases:
                self.leases[session].memory = nbytes
        steps: list[Instruction] = []
        for client in {lease.request.client for lease in self.leases.values()}:
            limit = self.rules.of(client).memory
            running = [lease for lease in self.of(client) if lease.slots and not lease.ending]
            used = sum(lease.memory for lease in running) + published.get(client, 0)
            if limit is None or used <= limit or not running:
                continue
            largest = max(running, key=lambda lease: lease.memory)
            error = OverQuota("memory", largest.memory, used - largest.memory, limit)
            steps += self._end_with(largest.request.session, error, now)
        return steps
