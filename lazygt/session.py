"""Session: the one room where recording, passes and the runtime meet."""

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
from lazygt.config import Config, Settings, takes_settings
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
from lazygt.recovery.checkpoint.program import CheckpointRecord, Checkpoints
from lazygt.recovery.checkpoint.saved import Saved
from lazygt.recovery.recover import RecoveryRecord
from lazygt.runtime.client import Client
from lazygt.runtime.compiling.artifacts import Cache
from lazygt.runtime.compiling.tiers import Compile, Tiers
from lazygt.runtime.console import Console
from lazygt.runtime.launch.interrupts import DEFER_INTERRUPT
from lazygt.runtime.launch.link import Link
from lazygt.runtime.launch.opening import by_engine, device_type, open_link
from lazygt.runtime.messages import Captured
from lazygt.runtime.plan import Plan
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.values import RemoteValue
from lazygt.submit.history import History, Probe
from lazygt.submit.memory import OTHER, by_kind
from lazygt.submit.planner import CachedPlan, Planner, Stages
from lazygt.submit.submission import Submitter
from lazygt.transfer import copy_request

if TYPE_CHECKING:
    from lazygt.passes.sharding.axis import AxisStep
    from lazygt.submit.memory import SessionMemory
    from lazygt.submit.status_page import StatusWriter
    from lazygt.submit.weights import SessionSource


#: What lets workers copy their values for transfers.
COPIER = "lazygt.transfer.copier:copier_for"


