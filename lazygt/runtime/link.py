"""Link: the client's connection to its workers, of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lazygt.errors import WorkerDied
from lazygt.runtime.wire import Buffer, Message

if TYPE_CHECKING:
    from lazygt.net.status_file import StatusFile
    from lazygt.runtime.arenas import Arena


class Link(Protocol):
    """Message channel to and from a set of workers."""

    world_size: int
    upload: Arena | None  # arena of large values for the workers; None: there is no shared memory
    #: number of workers on each host, in the order of their ranks
    hosts: tuple[int, ...]
    #: True if workers read copies of ``upload``, see ``mirror``
    mirrors: bool
    #: the session's name in `lazygt top`
    name: str

    @property
    def elsewhere(self) -> Mapping[int, int]:
        """One rank on each host other than the client's, by the host's number."""

    @property
    def status(self) -> StatusFile | None:
        """Status file that `lazygt top` reads, or None."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank, each on its own host."""

    @property
    def healthy(self) -> bool:
        """True if no fault of the link is known."""

    @property
    def lost(self) -> Mapping[int, WorkerDied]:
        """Workers that are known to have died, with their errors."""

    def replace(self, rank: int, group_number: int) -> None:
        """Start a new process in the place of a worker; see ``ProcessLink.replace``."""

    def refill(self) -> None:
        """Start spare processes up to the configured number."""

    def update_status(self) -> None:
        """Update ``status`` for ranks on other hosts, if `lazygt top` is watching.

        Called a few times a second, on a thread of its own; does not wait.
        """

    def last_step(self, rank: int) -> tuple[int, int]:
        """Return the run that a worker last timed, and its step in that run."""

    def native_fetcher(self, make: Any, *arguments: Any) -> Any:
        """Return the C++ fetcher of scalar results, if there is one worker; else None.

        Args:
            make: class of the fetcher, with a factory method for each kind of link.
            arguments: leading arguments of these methods, before the link's own.
        """

    def fetch_arena(self, rank: int) -> Arena | None:
        """Return the arena in which a worker leaves large fetched values."""

    def snapshot_arena(self, rank: int) -> Arena:
        """Return a new mapping of a worker's snapshot memory; the caller closes it."""

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copy slots of the upload arena to all hosts with workers that read them.

        Called before the message that refers to them.

        Args:
            slots: (offset, bytes) of each.
        """

    def encode(self, message: Message, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
        """Encode a message for ``send``; see ``wire.encode``."""

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Send a message; does not wait for the worker."""

    def receive(
        self, timeout: float | None, wake_fd: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """Return the next message of any rank.

        Args:
            timeout: seconds to wait; None: until a message comes.
            wake_fd: a descriptor that also ends the wait when it becomes readable.

        Returns:
            None if the wait has ended without a message.

        Raises:
            WorkerDied: a worker process ended.
            WorkerFrozen: a worker does not answer.
        """

    def close(self) -> None:
        """End the workers and leave nothing behind. May be called twice."""
