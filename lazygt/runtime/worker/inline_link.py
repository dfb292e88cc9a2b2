"""Link to a worker in the client's own process."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from lazygt.errors import LazyGTError, WorkerDied
from lazygt.graph.ops import undispatched
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.wire import Buffer, hand_over

if TYPE_CHECKING:
    from lazygt.net.status_file import StatusFile
    from lazygt.runtime.arenas import Arena
    from lazygt.runtime.worker.worker import Worker


class InlineLink:
    """Link to a worker in the client's own process: nothing is encoded."""

    world_size = 1
    upload: Arena | None = None
    hosts: tuple[int, ...] = (1,)
    elsewhere: Mapping[int, int] = MappingProxyType({})
    mirrors = False
    status: StatusFile | None = None
    name = "inline"
    encode = staticmethod(hand_over)

    def __init__(self, worker: Worker) -> None:
        self.pids: tuple[int, ...] = (os.getpid(),)
        self._worker = worker
        self._replies: deque[list[Buffer]] = deque()

    #: an inline worker is no process, so it does not die
    healthy = True
    lost: Mapping[int, WorkerDied] = {}

    def replace(self, rank: int, group_number: int) -> None:
        """Raise LazyGTError: an inline worker does not die.

        Raises:
            LazyGTError: always.
        """
        raise LazyGTError("an inline worker can't be replaced; please report this")

    def refill(self) -> None:
        """Do nothing: there are no spare processes."""

    def look(self) -> None:
        """Do nothing: there are no status pages."""

    def last_step(self, rank: int) -> tuple[int, int]:
        """Raise LazyGTError, as ``replace`` does."""
        raise LazyGTError("an inline worker has not died; please report this")

    def snapshot_arena(self, rank: int) -> Arena:
        """Raise LazyGTError, as ``replace`` does."""
        raise LazyGTError("an inline worker takes no snapshots; please report this")

    def native_fetcher(self, make: Any, *arguments: Any) -> Any:
        """Return a fetcher that calls the worker's known runs."""
        known = self._worker.known_runs
        return (
            None if known is None else make.inline(*arguments, known.runs, self._known_run_replies)
        )

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Raise LazyGTError, as ``replace`` does."""
        raise LazyGTError("an inline worker reads no copies of uploads; please report this")

    def _known_run_replies(self, answer: tuple[Any, ...]) -> list[Buffer]:
        """Return the encoded replies to a run that the extension executed."""
        with undispatched():
            return self._worker.finished(answer)

    def fetch_arena(self, rank: int) -> Arena | None:
        """Return None: values travel as buffers."""
        return None

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Handle the message synchronously, outside the dispatch of the client's op."""
        with undispatched():
            self._replies.extend(self._worker.handle(list(frames)))

    def receive(
        self, timeout: float | None, beside: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """Return the next reply, or None if there is none."""
        if not self._replies:
            if timeout is None:
                raise LazyGTError("the inline worker owes no answer; please report this")
            if beside is not None:
                poller = select.poll()
                poller.register(beside, select.POLLIN)
                DEFER_INTERRUPT.wait(poller, timeout * 1000)
            return None
        return 0, cast(list[memoryview], self._replies.popleft())

    def close(self) -> None:
        """Drop the worker's values."""
        self._worker.close()