class Session:
    """Workers, plans and the generator; ``lazygt.session(...)`` makes one.

    Use it as a context manager. Inside, new tensors are made on device ``lazygt`` (unless
    ``default_device=False``), ops are recorded, and sync points ship them.

    Each setting is also read from the variable ``LAZYGT_<NAME>``; a keyword wins.

    Raises:
        TypeError: a keyword is no setting.
        ValueError: a setting is out of its range.
    """

    @takes_settings
    def __init__(self, **settings: Unpack[Settings]) -> None:
        native.check_choice()
        native.warn_of_python()
        self.config = config = Config.load(**by_engine(_overseer.settings({**settings})))
        #: the workers as a grid with named axes
        self.mesh = Mesh.of(config.mesh or {"workers": config.workers})
        self._virtual_mesh = VirtualMesh.of(self.mesh, config.invariant)
        #: by whose costs plans are made
        self.machine = _machine(config)
        self._checkpoints = None if config.checkpoint is None else Checkpoints(config)
        self._link, opened = _open(config, self.mesh)
        if opened.device != config.device:
            self.config = config = opened
            self.machine = _machine(config)
        #: takes the hooks away, at the latest when nobody has the session any more
        hooks: list[RemovableHandle] = []
        self._unhook = weakref.finalize(self, _remove, hooks)
        try:
            self._connect(config, hooks)
            _overseer.opened(self)
        except BaseException:
            self._unhook()
            self._link.close()
            raise

    def _connect(self, config: Config, hooks: list[RemovableHandle]) -> None:
        """Put recorder, planner and client together, on top of the link."""
        #: the same costs, with those of the network where workers are on several hosts. Plans are
        #: not made by these: wherever the workers are, plans, and so the bits, are the same
        self.costs = self.machine
        if len(self._link.hosts) > 1:
            self.costs = on_hosts(self.machine, self._virtual_mesh, self._link.hosts)
        self.device_type = kind = device_type(config)
        self._console = Console.of(config.log)
        recovers = config.recover == "auto" and config.launcher not in {"inline", "dry"}
        self._client = Client(
            self._link, config.max_ahead, config.shm_threshold, self._console,
            (config.snapshot_cost, config.journal_bytes) if recovers else None, kind != "cpu",
        )  # fmt: skip
        trie = TraceTrie(
            config.max_plans, config.max_plan_bytes, config.max_trie_nodes,
            config.max_graph_nodes, config.max_graph_bytes, self.mesh.world_size,
        )  # fmt: skip
        self.recorder = new_recorder(trie, kind, config.ship_code, config.threads is None)
        self._tiers = Tiers(
            self._client, kind, config.compile, Cache(config.cache_dir), config.frozen_after,
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
        self._owner = os.getpid()
        self._closing = threading.Lock()
        self._opened = False
        self._weight_source: SessionSource | None = None
        hooks.append(register_optimizer_step_pre_hook(self._submitter.before_step))
        hooks.append(register_optimizer_step_post_hook(self._submitter.after_step))
        self._status: StatusWriter | None = None
        if self._link.status is not None:
            # why: it loads the mailboxes, which `import lazygt` does without
            from lazygt.submit.status_page import StatusWriter

            self._status = StatusWriter(self, self._link.status, self._link.name)
            self._status.start()
        self.idle = self._submitter.idle = Idle(self, config.default_device)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse a copy.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a lazygt.session can't be copied or pickled: it owns worker processes. Leave it out "
            "of copied objects, or ask lazygt.current() for the open one"
        )

    # -- the context ---------------------------------------------------------------------

    def __enter__(self) -> Session:
        """Record ops here until the block ends; nests, also inside itself."""
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
            if kind is None and not self.recorder.closed and os.getpid() == self._owner:
                self.synchronize()
                if self._checkpoints is not None:
                    self._checkpoints.end_well()
                self.recorder.generator.restore_host_state()
                recorder, sent = self.recorder, self._client.counts.bytes_uploaded
                if not (recorder.ops or recorder.has_numbers or sent):
                    self.idle.ended_unused()
        finally:
            self._end()

    def open(self) -> Session:
        """Record ops from here until ``close``: a session over several cells of a notebook.

        Opened once already, it stays as it is.
        """
        if self not in session_stack:
            self.__enter__()
        self._opened = True
        return self

    def close(self) -> None:
        """End the workers. Their values are lost. May be called twice.

        A session begun by ``open`` ends as a block does: recorded ops are run, and errors raised.
        """
        opened, self._opened = self._opened, False
        if opened:
            self.__exit__(None, None, None)
        self._end()

    def _end(self) -> None:
        try:
            with self._closing, DEFER_INTERRUPT:
                self._close()
        finally:
            if current_session() is None:
                DEFER_INTERRUPT.give_back()

    def _close(self) -> None:
        if self.recorder.closed:
            return
        self.recorder.closed = True
        with ExitStack() as ends:  # last first; each is reached, though another raises
            if self._console is not None:
                ends.callback(self._console.close)
            ends.callback(self._client.close)
            if os.getpid() == self._owner:
                ends.callback(self._link.close)
                if self._checkpoints is not None:
                    ends.callback(self._checkpoints.close)
                ends.callback(self._tiers.close)
                if self._status is not None:
                    ends.callback(self._status.close)
            ends.callback(self._unhook)
            ends.callback(self.idle.close)
            ends.callback(device.close_session, self)
            ends.callback(self.recorder.generator.close)

    # -- sync points ---------------------------------------------------------------------

    def flush(self) -> None:
        """Ship the recorded ops without waiting for them."""
        self._check_used()
        self.recorder.flush("flush()")

    def synchronize(self) -> None:
        """Ship the recorded ops and wait until the workers have run them, kernels included.

        Raises:
            ExecutionError: an op failed since the last sync point.
            WorkerDied, WorkerFrozen: a worker is gone or does not answer.
        """
        self._check_used()
        with self.recorder.lock, DEFER_INTERRUPT:
            self.recorder.flush("synchronize()")
            self._client.finish()
            self._client.raise_failure()

    # -- checkpoints ---------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Have objects saved by ``checkpoint`` and resumed by ``resume``, under these names.

        Does nothing without ``lazygt.session(checkpoint=FOLDER)``, like those two.

        Args:
            objects: whatever has ``state_dict()`` and ``load_state_dict()`` (modules, optimizers,
                schedules ...), tensors, dicts, and generators of random numbers.

        Raises:
            TypeError: an object of another kind.
        """
        if self._checkpoints is not None:
            self._checkpoints.register(objects)

    def resume(self) -> Saved:
        """Load the folder's last checkpoint into the registered objects.

        It is the state after ``step`` steps of a run that was killed, random generators included.
        Random numbers drawn after it continue their streams: call it right before the first step.

        Returns:
            The saved values; ``step`` is 0 where there is nothing yet.

        Raises:
            CheckpointError: it is damaged, or of another program, torch or lazygt. Nothing was
                loaded.
        """
        self._check_used()
        return Saved() if self._checkpoints is None else self._checkpoints.resume()

    def checkpoint(self, step: int, *, now: bool = False, **values: Any) -> bool:
        """Mark the end of a step, after which all registered objects are consistent.

        As often as ``checkpoint_every`` says, this state is saved beside the next steps.

        Args:
            now: save it in any case, and wait until it is on the disk.
            values: plain ones to be saved with it.

        Returns:
            True if this state is being saved; with ``now``, if it is saved.

        Raises:
            CheckpointError: the folder has checkpoints that were not resumed.
            TypeError: a state or a value can't be saved.
        """
        self._check_used()
        return self._checkpoints is not None and self._checkpoints.mark(step, values, now)

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        """The checkpoints that were written, oldest first."""
        return [] if self._checkpoints is None else list(self._checkpoints.records)

    def publish(
        self, name: str, value: torch.Tensor | Mapping[str, torch.Tensor], *, shared: bool = False
    ) -> None:
        """Keep a value in the pool of this session under a name, for later clients with this key;
        see ``lazygt.Pool.publish``. A sync point.

        Raises:
            ValueError: the session is in no pool.
            OverQuota: this key may not have so many bytes there.
            TypeError: it is neither a tensor nor a mapping of names to tensors.
        """
        self._check_used()
        if self.config.on is None or self.config.key is None:
            raise ValueError(
                "publish() is for a session in a pool: lazygt.session(on='tcp://HOST:PORT', ...)"
            )
        # why: only sessions in a pool need it
        from lazygt.pool.pool_client import Pool

        with Pool(self.config.on, self.config.key) as pool:
            pool.publish(name, value, shared=shared)

    def settle(self, tensors: Sequence[torch.Tensor]) -> list[RemoteValue]:
        """Compute the values of handles, and return their places on the workers.

        A sync point; it raises the same errors as ``synchronize``.
        """
        self._check_used()
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

        None under ``invariant``, in dry runs, and for workers of other hosts: the client then
        fetches the weights and sends them.
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

        Plans are compiled after their second run; call this after that, for example before
        timing a loop. Nothing else needs it.

        Args:
            timeout: seconds; None: as long as it takes, some seconds a group.

        Returns:
            False when the time was not enough.
        """
        self._check_used()
        with self.recorder.lock, DEFER_INTERRUPT:
            return self._tiers.wait(timeout)

    def _check_used(self) -> None:
        """Raise an error unless the session is entered."""
        if not self.idle.entered:
            self.idle.used()
        self._check_open()

    def _check_open(self) -> None:
        if self.recorder.closed:
            raise NoSession("this session is closed; open a new one with lazygt.session()")
        if os.getpid() != self._owner:
            raise NoSession(
                f"this session is of process {self._owner}, from which this one was forked; its "
                f"workers answer that process only. Open a session of its own here"
            )

    # -- seeing --------------------------------------------------------------------------

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return list(self._link.pids)

    @property
    def recoveries(self) -> list[RecoveryRecord]:
        """The times that workers were replaced, oldest first."""
        return list(self._client.recoveries)

    @property
    def compiler_pid(self) -> int | None:
        """Process id of the compile process; None while there is none."""
        return self._tiers.pid

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last flush that had one."""
        return self._history.last_plan

    @property
    def history(self) -> History:
        """Flushes, plan misses and gathers of the session."""
        return self._history

    def entries(self) -> list[PlanRecord]:
        """Return the cached plans with their shipments and runs, oldest first."""
        return list(self._client.entries)

    def plans(self) -> list[Plan]:
        """The plans that are kept, oldest first."""
        return [kept.entry.plan for kept in self._planner.kept()]

    def compiles(self) -> list[Compile]:
        """The fused groups for which compiled code was asked, in that order."""
        return list(self._tiers.compiles.values())

    def cuda_graphs(self) -> list[tuple[PlanRecord, int, Captured]]:
        """List hot plans on GPUs: plan, rank, and its CUDA graphs or the reason for none."""
        return [
            (entry, rank, told)
            for entry in self._client.entries
            for rank, told in sorted(entry.captures.items())
        ]

    def stages(self, plan: Plan) -> Stages:
        """A plan's graph as recorded and after each pass: (name, graph) in order.

        Raises:
            ValueError: when the session was not opened with ``keep_stages=True``, or does not
                keep this plan.
        """
        return self._kept(plan).stages

    def decided(self, plan: Plan) -> tuple[AxisStep, ...]:
        """Return the decisions on a plan's placements, one axis of the mesh after another.

        Empty where nothing was to be placed.

        Raises:
            ValueError: as ``stages``.
        """
        return self._kept(plan).decided

    def _kept(self, plan: Plan) -> CachedPlan:
        if not self.config.keep_stages:
            raise ValueError("stages() needs lazygt.session(keep_stages=True)")
        for kept in self._planner.kept():
            if kept.entry.plan.digest == plan.digest:
                return kept
        raise ValueError(f"this session keeps no plan {plan.digest.hex()[:12]}; see plans()")

    @contextmanager
    def observed(self, make: Callable[[Client], Probe]) -> Iterator[None]:
        """Attach an observer for a block; the end of the block is a sync point.

        Args:
            make: of the client, which sends and gets all messages.

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
            "cuda_graphs": sum(told.graphs for _, _, told in self.cuda_graphs()),
            "largest_run_message": counts.largest_run,
            "last_run_message": counts.last_run,
            "snapshots": self._client.snapshots,
            "snapshot_bytes": counts.snapshot_bytes,
            "free_messages": 0,
            "scalar_uploads": 0,
        }

    def memory(self) -> SessionMemory:
        """Measure the memory of each worker; the result prints as a table.

        A sync point; it raises the same errors as ``synchronize``.
        """
        # why: it brings rich, which few sessions need
        from lazygt.submit.memory import RankMemory, SessionMemory

        self._check_used()
        with self.recorder.lock, DEFER_INTERRUPT:
            self.recorder.flush("memory()")
            self._client.synchronize()
            self._client.raise_failure()
            groups = by_kind(self._submitter.kinds.by_id())
            told = self._client.memory(list(groups.values()))
        names = (*groups, OTHER)
        return SessionMemory([
            RankMemory(rank, dict(zip(names, each.living, strict=True)), each.allocated, each.peak,
                       each.resident)
            for rank, each in enumerate(told)
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


def _open(config: Config, mesh: Mesh) -> tuple[Link, Config]:
    """The link to the workers, new ones of this machine or a pool's, and the config with the device
    that these have."""
    if config.on is None:
        return open_link(config, mesh, COPIER), config
    # why: it loads sockets and keys, which only sessions in a pool need
    from lazygt.pool.pool_link import PoolLink

    link = PoolLink(config, mesh, COPIER)
    return link, link.config


def _machine(config: Config) -> Machine:
    """The machine that was named, else the one that serves for any of its kind.

    Raises:
        MachineError: there is none of that name, or its file is wrong.
    """
    if config.machine is None:
        return default_machine(device_type(config))
    return machine_of(config.machine, config.cache_dir)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class _Overseer(NamedTuple):
    """See ``overseen``."""

    settings: Callable[[dict[str, Any]], dict[str, Any]] = lambda settings: settings
    opened: Callable[[Session], object] = lambda session: None


_overseer = _Overseer()


@contextmanager
def overseen(
    settings: Callable[[dict[str, Any]], dict[str, Any]], opened: Callable[[Session], object]
) -> Iterator[None]:
    """Open all sessions meanwhile with other settings, and report them.

    Args:
        settings: requested settings -> settings of the session.
        opened: called with each session that has been made.
    """
    global _overseer
    before, _overseer = _overseer, _Overseer(settings, opened)
    try:
        yield
    finally:
        _overseer = before


def _source(tensor: LazyTensor) -> SessionSource | None:
    recorder = recorder_of(tensor)
    for session in session_stack:
        if isinstance(session, Session) and session.recorder is recorder:
            return session.weight_source
    return None


copy_request.BY_DEVICE[NAME] = _source


def current() -> Session:
    """The open session.

    Raises:
        NoSession: when there is none.
    """
    session = current_session()
    if not isinstance(session, Session):
        raise NoSession("no lazygt session is open; use `with lazygt.session():`")
    return session
