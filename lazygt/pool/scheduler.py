"""Scheduler of runs by deficit round robin, for more sessions than can run at once.

A pure state machine, owned by `policy`. Deficit round robin over run-seconds (Shreedhar
and Varghese, "Efficient Fair Queueing Using Deficit Round Robin", SIGCOMM 1995), with two
differences: the length of a run is known only at its end, so a client may owe time and then skips
rounds; and a client that is idle for a moment keeps its position in the round, since most programs
wait for one answer before they send the next run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

QUANTUM = 0.1
"""Run-seconds of a client in a round: seconds times occupied workers."""

LINGER = 0.02
"""Seconds for which an idle session keeps its turn and its position in the round."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Instruction to queue the client's messages to the workers of a session."""

    session: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Instruction to forward the queued messages of a session, and later ones."""

    session: str


@dataclass(slots=True)
class _Session:
    """Scheduling state of a session."""

    client: str
    #: workers that run at the same time
    gang_size: int
    running: int = 0
    queued: int = 0
    #: True during the session's turn
    passes: bool = False
    #: time of the end of the last turn, or of the session's beginning
    since: float = 0.0
    idle_since: float = 0.0

    @property
    def occupied(self) -> int:
        """Number of workers in use; runs that have begun finish even without a turn."""
        return self.gang_size if self.passes or self.running else 0

    def is_live(self, now: float) -> bool:
        """Return whether the session has runs, or was idle only for a moment."""
        return bool(self.running or self.queued) or now - self.idle_since < LINGER


class Turns:
    """Deficit-round-robin scheduler of sessions; clients share the rounds.

    Args:
        at_once: number of workers that may run at the same time.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._sessions: dict[str, _Session] = {}
        #: client -> remaining run-seconds of this round; in the order of the round
        self._deficits: OrderedDict[str, float] = OrderedDict()
        #: session with the next turn, as soon as enough workers are free; no other overtakes
        self._next: str | None = None

    def add(self, session: str, client: str, workers: int, now: float) -> list[Pause | Resume]:
        """Add a session with granted workers; its messages are queued at first."""
        gang_size = min(workers, self._at_once)
        self._sessions[session] = _Session(client, gang_size, since=now, idle_since=now)
        self._deficits.setdefault(client, 0.0)
        return self.share(now)

    def remove(self, session: str, now: float) -> list[Pause | Resume]:
        """Remove a session."""
        state = self._sessions.pop(session, None)
        if state is not None and not any(
            other.client == state.client for other in self._sessions.values()
        ):
            del self._deficits[state.client]
        return self.share(now)

    def load(self, session: str, running: int, queued: int, now: float) -> list[Pause | Resume]:
        """Set the numbers of a session's running and queued runs."""
        state = self._sessions.get(session)
        if state is None:
            return []
        if not running and not queued and (state.running or state.queued):
            state.idle_since = now
        state.running, state.queued = running, queued
        return self.share(now)

    def charge(self, session: str, seconds: float, now: float) -> list[Pause | Resume]:
        """Charge a session's client for the seconds that its workers have run."""
        state = self._sessions.get(session)
        if state is None:
            return []
        self._deficits[state.client] -= seconds * state.gang_size
        return self.share(now)

    def passes(self, session: str) -> bool:
        """Return whether a session has a turn: its messages are forwarded."""
        return session in self._sessions and self._sessions[session].passes

    def may_pass(self, session: str, running: int, now: float) -> bool:
        """Return whether the next run may be forwarded to the workers.

        If others wait, runs are forwarded one at a time, since a run can't be cancelled.

        Args:
            running: number of the session's running runs.
        """
        if not self.passes(session):
            return False
        return not running or (self._next is None and not any(self._waiting_sessions(now)))

    def deficit(self, client: str) -> float:
        """Return a client's remaining run-seconds of this round; negative: debt."""
        return self._deficits.get(client, 0.0)

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until `share` is due without an event; None: not at all."""
        states = self._sessions.values()
        if not any(not state.passes and state.is_live(now) for state in states):
            return None
        quiet = [
            state.idle_since + LINGER - now
            for state in states
            if not (state.running or state.queued)
        ]
        return min((wait for wait in quiet if wait > 0), default=None)

    def share(self, now: float) -> list[Pause | Resume]:
        """Begin and end turns as workers are free; return the instructions."""
        steps: list[Pause | Resume] = []
        while (session := self._next_session(now)) is not None:
            state = self._sessions[session]
            if not self._has_workers(state):
                steps += self._end_turns(now)
            if not self._has_workers(state):
                return steps
            state.passes, self._next = True, None
            self._deficits.move_to_end(state.client)
            steps.append(Resume(session))
        self._renew_deficits()
        return steps

    def _has_workers(self, state: _Session) -> bool:
        """Return whether enough workers are free for a session."""
        others = sum(other.occupied for other in self._sessions.values() if other is not state)
        return state.gang_size <= self._at_once - others

    def _end_turns(self, now: float) -> list[Pause | Resume]:
        """End the turns of idle sessions, and of clients without remaining run-seconds."""
        ended = [
            session
            for session, state in self._sessions.items()
            if state.passes and (self._deficits[state.client] <= 0 or not state.is_live(now))
        ]
        for session in ended:
            self._sessions[session].passes, self._sessions[session].since = False, now
        return [Pause(session) for session in ended]

    def _next_session(self, now: float) -> str | None:
        """Return the session with the next turn, if one waits."""
        if self._next is not None and not self._is_waiting(self._next, now):
            self._next = None
        if self._next is None:
            waiting = {self._sessions[session].client for session in self._waiting_sessions(now)}
            if not waiting:
                return None
            client = self._next_client(waiting)
            candidates = [
                s for s in self._waiting_sessions(now) if self._sessions[s].client == client
            ]
            self._next = min(candidates, key=lambda session: self._sessions[session].since)
        return self._next

    def _next_client(self, waiting: set[str]) -> str:
        """Rotate until a waiting client has run-seconds; each visit adds a quantum."""
        while True:
            client, deficit = next(iter(self._deficits.items()))
            if client in waiting:
                if deficit <= 0:
                    self._deficits[client] = deficit = deficit + QUANTUM
                if deficit > 0:
                    return client
            self._deficits.move_to_end(client)

    def _renew_deficits(self) -> None:
        """Renew the spent deficits of running clients, when no session waits."""
        for state in self._sessions.values():
            if state.passes and self._deficits[state.client] <= 0:
                self._deficits[state.client] = QUANTUM

    def _waiting_sessions(self, now: float) -> Iterator[str]:
        return (session for session in self._sessions if self._is_waiting(session, now))

    def _is_waiting(self, session: str, now: float) -> bool:
        state = self._sessions.get(session)
        return state is not None and not state.passes and state.is_live(now)
