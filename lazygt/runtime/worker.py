"""Worker: messages in, replies out. No socket, no process: the inline link uses it too."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lazygt.config import Config
from lazygt.errors import ProtocolError, kind_of
from lazygt.graph.flags import Flags, read_flags, write_flags
from lazygt.recovery.snapshot import Snapshots
from lazygt.runtime import kernels
from lazygt.runtime.collectives import desync, group
from lazygt.runtime.dynamic_results import DYNAMIC_IDS, DynamicResults
from lazygt.runtime.exchange import Exchange
from lazygt.runtime.executors.eager import EagerExecutor, Outcome, TimedExecutor
from lazygt.runtime.executors.interpreter import Stopped
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.host_copies import HostCopies
from lazygt.runtime.insight import WorkerInsight
from lazygt.runtime.kernels import RandomStream
from lazygt.runtime.known_runs import KnownRuns, Unfinished
from lazygt.runtime.memory import weighed
from lazygt.runtime.messages import (
    COLLECTIVE_ERROR,
    TO_WORKER,
    Done,
    Failure,
    Fetched,
    Install,
    Left,
    Lost,
    Need,
    Renew,
    Restore,
    Restored,
    Run,
    Ship,
    Snap,
    Snapped,
    Swap,
    Timings,
    Write,
)
from lazygt.runtime.plan import Plan, Schedule
from lazygt.runtime.shipped_plans import ShippedPlans
from lazygt.runtime.store import Failed, Store, Value
from lazygt.runtime.weight_copies import Copier, WeightCopies
from lazygt.runtime.wire import Buffer, Part, decode, encode

if TYPE_CHECKING:
    from lazygt.runtime.arenas import Arena

#: Text of an inline session's error when its device is lost.
_CONTEXT_GONE = (
    "\n  This process can't use its device any more: start the program again. Kernels run while "
    "others are launched, so an earlier op may be the cause: CUDA_LAUNCH_BLOCKING=1 in the "
    "environment shows which."
)


class Worker:
    """Holder of values, and executor of plans on them.

    Args:
        device: device to compute on: ``cpu``, ``cuda`` ...
        upload: the client's arena, mapped here; large uploads are used where they lie.
        fetch: this worker's own arena, for large values on their way to the client.
        max_plans, max_plan_bytes: of the executors kept; an older one is asked for again (a NEED
            message). None: as LAZYGT_MAX_PLANS and LAZYGT_MAX_PLAN_BYTES say.
        shm_threshold: bytes from which a fetched value goes through the arena. None: as
            LAZYGT_SHM_THRESHOLD says.
        cache_dir: directory of compiled code. None: as LAZYGT_CACHE_DIR says.
        plan_code: kind of code that runs plans after their first run. None: as LAZYGT_PLAN_CODE
            says.
        cuda_graphs, max_cuda_graph_bytes: see ``CudaGraphs``. None: as LAZYGT_CUDA_GRAPHS and
            LAZYGT_MAX_CUDA_GRAPH_BYTES say.
        inline: the generator is the client's own, so it is lent to a run and put back.
        copier: makes the copier of values, at the first transfer.
        encode: encodes the replies that ``handle`` returns.
        snapshots: memory for copies of the values that outlive this process.
    """

    def __init__(
        self,
        device: str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        upload: Arena | None = None,
        fetch: Arena | None = None,
        max_plans: int | None = None,
        max_plan_bytes: int | None = None,
        shm_threshold: int | None = None,
        inline: bool = False,
        cache_dir: str | None = None,
        plan_code: str | None = None,
        cuda_graphs: str | None = None,
        max_cuda_graph_bytes: int | None = None,
        copier: Callable[[torch.device], Copier] | None = None,
        encode: Callable[..., list[Buffer]] = encode,
        snapshots: Arena | None = None,
    ) -> None:
        self._encode = encode
        self._inline = inline
        #: True once the device can't be used any more, and the client has been told
        self._lost = False
        self.device = torch.device(device)
        kernels.initialize(self.device)
        self.rank, self.world_size = rank, world_size
        self.store = Store()
        config = Config.load(
            max_plans=max_plans,
            max_plan_bytes=max_plan_bytes,
            shm_threshold=shm_threshold,
            cache_dir=cache_dir,
            plan_code=plan_code,
            cuda_graphs=cuda_graphs,
            max_cuda_graph_bytes=max_cuda_graph_bytes,
        )
        self.plans = ShippedPlans(self.device, config)
        native = self.plans.make_code is NativeCode
        self.known_runs = KnownRuns(self.store) if native else None
        # Inline, values are handed over as they are.
        longest = sys.maxsize if inline else config.max_message_bytes
        copies = None if self.device.type == "cpu" else HostCopies(self.device)
        if copies is not None:
            for arena in filter(None, (upload, fetch, snapshots)):
                copies.register(arena)
        self.exchange = Exchange(self.store, copies, upload, fetch, config.shm_threshold, longest)
        self._dynamic = DynamicResults(self.store)
        self._copies = WeightCopies(self.store, self.device, copier)
        self._random = RandomStream(self.device, inline)
        #: torch's current flags; None: they are the client's own, and the client changes them
        self._flags: Flags | None = None if inline else read_flags()
        #: number of threads of kernels, unless flags set another
        self._threads = torch.get_num_threads()
        self._waiting: list[list[Buffer]] = []
        #: number of the process group, and the one that the client knows to be broken
        self._group, self._left = 0, -1
        self._snapshots = None
        if snapshots is not None:
            self._snapshots = Snapshots(snapshots, upload, self.device, world_size, copies)

    # -- messages ------------------------------------------------------------------------

    def handle(self, frames: list[Buffer]) -> list[list[Buffer]]:
        """Act on one message; return the replies.

        Raises:
            ProtocolError: the message is not of the schema, or names an unknown op.
        """
        return self._unless_lost(partial(self._handled, frames))

    @property
    def wakes(self) -> int | None:
        """An eventfd that announces ``late`` replies; None: there are never any."""
        return None if self._snapshots is None else self._snapshots.wakes

    def late(self) -> list[list[Buffer]]:
        """Return the replies to earlier messages that are there by now."""
        return self._unless_lost(self._late)

    def _late(self) -> list[list[Buffer]]:
        taken = None if self._snapshots is None else self._snapshots.taken()
        return [] if taken is None else [self._encode(taken)]

    def _unless_lost(self, work: Callable[[], list[list[Buffer]]]) -> list[list[Buffer]]:
        """Call ``work``, or tell the client, once, that the device can't be used any more."""
        if self._lost:
            return []
        try:
            return work()
        except _DeviceLost as lost:
            told = Lost(lost.failure, lost.exact)
        except ProtocolError:
            raise
        except Exception as error:
            if self._inline or not kernels.is_lost(self.device):
                raise
            told = Lost(Failure(-1, kind_of(error), str(error)))
        self._lost = True
        return [self._encode(told)]

    def _handled(self, frames: list[Buffer]) -> list[list[Buffer]]:
        if self.known_runs is not None and len(frames) == 1 and not self._waiting:
            told = self.known_runs.run(frames[0])
            if told is not None:
                return self._answered(told if type(told) is list else self.finished(told))
        message = decode(frames, TO_WORKER)
        if self.known_runs is not None and type(message) is not Run:
            self.known_runs.forget()
        if self._waiting and not isinstance(message, Ship | Restore):
            self._waiting.append(_kept(frames))  # in its turn
            return []
        match message:
            case Run():
                return self._run_or_ask(message, frames)
            case Ship():
                told = self.plans.take(message, frames)
                waiting, self._waiting = self._waiting, []
                replies = [reply for message in waiting for reply in self.handle(message)]
                return replies if told is None else [self._encode(told), *replies]
            case Swap():
                return [self._encode(self.plans.swap(message))]
            case Install():
                return [self._encode(self.plans.install(message, frames[1:]))]
            case Write():
                return [self._encode(self._copies.write(message))]
            case Renew():
                self._renew(message)
            case Snap():
                snapped = self._snap(message)
                return [] if snapped is None else [self._encode(snapped)]
            case Restore():
                return [self._encode(self._restore(message))]
        return []

    def _run_or_ask(self, run: Run, frames: list[Buffer]) -> list[list[Buffer]]:
        """Answer a run; if its plan is not known (any more), ask for that and let it wait."""
        if run.digest is not None and run.digest not in self.plans.executors:
            self._waiting.append(_kept(frames))
            return [self._encode(Need(run.seq, run.digest))]
        done = self._run(run, frames[1:])
        news = [] if run.digest is None else self.plans.news(run.digest)
        *departure, done = self._answered(done)
        return [*departure, *map(self._encode, news), done]

    def insight(self) -> WorkerInsight:
        """Return an object that reports this worker's state to another thread."""
        marked = None if self._snapshots is None else self._snapshots.marked
        return WorkerInsight(partial(weighed, self.store, (), self.device), marked)

    def close(self) -> None:
        """Drop all values."""
        self.store.clear()
        self.plans.clear()
        if self.known_runs is not None:
            self.known_runs.forget()
        self._copies.close()

    def _answered(self, done: list[Buffer]) -> list[list[Buffer]]:
        """Return the answer to a run, after the messages that precede it.

        If NCCL kernels were given up, all values fail: the buffers that these exchanges were to
        fill have their old bytes.
        """
        joined = group.current() if self.world_size > 1 else None
        if joined is not None and joined.parted_from is not None:
            told = decode(done, (Done,))
            assert isinstance(told, Done)
            for fetched in told.fetched:
                if isinstance(fetched, Fetched) and fetched.offset is not None:
                    self.exchange.free(fetched.offset)
            why = f"rank {joined.parted_from} has left while ranks were exchanging values"
            failure = Failure(-1, COLLECTIVE_ERROR, why, told.seq)
            failures = [*told.failures, failure] if told.fetched else told.failures
            told = Done(told.seq, failures, told.releases, [failure] * len(told.fetched))
            done = self._encode(told)
        return [*self._departure(), done]

    def _departure(self) -> list[list[Buffer]]:
        """Return the message, sent once, before a run's answer, that this rank left its group."""
        joined = group.current() if self.world_size > 1 else None
        if joined is None or not joined.left or self._left == self._group:
            return []
        self._left = self._group
        return [self._encode(Left(self._group))]

    def _renew(self, message: Renew) -> None:
        """Join a new process group. All ranks are told to, when all have answered all runs."""
        joined = group.current()
        if joined is not None and joined.nccl:
            self._doubt(message.since)
        group.renew(message.number)
        self._group = message.number

    def _snap(self, message: Snap) -> Snapped | None:
        """Take a snapshot; from here on runs are independent of earlier messages.

        Returns:
            The answer; None: ``late`` will have it.
        """
        if self._snapshots is None:
            raise ProtocolError("this worker was started without memory for snapshots")
        self.plans.begin_anew()
        return self._snapshots.take(message, self.store, self._dynamic.next_id, self._random.state)

    def _restore(self, message: Restore) -> Restored:
        """Restore a snapshot. Later work of this rank is repeated, on all ranks."""
        if self._snapshots is None:
            raise ProtocolError("this worker was started without memory for snapshots")
        self.plans.begin_anew()
        self.plans.clear()
        self._waiting.clear()
        self._snapshots.restore(message, self.store)
        self._dynamic.next_id = message.next_dynamic or DYNAMIC_IDS
        self._random.set(message.generator)
        if self.world_size > 1:
            group.renew(message.group)
            self._group = message.group
        return Restored(message.epoch)

    def _doubt(self, since: int) -> None:
        """Mark values as failed: NCCL does not report for which of them ranks have met."""
        why = Failure(-1, COLLECTIVE_ERROR, "the ranks parted while it was being computed")
        for key in self.store.made_since(since):
            self.store.put(key, Failed(why))

    # -- runs ----------------------------------------------------------------------------

    def _run(self, run: Run, buffers: Sequence[Buffer]) -> list[Buffer]:
        if run.timed:
            kernels.finish(self.device)
        begin = time.monotonic_ns() if run.timed else 0
        done = Done(run.seq)
        for offset in run.releases:
            self.exchange.free(offset)
        spare = iter(buffers)
        for put in run.puts:
            self.exchange.receive(put, spare, done)
        if run.digest is None:
            done.releases.extend(self.store.free(run.frees[1] if run.frees else ()))
        else:
            self._execute(run, done)
        replies = self._fetched(run.fetches, done, run.timed)
        if run.weigh is not None:
            done.memory = weighed(self.store, run.weigh, self.device)
        if run.timed:
            steps = () if done.timings is None else done.timings.steps
            done.timings = Timings(begin, time.monotonic_ns(), steps)
        return self._encode(done, replies)

    def finished(self, told: Unfinished) -> list[Buffer]:
        """Finish a known run after its program has ended or stopped at some node."""
        seq, base, digest, fetches, stopped = told
        done = Done(seq)
        if stopped is not None:
            executor = self.plans.executor(digest)
            assert executor is not None
            outcome = executor.go_on(Stopped(*stopped), self.plans.known[digest].params)
            self._settle(executor.plan, seq, base, outcome, done)
        return self._encode(done, self._fetched(fetches, done))

    def _fetched(self, fetches: Sequence[int], done: Done, waited: bool = False) -> list[Buffer]:
        """Note fetched values, or their failures, in ``done``; return their buffers.

        Args:
            waited: each op has ended before the next began.

        Raises:
            _DeviceLost: something has failed, for good.
        """
        replies = self.exchange.fetched(fetches, done)
        failures = [*done.failures, *(f for f in done.fetched if isinstance(f, Failure))]
        if failures and kernels.is_lost(self.device):
            first = failures[0]
            if not self._inline:
                raise _DeviceLost(first, waited and first.node >= 0 and first.seq == done.seq)
            for failure in failures:
                failure.detail = failure.detail.removesuffix(_CONTEXT_GONE) + _CONTEXT_GONE
        return replies

    def _execute(self, run: Run, done: Done) -> None:
        assert run.digest is not None
        executor, known = self.plans.executor(run.digest), self.plans.known[run.digest]
        assert executor is not None
        ids = known.inputs.decode(run.inputs, run.base)
        frees = known.frees.decode(run.frees, run.base)
        if run.params is not None:
            known.params = run.params
        if self._flags is not None and self._flags != executor.plan.flags:
            self._use(executor.plan.flags)
        graph = executor.plan.outline
        if len(ids) != len(graph.inputs) or len(known.params) != len(graph.params):
            raise ProtocolError("a run with the wrong number of inputs or parameters")
        inputs = self._inputs(executor.schedule, ids, frees)
        done.releases.extend(self.store.free(frees))
        if run.timed:
            kept = self._snapshots
            mark = None if kept is None else partial(kept.mark, run.seq)
            executor = TimedExecutor(executor.plain, mark)
        if known.checked != self._group:
            known.checked = self._group
            known.mismatch = self._mismatch(executor.plan, run.seq, known.own)
        refused = run.failed or known.mismatch
        if refused is None:
            outcome = self._isolated(executor, inputs, known.params)
        else:
            outcome = _nothing(executor.plan, refused)
        if isinstance(executor, TimedExecutor):
            done.timings = Timings(0, 0, tuple(executor.times))
        self._settle(executor.plan, run.seq, run.base, outcome, done)
        lends = self._random.is_lent and executor.plan.draws
        if self.known_runs is not None and known.mismatch is None and not (run.timed or lends):
            self.known_runs.keep(run.digest, known, executor)

    def _use(self, flags: Flags) -> None:
        """Set torch's flags for a plan, and forget known runs, which ran under others."""
        if self.known_runs is not None:
            self.known_runs.forget()
        write_flags(flags, self._threads)
        self._flags = flags

    def _settle(self, plan: Plan, seq: int, base: int, outcome: Outcome, done: Done) -> None:
        """Keep the outputs of a run, and note its failures and data-dependent results."""
        self.store.put_from(base, _stamped(outcome.outputs, seq))
        done.failures = [failure.during(seq) for failure in outcome.failures]
        if plan.asks:
            self._dynamic.describe(outcome, done, seq, len(plan.steps.graph.nodes) - 1)

    def _mismatch(self, plan: Plan, run: int, own: bool) -> Failure | None:
        """Return the reason for which ranks must not run a new plan: they would not meet."""
        joined = group.current() if self.world_size > 1 else None
        return None if joined is None else desync.check(joined, run, plan.steps.graph, own)

    def _inputs(self, schedule: Schedule, ids: list[int], frees: list[int]) -> list[Value]:
        """Return the inputs of a run; those that it overwrites without owning are copied."""
        inputs = self.store.get_all(ids)
        freed = set(frees)
        for position in schedule.writes.owned_inputs:
            value, key = inputs[position], ids[position]
            if type(value) is not Failed and (key not in freed or self.store.is_borrowed(key)):
                inputs[position] = kernels.clone(value)  # type: ignore[arg-type]
        return inputs

    def _isolated(
        self, executor: EagerExecutor, inputs: list[Value], params: tuple[Any, ...]
    ) -> Outcome:
        """Run a plan with this worker's random stream."""
        if not executor.plan.draws:
            return executor.run(inputs, params)
        with self._random.lent():
            return executor.run(inputs, params)


class _DeviceLost(Exception):
    """The device can't be used any more; see ``Lost``."""

    def __init__(self, failure: Failure, exact: bool) -> None:
        self.failure, self.exact = failure, exact


def _kept(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return a message that outlives the memory that it came in."""
    return [frame if isinstance(frame, Part) else bytes(frame) for frame in frames]


def _nothing(plan: Plan, failure: Failure) -> Outcome:
    """Return the outcome of a plan that was not run."""
    failed = Failed(failure)
    return Outcome([failed for _ in plan.outline.outputs], [failure], failed, [])


def _stamped(values: list[Value], seq: int) -> list[Value]:
    """Return the values, with the run's number in new failures."""
    if Failed not in map(type, values):
        return values
    return [Failed(v.failure.during(seq)) if isinstance(v, Failed) else v for v in values]
