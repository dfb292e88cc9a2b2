"""Orders of the client to workers besides runs, and the errors that it raises for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lazygt.errors import ExecutionError
from lazygt.runtime.answers import Answers
from lazygt.runtime.messages import Failure, Install, Renew, Write
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.recovery.journal import Renewed, Snapshot, SwappedIn
from lazygt.runtime.recovery.recover import Recovery
from lazygt.runtime.wire import Buffer


class Orders(Answers):
    """Orders to workers: plans, snapshots, process groups and transfers."""

    def swap(self, entry: PlanRecord, groups: Sequence[Sequence[tuple[int, str]]]) -> None:
        """Have every worker run compiled code from its next run of a plan on.

        Args:
            groups: (fused node, artifact) pairs for each of ``entry.plans``.
        """
        if not entry.sent:
            self._send_plan(entry, "swap")
        entry.swap, entry.swapped_from = tuple(groups), self.next_run
        if self.recovery is not None:
            self.recovery.journal.entries.append(SwappedIn(entry))
        self.tell_all("swap", self.entries.swap_messages(entry), "compiled")

    def install(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None:
        """Have a worker's host keep an artifact, or report whether it has it. See `Installs`."""
        self._send("install", rank, self.link.encode(message, buffers), "compiled")

    def _send_plan(self, entry: PlanRecord, why: str) -> None:
        messages = self.entries.plan_messages(entry)
        self.tell_all("plan", messages, why)
        self._shipped(entry, messages[0], len(messages))
        entry.sent = True

    def _snap(self, recovery: Recovery, then: Callable[[Snapshot], object] | None = None) -> None:
        """Have the workers take a snapshot. Later messages refer to nothing sent before it."""
        for entry in self.entries:
            entry.begin_anew()
        recovery.snap(self._seq, then)

    def snap(self, then: Callable[[Snapshot], object]) -> bool:
        """Have the workers take a snapshot here; return whether they take any.

        Args:
            then: called with it when all have taken it, unless recovery turns itself off before.

        Raises:
            WorkerDied, WorkerFrozen: while waiting for one that is being taken.
        """
        self.wait_snapped()
        if self.recovery is not None:
            self._snap(self.recovery, then)
        return self.recovery is not None

    def _renew(self, since: int) -> None:
        """Have the workers form a new process group, once all have answered all messages.

        Until then some may still meet in the old one. Ranks with different plans are not to meet.
        """
        if self._in_flight or self._failures.mismatched:
            return
        self._broken_since, self._group = None, self._group + 1
        self._failures.mended()
        if self.recovery is not None:
            self.recovery.journal.entries.append(Renewed(since))
        frames = self.link.encode(Renew(self._group, since))
        self.tell_all("renew", [frames] * self.link.world_size, "a rank has left the process group")

    # -- transfers -----------------------------------------------------------------------

    def wait_beside(self, descriptor: int, seconds: float) -> None:
        """Wait until a descriptor is readable, and take the workers' messages meanwhile.

        Waits at most so many seconds, and ends early when something comes.

        Raises:
            WorkerDied: a worker is gone, whether or not this was raised before.
            WorkerFrozen: a worker does not answer.
        """
        if self._death is not None:
            raise self._death
        message = self._receive(seconds, descriptor)
        if message is not None:
            self._take(message)

    def write(self, rank: int, number: int, request: tuple[Any, ...]) -> None:
        """Have a worker copy blocks for a transfer; ``written`` takes its answer.

        Raises:
            WorkerDied, WorkerFrozen: a worker had to be replaced.
        """
        self._writing = self._epoch
        self._send("write", rank, self.link.encode(Write(number, request)), "transfer_weights()")
        self._check_writing()

    def written(self, seconds: float) -> list[tuple[Any, ...]]:
        """Return (rank, number, checksums, error, handles) of each finished write.

        Waits at most ``seconds`` for one.

        Raises:
            WorkerDied, WorkerFrozen: a worker is gone, even if it was replaced meanwhile.
        """
        message = None if self._written else self._receive(seconds)
        while message is not None:
            self._take(message)
            message = self._receive(0)
        self._check_writing()
        written, self._written = self._written, []
        return written

    def _check_writing(self) -> None:
        """Raise the error for which a worker was replaced while it was asked to write."""
        recovery = self.recovery or self._former
        if recovery is not None and self._writing != recovery.epoch:
            self._writing = recovery.epoch
            self._written.clear()
            raise recovery.last

    # -- errors --------------------------------------------------------------------------

    def _raise(self, error: ExecutionError) -> NoReturn:
        """Raise a failure, or its cause on another rank, and neither again."""
        if self.link.world_size > 1:
            # The rank that is the cause may not have answered yet. And when all have, they can
            # form a new group: the user's next run does not come too late for that.
            self.synchronize()
        raised = self.undo() or self._failures.take(error)
        self._failures.told()
        raise raised.with_traceback(None)  # it may have been raised before

    def drop_failure(self, rank: int, failure: Failure) -> None:
        """Drop a failure that the caller reports in another way: it is not raised."""
        self._failures.drop(self._failures.error(rank, failure))

    def raise_for(self, rank: int, failure: Failure) -> NoReturn:
        """Raise the failure of a value on a rank.

        Raises:
            ExecutionError: naming the op and the user's line.
        """
        self._raise(self._failures.error(rank, failure))
