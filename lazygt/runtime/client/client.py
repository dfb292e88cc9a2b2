"""Client of a session: assigns numbers to runs and values, and sends runs to the workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from time import monotonic
from typing import Any, NoReturn

import torch

from lazygt.errors import ExecutionError, ProtocolError
from lazygt.graph.meta import TensorMeta
from lazygt.recovery.journal import GroupEntry, Snapshot, SwapEntry
from lazygt.recovery.recover import RollbackRecovery
from lazygt.runtime.client.answers import Answers
from lazygt.runtime.client.console import Observer
from lazygt.runtime.client.failures import Describe, Failures
from lazygt.runtime.executors.native import number_reader
from lazygt.runtime.link import Link
from lazygt.runtime.messages import Failure, Install, MemoryUse, Renew, Run, Write
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.values import (
    Answer,
    Freed,
    Regions,
    RemoteValue,
    Uploads,
    new_values,
    wanted,
)
from lazygt.runtime.wire import Buffer, bits, size_of

# -- orders to workers, besides runs ---------------------------------------------------------------


class Orders(Answers):
    """Orders to workers: plans, snapshots, process groups and transfers.

    An *entry* is the `PlanRecord` of a plan: the plan of each rank, and what was sent of it.
    """

    def swap(self, entry: PlanRecord, groups: Sequence[Sequence[tuple[int, str]]]) -> None:
        """Switch every worker to compiled code from its next run of a plan on.

        Args:
            groups: (fused node, artifact) pairs for each of ``entry.plans``.
        """
        if not entry.sent:
            self._send_plan(entry, "swap")
        entry.swap, entry.swapped_from = tuple(groups), self.next_run
        if self.recovery is not None:
            self.recovery.journal.entries.append(SwapEntry(entry))
        self.send_all("swap", self.entries.swap_messages(entry), "compiled")

    def install(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None:
        """Store an artifact on a worker's host, or query its presence there. See `Installs`."""
        self._send("install", rank, self.link.encode(message, buffers), "compiled")

    def _send_plan(self, entry: PlanRecord, why: str) -> None:
        """Send each rank its plan; ``why`` is for the log."""
        messages = self.entries.plan_messages(entry)
        self.send_all("plan", messages, why)
        self._shipped(entry, messages[0], len(messages))
        entry.sent = True

    def _snap(
        self, recovery: RollbackRecovery, then: Callable[[Snapshot], object] | None = None
    ) -> None:
        """Request a snapshot. Later messages send their lists of ids in full."""
        for entry in self.entries:
            entry.reset_codecs()
        recovery.request_snapshot(self._seq, then)

    def snap(self, then: Callable[[Snapshot], object]) -> bool:
        """Request a snapshot of the workers' values; return False if recovery is off.

        Args:
            then: called with the snapshot when all workers have taken it, unless recovery is turned
                off before.

        Raises:
            WorkerDied, WorkerFrozen: while waiting for an earlier snapshot.
        """
        self.wait_snapped()
        if self.recovery is not None:
            self._snap(self.recovery, then)
        return self.recovery is not None

    def _renew(self, since: int) -> None:
        """Request a new process group, once all workers have answered all messages.

        Until then collectives may still run in the old group. Ranks with different plans get no new
        group.

        Args:
            since: id of the first value for which ranks may not have met in a collective.
        """
        if self._in_flight or self._failures.mismatched:
            return
        self._broken_since, self._group = None, self._group + 1
        self._failures.group_renewed()
        if self.recovery is not None:
            self.recovery.journal.entries.append(GroupEntry(since))
        frames = self.link.encode(Renew(self._group, since))
        self.send_all("renew", [frames] * self.link.world_size, "a rank has left the process group")

    # -- transfers -----------------------------------------------------------------------

    def wait_for_message_or(self, descriptor: int, seconds: float) -> None:
        """Wait for a worker's message or a readable descriptor; handle the message.

        Args:
            seconds: the longest wait.

        Raises:
            WorkerDied: a worker is gone; raised again in each call.
            WorkerFrozen: a worker does not answer.
        """
        if self._death is not None:
            raise self._death
        message = self._receive(seconds, descriptor)
        if message is not None:
            self._handle_message(message)

    def write(self, rank: int, number: int, request: tuple[Any, ...]) -> None:
        """Request the copy of blocks for a transfer; ``written`` returns the answer.

        Raises:
            WorkerDied, WorkerFrozen: a worker had to be replaced.
        """
        self._write_epoch = self._epoch
        self._send("write", rank, self.link.encode(Write(number, request)), "transfer_weights()")
        self._check_writing()

    def written(self, seconds: float) -> list[tuple[Any, ...]]:
        """Return (rank, number, checksums, error, handles) of each finished write.

        Waits at most ``seconds`` for one.

        Raises:
            WorkerDied, WorkerFrozen: a worker is gone, even if it was replaced meanwhile.
        """
        message = None if self._finished_writes else self._receive(seconds)
        while message is not None:
            self._handle_message(message)
            message = self._receive(0)
        self._check_writing()
        written, self._finished_writes = self._finished_writes, []
        return written

    def _check_writing(self) -> None:
        """Raise the recovery's error if a worker was replaced since the request to write."""
        recovery = self.recovery or self._disabled_recovery
        if recovery is not None and self._write_epoch != recovery.epoch:
            self._write_epoch = recovery.epoch
            self._finished_writes.clear()
            raise recovery.last

    # -- errors --------------------------------------------------------------------------

    def _raise(self, error: ExecutionError) -> NoReturn:
        """Raise a failure or, instead of it, its cause on another rank. Neither is raised again.

        Waits for all ranks' answers; with ``undo`` set, rolls back to before the failed op.
        """
        if self.link.world_size > 1:
            # The rank that is the cause may not have answered yet. Once all ranks have answered,
            # they can form a new group before the user's next run.
            self.synchronize()
        raised = self.undo() or self._failures.resolve(error)
        self._failures.mark_reported()
        raise raised.with_traceback(None)  # it may have been raised before

    def drop_failure(self, rank: int, failure: Failure) -> None:
        """Drop a failure that the caller reports in another way: it is not raised."""
        self._failures.drop(self._failures.error(rank, failure))

    def raise_for(self, rank: int, failure: Failure) -> NoReturn:
        """Raise the failure of a value on a rank.

        Raises:
            ExecutionError: names the op and the user's line.
        """
        self._raise(self._failures.error(rank, failure))


