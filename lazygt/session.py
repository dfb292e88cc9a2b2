"""Session: the one room where recording, passes and the runtime meet."""

from __future__ import annotations

import importlib
import os
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lazygt import device, notebook
from lazygt.config import Config
from lazygt.description import Description, line_of, lines_of
from lazygt.errors import GatherWarning, NoSession
from lazygt.graph.label import Replicated
from lazygt.graph.logical import LogicalMesh
from lazygt.graph.mesh import Mesh, Stored
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph
from lazygt.graph.source import Mark, user_mark
from lazygt.opened import NAME, current_session
from lazygt.passes import PIPELINE
from lazygt.passes.base import uncollected
from lazygt.passes.sharding.places import MARKS, without_places
from lazygt.passes.template import Templates
from lazygt.recorder import Recorder
from lazygt.runtime.blocks import Region, sent
from lazygt.runtime.client import Answer, Client, PlanEntry, RemoteValue
from lazygt.runtime.compiling.artifacts import Cache
from lazygt.runtime.interrupts import HOLD
from lazygt.runtime.link import InlineLink, Link
from lazygt.runtime.log import InstructionLog
from lazygt.runtime.plan import Plan
from lazygt.runtime.tiers import Compile, Tiers
from lazygt.stretch import Stretch
from lazygt.tensor import Cell, LazyTensor
from lazygt.timeline import Probe, Timeline
from lazygt.transfer import origins
from lazygt.trie import Step, Trie, build_graph
from lazygt.why import Flush, Miss, Why, newly_alive

if TYPE_CHECKING:
    from lazygt.passes.sharding.gathers import Gather
    from lazygt.passes.sharding.shard import AxisStep
    from lazygt.transfer.workers import Workers

