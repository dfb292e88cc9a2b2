"""Client: the one who talks to the workers. Numbers runs and values, keeps what is in flight."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from lazygt.errors import CollectiveMismatch, ExecutionError, ProtocolError, WorkerDied
from lazygt.graph.mesh import Stored
from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.source import Mark
from lazygt.runtime import wire
from lazygt.runtime.blocks import Region, joined
from lazygt.runtime.link import Link
from lazygt.runtime.log import InstructionLog
from lazygt.runtime.plan import Plan
from lazygt.runtime.shm import tensor_over
from lazygt.runtime.waiting import WaitLine
from lazygt.runtime.wire import Buffer, Done, Failure, Fetched, Prediction, Put, Run, Timings

#: Answers "what is node n of a rank's run?": (op, inputs as text, the user's file:line).
Describe = Callable[[int, int], tuple[str, tuple[str, ...], str]]
#: A rank's answer to a run, with the buffers that came with it.
Answer = tuple[Done, list[memoryview]]
#: Takes (rank, run, plan, who wrote it, timings) of a timed run.
Timed = Callable[[int, int, "PlanEntry | None", "Describe | None", Timings], None]

#: Kinds of failures that come from several ranks at once, for one reason.
_SHARED = frozenset({wire.COLLECTIVE_ERROR, wire.MISMATCH})
_KEPT_ERRORS = 1_000
#: What stands for an op that nobody remembers.
_UNKNOWN: tuple[str, tuple[str, ...], str] = ("an earlier op", (), "?")


class RemoteValue:
    """A value that the workers hold. When nobody speaks of it any more, its id is freed with the
    next run."""

    __slots__ = ("_dead", "id", "mark", "rest", "stored")

    def __init__(self, key: int, dead: deque[int]) -> None:
        self.id = key
        self._dead = dead
        #: how it lies on the mesh; None: every rank has all of it
        self.stored: Stored | None = None
        #: the further blocks of a value of which a rank holds several
        self.rest: Sequence[RemoteValue] = ()
        #: the user's line that made it, for whoever looks at its handle
        self.mark: Mark | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Of all its blocks."""
        return (self.id, *[block.id for block in self.rest])

    def __del__(self) -> None:
        self._dead.append(self.id)


class PlanEntry:
    """What the ranks run, with what they are known to remember of its last run.

    Args:
        plans: each rank's plan, or one that all of them run.
    """

    __slots__ = (
        "considered",
        "frees",
        "inputs",
        "names",
        "params",
        "plans",
        "runs",
        "salt",
        "sent",
        "ships",
        "size",
        "swap",
    )

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        self.salt, self.names = _names(self.plans)
        self.inputs, self.frees = Prediction(), Prediction()
        self.params: tuple[Any, ...] | None = None
        self.sent = False
        self.runs = 0
        #: how often it was shipped, and the bytes of one such message
        self.ships = self.size = 0
        #: (fused node, artifact) of the compiled tier, for each of ``plans``, once it is there
        self.swap: tuple[Sequence[tuple[int, str]], ...] = ()
        #: whether it has been decided what of it is compiled
        self.considered = False

    @property
    def plan(self) -> Plan:
        """Rank 0's."""
        return self.plans[0]

    def of(self, rank: int) -> int:
        """Which of ``plans`` a rank runs."""
        return rank if len(self.plans) > 1 else 0


