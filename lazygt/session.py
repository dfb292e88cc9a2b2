"""Session: connects recording, passes and the runtime."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Unpack

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lazygt import native
from lazygt.config import Config, takes_settings
from lazygt.errors import NoSession
from lazygt.graph.mesh import Mesh, VirtualMesh
from lazygt.machine import Machine, default_machine, machine_of, on_hosts
from lazygt.record import device
from lazygt.record.bridge import new_recorder
from lazygt.record.context import NAME, current_session, session_stack
from lazygt.record.idle import Idle
from lazygt.record.recorder import recorder_of
from lazygt.record.tensor import LazyTensor, is_lazy, storage_of, view_of, viewer
from lazygt.record.trie import TraceTrie
from lazygt.recovery.checkpoint.checkpointing import CheckpointRecord, Checkpoints
from lazygt.recovery.checkpoint.saved import Saved
from lazygt.recovery.recover import RecoveryRecord
from lazygt.runtime.client.client import Client
from lazygt.runtime.client.console import Console
from lazygt.runtime.cluster.opening import by_engine, device_type, open_link
from lazygt.runtime.compiling.tiers import CompileRecord, Tiers
from lazygt.runtime.executors.compiled import Cache
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.link import Link
from lazygt.runtime.messages import Captured
from lazygt.runtime.plan import Plan
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.values import RemoteValue
from lazygt.settings import Settings, expand, expand_user_keywords
from lazygt.submit.history import History, Probe
from lazygt.submit.memory_categories import OTHER, by_kind
from lazygt.submit.planner import CachedPlan, Planner, Stages
from lazygt.submit.submission import Submitter
from lazygt.transfer import copy_request

if TYPE_CHECKING:
    from lazygt.passes.sharding.axis import AxisStep
    from lazygt.submit.memory import SessionMemory
    from lazygt.submit.status_page import StatusWriter
    from lazygt.submit.weights import SessionSource


#: Factory of the workers' copier of values for transfers.
COPIER = "lazygt.transfer.copier:copier_for"


class Session:
    """Workers, plans and the random generator; opened by ``lazygt.session(...)``.

    Use it as a context manager. Inside, new tensors are created on device ``lazygt`` (unless
    ``Tracing(default_device=False)``), ops are recorded, and sync points ship them.

    Each setting is also read from the variable ``LAZYGT_<NAME>``; a keyword wins.

    Raises:
        TypeError: a keyword is no setting.
        ValueError: a setting is out of its range.
    """

    @takes_settings
    def __init__(self, **settings: Unpack[Settings]) -> None:
        native.check_choice()
        native.warn_of_python()
        requested = expand(_interceptor.settings(expand_user_keywords(settings, 2)))
        self.config = config = Config.load(**by_engine(requested))
        #: grid of the workers with named axes
        self.mesh = Mesh.of(config.mesh or {"workers": config.workers})
        #: the workers, and the (virtual) ranks for which plans are built
        self._virtual_mesh = VirtualMesh.of(self.mesh, config.invariant)
        #: cost model of the plans
        self.machine = _find_machine(config)
        self._checkpoints = None if config.checkpoint is None else Checkpoints(config)
        self._link, opened = _open_link(config, self.mesh)
        if opened.device != config.device:  # a pool has decided on the device
            self.config = config = opened
            self.machine = _find_machine(config)
        #: removes the hooks, at the latest when the session is garbage-collected
        hooks: list[RemovableHandle] = []
        self._remove_all_hooks = weakref.finalize(self, _remove_hooks, hooks)
        try:
            self._connect(config, hooks)
            _interceptor.on_session_opened(self)
        except BaseException:
            self._remove_all_hooks()
            self._link.close()
            raise

    def _connect(self, config: Config, hooks: list[RemovableHandle]) -> None:
        """Create recorder, planner and client on top of the link."""
        #: the machine with the network's costs, if workers are on several hosts. Only reports use
        #: these costs: plans, and therefore bits, must not depend on the workers' hosts
        self.costs = self.machine
        if len(self._link.hosts) > 1:
            self.costs = on_hosts(self.machine, self._virtual_mesh, self._link.hosts)
        self.device_type = device_kind = device_type(config)
        self._console = Console.of(config.log)
        recovers = config.recovery == "auto" and config.launcher not in {"inline", "dry"}
        self._client = Client(
            self._link, config.max_ahead, config.shm_threshold, self._console,
            (config.snapshot_cost, config.journal_bytes) if recovers else None,
            device_kind != "cpu",
        )  # fmt: skip
        trie = TraceTrie(
            config.max_plans, config.max_plan_bytes, config.max_trie_nodes,
            config.max_graph_nodes, config.max_graph_bytes, self.mesh.world_size,
        )  # fmt: skip
        self.recorder = new_recorder(trie, device_kind, config.ship_code, config.threads is None)
        self._tiers = Tiers(
            self._client, device_kind, config.compile, Cache(config.cache_dir), config.frozen_after,
            config.compile_timeout,
        )  # fmt: skip
        self._history = History()
        self._planner = Planner(
            config, self._virtual_mesh, self.machine, self.recorder, self._client, self._tiers,
            self._history,
        )  # fmt: skip
        self._submitter = Submitter(
            config, self._virtual_mesh, self.recorder, self._client, self._planner, self._tiers,
            self._history,
        )  # fmt: skip
        if self._checkpoints is not None:
            mesh = self._virtual_mesh
            self._checkpoints.connect(self.recorder, self._client, mesh, config)
        self._owner_pid = os.getpid()
        self._closing = threading.Lock()
        #: True between ``open`` and ``close``, which ends the block that ``open`` has begun
        self._entered_by_open = False
        self._weight_source: SessionSource | None = None
        hooks.append(register_optimizer_step_pre_hook(self._submitter.before_step))
        hooks.append(register_optimizer_step_post_hook(self._submitter.after_step))
        self._status: StatusWriter | None = None
        if self._link.status is not None:
            # why: it loads the mailboxes, which `import lazygt` does not need
            from lazygt.submit.status_page import StatusWriter

            self._status = StatusWriter(self, self._link.status, self._link.name)
            self._status.start()
        self.idle = self._submitter.idle = Idle(self, config.default_device)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to copy or pickle the session.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a lazygt.session can't be copied or pickled: it owns worker processes. Leave it out "
            "of copied objects, or ask lazygt.current() for the open one"
        )

    # -- context manager -----------------------------------------------------------------

    def __enter__(self) -> Session:
        """Record ops in this session until the block ends; reentrant."""
        self.idle.enter()
        self._check_open()
        try:
            device.open_session(self)
        except BaseException:
            if self not in session_stack:
                self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the session at the end of its outermost block."""
        if session_stack.count(self) > 1:
            device.leave_session(self)
            return
        try:
            if kind is None and not self.recorder.closed and os.getpid() == self._owner_pid:
                self.synchronize()
                if self._checkpoints is not None:
                    self._checkpoints.end_well()
                self.recorder.generator.restore_host_state()
                recorder, uploaded = self.recorder, self._client.counts.bytes_uploaded
                if not (recorder.ops or recorder.has_numbers or uploaded):
                    self.idle.warn_unused()
        finally:
            self._end()

    def open(self) -> Session:
        """Record ops until ``close``, for a session over several cells of a notebook.

        Idempotent.
        """
        if self not in session_stack:
            self.__enter__()
        self._entered_by_open = True
        return self

    def close(self) -> None:
        """End the workers; their values are lost. Idempotent.

        A session begun by ``open`` ends like a block: recorded ops are run, and errors raised.
        """
        opened, self._entered_by_open = self._entered_by_open, False
        if opened:
            self.__exit__(None, None, None)
        self._end()

    def _end(self) -> None:
        """Close the session with Ctrl-C deferred."""
        try:
            with self._closing, DEFER_INTERRUPT:
                self._close()
        finally:
            if current_session() is None:
                DEFER_INTERRUPT.give_back()

    def _close(self) -> None:
        """Close all parts once; a forked process leaves the workers alone."""
        if self.recorder.closed:
            return
        self.recorder.closed = True
        with ExitStack() as stack:  # callbacks run in reverse order, even if one raises
            if self._console is not None:
                stack.callback(self._console.close)
            stack.callback(self._client.close)
            if os.getpid() == self._owner_pid:
                stack.callback(self._link.close)
                if self._checkpoints is not None:
                    stack.callback(self._checkpoints.close)
                stack.callback(self._tiers.close)
                if self._status is not None:
                    stack.callback(self._status.close)
            stack.callback(self._remove_all_hooks)
            stack.callback(self.idle.close)
            stack.callback(device.close_session, self)
            stack.callback(self.recorder.generator.close)

    # -- sync points ---------------------------------------------------------------------

    def flush(self) -> None:
        """Ship the recorded ops without waiting for them."""
        self._check_entered()
        self.recorder.flush("flush()")

    def synchronize(self) -> None:
        """Ship the recorded ops and wait until the workers have run them, kernels included.

        Raises:
            ExecutionError: an op failed since the last sync point.
            WorkerDied, WorkerFrozen: a worker is gone or does not answer.
        """
        self._check_entered()
        with self.recorder.lock, DEFER_INTERRUPT:
            self.recorder.flush("synchronize()")
            self._client.finish()
            self._client.raise_failure()

    # -- checkpoints ---------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Register objects by name for ``checkpoint`` and ``resume``.

        Without ``lazygt.session(checkpoint=FOLDER)`` the three methods do nothing.

        Args:
            objects: objects with ``state_dict()`` and ``load_state_dict()`` (modules, optimizers,
                schedulers ...), tensors, dicts, and generators of random numbers.

        Raises:
            TypeError: an object of another kind.
        """
        if self._checkpoints is not None:
            self._checkpoints.register(objects)

    def resume(self) -> Saved:
        """Load the folder's last checkpoint into the registered objects.

        The result is the state after ``step`` steps of a killed run, random generators included.
        Call this right before the first step: random numbers drawn later continue their streams.

        Returns:
            The saved values; ``step`` is 0 without a checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another program, torch or lazygt.
                Nothing was loaded.
        """
        self._check_entered()
        return Saved() if self._checkpoints is None else self._checkpoints.resume()

    def checkpoint(self, step: int, *, now: bool = False, **values: Any) -> bool:
        """Mark the end of a step, at which all registered objects are consistent.

        At intervals of ``checkpoint_every`` the state is saved, overlapped with the next steps.

        Args:
            now: save the state in any case, and wait until it is on the disk.
            values: plain values to save with the state.

        Returns:
            True if this state is being saved; with ``now``, if the save has finished.

        Raises:
            CheckpointError: the folder has checkpoints that were not resumed.
            TypeError: a state or a value can't be saved.
        """
        self._check_entered()
        return self._checkpoints is not None and self._checkpoints.mark(step, values, now)

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        """Written checkpoints, oldest first."""
        return [] if self._checkpoints is None else list(self._checkpoints.records)

    def publish(
        self, name: str, value: torch.Tensor | Mapping[str, torch.Tensor], *, shared: bool = False
    ) -> None:
        """Publish a value in the session's pool, for later clients with this key; a sync point.

        See ``lazygt.Pool.publish``.

        Raises:
            ValueError: the session is in no pool.
            OverQuota: the value exceeds the quota of this key.
            TypeError: the value is neither a tensor nor a mapping of names to tensors.
        """
        self._check_entered()
        if self.config.pool is None or self.config.key is None:
            raise ValueError(
                "publish() is for a session in a pool: "
                "lazygt.session(pool=PoolAccess('tcp://HOST:PORT', ...))"
            )
        # why: only sessions in a pool need it
        from lazygt.pool.pool_client import Pool

        with Pool(self.config.pool, self.config.key) as pool:
            pool.publish(name, value, shared=shared)

    def settle(self, tensors: Sequence[torch.Tensor]) -> list[RemoteValue]:
        """Compute the values of lazy tensors, and return them as values on the workers.

        A view is copied, since a value on the workers is a full storage. A sync point; raises the
        same errors as ``synchronize``.
        """
        self._check_entered()
        with self.recorder.lock, torch.no_grad():
            handles: list[LazyTensor] = []
            for t in tensors:
                assert is_lazy(t)
                handle = t if view_of(t) is None else t.clone()
                assert is_lazy(handle)
                if storage_of(handle).remote is None:
                    self.recorder.index_of(handle)
                handles.append(handle)
            self.synchronize()
            remotes = [storage_of(t).remote for t in handles]
            return [remote for remote in remotes if remote is not None]

    @property
    def weight_source(self) -> SessionSource | None:
        """Source of weights that the workers send themselves.

        None under ``invariant``, in dry runs, and for workers on other hosts: then the client
        fetches and sends the weights.
        """
        if self.config.invariant or self.config.launcher == "dry" or self._link.mirrors:
            return None
        if self._weight_source is None:
            # why: few sessions transfer
            from lazygt.submit.weights import SessionSource

            self._weight_source = SessionSource(
                self.mesh, self._client, self.recorder.lock, self.settle
            )
        return self._weight_source

    def compiled(self, timeout: float | None = None) -> bool:
        """Wait until groups under compilation are compiled and swapped in.

        Plans are compiled after their second run. Call this afterwards, for example before timing a
        loop.

        Args:
            timeout: seconds; None: no limit. A group takes some seconds.

        Returns:
            False after a timeout.
        """
        self._check_entered()
        with self.recorder.lock, DEFER_INTERRUPT:
            return self._tiers.wait(timeout)

    def _check_entered(self) -> None:
        """Warn if the session was never entered; raise NoSession if it is closed."""
        if not self.idle.entered:
            self.idle.warn_if_never_entered()
        self._check_open()

    def _check_open(self) -> None:
        """Raise NoSession if the session is closed, or of the parent process of a fork."""
        if self.recorder.closed:
            raise NoSession("this session is closed; open a new one with lazygt.session()")
        if os.getpid() != self._owner_pid:
            raise NoSession(
                f"this session is of process {self._owner_pid}, from which this one was forked; "
                f"its workers answer that process only. Open a session of its own here"
            )

    # -- introspection -------------------------------------------------------------------

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return list(self._link.pids)

    @property
    def recoveries(self) -> list[RecoveryRecord]:
        """Replacements of workers, oldest first."""
        return list(self._client.recoveries)

    @property
    def compiler_pid(self) -> int | None:
        """Process id of the compile process; None while there is none."""
        return self._tiers.pid

    @property
    def last_plan(self) -> Plan | None:
        """Plan of the last flush with a plan."""
        return self._history.last_plan

    @property
    def history(self) -> History:
        """Flushes, plan misses and gathers of the session."""
        return self._history

    def entries(self) -> list[PlanRecord]:
        """Return the cached plans with their shipments and runs, oldest first."""
        return list(self._client.entries)

    def plans(self) -> list[Plan]:
        """List the cached plans, oldest first."""
        return [cached.entry.plan for cached in self._planner.cached_plans()]

    def compiles(self) -> list[CompileRecord]:
        """List the fused groups with requested compilations, in order of the requests."""
        return list(self._tiers.compiles.values())

    def cuda_graphs(self) -> list[tuple[PlanRecord, int, Captured]]:
        """List hot plans on GPUs: plan, rank, and its CUDA graphs or the reason for none."""
        return [
            (entry, rank, captured)
            for entry in self._client.entries
            for rank, captured in sorted(entry.captures.items())
        ]

    def stages(self, plan: Plan) -> Stages:
        """Return a plan's graph as recorded and after each pass: (name, graph) in order.

        Raises:
            ValueError: the session was not opened with ``Planning(keep_stages=True)``, or does not
                cache this plan.
        """
        return self._cached_plan(plan).stages

    def decided(self, plan: Plan) -> tuple[AxisStep, ...]:
        """Return the decisions on a plan's placements, one axis of the mesh after another.

        Empty if the plan has no values to shard.

        Raises:
            ValueError: see ``stages``.
        """
        return self._cached_plan(plan).decided

    def _cached_plan(self, plan: Plan) -> CachedPlan:
        """Find a plan in the cache by its digest; raise ValueError without ``keep_stages``."""
        if not self.config.keep_stages:
            raise ValueError("stages() needs lazygt.session(planning=Planning(keep_stages=True))")
        for cached in self._planner.cached_plans():
            if cached.entry.plan.digest == plan.digest:
                return cached
        raise ValueError(f"this session keeps no plan {plan.digest.hex()[:12]}; see plans()")

    @contextmanager
    def observed(self, make: Callable[[Client], Probe]) -> Iterator[None]:
        """Attach an observer for a block; the end of the block is a sync point.

        Args:
            make: creates the observer of the client, which sends and receives all messages.

        Raises:
            RuntimeError: an observer is attached already.
        """
        self._check_open()
        if self._history.probe is not None:
            raise RuntimeError("this session is being profiled already; end that profile first")
        self._history.probe = probe = make(self._client)
        probe.attach()
        try:
            yield
            if not self.recorder.closed:
                self.synchronize()
        finally:
            self._history.probe = None
            probe.detach(self.compiles())

    def stats(self) -> Mapping[str, Any]:
        """Counts since the session opened; reading them costs no sync point."""
        counts, history = self._client.counts, self._history
        return {
            "ops_recorded": self.recorder.ops,
            "flushes": dict(history.flushes),
            "plans_built": history.plans_built,
            "plans_resized": history.plans_resized,
            "plan_hits": history.plan_hits,
            "plan_misses": [miss.summary() for miss in history.misses],
            "ops_inferred": self.recorder.ops_inferred,
            "messages_sent": counts.messages_sent,
            "messages_received": counts.messages_received,
            "bytes_sent": counts.bytes_sent,
            "bytes_received": counts.bytes_received,
            "bytes_uploaded": counts.bytes_uploaded,
            "bytes_fetched": counts.bytes_fetched,
            "fetches": counts.fetches,
            "plans_sent": counts.plans_sent,
            "cuda_graphs": sum(captured.graphs for _, _, captured in self.cuda_graphs()),
            "largest_run_message": counts.largest_run,
            "last_run_message": counts.last_run,
            "snapshots": self._client.snapshots,
            "snapshot_bytes": counts.snapshot_bytes,
            "free_messages": 0,
            "scalar_uploads": 0,
        }

    def memory(self) -> SessionMemory:
        """Measure the memory of each worker; the result prints as a table.

        A sync point; raises the same errors as ``synchronize``.
        """
        # why: it imports rich, which few sessions need
        from lazygt.submit.memory import RankMemory, SessionMemory

        self._check_entered()
        with self.recorder.lock, DEFER_INTERRUPT:
            self.recorder.flush("memory()")
            self._client.synchronize()
            self._client.raise_failure()
            groups = by_kind(self._submitter.categories.by_id())
            measured = self._client.memory(list(groups.values()))
        names = (*groups, OTHER)
        return SessionMemory([
            RankMemory(rank, dict(zip(names, sizes.living, strict=True)), sizes.allocated,
                       sizes.peak, sizes.resident)
            for rank, sizes in enumerate(measured)
        ])  # fmt: skip

    def _repr_html_(self) -> str:
        return viewer().session_html(self)

    def __repr__(self) -> str:
        history = self._history
        state = "closed" if self.recorder.closed else "open"
        costs = "sums travel unreduced, nothing is compiled"
        same = f" for {self._virtual_mesh.ranks} ({costs})" if self.config.invariant else ""
        return (
            f"<lazygt.session {state}: {self._link.world_size} {self.device_type} worker(s){same}, "
            f"{self.config.launcher}; {self.recorder.ops} ops recorded, "
            f"{sum(history.flushes.values())} flushes, {history.plans_built} plans, "
            f"{history.plan_hits} hits>"
        )


def _open_link(config: Config, mesh: Mesh) -> tuple[Link, Config]:
    """Open the link to new workers or a pool's; return the config with their device, too."""
    if config.pool is None:
        return open_link(config, mesh, COPIER), config
    # why: it loads sockets and keys, which only sessions in a pool need
    from lazygt.pool.pool_client import PoolLink

    link = PoolLink(config, mesh, COPIER)
    return link, link.config