# -- client ----------------------------------------------------------------------------------------


class Client(Orders):
    """Sender of plans and runs over a link, and receiver of the answers.

    Args:
        max_ahead: runs that may be unanswered before ``run`` waits.
        shm_threshold: bytes from which an upload goes through the shared-memory arena.
        recover: limits of snapshots: (share of the run time, bytes); None: no recovery.
        launches_ahead: workers answer when kernels are launched, not when they have ended.
    """

    def __init__(
        self,
        link: Link,
        max_ahead: int,
        shm_threshold: int,
        observer: Observer | None = None,
        recover: tuple[float, int] | None = None,
        launches_ahead: bool = False,
    ) -> None:
        retains = recover is not None
        uploads = Uploads(link.upload, link.world_size, shm_threshold, retains)
        super().__init__(link, observer, uploads, max_ahead, launches_ahead)
        self.recovery = None if recover is None else RollbackRecovery(self, link, *recover)
        self.number_reader = number_reader() if link.world_size == 1 else None
        self._next_id = 1
        self._freed = Freed()
        #: ids that the last run has freed
        self.last_frees: Collection[int] = ()

    def close(self) -> None:
        """Drop the failures, to break a reference cycle.

        A raised error refers to its frames, the frames to the user's tensors, and the tensors to
        the session.
        """
        self._failures = Failures()
        self._in_flight.clear()

    @property
    def snapshots(self) -> int:
        """Number of snapshots that all workers have taken."""
        return 0 if self.recovery is None else self.recovery.journal.committed.number

    # -- values --------------------------------------------------------------------------

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> RemoteValue:
        """Copy a CPU tensor in ``meta``'s layout; the copy is sent with the next run."""
        self.counts.bytes_uploaded += meta.nbytes
        key = self._new_ids(1)
        try:
            self._uploads.add(key, source, meta)
        except MemoryError as error:
            if self.recovery is None:
                raise
            self._disable_recovery(f"there is no memory for an upload beside those kept: {error}")
            self._uploads.add(key, source, meta)
        return RemoteValue(key, self._freed)

    def adopt(self, key: int) -> RemoteValue:
        """Return a value under an id that a worker chose (a data-dependent result)."""
        return RemoteValue(key, self._freed)

    def _new_ids(self, count: int) -> int:
        first = self._next_id
        self._next_id += count
        return first

    def id_of_next_output(self, position: int) -> int:
        """Return the id that output ``position`` of the next run will have."""
        return self._next_id + position

    @property
    def idle(self) -> bool:
        """True if there are no uploads and no freed ids to send."""
        return not self._uploads and not self._freed

    # -- runs ----------------------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """True if the C++ extension may send a run: nothing is in flight, unread or observed."""
        pending = self._in_flight or self.entries.swapping or self._uploads or self._fetches.waiting
        unread = self.installing or self.unexpected_strides or self.capture_errors or self.observer
        fault = self._death or self._fatal_error or self._failures.unraised or not self.link.healthy
        return not (pending or unread or fault) and monotonic() < self.quiet_until

    def continue_run(
        self, unsent: list[Buffer] | None, answer: list[memoryview] | None, why: str
    ) -> None:
        """Continue an expected run after the C++ extension has done its share.

        Args:
            unsent: the run's message, if Python has to send it.
            answer: the answer, if the extension has received it.
            why: reason of the run, for the log.
        """
        if unsent is not None:
            self._send("run", 0, unsent, why)
        elif answer is not None:
            self._handle_message((0, answer))

    def run(
        self,
        entry: PlanRecord | None,
        inputs: Collection[int],
        params: tuple[Any, ...],
        fetches: tuple[int, ...] = (),
        describe: Describe | None = None,
        why: str = "",
        ranks: Collection[int] = (0,),
        measure: tuple[tuple[int, ...], ...] | None = None,
        timed: bool = False,
    ) -> tuple[int, Iterable[RemoteValue]]:
        """Send a run; return its number and the values of the plan's outputs.

        Does not wait for the answers; see ``hold_back``. Pending uploads and freed ids go with it.

        Args:
            entry: the plan to run, which is sent first if that has not been done; None: no plan.
            inputs: ids of the plan's inputs.
            params: run-time numbers of the plan.
            fetches: ids of the values to send back.
            describe: describes the plan's nodes in errors.
            why: reason of the run, for the log.
            ranks: the ranks that send the fetched values; only their answers are read.
            measure: groups of ids; the answers report the memory of each group and of the workers.
            timed: wait for the devices after each step; see ``messages.Run``.
        """
        self.pump()
        if self._broken_since is not None:
            self._renew(self._broken_since)
        outputs = 0
        if entry is not None:
            outputs = entry.outputs
            if not entry.sent:
                self._send_plan(entry, why)
        base = self._new_ids(outputs)
        self._seq += 1
        puts, buffers = self._uploads.take()
        if puts and self.link.mirrors:
            self.link.mirror([(p.offset, p.meta.nbytes) for p in puts if p.offset is not None])
        run = Run(self._seq, base=base, puts=puts, fetches=fetches, measure=measure)
        run.timed = timed or (self.observer is not None and self.observer.wants_timings)
        if measure is not None:
            run.timed = True  # else C++ might take it, and C++ does not report memory
        self.last_frees = frees = self._freed.take()
        if entry is None:
            run.frees = (0, tuple(frees)) if frees else None
        else:
            run.inputs = entry.inputs.encode(inputs, base)
            run.frees = entry.frees.encode(frees, base)
            numbers = bits(params) if params else b""
            run.params = None if numbers == entry.numbers else params
            entry.numbers = numbers
            entry.runs += 1
        messages = self._encoded(run, buffers, entry, ranks)
        self.counts.last_run = size_of(messages[0][:1])
        self.counts.largest_run = max(self.counts.largest_run, self.counts.last_run)
        self.expect(self._seq, entry, describe, base, len(fetches), ranks)
        if self.recovery is not None:
            self.recovery.journal.entries.append((self._seq, entry, messages))
        self.send_all("run", messages, why)
        if self.recovery is not None and self.recovery.snapshot_is_due(
            self._uploads.retained_bytes
        ):
            self._snap(self.recovery)
        return self._seq, new_values(base, outputs, self._freed)

    def finish(self) -> None:
        """Wait until every rank has answered every run and every device has finished.

        Raises:
            WorkerDied, WorkerFrozen: as ``synchronize``.
        """
        if self._death is None and self._launches_ahead:
            self.run(None, (), (), why="synchronize()", timed=True)
        self.synchronize()

    def memory(self, groups: Sequence[Iterable[int]]) -> list[MemoryUse]:
        """Return each worker's memory, by rank, once it has done everything sent before.

        Args:
            groups: ids of values; the bytes of each group are reported as one number.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        ranks = range(self.link.world_size)
        requested = tuple([tuple(group) for group in groups])
        seq, _ = self.run(None, (), (), why="memory()", ranks=ranks, measure=requested)
        answers = self.wait(seq)
        reports = [memory for rank in ranks if (memory := answers[rank][0].memory) is not None]
        if [len(memory.living) for memory in reports] != [len(requested) + 1] * len(ranks):
            raise ProtocolError("a worker was asked for its memory, and does not tell of it")
        return reports

    def _encoded(
        self, run: Run, buffers: list[Buffer], entry: PlanRecord | None, ranks: Collection[int]
    ) -> list[list[Buffer]]:
        """Return the message to each rank; ranks with equal messages share one object.

        Args:
            entry: record of the run's plan; None: the run has no plan.
            ranks: those that the run's fetches are requested from.
        """
        fetches = run.fetches
        encoded: dict[Any, list[Buffer]] = {}
        messages = []
        names: Sequence[bytes | None] = (None,) if entry is None else entry.names
        for rank in range(self.link.world_size):
            run.digest = names[rank if len(names) > 1 else 0]
            run.fetches = fetches if rank in ranks else ()
            run.releases = self._fetches.releases(rank)
            key = run.digest, run.fetches, run.releases
            if key not in encoded:
                encoded[key] = self.link.encode(run, buffers)
            messages.append(encoded[key])
        return messages

    # -- rollback ------------------------------------------------------------------------

    def roll_back(
        self, seq: int, undone: Sequence[int], rank: int, node: int, error: ExecutionError
    ) -> bool:
        """Roll all ranks back to the state before a run; later uploads stay.

        Args:
            seq: number of the run.
            undone: ids of the values made since; they count as failed.
            rank, node, error: the failure that causes the rollback.

        Returns:
            False if a snapshot was taken since, so that no rollback is possible.

        Raises:
            WorkerDied, WorkerFrozen: a worker is gone, and can't be replaced.
        """
        if self.recovery is None or not self.recovery.can_undo(seq):
            return False
        self._uploads.mark_unread_since(seq)
        failure = Failure(node, error.kind, error.detail, seq)
        self.recovery.rollback(seq, [(key, failure) for key in undone])
        self._failures.undone(seq, node, error, self.link.world_size)
        if (recovery := self.recovery) is not None:  # it may have been turned off meanwhile
            self._snap(recovery)
        return True

    def revive(self, ids: Set[int], freed: Set[int]) -> dict[int, RemoteValue]:
        """Return new handles to values that lost theirs.

        Args:
            ids: values that get a handle.
            freed: ids that were freed, and that the workers own again after a rollback.
        """
        for key in sorted({*self._freed.take(), *freed} - ids):
            self._freed.add(key)
        return {key: RemoteValue(key, self._freed) for key in ids}

    # -- fetches -------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise the first failure that has not been raised yet.

        Raises:
            ExecutionError: names the op and the user's line.
        """
        if self._failures.unraised:
            self._raise(self._failures.unraised[0])

    def fetched(
        self,
        answers: Mapping[int, Answer],
        meta: TensorMeta,
        regions: Regions | None,
        as_number: bool = False,
    ) -> Any:
        """Return a fetched value as a CPU tensor with its own memory.

        Args:
            answers: of rank 0, or of each rank in ``regions``.
            regions: the blocks of the value that each rank has sent; None: rank 0 sent all of it.
            as_number: return a Python number instead if the value is a single one.

        Raises:
            ExecutionError: the value could not be computed.
        """
        self.counts.fetches += 1
        for rank, block in wanted(answers, regions):
            if isinstance(block, Failure):
                for sender, (done, _) in answers.items():
                    self._fetches.drop(sender, done)
                self.raise_for(rank, block)
            self.counts.bytes_fetched += block.meta.nbytes
        number = self._fetches.number(answers[0]) if as_number and regions is None else None
        return self._fetches.value(answers, meta, regions) if number is None else number
