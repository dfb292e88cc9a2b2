"""When is a worker dead, when is it frozen: a pure state machine.

Events go in with the time at which they were seen (seconds, any monotonic origin), instructions
come out. There is no clock, socket or thread here; `process_link` has those.

Death needs no judgement: the kernel tells it. Frozen means: a ping was sent, and for the whole
deadline nothing came back, although the worker answers pings on a thread of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

TICK_SECONDS = 0.5
"""While something waits, a `Tick` comes at least this often."""

_LONGEST_SILENCE = 5.0  # seconds until a quiet worker is pinged
_ABSENT_AFTER = 3 * TICK_SECONDS


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The worker has started and accepted us."""

    rank: int


@dataclass(frozen=True, slots=True)
class Heard:
    """Anything came from the worker: a reply, a pong."""

    rank: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker's process has ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed while something waits, and all that had arrived has been taken."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Send a ping to the worker."""

    rank: int


@dataclass(frozen=True, slots=True)
class ReportDied:
    """Raise WorkerDied; said once a worker."""

    rank: int


@dataclass(frozen=True, slots=True)
class ReportFrozen:
    """Raise WorkerFrozen; said again after every further deadline without an answer."""

    rank: int
    deadline: float


Event = Welcomed | Heard | Ended | Tick
Instruction = Ping | ReportDied | ReportFrozen


@dataclass(slots=True)
class _State:
    started: bool = False
    dead: bool = False
    frozen: bool = False
    heard: float = 0.0
    asked: float | None = None


class Watch:
    """The watch over the workers of one session.

    Args:
        world_size: number of workers.
        now: the time at which they were started.
        frozen_after: seconds without an answer after which a worker counts as frozen.
        start_timeout: the same while a worker starts: loading torch from a cold disk holds the
            interpreter, so it cannot answer then.
    """

    def __init__(
        self, world_size: int, now: float, frozen_after: float, start_timeout: float
    ) -> None:
        self._frozen_after = frozen_after
        self._start_timeout = max(start_timeout, frozen_after)
        self._silence = min(frozen_after / 4, _LONGEST_SILENCE)
        self._states = [_State(heard=now) for _ in range(world_size)]
        self._last_tick = now
        self._patient_until = now

    @property
    def dead(self) -> tuple[int, ...]:
        return tuple(rank for rank, state in enumerate(self._states) if state.dead)

    def is_started(self, rank: int) -> bool:
        return self._states[rank].started

    def is_frozen(self, rank: int) -> bool:
        return self._states[rank].frozen

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What follows from an event seen at ``now``; times must not run backwards."""
        match event:
            case Welcomed(rank):
                self._states[rank].started = True
                self._hear(rank, now)
            case Heard(rank):
                self._hear(rank, now)
            case Ended(rank):
                return self._end(rank)
            case Tick():
                return self._tick(now)
        return []

    def _hear(self, rank: int, now: float) -> None:
        state = self._states[rank]
        state.heard, state.asked, state.frozen = now, None, False

    def _end(self, rank: int) -> list[Instruction]:
        state = self._states[rank]
        if state.dead:
            return []
        state.dead = True
        return [ReportDied(rank)]

    def _tick(self, now: float) -> list[Instruction]:
        if now - self._last_tick > _ABSENT_AFTER:
            # We were stopped ourselves, or nobody waited: the answer may be on its way to us.
            self._patient_until = now + TICK_SECONDS
        self._last_tick = now
        living = ((rank, state) for rank, state in enumerate(self._states) if not state.dead)
        return [step for rank, state in living for step in self._judge(rank, state, now)]

    def _judge(self, rank: int, state: _State, now: float) -> list[Instruction]:
        deadline = self._frozen_after if state.started else self._start_timeout
        if state.asked is None:
            if now - state.heard < self._silence:
                return []
            state.asked = now
            return [Ping(rank)]
        if now - state.asked < deadline or now < self._patient_until:
            return []
        state.asked, state.frozen = now, True
        return [ReportFrozen(rank, deadline)]

    def seconds_to_next(self, now: float) -> float:
        """How long a wait may last before the next `Tick` must be given."""
        due = [self._due(state) - now for state in self._states if not state.dead]
        return max(min([*due, TICK_SECONDS]), 0.0)

    def _due(self, state: _State) -> float:
        if state.asked is None:
            return state.heard + self._silence
        deadline = self._frozen_after if state.started else self._start_timeout
        return max(state.asked + deadline, self._patient_until)