def _find_machine(config: Config) -> Machine:
    """Return the configured machine, else the default one of the workers' kind of device.

    Raises:
        MachineError: no machine has that name, or its file is invalid.
    """
    if config.machine is None:
        return default_machine(device_type(config))
    return machine_of(config.machine, config.cache_dir)


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove a session's hooks on all optimizers."""
    for hook in hooks:
        hook.remove()


class _Interceptor(NamedTuple):
    """Callbacks on the opening of sessions; see ``intercepted_sessions``."""

    settings: Callable[[dict[str, Any]], dict[str, Any]] = lambda settings: settings
    on_session_opened: Callable[[Session], object] = lambda session: None


_interceptor = _Interceptor()


@contextmanager
def intercepted_sessions(
    settings: Callable[[dict[str, Any]], dict[str, Any]],
    on_session_opened: Callable[[Session], object],
) -> Iterator[None]:
    """Context that changes the settings of all opened sessions, and reports the sessions.

    Args:
        settings: function from requested settings to those of the session.
        on_session_opened: called with each opened session.
    """
    global _interceptor
    previous, _interceptor = _interceptor, _Interceptor(settings, on_session_opened)
    try:
        yield
    finally:
        _interceptor = previous


def _source_of(tensor: LazyTensor) -> SessionSource | None:
    """Return the weight source of a tensor's open session; see ``copy_request.BY_DEVICE``."""
    recorder = recorder_of(tensor)
    for session in session_stack:
        if isinstance(session, Session) and session.recorder is recorder:
            return session.weight_source
    return None


copy_request.BY_DEVICE[NAME] = _source_of


def current() -> Session:
    """Return the open session.

    Raises:
        NoSession: no session is open.
    """
    session = current_session()
    if not isinstance(session, Session):
        raise NoSession("no lazygt session is open; use `with lazygt.session():`")
    return session
