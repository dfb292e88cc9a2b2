"""Status page of the client, for observers of the session such as ``lazygt top``.

A thread writes it, a few times a second, from counts that are kept anyway, so it costs a flush
nothing. Memory categories are determined only while there is an observer.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from typing import Protocol

from msgspec.structs import replace

from lazygt.graph.mesh import Mesh
from lazygt.graph.source import expand
from lazygt.record.recorder import Recorder
from lazygt.runtime.client import Client
from lazygt.runtime.compiling.tiers import Tiers
from lazygt.runtime.launch.activity import EVERY
from lazygt.runtime.launch.link import Link
from lazygt.runtime.launch.status_file import MOST_RANKS, ClientPage, StatusFile
from lazygt.submit.history import History
from lazygt.submit.submission import Submitter

_RATES_OVER = 3.0  # seconds
_WEIGH_EVERY = 2.0  # seconds, at the least
_WEIGH_SHARE = 500  # so many times longer than it takes is until it is done again
_MOST_TEXT = 240  # characters


class Parts(Protocol):
    """Parts of a session that its status page reports."""

    recorder: Recorder
    mesh: Mesh
    device_type: str
    _link: Link
    _client: Client
    _history: History
    _submitter: Submitter
    _tiers: Tiers


class StatusWriter(threading.Thread):
    """Writes the page of a session's client.

    Args:
        session: not kept alive by this.
        file: of its workers.
        name: of its directory.
    """

    def __init__(self, session: Parts, file: StatusFile, name: str) -> None:
        super().__init__(name="lazygt-status", daemon=True)
        self._session = weakref.ref(session)
        self._file = file
        self._ended = threading.Event()
        #: (when, runs, steps), the oldest first
        self._counts: deque[tuple[float, int, int]] = deque(maxlen=int(_RATES_OVER / EVERY))
        self._weigher = Weigher(session._submitter)
        mesh = session.mesh
        self._first = ClientPage(
            name, os.getpid(), mesh.world_size, session.device_type, str(mesh), time.time()
        )
        file.write(0, self._first)

    def close(self) -> None:
        """End it, say so, and wait until it does not write any more."""
        self._ended.set()
        if threading.current_thread() is not self:
            self.join()
        self._file.write(0, replace(self._first, ended=True))

    def run(self) -> None:
        while not self._ended.wait(EVERY):
            session = self._session()
            if session is None:
                return
            self._look(session)
            del session

    def _look(self, session: Parts) -> None:
        client, submitter = session._client, session._submitter
        self._counts.append((time.monotonic(), client.next_run - 1, submitter.steps))
        if self._file.watched:
            self._weigher.begin(submitter)
        self._file.write(0, self._page(session))
        session._link.look()

    def _page(self, session: Parts) -> ClientPage:
        client, history = session._client, session._history
        flush = history.recent[-1] if history.recent else None
        miss = history.misses[-1] if history.misses else None
        compiles = Counter(compile.status for compile in list(session._tiers.compiles.values()))
        queue, waits_for = client.unanswered
        (since, runs_then, steps_then), (now, runs, steps) = self._counts[0], self._counts[-1]
        seconds = max(now - since, EVERY)
        recoveries = client.recoveries
        return replace(
            self._first,
            line="" if flush is None else expand(flush.call_site)[-_MOST_TEXT:],
            reason="" if flush is None else flush.reason[:_MOST_TEXT],
            runs=runs,
            queue=queue,
            waits_for=waits_for[:MOST_RANKS],
            steps=steps,
            runs_a_second=(runs - runs_then) / seconds,
            steps_a_second=(steps - steps_then) / seconds,
            hits=history.plan_hits,
            misses=history.plans_built,
            resized=history.plans_resized,
            miss="" if miss is None else miss.reason[:_MOST_TEXT],
            miss_line="" if miss is None else miss.line[-_MOST_TEXT:],
            compiling=compiles["compiling"],
            compiled=compiles["compiled"] + compiles["cached"],
            failed_compiles=compiles["failed"],
            snapshots=client.snapshots,
            recoveries=len(recoveries),
            recovery=str(recoveries[-1])[:_MOST_TEXT] if recoveries else "",
            kinds=tuple(self._weigher.kinds.items()),
        )


class Weigher:
    """Periodic account of a rank's memory by category, as far as the client knows.

    It reads gradients, which only the program's own thread may do, as torch may be freeing one. So
    it runs when an optimizer steps; the first time with or without an observer.

    Attributes:
        kinds: bytes on rank 0, by kind.
    """

    def __init__(self, submitter: Submitter) -> None:
        self.kinds: Mapping[str, int] = {}
        self._at = 0.0
        submitter.at_step = self._weigh

    def begin(self, submitter: Submitter) -> None:
        """Have it found out at the next step, unless that was done a moment ago."""
        if time.monotonic() >= self._at:
            submitter.at_step = self._weigh

    def _weigh(self, submitter: Submitter) -> None:
        begin = time.monotonic()
        sizes = submitter.kinds.sizes(submitter.ranks)
        if any(sizes.values()):  # else it is the first step, and nothing has been sent yet
            self.kinds, submitter.at_step = sizes, None
        self._at = begin + max(_WEIGH_EVERY, _WEIGH_SHARE * (time.monotonic() - begin))
