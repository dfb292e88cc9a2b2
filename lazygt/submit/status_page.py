"""Status page of the client, for observers of the session such as ``lazygt top``.

A thread writes the page a few times a second from existing counters, so that flushes take no
longer. Memory categories are measured only while there is an observer.
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
from lazygt.net.status_file import MOST_RANKS, ClientPage, StatusFile
from lazygt.record.recorder import Recorder
from lazygt.runtime.client.client import Client
from lazygt.runtime.compiling.tiers import Tiers
from lazygt.runtime.launch.activity import EVERY
from lazygt.runtime.link import Link
from lazygt.submit.history import History
from lazygt.submit.submission import Submitter

_RATE_WINDOW = 3.0  # seconds
_MEASURE_EVERY = 2.0  # seconds, at least
_MEASURE_SHARE = 500  # the interval between measurements, as a multiple of their duration
_MOST_TEXT = 240  # characters


class SessionParts(Protocol):
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
    """Thread that writes the status page of a session's client.

    Args:
        session: held by a weak reference.
        file: the status file of the session's workers.
        name: of the session's directory.
    """

    def __init__(self, session: SessionParts, file: StatusFile, name: str) -> None:
        super().__init__(name="lazygt-status", daemon=True)
        self._session = weakref.ref(session)
        self._file = file
        self._ended = threading.Event()
        #: samples for the rates: (time, number of runs, number of steps), the oldest first
        self._counts: deque[tuple[float, int, int]] = deque(maxlen=int(_RATE_WINDOW / EVERY))
        self._memory_sampler = MemorySampler(session._submitter)
        mesh = session.mesh
        self._first = ClientPage(
            name, os.getpid(), mesh.world_size, session.device_type, str(mesh), time.time()
        )
        file.write(0, self._first)

    def close(self) -> None:
        """Stop the thread, wait for its end, and mark the page as ended."""
        self._ended.set()
        if threading.current_thread() is not self:
            self.join()
        self._file.write(0, replace(self._first, ended=True))

    def run(self) -> None:
        while not self._ended.wait(EVERY):
            session = self._session()
            if session is None:
                return
            self._update(session)
            del session

    def _update(self, session: SessionParts) -> None:
        """Write the current page, and check the link to the workers."""
        client, submitter = session._client, session._submitter
        self._counts.append((time.monotonic(), client.next_run - 1, submitter.steps))
        if self._file.watched:
            self._memory_sampler.begin(submitter)
        self._file.write(0, self._page(session))
        session._link.update_status()

    def _page(self, session: SessionParts) -> ClientPage:
        """Return the current page."""
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
            kinds=tuple(self._memory_sampler.kinds.items()),
        )


class MemorySampler:
    """Periodic measurement of rank 0's memory by category.

    The measurement reads gradients, which is safe only on the program's own thread, since torch may
    be freeing one. So it runs when an optimizer steps; the first time also without an observer.

    Attributes:
        kinds: category -> bytes on rank 0.
    """

    def __init__(self, submitter: Submitter) -> None:
        self.kinds: Mapping[str, int] = {}
        self._next_time = 0.0
        submitter.on_optimizer_step = self._measure

    def begin(self, submitter: Submitter) -> None:
        """Request a measurement at the next step, unless the last one was a moment ago."""
        if time.monotonic() >= self._next_time:
            submitter.on_optimizer_step = self._measure

    def _measure(self, submitter: Submitter) -> None:
        """Measure the memory now; callback of the submitter at an optimizer's step."""
        begin = time.monotonic()
        sizes = submitter.categories.sizes(submitter.ranks)
        if any(sizes.values()):  # at the first step nothing has been sent yet
            self.kinds, submitter.on_optimizer_step = sizes, None
        self._next_time = begin + max(_MEASURE_EVERY, _MEASURE_SHARE * (time.monotonic() - begin))
