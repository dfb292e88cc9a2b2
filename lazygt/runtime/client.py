"""Client: the one who talks to the workers. Numbers runs and values, keeps what is in flight."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazygt.errors import ExecutionError, ProtocolError, WorkerDied
from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.source import Mark
from lazygt.runtime import wire
from lazygt.runtime.link import Link
from lazygt.runtime.log import InstructionLog
from lazygt.runtime.plan import Plan
from lazygt.runtime.shm import tensor_over
from lazygt.runtime.waiting import WaitLine
from lazygt.runtime.wire import Buffer, Done, Failure, Fetched, Prediction, Put, Run, Timings

#: Answers "what is node n of this run?": (op, inputs as text, the user's file:line).
Describe = Callable[[int], tuple[str, tuple[str, ...], str]]
#: Takes (rank, run, plan, who wrote it, timings) of a timed run.
Timed = Callable[[int, int, "PlanEntry | None", "Describe | None", Timings], None]

_KEPT_ERRORS = 1_000


class RemoteValue:
    """A value that the workers hold. When nobody speaks of it any more, its id is freed with the
    next run."""

    __slots__ = ("_dead", "id", "mark")

    def __init__(self, key: int, dead: deque[int]) -> None:
        self.id = key
        self._dead = dead
        #: the user's line that made it, for whoever looks at its handle
        self.mark: Mark | None = None

    def __del__(self) -> None:
        self._dead.append(self.id)


class PlanEntry:
    """A plan with what the workers are known to remember of its last run."""

    __slots__ = (
        "considered",
        "frees",
        "inputs",
        "params",
        "plan",
        "runs",
        "sent",
        "ships",
        "size",
        "swap",
    )

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.inputs, self.frees = Prediction(), Prediction()
        self.params: tuple[Any, ...] | None = None
        self.sent = False
        self.runs = 0
        #: how often it was shipped, and the bytes of one such message
        self.ships = self.size = 0
        #: (fused node, artifact) of the compiled tier, once it is there
        self.swap: tuple[tuple[int, str], ...] = ()
        #: whether it has been decided what of it is compiled
        self.considered = False


@dataclass(slots=True)
class _Flight:
    entry: PlanEntry | None
    describe: Describe | None
    waiting: set[int]
    done: Done | None = None
    abandoned: bool = False
    buffers: list[memoryview] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Messages and bytes so far."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_uploaded: int = 0
    bytes_fetched: int = 0
    fetches: int = 0
    plans_sent: int = 0
    largest_run: int = 0
    last_run: int = 0


class Client:
    """Sends plans and runs over a link and takes the answers.

    Args:
        max_ahead: runs that may be unanswered before ``run`` waits.
        shm_threshold: bytes from which an upload goes through the shared-memory arena.
    """

    def __init__(self, link: Link, max_ahead: int, shm_threshold: int, log: InstructionLog) -> None:
        self.link, self.log = link, log
        #: set while a profile is taken: runs are timed, and it is told the timings
        self.timed: Timed | None = None
        self.counts = Counts()
        #: plans that are being swapped -> ranks that have not said so yet; and what went wrong
        self.swapping: dict[bytes, int] = {}
        self.swap_errors: list[tuple[bytes, str]] = []
        self._line = WaitLine()
        self._death: WorkerDied | None = None
        self._max_ahead, self._shm_threshold = max_ahead, shm_threshold
        self._seq = 0
        self._next_id = 1
        self._puts: list[Put] = []
        self._buffers: list[Buffer] = []
        self._dead: deque[int] = deque()
        self._read: deque[int] = deque()
        self._forget: list[bytes] = []
        self._known: dict[bytes, PlanEntry] = {}
        self._flights: OrderedDict[int, _Flight] = OrderedDict()
        self._held: dict[int, int] = {}
        self._failures: deque[ExecutionError] = deque()
        self._errors: OrderedDict[tuple[int, int], ExecutionError] = OrderedDict()

    # -- values --------------------------------------------------------------------------

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> RemoteValue:
        """Copy a CPU tensor now; it travels with the next run. Its layout will be ``meta``'s."""
        nbytes = meta.numel * meta.dtype.itemsize
        self.counts.bytes_uploaded += nbytes
        key = self._new_ids(1)
        arena = self.link.upload
        if arena is not None and nbytes >= self._shm_threshold:
            slot = arena.allocate(nbytes)
            room = arena.view(slot.offset, nbytes).view(meta.dtype)
            room.as_strided(meta.shape, meta.stride).copy_(source)
            self._held[slot.offset] = self.link.world_size
            self._puts.append(Put(key, meta, slot.offset))
        else:
            host = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
            host.copy_(source)
            flat = host.as_strided((meta.numel,), (1,)) if meta.numel else host.reshape(0)
            self._puts.append(Put(key, meta))
            self._buffers.append(flat.view(torch.uint8).numpy().tobytes())
        return RemoteValue(key, self._dead)

    def adopt(self, key: int) -> RemoteValue:
        """A value that a worker named itself (a data-dependent result)."""
        return RemoteValue(key, self._dead)

    def _new_ids(self, count: int) -> int:
        first = self._next_id
        self._next_id += count
        return first

    def next_output(self, position: int) -> int:
        """The id that output ``position`` of the next run will have."""
        return self._next_id + position

    @property
    def idle(self) -> bool:
        """Whether there is nothing that a message would have to carry."""
        return not self._puts and not self._dead

    # -- runs ----------------------------------------------------------------------------

    def run(
        self,
        entry: PlanEntry | None,
        inputs: list[int],
        params: tuple[Any, ...],
        fetches: tuple[int, ...] = (),
        describe: Describe | None = None,
        why: str = "",
    ) -> tuple[int, list[RemoteValue]]:
        """Send a run; returns its number and the values of the plan's outputs.

        Does not wait; see ``hold_back``.
        """
        self.pump()
        if entry is not None:
            self._send_plan(entry, why)
        outputs = len(entry.plan.graph.outputs) if entry is not None else 0
        base = self._new_ids(outputs)
        self._seq += 1
        run = Run(self._seq, base=base, puts=self._puts, fetches=fetches)
        run.timed = self.timed is not None
        buffers, self._puts, self._buffers = self._buffers, [], []
        run.releases = tuple(_drain(self._read))
        frees = sorted(_drain(self._dead))
        if entry is None:
            run.frees = tuple(frees) or None
        else:
            run.digest = entry.plan.digest
            run.inputs = entry.inputs.encode(inputs, base)
            run.frees = entry.frees.encode(frees, base)
            run.params = None if params == entry.params and entry.runs else params
            entry.params = params
            entry.runs += 1
        frames = wire.encode_run(run, buffers)
        self.counts.last_run = len(frames[0])
        self.counts.largest_run = max(self.counts.largest_run, self.counts.last_run)
        flight = _Flight(entry, describe, set(range(self.link.world_size)))
        self._flights[self._seq] = flight
        self._send("run", 0, frames, why)
        if self.link.world_size > 1:
            run.fetches = ()  # rank 0 answers for all
            others = wire.encode_run(run, buffers) if fetches else frames
            for rank in range(1, self.link.world_size):
                self._send("run", rank, others, why)
        return self._seq, [RemoteValue(base + k, self._dead) for k in range(outputs)]

    def hold_back(self) -> None:
        """Wait while more than ``max_ahead`` runs are unanswered.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while len(self._flights) > self._max_ahead:
            self._take_next()

    def wait(self, seq: int) -> tuple[Done, list[memoryview]]:
        """The answer of rank 0 to run ``seq``.

        Raises:
            WorkerDied, WorkerFrozen: instead of an answer.
        """
        flight = self._flights[seq]
        try:
            while flight.done is None:
                self._take_next()
        except BaseException:
            # Ctrl-C: the answer will come, and nobody will look at it
            flight.abandoned = True
            raise
        return flight.done, flight.buffers

    def synchronize(self) -> None:
        """Wait until every rank has answered every run.

        Raises:
            WorkerDied: a worker is gone, whether or not this was raised before.
            WorkerFrozen: a worker does not answer.
        """
        if self._death is not None:
            raise self._death
        while self._flights:
            self._take_next()

    def wait_swapped(self) -> None:
        """Wait until every rank has answered every swap.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while self.swapping:
            self._take_next()

    def pump(self) -> None:
        """Take the answers that are there already."""
        while self._flights or self.swapping:  # a look costs a system call
            message = self._receive(0)
            if message is None:
                return
            self._take(message)

    def _receive(self, timeout: float | None) -> tuple[int, list[memoryview]] | None:
        try:
            return self.link.receive(timeout)
        except WorkerDied as error:
            self._death = error
            raise

    def forget(self, entries: Sequence[PlanEntry]) -> None:
        """Plans that will never be used again: workers drop them with the next plan."""
        for entry in entries:
            if self._known.get(entry.plan.digest) is entry:
                del self._known[entry.plan.digest]
                self._forget.append(entry.plan.digest)

    def entry_for(self, plan: Plan) -> PlanEntry:
        """The entry of a plan: the one there is for the same content, or a new one."""
        return self._known.setdefault(plan.digest, PlanEntry(plan))

    def entries(self) -> list[PlanEntry]:
        """The plans that are known, oldest first."""
        return list(self._known.values())

    def _send_plan(self, entry: PlanEntry, why: str) -> None:
        if entry.sent:
            return
        plan = entry.plan
        forget = [digest for digest in self._forget if digest != plan.digest]
        self._forget = []
        frames = wire.encode_plan(plan.digest, plan.graph, True, forget)
        self._send_all("plan", frames, why)
        self._shipped(entry, frames, self.link.world_size)
        entry.sent = True

    def swap(self, entry: PlanEntry, groups: Sequence[tuple[int, str]]) -> None:
        """Have every worker run compiled code from its next run of a plan on."""
        self._send_plan(entry, "swap")
        entry.swap = tuple(groups)
        self._send_all("swap", wire.encode_swap(entry.plan.digest, groups), "compiled")
        self.swapping[entry.plan.digest] = self.link.world_size

    def _shipped(self, entry: PlanEntry, frames: Sequence[Buffer], times: int) -> None:
        self.counts.plans_sent += 1
        entry.ships += times
        entry.size = sum(len(frame) for frame in frames)

    def _send_all(self, kind: str, frames: Sequence[Buffer], why: str) -> None:
        for rank in range(self.link.world_size):
            self._send(kind, rank, frames, why)

    def _send(self, kind: str, rank: int, frames: Sequence[Buffer], why: str) -> None:
        size = sum(len(frame) for frame in frames)
        try:
            self.link.send(rank, frames)
        except WorkerDied as error:
            self._death = error
            raise
        self.counts.messages_sent += 1
        self.counts.bytes_sent += size
        self.log.write("send", kind, rank, self._seq, size, why)

    # -- answers -------------------------------------------------------------------------

    def _take_next(self) -> None:
        """Wait for one answer and take it."""
        try:
            while True:
                message = self._receive(self._line.patience)
                if message is not None:
                    self._take(message)
                    return
                self._line.update(f"{len(self._flights)} runs of {self.link.world_size} worker(s)")
        finally:
            self._line.done()

    def _take(self, message: tuple[int, list[memoryview]]) -> None:
        rank, frames = message
        header = wire.unpack(frames[0])
        size = sum(len(frame) for frame in frames)
        self.counts.messages_received += 1
        self.counts.bytes_received += size
        kinds = {wire.DONE: "done", wire.NEED: "need", wire.SWAPPED: "swapped"}
        number = header[1] if isinstance(header[1], int) else 0
        self.log.write("receive", kinds.get(header[0], "?"), rank, number, size, "")
        if header[0] == wire.NEED:
            self._resend(rank, header[1], header[2])
        elif header[0] == wire.DONE:
            self._done(rank, wire.decode_done(header), frames[1:])
        elif header[0] == wire.SWAPPED:
            self._swapped(rank, header[1], header[2])
        else:
            raise ProtocolError(f"worker {rank} sent a message of unknown kind {header[0]!r}")

    def _resend(self, rank: int, seq: int, digest: bytes) -> None:
        entry = self._known.get(digest)
        flight = self._flights.get(seq)
        entry = flight.entry if flight is not None and flight.entry is not None else entry
        if entry is None:
            raise ProtocolError(f"worker {rank} asks for a plan that was never sent")
        frames = wire.encode_plan(digest, entry.plan.graph, False)
        self._send("plan", rank, frames, f"worker {rank} had forgotten it")
        self._shipped(entry, frames, 1)
        if entry.swap:
            self._send("swap", rank, wire.encode_swap(digest, entry.swap), "compiled")

    def _swapped(self, rank: int, digest: bytes, error: str) -> None:
        if digest in self.swapping:
            self.swapping[digest] -= 1
            if not self.swapping[digest]:
                del self.swapping[digest]
        if error:
            self.swap_errors.append((digest, f"worker {rank}: {error}"))

    def _done(self, rank: int, done: Done, buffers: list[memoryview]) -> None:
        flight = self._flights[done.seq]
        flight.waiting.discard(rank)
        if done.timings is not None and self.timed is not None:
            self.timed(rank, done.seq, flight.entry, flight.describe, done.timings)
        for offset in done.releases:
            self._released(offset)
        if rank == 0:
            flight.done, flight.buffers = done, buffers
            if flight.abandoned:
                self._read.extend(f.offset for f in done.fetched
                                  if isinstance(f, Fetched) and f.offset is not None)  # fmt: skip
            for failure in done.failures:
                self._failures.append(self._error(failure, flight.describe))
        if not flight.waiting:
            del self._flights[done.seq]

    def _released(self, offset: int) -> None:
        self._held[offset] -= 1
        if not self._held[offset]:
            del self._held[offset]
            assert self.link.upload is not None
            self.link.upload.free(offset)

    # -- errors --------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise the first failure that has not been raised yet.

        Raises:
            ExecutionError: naming the op and the user's line.
        """
        if self._failures:
            raise self._failures.popleft()

    def drop_failure(self, seq: int, node: int) -> None:
        """Do not raise this failure again: the caller reports it in another way."""
        error = self._errors.get((seq, node))
        if error is not None and error in self._failures:
            self._failures.remove(error)

    def raise_known(self, seq: int, node: int) -> None:
        """Raise the ExecutionError of an earlier node, if it is remembered."""
        error = self._errors.get((seq, node))
        if error is not None:
            raise error

    def _error(self, failure: Failure, describe: Describe | None) -> ExecutionError:
        known = self._errors.get((failure.seq, failure.node))
        if known is None:
            op, inputs, where = describe(failure.node) if describe else ("an earlier op", (), "?")
            known = ExecutionError(op, inputs, where, failure.kind, failure.detail)
            self._errors[failure.seq, failure.node] = known
            if len(self._errors) > _KEPT_ERRORS:
                self._errors.popitem(last=False)
        return known

    # -- fetches -------------------------------------------------------------------------

    def tensor(self, item: Fetched | Failure, buffers: list[memoryview]) -> torch.Tensor:
        """A fetched value as a CPU tensor of its own.

        Raises:
            ExecutionError: the value could not be computed.
        """
        self.counts.fetches += 1
        if isinstance(item, Failure):
            error = self._error(item, None)
            if error in self._failures:
                self._failures.remove(error)
            raise error
        meta = item.meta
        nbytes = meta.numel * meta.dtype.itemsize
        self.counts.bytes_fetched += nbytes
        if item.offset is not None:
            arena = self.link.fetch_arena(0)
            assert arena is not None
            flat = tensor_over(arena, item.offset, nbytes, self._read.append)
        elif nbytes:
            flat = wire.received(buffers[0])
        else:
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        typed = flat.view(meta.dtype)
        if meta.stride == contiguous_stride(meta.shape):
            return typed.view(meta.shape)
        return typed.as_strided(meta.shape, meta.stride)


def _drain(queue: deque[int]) -> list[int]:
    items = []
    while queue:
        items.append(queue.popleft())
    return items
