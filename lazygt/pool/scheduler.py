"""Scheduler of runs, for more sessions than there is room for.

A pure state machine, as `policy`, which owns it. Deficit round robin over run-seconds (Shreedhar
and Varghese, "Efficient Fair Queueing Using Deficit Round Robin", SIGCOMM 1995), with two
differences: the length of a run shows only at its end, so a client may owe time and sits out rounds
for it; and a client that is quiet for a moment keeps its place in the round, since most programs
wait for one answer before they send the next run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

QUANTUM = 0.1
"""Run-seconds that a client gets in a round: seconds times the workers that they occupy."""

LINGER = 0.02
"""Seconds that a session which has nothing to run keeps its turn, and its place in the round."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Instruction to hold back the client's messages to the workers of a session."""

    session: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Instruction to pass on the messages held back, and the later ones."""

    session: str


@dataclass(slots=True)
class _Part:
    """A session's part in the rounds."""

    client: str
    #: workers that run at once
    width: int
    running: int = 0
    held: int = 0
    #: True if it has its turn
    passes: bool = False
    #: time of the end of its last turn, or of its beginning
    since: float = 0.0
    quiet_since: float = 0.0

    @property
    def taken(self) -> int:
        """Number of workers in use; runs already with the workers finish without a turn, too."""
        return self.width if self.passes or self.running else 0

    def is_live(self, now: float) -> bool:
        return bool(self.running or self.held) or now - self.quiet_since < LINGER


class Turns:
    """The scheduler's rounds and turns.

    Args:
        at_once: number of workers that may run at the same time.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._parts: dict[str, _Part] = {}
        #: client -> run-seconds left in this round; in the order of the round
        self._deficits: OrderedDict[str, float] = OrderedDict()
        #: the session with the next turn, as soon as there is room: none overtakes it
        self._next: str | None = None

    def add(self, session: str, client: str, workers: int, now: float) -> list[Pause | Resume]:
        """Add a session with granted workers; it begins with its messages held back."""
        width = min(workers, self._at_once)
        self._parts[session] = _Part(client, width, since=now, quiet_since=now)
        self._deficits.setdefault(client, 0.0)
        return self.share(now)

    def remove(self, session: str, now: float) -> list[Pause | Resume]:
        """Remove a session."""
        part = self._parts.pop(session, None)
        if part is not None and not any(p.client == part.client for p in self._parts.values()):
            del self._deficits[part.client]
        return self.share(now)

    def load(self, session: str, running: int, held: int, now: float) -> list[Pause | Resume]:
        """Set the numbers of a session's runs with its workers, and held back."""
        part = self._parts.get(session)
        if part is None:
            return []
        if not running and not held and (part.running or part.held):
            part.quiet_since = now
        part.running, part.held = running, held
        return self.share(now)

    def charge(self, session: str, seconds: float, now: float) -> list[Pause | Resume]:
        """Charge a session's client for the seconds that its workers have run."""
        part = self._parts.get(session)
        if part is None:
            return []
        self._deficits[part.client] -= seconds * part.width
        return self.share(now)

    def passes(self, session: str) -> bool:
        """Return whether a session's messages go on to its workers."""
        return session in self._parts and self._parts[session].passes

    def may_pass(self, session: str, running: int, now: float) -> bool:
        """Return whether the next run may go on to the workers.

        If others wait, runs go on one at a time, since a run can't be cancelled.

        Args:
            running: number of the session's runs with its workers.
        """
        if not self.passes(session):
            return False
        return not running or (self._next is None and not any(self._waiting(now)))

    def deficit(self, client: str) -> float:
        """Return the run-seconds that a client has left in this round; negative: it owes."""
        return self._deficits.get(client, 0.0)

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until `share` is due without an event; None: not at all."""
        parts = self._parts.values()
        if not any(not part.passes and part.is_live(now) for part in parts):
            return None
        quiet = [p.quiet_since + LINGER - now for p in parts if not (p.running or p.held)]
        return min((wait for wait in quiet if wait > 0), default=None)

    def share(self, now: float) -> list[Pause | Resume]:
        """Begin and end turns, and return the instructions."""
        steps: list[Pause | Resume] = []
        while (session := self._choose(now)) is not None:
            part = self._parts[session]
            if not self._fits(part):
                steps += self._end_turns(now)
            if not self._fits(part):
                return steps
            part.passes, self._next = True, None
            self._deficits.move_to_end(part.client)
            steps.append(Resume(session))
        self._renew()
        return steps

    def _fits(self, part: _Part) -> bool:
        others = sum(other.taken for other in self._parts.values() if other is not part)
        return part.width <= self._at_once - others

    def _end_turns(self, now: float) -> list[Pause | Resume]:
        """End turns of clients without run-seconds left, and of quiet sessions."""
        over = [
            session
            for session, part in self._parts.items()
            if part.passes and (self._deficits[part.client] <= 0 or not part.is_live(now))
        ]
        for session in over:
            self._parts[session].passes, self._parts[session].since = False, now
        return [Pause(session) for session in over]

    def _choose(self, now: float) -> str | None:
        """Return the session with the next turn, if one waits."""
        if self._next is not None and not self._waits(self._next, now):
            self._next = None
        if self._next is None:
            waiting = {self._parts[session].client for session in self._waiting(now)}
            if not waiting:
                return None
            client = self._next_client(waiting)
            theirs = [s for s in self._waiting(now) if self._parts[s].client == client]
            self._next = min(theirs, key=lambda session: self._parts[session].since)
        return self._next

    def _next_client(self, waiting: set[str]) -> str:
        """Go round until a waiting client owes nothing; each visit adds a quantum to it."""
        while True:
            client, deficit = next(iter(self._deficits.items()))
            if client in waiting:
                if deficit <= 0:
                    self._deficits[client] = deficit = deficit + QUANTUM
                if deficit > 0:
                    return client
            self._deficits.move_to_end(client)

    def _renew(self) -> None:
        """Renew the used-up deficits of running clients, when no session waits."""
        for part in self._parts.values():
            if part.passes and self._deficits[part.client] <= 0:
                self._deficits[part.client] = QUANTUM

    def _waiting(self, now: float) -> Iterator[str]:
        return (session for session in self._parts if self._waits(session, now))

    def _waits(self, session: str, now: float) -> bool:
        part = self._parts.get(session)
        return part is not None and not part.passes and part.is_live(now)