@dataclass(slots=True)
class _Flight:
    entry: PlanEntry | None
    describe: Describe | None
    waiting: set[int]
    #: ranks whose answers are looked at
    asked: frozenset[int]
    answers: dict[int, Answer] = field(default_factory=dict)
    abandoned: bool = False
    #: (op, line, kind of error) of what has failed on some rank
    failed: set[tuple[str, str, str]] = field(default_factory=set)


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
        #: for each rank the room in its arena that nobody reads any more
        self._read: list[deque[int]] = [deque() for _ in range(link.world_size)]
        self._forget: list[PlanEntry] = []
        self._known: dict[bytes, PlanEntry] = {}
        self._flights: OrderedDict[int, _Flight] = OrderedDict()
        self._written: list[tuple[int, int, tuple[int, ...], str]] = []
        self._held: dict[int, int] = {}
        self._failures: deque[ExecutionError] = deque()
        self._errors: OrderedDict[tuple[int, int, int], ExecutionError] = OrderedDict()

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
        ranks: Collection[int] = (0,),
    ) -> tuple[int, list[RemoteValue]]:
        """Send a run; returns its number and the values of the plan's outputs.

        Does not wait; see ``hold_back``.

        Args:
            ranks: those that send what is fetched, and whose answers are looked at.
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
        frees = sorted(_drain(self._dead))
        if entry is None:
            run.frees = tuple(frees) or None
        else:
            run.inputs = entry.inputs.encode(inputs, base)
            run.frees = entry.frees.encode(frees, base)
            run.params = None if params == entry.params and entry.runs else params
            entry.params = params
            entry.runs += 1
        messages = self._encoded(run, buffers, entry, ranks)
        self.counts.last_run = len(messages[0][0])
        self.counts.largest_run = max(self.counts.largest_run, self.counts.last_run)
        everyone = set(range(self.link.world_size))
        self._flights[self._seq] = _Flight(entry, describe, everyone, frozenset(ranks))
        for rank, frames in enumerate(messages):
            self._send("run", rank, frames, why)
        return self._seq, [RemoteValue(base + k, self._dead) for k in range(outputs)]

    def _encoded(
        self, run: Run, buffers: list[Buffer], entry: PlanEntry | None, ranks: Collection[int]
    ) -> list[list[Buffer]]:
        """The message to each rank; ranks that are told the same get one object."""
        fetches = run.fetches
        made: dict[Any, list[Buffer]] = {}
        messages = []
        for rank, read in enumerate(self._read):
            run.digest = None if entry is None else entry.names[entry.of(rank)]
            run.fetches = fetches if rank in ranks else ()
            run.releases = tuple(_drain(read))
            told = run.digest, run.fetches, run.releases
            if told not in made:
                made[told] = wire.encode_run(run, buffers)
            messages.append(made[told])
        return messages

    def hold_back(self) -> None:
        """Wait while more than ``max_ahead`` runs are unanswered.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while len(self._flights) > self._max_ahead:
            self._take_next()

    def wait(self, seq: int) -> dict[int, Answer]:
        """The answers to run ``seq`` of all ranks that were asked for something.

        Raises:
            WorkerDied, WorkerFrozen: instead of an answer.
        """
        flight = self._flights[seq]
        try:
            while len(flight.answers) < len(flight.asked):
                self._take_next()
        except BaseException:
            # Ctrl-C: the answer will come, and nobody will look at it
            flight.abandoned = True
            for rank, (done, _) in flight.answers.items():
                self._drop(rank, done)
            raise
        return flight.answers

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
            if self._known.get(entry.names[0]) is entry:
                del self._known[entry.names[0]]
                self._forget.append(entry)

    def entry_for(self, plans: Sequence[Plan]) -> PlanEntry:
        """The entry of the ranks' plans: the one there is for the same content, or a new one.

        Args:
            plans: each rank's, or one that all ranks run.
        """
        entry = PlanEntry(plans)
        return self._known.setdefault(entry.names[0], entry)

    def entries(self) -> list[PlanEntry]:
        """The plans that are known, oldest first."""
        return list(self._known.values())

    def _send_plan(self, entry: PlanEntry, why: str) -> None:
        if entry.sent:
            return
        forgotten, self._forget = self._forget, []
        made: dict[int, list[Buffer]] = {}
        for rank in range(self.link.world_size):
            which = entry.of(rank)
            if which not in made:
                name = entry.names[which]
                forget = [n for old in forgotten if (n := old.names[old.of(rank)]) != name]
                graph = entry.plans[which].graph
                made[which] = wire.encode_plan(name, graph, True, forget, entry.salt)
            self._send("plan", rank, made[which], why)
        self._shipped(entry, made[0], self.link.world_size)
        entry.sent = True

    def swap(self, entry: PlanEntry, groups: Sequence[Sequence[tuple[int, str]]]) -> None:
        """Have every worker run compiled code from its next run of a plan on.

        Args:
            groups: (fused node, artifact) pairs for each of ``entry.plans``.
        """
        self._send_plan(entry, "swap")
        entry.swap = tuple(groups)
        for rank in range(self.link.world_size):
            self._send_swap(entry, rank)
        self.swapping[entry.names[0]] = self.link.world_size

    def _send_swap(self, entry: PlanEntry, rank: int) -> None:
        which = entry.of(rank)
        frames = wire.encode_swap(entry.names[which], entry.swap[which])
        self._send("swap", rank, frames, "compiled")

    def _shipped(self, entry: PlanEntry, frames: Sequence[Buffer], times: int) -> None:
        self.counts.plans_sent += 1
        entry.ships += times
        entry.size = sum(len(frame) for frame in frames)

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

    def order(self, rank: int, number: int, order: tuple[Any, ...]) -> None:
        """Have a worker write blocks for a transfer; ``written`` takes its answer."""
        self._send("write", rank, wire.encode_write(number, order), "transfer()")

    def written(self, seconds: float) -> list[tuple[int, int, tuple[int, ...], str]]:
        """(rank, number, checksums, error) of what was ordered and is done.

        Waits at most ``seconds`` for something to come.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        message = None if self._written else self._receive(seconds)
        while message is not None:
            self._take(message)
            message = self._receive(0)
        written, self._written = self._written, []
        return written

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
        kinds = {
            wire.DONE: "done",
            wire.NEED: "need",
            wire.SWAPPED: "swapped",
            wire.WROTE: "wrote",
        }
        number = header[1] if isinstance(header[1], int) else 0
        self.log.write("receive", kinds.get(header[0], "?"), rank, number, size, "")
        if header[0] == wire.NEED:
            self._resend(rank, header[1], header[2])
        elif header[0] == wire.DONE:
            self._done(rank, wire.decode_done(header), frames[1:])
        elif header[0] == wire.WROTE:
            self._written.append((rank, *header[1:]))
        elif header[0] == wire.SWAPPED:
            self._swapped(rank, header[1], header[2])
        else:
            raise ProtocolError(f"worker {rank} sent a message of unknown kind {header[0]!r}")

    def _resend(self, rank: int, seq: int, digest: bytes) -> None:
        flight = self._flights.get(seq)
        entry = None if flight is None else flight.entry
        if entry is None:
            raise ProtocolError(f"worker {rank} asks for a plan that was never sent")
        graph = entry.plans[entry.of(rank)].graph
        frames = wire.encode_plan(digest, graph, False, salt=entry.salt)
        self._send("plan", rank, frames, f"worker {rank} had forgotten it")
        self._shipped(entry, frames, 1)
        if entry.swap:
            self._send_swap(entry, rank)

    def _swapped(self, rank: int, digest: bytes, error: str) -> None:
        name = self._rank0_name(rank, digest)
        if name in self.swapping:
            self.swapping[name] -= 1
            if not self.swapping[name]:
                del self.swapping[name]
        if error:
            self.swap_errors.append((digest, f"worker {rank}: {error}"))

    def _rank0_name(self, rank: int, digest: bytes) -> bytes:
        """The name that rank 0 has for a plan that a rank knows by another."""
        known = self._known.values()
        return next((e.names[0] for e in known if e.names[e.of(rank)] == digest), digest)

    def _done(self, rank: int, done: Done, buffers: list[memoryview]) -> None:
        flight = self._flights[done.seq]
        flight.waiting.discard(rank)
        if done.timings is not None and self.timed is not None:
            self.timed(rank, done.seq, flight.entry, flight.describe, done.timings)
        for offset in done.releases:
            self._released(offset)
        if rank in flight.asked:
            flight.answers[rank] = done, buffers
            if flight.abandoned:
                self._drop(rank, done)
        for failure in done.failures:
            self._failed(flight, self._error(rank, failure, flight.describe))
        if not flight.waiting:
            del self._flights[done.seq]

    def _failed(self, flight: _Flight, error: ExecutionError) -> None:
        """Note a failure, unless another rank's is the same or its cause."""
        follows = error.kind in _SHARED and flight.failed
        # of one op, one rank may fail to make the result and another to receive it
        what = error.op, error.where, error.kind
        if not follows and what not in flight.failed:
            self._failures.append(error)
        flight.failed.add(what)

    def _drop(self, rank: int, done: Done) -> None:
        """Give back the room of what was fetched and is not wanted any more."""
        self._read[rank].extend(
            f.offset for f in done.fetched if isinstance(f, Fetched) and f.offset is not None
        )

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
            self._raise(self._failures[0])

    def _raise(self, error: ExecutionError) -> NoReturn:
        """Raise a failure, or the one on another rank that is its cause, and neither again."""
        if error.kind in _SHARED:
            self.synchronize()  # the rank that is the cause may not have answered yet
            causes = (e for e in self._failures if e.kind != wire.COLLECTIVE_ERROR)
            error = next(causes, error)
        self._failures = deque(
            e for e in self._failures if e is not error and e.kind not in _SHARED
        )
        raise error

    def drop_failure(self, seq: int, node: int) -> None:
        """Do not raise this failure again: the caller reports it in another way."""
        error = self._errors.get((seq, 0, node))
        if error is not None and error in self._failures:
            self._failures.remove(error)

    def raise_known(self, seq: int, node: int) -> None:
        """Raise the ExecutionError of an earlier node, if it is remembered."""
        error = self._errors.get((seq, 0, node))
        if error is not None:
            raise error

    def _error(self, rank: int, failure: Failure, describe: Describe | None) -> ExecutionError:
        known = self._errors.get((failure.seq, rank, failure.node))
        if known is None:
            op, inputs, where = describe(failure.node, rank) if describe else _UNKNOWN
            kind = CollectiveMismatch if failure.kind == wire.MISMATCH else ExecutionError
            known = kind(op, inputs, where, failure.kind, failure.detail, rank)
            self._errors[failure.seq, rank, failure.node] = known
            if len(self._errors) > _KEPT_ERRORS:
                self._errors.popitem(last=False)
        return known

    # -- fetches -------------------------------------------------------------------------

    def fetched(
        self,
        answers: Mapping[int, Answer],
        meta: TensorMeta,
        regions: Mapping[int, Sequence[Region]] | None,
    ) -> torch.Tensor:
        """A fetched value as a CPU tensor of its own.

        Args:
            answers: of rank 0, or of each rank in ``regions``.
            regions: rank -> what of the value it has sent, one region a block; None: rank 0 has
                sent all of it.

        Raises:
            ExecutionError: the value could not be computed.
        """
        self.counts.fetches += 1
        if regions is None:
            return self._tensor(0, answers[0])
        blocks = [
            (region, self._tensor(rank, answers[rank], which))
            for rank, sent in regions.items()
            for which, region in enumerate(sent)
        ]
        return joined(meta, blocks)

    def _tensor(self, rank: int, answer: Answer, which: int = 0) -> torch.Tensor:
        fetched, buffers = answer[0].fetched, answer[1]
        item = fetched[which]
        if isinstance(item, Failure):
            self._raise(self._error(rank, item, None))
        meta = item.meta
        nbytes = meta.numel * meta.dtype.itemsize
        self.counts.bytes_fetched += nbytes
        if item.offset is not None:
            arena = self.link.fetch_arena(rank)
            assert arena is not None
            flat = tensor_over(arena, item.offset, nbytes, self._read[rank].append)
        elif nbytes:
            earlier = [one for one in fetched[:which] if isinstance(one, Fetched)]
            flat = wire.received(buffers[sum(one.offset is None for one in earlier)])
        else:
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        typed = flat.view(meta.dtype)
        if meta.stride == contiguous_stride(meta.shape):
            return typed.view(meta.shape)
        return typed.as_strided(meta.shape, meta.stride)


def _names(plans: tuple[Plan, ...]) -> tuple[bytes, list[bytes]]:
    """The salt, and the name of each plan on the wire.

    Two entries may have the same plan for one rank and different ones for another; the rank
    remembers the last run of each entry, so it must not take one for the other.
    """
    if len(plans) == 1:
        return b"", [plans[0].digest]
    salt = wire.plan_name(b"".join(plan.digest for plan in plans))
    return salt, [wire.plan_name(wire.encode_graph(plan.graph), salt) for plan in plans]


def _drain(queue: deque[int]) -> list[int]:
    items = []
    while queue:
        items.append(queue.popleft())
    return items
