"""Link: the client's way to its workers, whatever they are."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from lazygt.errors import LazyGTError, WorkerDied
from lazygt.graph.ops import undispatched
from lazygt.runtime.launch.interrupts import DEFER_INTERRUPT
from lazygt.runtime.wire import Buffer, Part, hand_over

if TYPE_CHECKING:
    from lazygt.runtime.launch.status_file import StatusFile
    from lazygt.runtime.shared_memory import Arena
    from lazygt.runtime.worker import Worker


class Link(Protocol):
    """Messages to and from a set of workers."""

    world_size: int
    upload: Arena | None
    #: how many workers are on each host, by rank
    hosts: tuple[int, ...]
    #: whether workers read copies of what lies in ``upload``, see ``mirror``
    mirrors: bool
    #: the name by which `lazygt top` calls the session
    name: str

    @property
    def elsewhere(self) -> Mapping[int, int]:
        """A rank on each host but the client's own, by the number of the host."""

    @property
    def status(self) -> StatusFile | None:
        """What `lazygt top` reads; None: nothing."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank, each on its own host."""

    @property
    def healthy(self) -> bool:
        """Whether nothing is known to be wrong with it."""

    @property
    def lost(self) -> Mapping[int, WorkerDied]:
        """The workers that are known to have died, with how they did."""

    def replace(self, rank: int, group_number: int) -> None:
        """Start a new process in the place of a worker; see ``ProcessLink.replace``."""

    def refill(self) -> None:
        """Have as many spare processes as there are to be."""

    def look(self) -> None:
        """Have ``status`` tell of ranks on other hosts, if somebody watches. Called a few times a
        second, on a thread of its own; does not wait."""

    def last_step(self, rank: int) -> tuple[int, int]:
        """The run that a worker did last with times taken, and the step of it at which it was."""

    def native_fetcher(self, make: Any, *whose: Any) -> Any:
        """C++'s way to get numbers from its only worker; None: there is none.

        Args:
            make: the class, which has a method to make one for each kind of link.
            whose: what these take besides what is the link's own.
        """

    def fetch_arena(self, rank: int) -> Arena | None:
        """The arena in which a worker leaves large fetched values."""

    def snapshot_arena(self, rank: int) -> Arena:
        """A mapping of the memory in which a worker's snapshots lie, for who closes it."""

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Have (offset, bytes) of the arena of uploads wherever workers read them, before a message
        tells of them."""

    def encode(self, message: Part, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
        """A message as ``send`` takes it; see ``wire.encode``."""

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Send a message; does not wait for the worker."""

    def receive(
        self, timeout: float | None, beside: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """The next message of any rank.

        Args:
            timeout: seconds to wait; None: until one comes.
            beside: a descriptor that ends the wait, too, when it can be read.

        Returns:
            None when the wait has ended without one.

        Raises:
            WorkerDied: a worker process ended.
            WorkerFrozen: a worker does not answer.
        """

    def close(self) -> None:
        """End the workers; leaves nothing behind. May be called twice."""


class InlineLink:
    """A worker in the client's own process, behind the same interface: nothing is encoded."""

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

    #: a worker that is no process does not die
    healthy = True
    lost: Mapping[int, WorkerDied] = {}

    def replace(self, rank: int, group_number: int) -> None:
        """Never called: it does not die.

        Raises:
            LazyGTError: always.
        """
        raise LazyGTError("an inline worker can't be replaced; please report this")

    def refill(self) -> None:
        """There are none."""

    def look(self) -> None:
        """Never called: there are no pages."""

    def last_step(self, rank: int) -> tuple[int, int]:
        """Never called; as ``replace``."""
        raise LazyGTError("an inline worker has not died; please report this")

    def snapshot_arena(self, rank: int) -> Arena:
        """Never called; as ``replace``."""
        raise LazyGTError("an inline worker takes no snapshots; please report this")

    def native_fetcher(self, make: Any, *whose: Any) -> Any:
        """One that calls the worker's known runs."""
        known = self._worker.known_runs
        return None if known is None else make.inline(*whose, known.runs, self._finished)

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Never called; as ``replace``."""
        raise LazyGTError("an inline worker reads no copies of uploads; please report this")

    def _finished(self, told: tuple[Any, ...]) -> list[Buffer]:
        with undispatched():
            return self._worker.finished(told)

    def fetch_arena(self, rank: int) -> Arena | None:
        """None: values travel as buffers."""
        return None

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Run the message here and now, whatever op of the client's is being dispatched."""
        with undispatched():
            self._replies.extend(self._worker.handle(list(frames)))

    def receive(
        self, timeout: float | None, beside: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """The next reply; None when there is none."""
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
