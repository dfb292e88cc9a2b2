"""A worker in this process that dies when it is told to, and one that takes its place."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from typing import Any
from unittest import mock

import pytest

import lazygt
from lazygt.config import Config
from lazygt.errors import WorkerDied
from lazygt.graph.ops import undispatched
from lazygt.recovery.recover import RollbackRecovery
from lazygt.runtime.arenas import Arena, create_memory
from lazygt.runtime.cluster import opening
from lazygt.runtime.wire import Buffer, Message, encode
from lazygt.runtime.worker.worker import Worker

#: (message, when): the messages are counted over all lives
Fault = tuple[int, str]


class Death(BaseException):
    """In the midst of a message."""


class MortalLink:
    """A link to one worker.

    Args:
        faults: when it dies: ``before`` a message is handled, ``inside`` (what it made is not
            kept), or ``after``: the answer is not sent.
    """

    world_size = 1
    hosts, elsewhere, mirrors = (1,), dict[int, int](), False
    status, name = None, "mortal"
    encode = staticmethod(encode)

    def __init__(self, faults: Sequence[Fault], shm_threshold: int) -> None:
        self.pids: tuple[int, ...] = (os.getpid(),)
        self.upload: Arena | None = Arena.create(1 << 20)
        self.messages: list[Message] = []
        self.lives = 1
        self._faults, self._shm_threshold = dict(faults), shm_threshold
        self._memory = create_memory(1 << 20)
        self._dead, self._replies = False, deque[list[memoryview]]()
        self._start()

    def _start(self) -> None:
        assert self.upload is not None
        fetch = create_memory(1 << 20)
        self._fetch = Arena.attach(os.dup(fetch))
        self._worker = Worker(
            upload=Arena.attach(os.dup(self.upload.fd)),
            fetch=Arena.own(fetch),
            inline=True,
            config=Config.load(shm_threshold=self._shm_threshold),
            snapshots=Arena.own(os.dup(self._memory)),
        )

    healthy = property(lambda self: not self._dead)

    @property
    def lost(self) -> Mapping[int, WorkerDied]:
        return {0: self._death()} if self._dead else {}

    def _death(self) -> WorkerDied:
        return WorkerDied(0, self.pids[0], "signal SIGKILL", "")

    def replace(self, rank: int, group_number: int) -> None:
        self._replies.clear()
        self._worker.close()
        self._fetch.close()
        self._dead, self.lives = False, self.lives + 1
        self._start()

    def refill(self) -> None:
        """There are no spares."""

    def last_step(self, rank: int) -> tuple[int, int]:
        raise AssertionError("no run kills it again and again")

    def native_fetcher(self, make: Any, *whose: Any) -> Any:
        return None

    def fetch_arena(self, rank: int) -> Arena | None:
        return self._fetch

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        if self._dead:
            raise self._death()
        self.messages.append(frames[0])  # type: ignore[arg-type]
        when = self._faults.pop(len(self.messages), "")
        if when == "before":
            self._dead = True
            return
        try:
            replies = self._handled([bytes(frame) for frame in frames], when == "inside")
        except Death:
            self._dead = True
            return
        self._dead = bool(when)
        if not when:
            self._replies.extend([[memoryview(bytes(f)) for f in reply] for reply in replies])

    def _handled(self, frames: list[Buffer], dies: bool) -> list[list[Buffer]]:
        with undispatched():
            if not dies:
                return self._worker.handle(frames)
            with (
                mock.patch.object(self._worker, "known_runs", None),
                mock.patch.object(self._worker.store, "put_from", mock.Mock(side_effect=Death)),
            ):
                self._worker.handle(frames)
            raise Death

    def receive(
        self, timeout: float | None, beside: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        if self._replies:
            return 0, self._replies.popleft()
        if self._dead:
            raise self._death()
        assert timeout is not None, "nothing is under way"
        return None

    def close(self) -> None:
        self._worker.close()
        for arena in (self._fetch, self.upload):
            if arena is not None:
                arena.close()
        os.close(self._memory)


def _snapshot_is_due(recovery: RollbackRecovery, snapshots: bool, retained_bytes: int) -> bool:
    return snapshots and not recovery.journal.snapshot_under_way


@contextmanager
def mortal_session(
    faults: Sequence[Fault] = (), snapshots: bool = False
) -> Iterator[tuple[lazygt.Session, MortalLink]]:
    """A session whose only worker is in this process.

    Args:
        snapshots: whether they are taken, after every run.
    """
    links: list[MortalLink] = []

    def open_mortal(config: Any, mesh: Any, copier: str) -> MortalLink:
        links.append(MortalLink(faults, config.shm_threshold))
        return links[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(opening.LAUNCHERS, "mortal", open_mortal)
        patch.setattr(
            RollbackRecovery, "snapshot_is_due", partialmethod(_snapshot_is_due, snapshots)
        )
        with lazygt.session(
            launcher="mortal", compile="off", workers=lazygt.Workers(shm_threshold=1024)
        ) as s:
            yield s, links[0]
