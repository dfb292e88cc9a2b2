"""Admission policy of a pool as a pure state machine: grants, queue, refusals and ends.

Its input is events with the time at which they were seen (seconds, any monotonic origin), its
output instructions. There is no clock, socket or thread here; `gateway` has those. `turns`
schedules the runs of admitted sessions.

A place is room for one worker process; a session gets as many as it asks for at once, or none. It
keeps them until its processes are gone (`Released`), so a place never has two.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from lazygt.errors import (
    GangTooLarge,
    OverQuota,
    PoolDraining,
    PoolError,
    PoolFull,
    SessionEnded,
)
from lazygt.pool.events import (
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
    Ran,
    Refuse,
    Released,
    Tick,
    Used,
)
from lazygt.pool.rules import Rules
from lazygt.pool.scheduler import Turns


@dataclass(slots=True)
class Lease:
    """A session with places, or waiting for them.

    Attributes:
        places: its places; empty while it waits.
        granted: time of the grant.
        expires: time of its end unless its client comes back; None: the client is connected.
        run_seconds: seconds that its workers have run, times their number.
        memory: bytes of its workers at the last measurement.
    """

    asked: Asked
    places: tuple[int, ...] = ()
    granted: float = 0.0
    expires: float | None = None
    ending: bool = False
    run_seconds: float = 0.0
    memory: int = 0


class Policy:
    """The state of a pool.

    Attributes:
        leases: lease of each session, in the order of the requests.
        draining: True if no session is admitted any more.
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
        """Number of free places."""
        return len(self._free)

    @property
    def queue(self) -> list[str]:
        """The waiting sessions, in the order of admission."""
        rows = [list(waiting) for waiting in self._queue.values()]
        longest = max(map(len, rows), default=0)
        return [row[turn] for turn in range(longest) for row in rows if turn < len(row)]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Return the instructions that follow from an event at ``now``, in order of time."""
        match event:
            case Asked():
                return self._ask(event, now)
            case Released(session):
                return self._release(session, now)
            case Load(session, running, held):
                return [*self.turns.load(session, running, held, now)]
            case Ran(session, seconds):
                return self._ran(session, seconds, now)
            case Used(sessions, published):
                return self._weigh(sessions, published, now)
            case ClientGone(session, for_good):
                return self._gone(session, for_good, now)
            case ClientBack(session):
                self._back(session)
            case Drain():
                return self._drain()
            case Evict(session):
                return self._end(session, "it was evicted (lazygt pool evict)", now)
            case Tick():
                return self._tick(now)
        return []

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until the next `Tick` is due; None: not before another event."""
        expiries = [
            max(lease.expires - now, 0.0)
            for lease in self.leases.values()
            if lease.expires is not None and not lease.ending
        ]
        turn = self.turns.seconds_to_next(now)
        return min([*expiries, *([] if turn is None else [turn])], default=None)

    # -- admission -----------------------------------------------------------------------

    def _ask(self, asked: Asked, now: float) -> list[Instruction]:
        error = self._objection(asked)
        if error is not None:
            return [Refuse(asked.session, error)]
        self.leases[asked.session] = Lease(asked)
        self._queue.setdefault(asked.client, deque()).append(asked.session)
        steps = self._admit(now)
        waiting = len(self.queue)
        if waiting > self.rules.queue:
            last = self._last_of_most(asked.client)
            self._leave_queue(last)
            steps.append(Refuse(last, PoolFull(waiting - 1, self.rules.workers)))
        return steps

    def _last_of_most(self, newcomer: str) -> str:
        """Return the session that leaves a full queue: the last of the client with most.

        So no client keeps others out. The newcomer loses if none has more than it.
        """
        most = max(self._queue, key=lambda name: (len(self._queue[name]), name == newcomer))
        return self._queue[most][-1]

    def _objection(self, asked: Asked) -> PoolError | None:
        """Return the reason to refuse a session, or None."""
        if asked.session in self.leases:
            return PoolError(f"there is a session {asked.session!r} already")
        if self.draining:
            return PoolDraining()
        if not 1 <= asked.workers <= self.rules.workers:
            return GangTooLarge(asked.workers, self.rules.workers)
        quota, theirs = self.rules.of(asked.client), self.of(asked.client)
        counts = (
            ("sessions", quota.sessions, 1, len(theirs)),
            ("workers", quota.workers, asked.workers, sum(x.asked.workers for x in theirs)),
            ("cores", quota.cores, asked.cores, sum(x.asked.cores for x in theirs)),
        )
        for what, limit, wanted, used in counts:
            if limit is not None and wanted + used > limit:
                return OverQuota(what, wanted, used, limit)
        return None

    def of(self, client: str) -> list[Lease]:
        """Return a client's sessions."""
        return [lease for lease in self.leases.values() if lease.asked.client == client]

    def _admit(self, now: float) -> list[Instruction]:
        """Grant places to the waiting clients round-robin; no session overtakes."""
        steps: list[Instruction] = []
        while self._queue:
            client, waiting = next(iter(self._queue.items()))
            lease = self.leases[waiting[0]]
            asked = lease.asked
            if asked.workers > len(self._free):
                break
            lease.places, lease.granted = tuple(self._free[: asked.workers]), now
            del self._free[: asked.workers]
            self._queue.move_to_end(client)
            self._leave(asked)
            steps.append(Grant(asked.session, lease.places))
            steps += self.turns.add(asked.session, client, asked.workers, now)
        return steps

    def _leave(self, asked: Asked) -> None:
        """Take a session out of the queue."""
        waiting = self._queue[asked.client]
        waiting.remove(asked.session)
        if not waiting:
            del self._queue[asked.client]

    def _leave_queue(self, session: str) -> None:
        self._leave(self.leases.pop(session).asked)

    def _release(self, session: str, now: float) -> list[Instruction]:
        lease = self.leases.get(session)
        if lease is None:
            return []
        if not lease.places:
            self._leave_queue(session)
            return self._admit(now)
        del self.leases[session]
        self._free = sorted([*self._free, *lease.places])
        return [*self.turns.remove(session, now), *self._admit(now)]

    def _drain(self) -> list[Instruction]:
        self.draining = True
        waiting = self.queue
        for session in waiting:
            self._leave_queue(session)
        return [Refuse(session, PoolDraining()) for session in waiting]

    # -- the life of a session -----------------------------------------------------------

    def _ran(self, session: str, seconds: float, now: float) -> list[Instruction]:
        lease = self.leases.get(session)
        if lease is None:
            return []
        lease.run_seconds += seconds * lease.asked.workers
        return [*self.turns.charge(session, seconds, now)]

    def _gone(self, session: str, for_good: bool, now: float) -> list[Instruction]:
        lease = self.leases.get(session)
        if lease is None:
            return []
        asked, rules = lease.asked, self.rules
        if for_good and not lease.places:
            return self._release(session, now)
        grace = 0.0 if for_good else min(asked.grace, rules.grace)
        lease.expires = now + (rules.expiry if asked.detach and lease.places else grace)
        return self._tick(now)

    def _back(self, session: str) -> None:
        if session in self.leases:
            self.leases[session].expires = None

    def _tick(self, now: float) -> list[Instruction]:
        steps: list[Instruction] = []
        for session, lease in list(self.leases.items()):
            if lease.expires is not None and lease.expires <= now:
                steps += self._end(session, "its client did not come back in time", now)
        return [*steps, *self.turns.share(now)]

    def _end(self, session: str, why: str, now: float) -> list[Instruction]:
        return self._end_with(session, SessionEnded(session, why), now)

    def _end_with(self, session: str, error: PoolError, now: float) -> list[Instruction]:
        lease = self.leases.get(session)
        if lease is None or lease.ending:
            return []
        if not lease.places:
            self._leave_queue(session)
            return [Refuse(session, error), *self._admit(now)]
        lease.ending = True
        return [End(session, error), *self.turns.remove(session, now)]

    def _weigh(
        self, sessions: Mapping[str, int], published: Mapping[str, int], now: float
    ) -> list[Instruction]:
        """Note the memory, and end the largest session of each client above its quota."""
        for session, nbytes in sessions.items():
            if session in self.leases:
                self.leases[session].memory = nbytes
        steps: list[Instruction] = []
        for client in {lease.asked.client for lease in self.leases.values()}:
            limit = self.rules.of(client).memory
            theirs = [lease for lease in self.of(client) if lease.places and not lease.ending]
            used = sum(lease.memory for lease in theirs) + published.get(client, 0)
            if limit is None or used <= limit or not theirs:
                continue
            largest = max(theirs, key=lambda lease: lease.memory)
            error = OverQuota("memory", largest.memory, used - largest.memory, limit)
            steps += self._end_with(largest.asked.session, error, now)
        return steps