_KEPT_MISSES = 256
_KEPT_FLUSHES = 1_000
_BUILTIN_ERRORS = {
    error.__name__: error
    for error in (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
}


Stages = tuple[tuple[str, Graph], ...]


class Kept(NamedTuple):
    """A plan as the trie keeps it.

    Attributes:
        outputs: the numbers of its outputs among the stretch's values.
        origins: for each plan of the entry, step -> recorded op (empty: the same numbers).
        makers: output -> recorded op.
        stored: how each output lies on the mesh; None: whole on every rank.
        slots: of each output the places of its blocks among those of the plans.
    """

    entry: PlanEntry
    outputs: tuple[int, ...]
    origins: tuple[tuple[int, ...], ...]
    makers: tuple[int, ...]
    stored: tuple[Stored | None, ...]
    slots: tuple[range, ...]


class Reply(NamedTuple):
    """What a data-dependent op returned and wrote."""

    returned: list[Any]
    written: list[tuple[TensorMeta, RemoteValue]]


class Session:
    """Workers, plans and the generator; ``lazygt.session(...)`` makes one.

    Use it as a context manager. Inside, new tensors are made on device ``lazygt`` (unless
    ``default_device=False``), ops are recorded, and sync points ship them.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = config = Config.load(**settings)
        #: the workers as a grid with named axes
        self.mesh = Mesh.of(config.mesh or {"workers": config.workers})
        self._logical = LogicalMesh.of(self.mesh, config.invariant)
        self._link, kind = _open_link(config, self.mesh)
        self.device_type = kind
        self._log = InstructionLog(config.log)
        self._client = Client(self._link, config.max_ahead, config.shm_threshold, self._log)
        self._trie = Trie(
            config.max_plans, config.max_trie_nodes, config.max_graph_nodes, config.max_graph_bytes
        )
        self._templates = Templates(PIPELINE, config.max_plans)
        self.recorder = Recorder(self, self._trie, kind)
        self._tiers = Tiers(self._client, kind, config.compile, Cache(config.cache_dir))
        self._owner = os.getpid()
        self._flushes: Counter[str] = Counter()
        self._misses: deque[Miss] = deque(maxlen=_KEPT_MISSES)
        self._recent: deque[Flush] = deque(maxlen=_KEPT_FLUSHES)
        self._probe: Probe | None = None
        self._built = self._hits = 0
        self._origins: tuple[tuple[int, ...], ...] = ((),)
        self._makers: tuple[int, ...] = ()
        self._stored: tuple[Stored | None, ...] = ()
        self._slots: tuple[range, ...] = ()
        self._hook: RemovableHandle | None = None
        self._stages: dict[bytes, Stages] = {}
        self._decided: dict[bytes, tuple[AxisStep, ...]] = {}
        self._gathers: dict[str, Gather] = {}
        self._closing = threading.Lock()
        self._workers: Workers | None = None
        self.last_plan: Plan | None = None

    # -- the context ---------------------------------------------------------------------

    def __enter__(self) -> Session:
        device.open_session(self)
        if self._logical.ranks.world_size > 1:
            self._hook = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and not self.recorder.closed:
                self.synchronize()
                self.recorder.generator.give_back()
        finally:
            self.close()

    def close(self) -> None:
        """End the workers. Their values are lost. May be called twice."""
        with self._closing:
            if self.recorder.closed:
                return
            self.recorder.closed = True
            device.close_session(self)
            if self._hook is not None:
                self._hook.remove()
            if os.getpid() == self._owner:
                self._tiers.close()
                self._link.close()
            self._log.close()

    # -- sync points ---------------------------------------------------------------------

    def flush(self) -> None:
        """Ship what is recorded; does not wait for it."""
        self._check_open()
        self.recorder.flush("flush()")

    def synchronize(self) -> None:
        """Ship what is recorded and wait until the workers have done it.

        Raises:
            ExecutionError: an op failed since the last sync point.
            WorkerDied, WorkerFrozen: a worker is gone or does not answer.
        """
        self._check_open()
        with self.recorder.lock, HOLD:
            self.recorder.flush("synchronize()")
            self._client.synchronize()
            self._client.raise_failure()

    def settle(self, tensors: Sequence[torch.Tensor]) -> list[RemoteValue]:
        """Have the values of handles computed; where they are now.

        A sync point, as ``synchronize``, and raises what that does.
        """
        self._check_open()
        with self.recorder.lock, torch.no_grad():
            handles: list[LazyTensor] = []
            for t in tensors:
                assert isinstance(t, LazyTensor)
                own = t if t._view is None else t.clone()
                assert isinstance(own, LazyTensor)
                if own._cell.remote is None:
                    self.recorder.index_of(own)
                handles.append(own)
            self.synchronize()
            return [t._cell.remote for t in handles if t._cell.remote is not None]

    @property
    def origin(self) -> Workers | None:
        """The workers as those who send their own weights; None where one stands for many."""
        if self.config.invariant or self.config.executor == "dry":
            return None
        if self._workers is None:
            # why: few sessions transfer
            from lazygt.transfer.workers import Workers

            self._workers = Workers(self.mesh, self._client, self.recorder.lock, self.settle)
        return self._workers

    def compiled(self, timeout: float | None = None) -> bool:
        """Wait until what is being compiled is compiled and swapped in.

        Plans are compiled after their second run; call this after that, for example before
        timing a loop. Nothing else needs it.

        Args:
            timeout: seconds; None: as long as it takes, some seconds a group.

        Returns:
            False when the time was not enough.
        """
        self._check_open()
        with self.recorder.lock, HOLD:
            return self._tiers.wait(timeout)

    def after_backward(self) -> None:
        """The sync point at the end of ``.backward()``.

        A sharded step is shipped after its update: where gradients are reduced, and whether they
        are cut into blocks, is decided together with what the optimizer does with them.
        """
        if self.config.flush_on_backward and not self.recorder.closed and not self._is_sharded():
            self.recorder.flush("backward")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The sync point at the end of an optimizer's step, of sharded programs only."""
        if self.config.flush_on_backward and not self.recorder.closed and self._is_sharded():
            self.recorder.flush("optimizer step")

    def _is_sharded(self) -> bool:
        """Whether anything in the current stretch is placed on the mesh."""
        stretch = self.recorder.stretch
        if self._logical.ranks.world_size == 1:
            return False
        if any(remote.stored is not None for _, remote in stretch.inputs):
            return True
        return any(step.node is not None and step.node.op in MARKS for step in stretch.step.path())

    def _check_open(self) -> None:
        if self.recorder.closed:
            raise NoSession("this session is closed; open a new one with lazygt.session()")

    # -- what the recorder asks for --------------------------------------------------------

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> RemoteValue:
        """Take a copy of a CPU tensor for the workers."""
        value = self._client.upload(source, meta)
        value.mark = user_mark(1)
        return value

    def ship(self, stretch: Stretch, reason: str, fetch: Cell | None, ask: bool) -> Any:
        """Turn the stretch into a run and begin a new one.

        Returns:
            The fetched CPU tensor, the Reply to a data-dependent op, or None.
        """
        with HOLD:
            if self._probe is None:
                return self._ship(stretch, reason, fetch, ask)
            with self._probe.flush(self._recent):
                return self._ship(stretch, reason, fetch, ask)

    def _ship(self, stretch: Stretch, reason: str, fetch: Cell | None, ask: bool) -> Any:
        recorder = self.recorder
        cells, outputs = stretch.alive()
        if not stretch.marks and fetch is None and self._client.idle:
            return None
        self._flushes[reason.split(":")[0]] += 1
        hits = self._hits
        entry = self._entry(stretch, outputs, reason) if stretch.marks else None
        marks, params, step = stretch.marks, tuple(stretch.params), stretch.step
        inputs = [remote.id for _, remote in stretch.inputs]
        if self.config.invariant:
            inputs = [key for _, remote in stretch.inputs for key in remote.ids]
        held = stretch.inputs
        wanted, regions = self._wanted(fetch, stretch, entry)
        recorder.next_stretch()
        stretch.inputs = []
        for cell, _ in held:
            entered = cell()
            if entered is not None and entered.serial == stretch.serial and entered.index < 0:
                entered.serial = 0
        del held
        describe = Description(step, marks, recorder.backward_mark, self._origins)
        seq, values = self._client.run(
            entry, inputs, params, wanted, describe, reason, regions or (0,)
        )
        digest = None if entry is None else entry.plan.digest
        self._recent.append(
            Flush(reason, self.forced_by(), len(marks), digest, self._hits > hits, seq)
        )
        if entry is not None:
            self._tiers.ran(entry)
            self._rebind(outputs, cells, values, marks)
        del values
        if fetch is None and not ask:
            self._client.hold_back()
        if fetch is not None:
            return self._fetched(seq, fetch, regions)
        return self._asked(seq, describe) if ask else None

    def forced_by(self) -> Mark | None:
        """The user's line that forces a flush now."""
        return user_mark(1) or self.recorder.backward_mark

    def _wanted(
        self, fetch: Cell | None, stretch: Stretch, entry: PlanEntry | None
    ) -> tuple[tuple[int, ...], dict[int, tuple[Region, ...]] | None]:
        """The ids that the fetched cell's blocks will have, and which ranks have what of it.

        Ids of outputs follow each other. No regions: rank 0 has all of it.
        """
        if fetch is None:
            return (), None
        if fetch.remote is not None and not (fetch.serial == stretch.serial and fetch.index >= 0):
            keys, stored = fetch.remote.ids, fetch.remote.stored
        else:
            assert entry is not None
            position = self._positions[fetch.index]
            keys, stored = self._next_ids(position), self._stored[position]
        if stored is None or self.config.executor == "dry":  # one worker stands for all
            return keys[:1], None
        return keys, sent(self._logical, stored.labels, fetch.meta.shape)

    def _next_ids(self, position: int) -> tuple[int, ...]:
        """The ids that the blocks of an output of the next run will have."""
        return tuple([self._client.next_output(slot) for slot in self._slots[position]])

    def _entry(self, stretch: Stretch, outputs: tuple[int, ...], reason: str) -> PlanEntry:
        """The plan of a stretch, built if it is a new one."""
        step = stretch.step
        found = self._trie.find(step, outputs)
        if found is not None:
            self._hits += 1
        else:
            found = self._build(stretch, outputs, reason)
            dropped = self._trie.keep(step, outputs, found)
            self._client.forget([old.entry for old in dropped])
            for old in dropped:
                self._stages.pop(old.entry.plan.digest, None)
                self._decided.pop(old.entry.plan.digest, None)
        entry: PlanEntry
        entry, numbers, self._origins, self._makers, self._stored, self._slots = found
        self._positions = {index: k for k, index in enumerate(numbers)}
        self.last_plan = entry.plan
        return entry

    @uncollected()
    def _build(self, stretch: Stretch, outputs: tuple[int, ...], reason: str) -> Kept:
        """The plan of a stretch."""
        begin = time.monotonic_ns()
        steps = stretch.step.path()
        lines = lines_of(steps, stretch.marks, self.recorder.backward_mark)
        kinds = tuple(type(value).__name__ for value in stretch.params)
        recorded = build_graph(steps, outputs, lines, kinds)
        stages = [("recorded", recorded)] if self.config.keep_stages else None
        given = [_stored(step) for step in steps if step.input is not None]
        decided: list[AxisStep] = []
        ops = [step for step in steps if step.node is not None]
        backward = {number for number, step in enumerate(ops) if step.backward}
        plans, stored = self._plans(recorded, given, stages, decided, backward)
        entry = self._client.entry_for(plans)
        self._missed(self._why_missed(stretch.step, recorded, outputs, reason), plans[0], begin)
        if stages is not None:
            self._stages[plans[0].digest] = tuple(stages)
            self._decided[plans[0].digest] = tuple(decided)
        if not entry.sent:
            self._built += 1
        self._tiers.built(entry)
        made = notebook.makers(steps)
        makers = tuple([made[index] for index in outputs])
        origins = tuple([plan.origins for plan in plans])
        return Kept(entry, outputs, origins, makers, stored, self._logical.slots(stored))

    def _plans(
        self,
        recorded: Graph,
        given: list[Stored | None],
        stages: list[tuple[str, Graph]] | None,
        decided: list[AxisStep],
        backward: Collection[int] = (),
    ) -> tuple[tuple[Plan, ...], tuple[Stored | None, ...]]:
        """Each rank's plan, or the one that all run, and how the outputs lie on the mesh.

        Args:
            given: how the inputs do.
            decided: gets how each axis of the mesh was decided.
            backward: the recorded ops, by number, that autograd ran.
        """
        check = self.config.check_passes
        marked = any(node.op in MARKS for node in recorded.nodes)
        ranks = self._logical.ranks
        if ranks.world_size == 1 or not (marked or any(given)):
            if marked:
                recorded = without_places(recorded, MARKS)
            plan = Plan(self._templates.optimised(recorded, check, stages))
            return (plan,), (None,) * len(recorded.outputs)
        # why: the rules of every op take a while to load, and few sessions shard
        from lazygt.passes.sharding.gathers import gathers
        from lazygt.passes.sharding.programs import programs

        workers = self._logical if self.config.invariant else None
        made = programs(recorded, ranks, given, self.device_type, check, stages, decided, workers,
                        bucket_bytes=int(self.config.bucket_cap_mb * (1 << 20)),
                        backward=backward)  # fmt: skip
        self._gathered(gathers(decided))
        graphs = {id(graph): Plan(graph, mesh=self.mesh) for graph in made.graphs}
        plans = tuple([graphs[id(graph)] for graph in made.graphs])
        whole = Stored((Replicated(),) * len(self.mesh.names))
        stored = tuple([None if each == whole else each for each in made.outputs])
        return plans[:1] if len(graphs) == 1 else plans, stored

    def _gathered(self, found: list[Gather]) -> None:
        """Say once for each op that it had to run on whole values."""
        for each in found:
            if each.op not in self._gathers:
                self._gathers[each.op] = each
                warnings.warn(
                    f"{each}. The numbers are right. Where that costs too much, give the op what "
                    f"is whole or cut otherwise (lazygt.redistribute), or write it with ops that "
                    f"have a rule.",
                    GatherWarning,
                    stacklevel=2,
                )

    def _why_missed(
        self, step: Step, recorded: Graph, outputs: tuple[int, ...], reason: str
    ) -> Miss:
        first = self.recorder.first_miss
        if first is not None:
            return Miss.at(reason, first, line_of)
        alive = newly_alive(recorded, outputs, step.plans)
        return Miss(reason, None, ended=bool(step.plans), alive=alive)

    def _missed(self, miss: Miss, plan: Plan, begin: int) -> None:
        """Note a miss whose plan has been built since ``begin``."""
        miss.digest, miss.seconds = plan.digest, (time.monotonic_ns() - begin) / 1e9
        self._misses.append(miss)
        if self._probe is not None:
            self._probe.did("build plan", begin, miss.summary())

    def _rebind(
        self,
        outputs: tuple[int, ...],
        cells: list[Cell],
        values: list[RemoteValue],
        marks: list[Mark | None],
    ) -> None:
        positions, makers, stored = self._positions, self._makers, self._stored
        if self.config.invariant:
            values = _grouped(values, self._slots)
        for cell, index in zip(cells, outputs, strict=True):
            position = positions[index]
            cell.remote = value = values[position]
            value.stored = stored[position]
            value.mark = marks[makers[position]] or self.recorder.backward_mark
            cell.serial = 0

    def _wait(self, seq: int) -> dict[int, Answer]:
        """The answers to a run."""
        if self._probe is None:
            return self._client.wait(seq)
        begin = time.monotonic_ns()
        answer = self._client.wait(seq)
        self._probe.did("wait for the answer", begin, {"run": seq})
        return answer

    def _fetched(
        self, seq: int, cell: Cell, regions: dict[int, tuple[Region, ...]] | None
    ) -> torch.Tensor:
        value = self._client.fetched(self._wait(seq), cell.meta, regions)
        self._client.raise_failure()
        if self.config.executor == "dry" and value.shape != cell.meta.shape:
            return torch.zeros(cell.meta.shape, dtype=value.dtype, device="cpu")
        return value

    def _asked(self, seq: int, describe: Description) -> Reply:
        done, _ = self._wait(seq)[0]
        if done.returned and done.returned[0] == "failed":
            _, kind, detail, number = done.returned
            self._client.drop_failure(seq, number)
            if not describe.is_last(number):
                self._client.raise_known(seq, number)
            raise _BUILTIN_ERRORS.get(kind, RuntimeError)(detail)
        self._client.raise_failure()
        mark = describe.marks[-1]
        returned = [self._received(item, mark) for item in done.returned]
        written = [self._received(item, mark) for item in done.written]
        return Reply(returned, written)

    def _received(self, item: Any, mark: Mark | None) -> Any:
        if item[0] == "list":
            return [self._received(one, mark) for one in item[1]]
        if item[0] == "value":
            return item[1]
        meta, key = item
        value = self._client.adopt(key)
        value.mark = mark
        return meta, value

    # -- seeing --------------------------------------------------------------------------

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return list(self._link.pids)

    @property
    def compiler_pid(self) -> int | None:
        """Process id of the compile process; None while there is none."""
        return self._tiers.pid

    def entries(self) -> list[PlanEntry]:
        """The plans that are kept, with what was shipped and run of each, oldest first."""
        return self._client.entries()

    def plans(self) -> list[Plan]:
        """The plans that are kept, oldest first."""
        return [kept.entry.plan for kept in self._trie.kept()]

    def compiles(self) -> list[Compile]:
        """The fused groups for which compiled code was asked, in that order."""
        return list(self._tiers.compiles.values())

    def stages(self, plan: Plan) -> Stages:
        """A plan's graph as recorded and after each pass: (name, graph) in order.

        Raises:
            ValueError: when the session was not opened with ``keep_stages=True``, or does not
                keep this plan.
        """
        if not self.config.keep_stages:
            raise ValueError("stages() needs lazygt.session(keep_stages=True)")
        if plan.digest not in self._stages:
            raise ValueError(f"this session keeps no plan {plan.digest.hex()[:12]}; see plans()")
        return self._stages[plan.digest]

    def decided(self, plan: Plan) -> tuple[AxisStep, ...]:
        """How a plan's values were placed, one axis of the mesh after another; none where nothing
        was to be placed.

        Raises:
            ValueError: as ``stages``.
        """
        self.stages(plan)
        return self._decided[plan.digest]

    def why(self) -> Why:
        """Flushes with who forced them, plan misses, fallbacks and compiles; print it."""
        flushed = sum(self._flushes.values())
        gathered = tuple(self._gathers.values())
        return Why(tuple(self._recent), flushed, tuple(self._misses), self.compiles(), gathered)

    @contextmanager
    def profile(self, into: Timeline | None = None) -> Iterator[Timeline]:
        """Draw what happens meanwhile into a timeline; ``save`` it for Perfetto.

        Workers run plans node by node meanwhile; a compiled group is one node. The end of the
        block is a sync point.

        Args:
            into: a timeline to draw into; by default a new one.

        Raises:
            RuntimeError: when a profile is being taken already.
        """
        self._check_open()
        if self._probe is not None:
            raise RuntimeError("this session is being profiled already; end that profile first")
        timeline = Timeline() if into is None else into
        self._probe = probe = Probe(timeline, self._client)
        probe.attach()
        try:
            yield timeline
            if not self.recorder.closed:
                self.synchronize()
        finally:
            self._probe = None
            probe.detach(self.compiles())

    def stats(self) -> Mapping[str, Any]:
        """Counts since the session opened; reading them costs no sync point."""
        counts = self._client.counts
        return {
            "ops_recorded": self.recorder.ops,
            "flushes": dict(self._flushes),
            "plans_built": self._built,
            "plan_hits": self._hits,
            "plan_misses": [miss.summary() for miss in self._misses],
            "ops_inferred": self.recorder.inference.runs,
            "messages_sent": counts.messages_sent,
            "messages_received": counts.messages_received,
            "bytes_sent": counts.bytes_sent,
            "bytes_received": counts.bytes_received,
            "bytes_uploaded": counts.bytes_uploaded,
            "bytes_fetched": counts.bytes_fetched,
            "fetches": counts.fetches,
            "plans_sent": counts.plans_sent,
            "largest_run_message": counts.largest_run,
            "last_run_message": counts.last_run,
            "free_messages": 0,
            "scalar_uploads": 0,
        }

    def _repr_html_(self) -> str:
        collectives = () if self.last_plan is None else self.last_plan.collectives
        return notebook.session_html(repr(self), self.stats(), collectives)

    def __repr__(self) -> str:
        state = "closed" if self.recorder.closed else "open"
        costs = "sums travel unreduced, nothing is compiled"
        same = f" for {self._logical.ranks} ({costs})" if self.config.invariant else ""
        return (
            f"<lazygt.session {state}: {self._link.world_size} {self.device_type} worker(s){same}, "
            f"{self.config.executor}; {self.recorder.ops} ops recorded, "
            f"{sum(self._flushes.values())} flushes, {self._built} plans, {self._hits} hits>"
        )


def _stored(step: Step) -> Stored | None:
    """How the input that enters at a step lies on the mesh; see ``Recorder._enter``."""
    stored: Stored | None = step.key[1] if type(step.key) is tuple else None
    return stored


def _grouped(values: list[RemoteValue], slots: tuple[range, ...]) -> list[RemoteValue]:
    """The first block of each output, which keeps the others."""
    for slot in slots:
        values[slot.start].rest = values[slot.start + 1 : slot.stop]
    return [values[slot.start] for slot in slots]


def _open_link(config: Config, mesh: Mesh) -> tuple[Link, str]:
    """The link and the type of device that the workers compute on."""
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if config.executor == "inline":
        # why: only here does the client run plans itself
        from lazygt.runtime.worker import Worker

        worker = Worker(kind, max_plans=config.max_plans, inline=True, cache_dir=config.cache_dir)
        return InlineLink(worker), kind
    if config.executor == "dry":
        # why: few sessions are dry
        from lazygt.runtime.dry import DryWorker

        return InlineLink(DryWorker(max_plans=config.max_plans)), kind
    # why: an inline session needs neither sockets nor processes
    from lazygt.runtime.process_link import LinkSpec, ProcessLink

    spec = LinkSpec(
        world_size=config.workers,
        mesh=str(mesh),
        device=kind,
        threads=config.threads,
        transport=config.transport,
        frozen_after=config.frozen_after,
        start_timeout=config.start_timeout,
        max_message=config.max_message_bytes,
        environment={
            "LAZYGT_MAX_PLANS": str(config.max_plans),
            "LAZYGT_SHM_THRESHOLD": str(config.shm_threshold),
            "LAZYGT_CACHE_DIR": str(Cache(config.cache_dir).place),
        },
    )
    link = ProcessLink(spec)
    _load_meanwhile()
    return link, kind


def _load_meanwhile() -> None:
    """Load what torch would load at the first op: the workers are starting, so it costs nothing."""
    importlib.import_module("torch.distributed.tensor")  # asked for by dispatch to a subclass
    importlib.import_module("torch._dynamo")  # asked for by meta kernels written in Python


def _origin(tensor: LazyTensor) -> Workers | None:
    session = tensor._cell.recorder.shipper
    return session.origin if isinstance(session, Session) else None


origins.BY_DEVICE[NAME] = _origin


def current() -> Session:
    """The open session.

    Raises:
        NoSession: when there is none.
    """
    session = current_session()
    if not isinstance(session, Session):
        raise NoSession("no lazygt session is open; use `with lazygt.session():`")
    return session
