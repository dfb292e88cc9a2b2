"""Submission of recorded traces: planning, runs on the workers, and fetched values."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from lazygt.config import Config
from lazygt.errors import ProtocolError, exception_class
from lazygt.graph.mesh import VirtualMesh, regions_by_worker
from lazygt.graph.meta import TensorMeta
from lazygt.graph.source import CallSite, user_call_site
from lazygt.host.gc_pause import gc_paused
from lazygt.record.annotate import current_sharding, is_everywhere, restore_sharding
from lazygt.record.idle import Idle
from lazygt.record.infer import apply_stride_reports
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import NATIVE, LazyTensor, Storage, is_lazy, storage_of
from lazygt.record.trace import Trace, closed_error
from lazygt.record.trie import Provenance, TrieNode
from lazygt.recovery.recover import RecoveryRecord
from lazygt.recovery.rollback import Recorded, Rollback
from lazygt.runtime.client.client import Client
from lazygt.runtime.compiling.tiers import Tiers
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.messages import Made, Plain, Run, Several
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.values import Answer, Regions, RemoteValue
from lazygt.runtime.wire import Buffer
from lazygt.submit.history import Flush, History
from lazygt.submit.memory_categories import MemoryCategories
from lazygt.submit.planner import CachedPlan, Planner

#: Exception classes of torch's own ops; a call that waits for its op raises no other class.
_TORCH_ERRORS: tuple[Any, ...] = (RuntimeError, IndexError, ValueError, TypeError,
                                NotImplementedError, torch.OutOfMemoryError)  # fmt: skip
#: Every so many runs, answered runs are dropped from the rollback.
_FORGET_EVERY = 8
_RUN_TAG = Run.__struct_config__.tag


class DataDependentReply(NamedTuple):
    """Returned and written values of an op with shapes that depend on values, such as nonzero."""

    returned: list[Any]  # plain data, or (meta, remote value) of a tensor
    written: list[tuple[TensorMeta, RemoteValue]]  # new values of the tensors that it wrote


class Submitter:
    """Sink of a session's recorder: submits one trace after another to the workers.

    Args:
        virtual_mesh: the ranks for which plans are built, and the workers.
        history: records the flushes.

    Attributes:
        mesh: the workers.
        ranks: the ranks for which plans are built.
        names_lines: whether flushes are recorded with the user's line (read by the extension, too).
        steps: number of optimizer steps.
    """

    def __init__(
        self,
        config: Config,
        virtual_mesh: VirtualMesh,
        recorder: Recorder,
        client: Client,
        planner: Planner,
        tiers: Tiers,
        history: History,
    ) -> None:
        self.mesh, self.names_lines, self.steps = virtual_mesh.workers, True, 0
        self.ranks = virtual_mesh.ranks
        self._virtual_mesh, self._recorder, self._client = virtual_mesh, recorder, client
        self._planner, self._tiers, self._history = planner, tiers, history
        #: one worker stands for all
        self._dry = config.launcher == "dry"
        #: a value may have several blocks on a worker
        self._in_blocks = bool(config.invariant)
        self._flushes_on_backward = config.flush_on_backward
        self._process = os.getpid()
        #: rollback of failed steps; None: not available
        self.rollback: Rollback | None = None
        if client.recovery is not None and not self._in_blocks:
            self.rollback = Rollback(recorder, client, planner, config.max_ahead)
            client.undo = self.rollback.undo
        self._may_shard = virtual_mesh.ranks.world_size > 1
        #: memory categories of the workers' values
        self.categories = MemoryCategories(recorder)
        #: callback on the program's thread when an optimizer steps
        self.on_optimizer_step: Callable[[Submitter], object] | None = None
        #: watcher of optimizers' steps, until it has its result
        self.idle: Idle | None = None
        recorder.sink = self
        #: native fetcher of numbers; active as long as this reference exists
        self._fetcher = self._native_fetcher()
        client.on_recovery.append(self._renew_fetcher)

    def _renew_fetcher(self, record: RecoveryRecord) -> None:
        """Replace the native fetcher after the recovery of a worker."""
        self._fetcher = None  # the recorder has at most one
        self._fetcher = self._native_fetcher()

    def _native_fetcher(self) -> Any:
        """Return the C++ fetcher of numbers; None where it is not available."""
        if NATIVE is None or self._dry or self._in_blocks or self._client.number_reader is None:
            return None
        arguments = self._recorder.native, self, Flush, self._client.number_reader, _RUN_TAG
        return self._client.link.native_fetcher(NATIVE.Fetcher, *arguments)

    # -- interface of the recorder's sink --------------------------------------------------

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> RemoteValue:
        """Upload a copy of a CPU tensor to the workers."""
        value = self._client.upload(source, meta)
        value.call_site = user_call_site(1)
        return value

    def submit(
        self, trace: Trace, reason: str, fetch: Storage | None, ask: bool, as_number: bool = False
    ) -> Any:
        """Submit a trace as a run, and begin a new trace.

        Args:
            reason: the sync point, for the history.
            fetch: the storage with the value to return.
            ask: wait for the reply to the data-dependent op that ends the trace, and return it.
            as_number: return a single number without a tensor.

        Returns:
            The fetched CPU tensor, the reply to a data-dependent op, or None.

        Raises:
            NoSession: this is a forked child; the workers answer its parent.
        """
        if os.getpid() != self._process:
            raise closed_error()
        with DEFER_INTERRUPT:
            if self._history.probe is None:
                return self._submit(trace, reason, fetch, ask, as_number)
            with self._history.probe.flush(self._history.recent):
                return self._submit(trace, reason, fetch, ask, as_number)

    def after_backward(self) -> None:
        """Sync point at the end of ``.backward()``.

        A sharded step is submitted after its update instead, so that the reduction and sharding of
        gradients are planned together with their use by the optimizer.
        """
        self._flush_after("backward", sharded=False)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Prepare an optimizer's step: save its state for a rollback, and shard a loaded state.

        State that was loaded from a checkpoint gets the placements of its parameters.
        """
        if self.rollback is not None:
            self.rollback.before_step(optimizer)
        if self.on_optimizer_step is not None and not self._step_is_sharded:
            self.on_optimizer_step(self)
        if not self._may_shard:
            return
        loaded = [
            (value, parameter)
            for parameter, state in optimizer.state.items()
            if is_lazy(parameter)
            and storage_of(parameter).placed is not None
            and storage_of(parameter).owner is self._recorder
            for value in state.values()
            if _is_loaded(value, parameter)
        ]
        for value, parameter in loaded:
            restore_sharding(value, current_sharding(parameter)._replace(fixed=False, unit=None))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Register an optimizer's step; for sharded programs this is a sync point."""
        self.steps += 1
        known = self.categories.optimizers.get(id(optimizer))
        if known is None or known() is not optimizer:  # only its first step, not every one
            self.categories.add(optimizer)
        if self.idle is not None and self.idle.stepped(optimizer):
            self.idle = None
        if self._may_shard:
            sharded = self._step_is_sharded
            self._flush_after("optimizer step", sharded=True)
            if self.on_optimizer_step is not None and sharded:
                self.on_optimizer_step(self)

    @property
    def _step_is_sharded(self) -> bool:
        """True if a step is submitted after its update, not after its backward."""
        return self._may_shard and self._recorder.trace.step.placed

    def _flush_after(self, reason: str, sharded: bool) -> None:
        """Flush at a sync point of sharded, or of other, steps."""
        recorder = self._recorder
        if not self._flushes_on_backward or recorder.closed or os.getpid() != self._process:
            return
        if self._step_is_sharded == sharded:
            recorder.flush(reason)

    # -- interface of the native fetcher, which fetches numbers with cached plans -----------

    @property
    def plain(self) -> bool:
        """True if the native fetcher may submit a run on its own: nothing else is to be done."""
        untouched: bool = self._recorder.trace.untouched
        ordinary = untouched and self._history.probe is None
        return ordinary and self._client.plain and DEFER_INTERRUPT.adopted

    def ran(self, entry: PlanRecord) -> None:
        """Count a run of a plan, which may make it hot enough to be compiled."""
        if self._tiers.busy or entry.runs <= self._tiers.warmup_runs:
            self._tiers.on_run(entry)

    def go_on(
        self,
        recorded: tuple[Any, ...],
        fetch: Storage,
        unsent: list[Buffer] | None,
        received: list[memoryview] | None,
    ) -> Any:
        """Continue a run that the native fetcher began, and return the fetched number.

        The fetcher hands over where it cannot send, the answer takes long, or there are reports.

        Args:
            recorded: as ``Recorded``, with step and call sites instead of provenance.
            fetch: the storage with the number.
            unsent: the buffers that are not sent yet.
            received: the answer, if it has arrived.
        """
        with DEFER_INTERRUPT:
            seq, base, plan, step, call_sites, *rest = recorded
            provenance = self._provenance(step, call_sites, plan)
            entry = None if plan is None else plan.entry
            self._client.expect(seq, entry, provenance, base, 1)
            self._record_run(Recorded(seq, base, plan, provenance, *rest))
            self._client.continue_run(unsent, received, "item")
            if entry is not None:
                self.ran(entry)
            answer = self._fetched(seq, fetch, None, True)
            self._handle_reports()
            return answer

    # -- one run -------------------------------------------------------------------------

    def _submit(
        self, trace: Trace, reason: str, fetch: Storage | None, ask: bool, as_number: bool
    ) -> Any:
        """Submit a trace; see ``submit``."""
        ops = trace.step.ops
        if not ops and fetch is None and self._client.idle:
            return None
        history, plan, hit = self._history, None, False
        history.flushes[reason.split(":")[0]] += 1
        living = trace.alive()  # the values that tensors of the program still show
        if ops:
            outputs = living.numbers
            plan = trace.plan(outputs)
            hit = plan is not None
            if plan is None:
                plan = self._planner.build(trace, outputs, reason)
            history.plan_hits += hit
            history.last_plan = plan.entry.plan
        # a new plan is sent as many small objects: pause the garbage collector
        send = self._run if plan is None or hit else gc_paused()(self._run)
        run, values, regions = send(trace, plan, reason, fetch)
        forced_by = user_call_site(1) or self._recorder.backward_call_site
        history.recent.append(
            Flush(
                reason,
                forced_by if self.names_lines else None,
                ops,
                None if plan is None else plan.entry.plan.digest,
                hit,
                run.seq,
            )
        )
        if plan is not None:
            self.ran(plan.entry)
            if self._in_blocks:
                values = plan.grouped(list(values))
            trace.rebind(plan, living, values, self._recorder.backward_call_site)
        del values, living
        if self._client.observer is not None:
            entry = None if plan is None else plan.entry
            self._client.observer.submitted(run.seq, entry, run.inputs, run.base)
        answer: Any = None
        if fetch is not None:
            answer = self._fetched(run.seq, fetch, regions, as_number)
        elif ask:
            answer = self._data_dependent_reply(run.seq, run.provenance)
        else:
            self._client.hold_back()  # wait if the client is ``max_ahead`` runs ahead
        self._handle_reports()
        return answer

    def _run(
        self, trace: Trace, plan: CachedPlan | None, reason: str, fetch: Storage | None
    ) -> tuple[Recorded, Iterable[RemoteValue], Regions | None]:
        """Send the run of a trace and begin a new trace, without waiting.

        Args:
            plan: the trace's plan; None: it has no ops to run.

        Returns:
            The run, its outputs, and the regions of the fetched value's blocks by rank.
        """
        entry = None if plan is None else plan.entry
        wanted, regions = self._wanted(fetch, trace, plan)
        self._recorder.next_trace()
        inputs = trace.release_inputs()
        provenance = self._provenance(trace.step, trace.call_sites, plan)
        params = tuple(trace.params)
        first_output = self._client.id_of_next_output(0)  # the run takes the ids from here on
        fetched_from = (0,) if regions is None else tuple(regions)
        seq, values = self._client.run(
            entry, inputs, params, wanted, provenance, reason, fetched_from
        )
        frees = self._client.last_frees  # a rollback needs these values again
        run = Recorded(seq, first_output, plan, provenance, params, inputs, frees, trace.shown)
        self._record_run(run)
        return run, values, regions

    def _provenance(
        self, step: TrieNode, call_sites: Sequence[CallSite | None], plan: CachedPlan | None
    ) -> Provenance:
        """Return the ops of a run with the user's lines, for errors and rollbacks."""
        origins = ((),) if plan is None else plan.origins
        return Provenance(step, call_sites, self._recorder.backward_call_site, origins)

    def _record_run(self, run: Recorded) -> None:
        """Retain a run for a rollback."""
        if self.rollback is None:
            return
        self.rollback.runs.append(run)
        if run.seq % _FORGET_EVERY == 0:
            self.rollback.forget_answered()

    def _wanted(
        self, fetch: Storage | None, trace: Trace, plan: CachedPlan | None
    ) -> tuple[tuple[int, ...], Regions | None]:
        """Return the ids of the fetched storage's blocks, and their regions by rank.

        Regions are None if rank 0 has the full value.

        Args:
            plan: the trace's plan, if the storage's value is one of its outputs.
        """
        if fetch is None:
            return (), None
        is_recorded = fetch.serial == trace.serial and fetch.index >= 0
        if fetch.remote is not None and not is_recorded:
            keys, sharding = fetch.remote.ids, fetch.remote.sharding
        else:  # an output of this run
            assert plan is not None
            position = plan.positions[fetch.index]
            keys = tuple([self._client.id_of_next_output(slot) for slot in plan.slots[position]])
            sharding = plan.shardings[position]
        if sharding is None or self._dry:
            return keys[:1], None
        return keys, regions_by_worker(self._virtual_mesh, sharding.placements, fetch.meta.shape)

    def _handle_reports(self) -> None:
        """Process the workers' reports about layouts and CUDA graph captures."""
        if self._client.unexpected_strides:
            self._learn_layouts()
        if self._client.capture_errors:
            self._warn_of_captures()

    def _learn_layouts(self) -> None:
        """Correct inferred strides by the workers' reports, and drop plans with wrong ones."""
        reports, self._client.unexpected_strides = self._client.unexpected_strides, []
        dropped = apply_stride_reports(self._recorder.inference, self._recorder.trie, reports)
        self._planner.forget(dropped)

    def _warn_of_captures(self) -> None:
        """Warn of CUDA graphs that workers could not capture."""
        errors, self._client.capture_errors = self._client.capture_errors, []
        warnings.warn(
            f"lazygt: a CUDA graph could not be captured: {errors[0]}\nThe plan runs step by "
            f"step, as before, and that worker captures no others. "
            f"lazygt.session(compile=Compile(cuda_graphs='off')) asks for none.",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- answers -------------------------------------------------------------------------

    def _wait(self, seq: int) -> dict[int, Answer]:
        """Wait for a run; return the answers by rank."""
        probe = self._history.probe
        if probe is None:
            answers: dict[int, Answer] = self._client.wait(seq)
            return answers
        begin = time.monotonic_ns()
        answers = self._client.wait(seq)
        probe.record("wait for the answer", begin, {"run": seq})
        return answers

    def _fetched(self, seq: int, storage: Storage, regions: Regions | None, as_number: bool) -> Any:
        """Wait for a run; return the fetched value of a storage.

        Args:
            regions: of the value's blocks by rank; None: rank 0 has the full value.
            as_number: return a Python number.
        """
        client = self._client
        if as_number and regions is None and self._history.probe is None:
            answers = client.wait(seq, as_number=True)
            if type(answers) is not dict:  # the number, which came alone
                client.raise_failure()
                return answers
        else:
            answers = self._wait(seq)
        value = client.fetched(answers, storage.meta, regions, as_number)
        client.raise_failure()
        if self._dry and isinstance(value, torch.Tensor) and value.shape != storage.meta.shape:
            # the only worker of a dry run has one block, and no values
            return torch.zeros(storage.meta.shape, dtype=value.dtype, device="cpu")
        return value

    def _data_dependent_reply(self, seq: int, provenance: Provenance) -> DataDependentReply:
        """Return the reply to a run that ends with a data-dependent op.

        Raises:
            ExecutionError: an earlier op failed.
            Exception: torch's own, if the data-dependent op failed.
        """
        done, _ = self._wait(seq)[0]
        reply = done.reply
        if reply is None:
            raise ProtocolError("worker 0 did not say what a data-dependent op returned")
        failure = reply.failure
        if failure is not None:
            eager = exception_class(failure.kind)
            is_earlier_op = failure.seq != seq or not provenance.is_last(failure.node)
            if is_earlier_op or eager is None or eager not in _TORCH_ERRORS:
                self._client.raise_for(0, failure)
            self._client.drop_failure(0, failure)
            raise eager(failure.detail)
        self._client.raise_failure()
        call_site = provenance.call_sites[-1]
        returned = [self._received(item, call_site) for item in reply.returned]
        return DataDependentReply(
            returned, [self._adopted(tensor, call_site) for tensor in reply.written]
        )

    def _received(self, item: Made | Several | Plain, call_site: CallSite | None) -> Any:
        """Convert a value that an op has returned, from its form in the worker's message.

        Returns:
            Plain data, (meta, remote value) of a tensor, or a list of these.
        """
        match item:
            case Several():
                return [self._received(element, call_site) for element in item.items]
            case Plain():
                return item.value
            case Made():
                return self._adopted(item, call_site)

    def _adopted(self, tensor: Made, call_site: CallSite | None) -> tuple[TensorMeta, RemoteValue]:
        """Return the meta and the remote value of a tensor that a worker created."""
        value = self._client.adopt(tensor.id)
        value.call_site = call_site
        return tensor.meta, value


def _is_loaded(value: Any, parameter: LazyTensor) -> bool:
    """Return whether a value has the parameter's shape and is replicated by default."""
    return is_lazy(value) and value.shape == parameter.shape and is_everywhere(value)
