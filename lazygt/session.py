"""Session: the one room where recording, passes and the runtime meet."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch

from lazygt import device
from lazygt.config import Config
from lazygt.errors import NoSession
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Param, Ref
from lazygt.graph.source import Mark, expand
from lazygt.opened import current_session
from lazygt.passes import PIPELINE, run_passes
from lazygt.recorder import Recorder
from lazygt.runtime.client import Client, PlanEntry, RemoteValue
from lazygt.runtime.interrupts import HOLD
from lazygt.runtime.link import InlineLink, Link
from lazygt.runtime.log import InstructionLog
from lazygt.runtime.plan import Plan
from lazygt.runtime.worker import Worker
from lazygt.stretch import Stretch
from lazygt.tensor import Cell
from lazygt.trie import Step, Trie, build_graph

_KEPT_MISSES = 256
_BUILTIN_ERRORS = {
    error.__name__: error
    for error in (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
}


Stages = tuple[tuple[str, Graph], ...]


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
        self._link, kind = _open_link(config)
        self.device_type = kind
        self._log = InstructionLog(config.log)
        self._client = Client(self._link, config.max_ahead, config.shm_threshold, self._log)
        self._trie = Trie(
            config.max_plans, config.max_trie_nodes, config.max_graph_nodes, config.max_graph_bytes
        )
        self.recorder = Recorder(self, self._trie, kind)
        self._owner = os.getpid()
        self._flushes: Counter[str] = Counter()
        self._misses: deque[dict[str, Any]] = deque(maxlen=_KEPT_MISSES)
        self._built = self._hits = 0
        self._origins: tuple[int, ...] = ()
        self._stages: dict[bytes, Stages] = {}
        self._closing = threading.Lock()
        self.last_plan: Plan | None = None

    # -- the context ---------------------------------------------------------------------

    def __enter__(self) -> Session:
        device.open_session(self)
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
            if os.getpid() == self._owner:
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

    def after_backward(self) -> None:
        """The sync point at the end of ``.backward()``."""
        if self.config.flush_on_backward and not self.recorder.closed:
            self.recorder.flush("backward")

    def _check_open(self) -> None:
        if self.recorder.closed:
            raise NoSession("this session is closed; open a new one with lazygt.session()")

    # -- what the recorder asks for --------------------------------------------------------

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> RemoteValue:
        """Take a copy of a CPU tensor for the workers."""
        return self._client.upload(source, meta)

    def ship(self, stretch: Stretch, reason: str, fetch: Cell | None, ask: bool) -> Any:
        """Turn the stretch into a run and begin a new one.

        Returns:
            The fetched CPU tensor, the Reply to a data-dependent op, or None.
        """
        with HOLD:
            return self._ship(stretch, reason, fetch, ask)

    def _ship(self, stretch: Stretch, reason: str, fetch: Cell | None, ask: bool) -> Any:
        recorder = self.recorder
        cells, outputs = stretch.alive()
        if not stretch.marks and fetch is None and self._client.idle:
            return None
        self._flushes[reason.split(":")[0]] += 1
        entry = self._entry(stretch, outputs, reason) if stretch.marks else None
        marks, params, step = stretch.marks, tuple(stretch.params), stretch.step
        inputs = [remote.id for _, remote in stretch.inputs]
        held = stretch.inputs
        wanted = self._wanted(fetch, stretch, entry)
        recorder.next_stretch()
        stretch.inputs = []
        for cell, _ in held:
            entered = cell()
            if entered is not None and entered.serial == stretch.serial and entered.index < 0:
                entered.serial = 0
        del held
        describe = _Description(step, marks, recorder.backward_mark, self._origins)
        seq, values = self._client.run(entry, inputs, params, wanted, describe, reason)
        if entry is not None:
            self._rebind(entry, step, outputs, cells, values)
        del values
        if fetch is None and not ask:
            self._client.hold_back()
        if fetch is not None:
            return self._fetched(seq, fetch)
        return self._asked(seq, describe) if ask else None

    def _wanted(
        self, fetch: Cell | None, stretch: Stretch, entry: PlanEntry | None
    ) -> tuple[int, ...]:
        """The id that the fetched cell will have. Ids of outputs follow each other."""
        if fetch is None:
            return ()
        if fetch.remote is not None and not (fetch.serial == stretch.serial and fetch.index >= 0):
            return (fetch.remote.id,)
        assert entry is not None
        position = self._positions[fetch.index]
        return (self._client.next_output(position),)

    def _entry(self, stretch: Stretch, outputs: tuple[int, ...], reason: str) -> PlanEntry:
        """The plan of a stretch, built if it is a new one."""
        step = stretch.step
        found = self._trie.find(step, outputs)
        entry: PlanEntry
        if found is not None:
            self._hits += 1
            entry, numbers, self._origins = found
        else:
            entry, self._origins = self._build(stretch, outputs, reason)
            numbers = outputs
            dropped = self._trie.keep(step, outputs, (entry, outputs, self._origins))
            self._client.forget([old for old, _, _ in dropped])
        self._positions = {index: k for k, index in enumerate(numbers)}
        self.last_plan = entry.plan
        return entry

    def _build(
        self, stretch: Stretch, outputs: tuple[int, ...], reason: str
    ) -> tuple[PlanEntry, tuple[int, ...]]:
        """The plan of a stretch, and the recorded op behind each of its steps."""
        steps = stretch.step.path()
        lines = _lines(steps, stretch.marks, self.recorder.backward_mark)
        kinds = tuple(type(value).__name__ for value in stretch.params)
        recorded = build_graph(steps, outputs, lines, kinds)
        stages = [("recorded", recorded)]
        graph = run_passes(recorded, PIPELINE, self.config.check_passes, stages)
        self._misses.append(self._why_missed(outputs, reason))
        plan = Plan.build(graph)
        entry = self._client.entry_for(plan)
        if self.config.keep_stages:
            self._stages[plan.digest] = tuple(stages)
        if not entry.sent:
            self._built += 1
        return entry, plan.steps.graph.origins

    def _why_missed(self, outputs: tuple[int, ...], reason: str) -> dict[str, Any]:
        first = self.recorder.first_miss
        if first is None:
            return {"reason": "another set of values is alive", "op": None, "line": "?",
                    "flush": reason}  # fmt: skip
        step, key, f, mark = first
        known = [other.facts.name for other in step.children.values()
                 if other.facts is not None and other.key is not key]  # fmt: skip
        if isinstance(key, TensorMeta):
            name = f"input {key}"
        else:
            name = f.name if f is not None else key[0]
        if not known:
            why = "a new sequence of ops"
        elif name in known:
            why = f"{name} with other arguments or shapes than before"
        else:
            why = f"{name} where {known[0]} was before"
        return {"reason": why, "op": name, "line": expand(mark), "flush": reason}

    def _rebind(
        self,
        entry: PlanEntry,
        step: Step,
        outputs: tuple[int, ...],
        cells: list[Cell],
        values: list[RemoteValue],
    ) -> None:
        positions = self._positions
        for cell, index in zip(cells, outputs, strict=True):
            cell.remote = values[positions[index]]
            cell.serial = 0

    def _fetched(self, seq: int, cell: Cell) -> torch.Tensor:
        done, buffers = self._client.wait(seq)
        value = self._client.tensor(done.fetched[0], buffers)
        self._client.raise_failure()
        return value

    def _asked(self, seq: int, describe: _Description) -> Reply:
        done, _ = self._client.wait(seq)
        if done.returned and done.returned[0] == "failed":
            _, kind, detail, number = done.returned
            self._client.drop_failure(seq, number)
            if not describe.is_last(number):
                self._client.raise_known(seq, number)
            raise _BUILTIN_ERRORS.get(kind, RuntimeError)(detail)
        self._client.raise_failure()
        returned = [self._received(item) for item in done.returned]
        written = [self._received(item) for item in done.written]
        return Reply(returned, written)

    def _received(self, item: Any) -> Any:
        if item[0] == "list":
            return [self._received(one) for one in item[1]]
        if item[0] == "value":
            return item[1]
        meta, key = item
        return meta, self._client.adopt(key)

    # -- seeing --------------------------------------------------------------------------

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return list(self._link.pids)

    def entries(self) -> list[PlanEntry]:
        """The plans that are kept, with what was shipped and run of each, oldest first."""
        return self._client.entries()

    def plans(self) -> list[Plan]:
        """The plans that are kept, oldest first."""
        return [entry.plan for entry, _, _ in self._trie.kept()]

    def stages(self, plan: Plan) -> Stages:
        """A plan's graph as recorded and after each pass: (name, graph) in order.

        Raises:
            ValueError: when the session was not opened with ``keep_stages=True``.
        """
        if not self.config.keep_stages:
            raise ValueError("stages() needs lazygt.session(keep_stages=True)")
        return self._stages[plan.digest]

    def stats(self) -> Mapping[str, Any]:
        """Counts since the session opened; reading them costs no sync point."""
        counts = self._client.counts
        return {
            "ops_recorded": self.recorder.ops,
            "flushes": dict(self._flushes),
            "plans_built": self._built,
            "plan_hits": self._hits,
            "plan_misses": list(self._misses),
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

    def __repr__(self) -> str:
        state = "closed" if self.recorder.closed else "open"
        return (
            f"<lazygt.session {state}: {self._link.world_size} {self.device_type} worker(s), "
            f"{self.config.executor}; {self.recorder.ops} ops recorded, "
            f"{sum(self._flushes.values())} flushes, {self._built} plans, {self._hits} hits>"
        )


class _Description:
    """Says which op a step of a run is, and who wrote it; expanded only for an error."""

    def __init__(
        self, step: Step, marks: list[Mark | None], backward: Mark | None, origins: tuple[int, ...]
    ) -> None:
        self.step, self.marks, self.backward = step, marks, backward
        #: step of the plan -> recorded op; empty: the same numbers
        self.origins = origins

    def is_last(self, number: int) -> bool:
        """Whether a step of the plan is the op that was recorded last."""
        return (self.origins[number] if self.origins else number) == len(self.marks) - 1

    def __call__(self, number: int) -> tuple[str, tuple[str, ...], str]:
        number = self.origins[number] if self.origins else number
        steps = self.step.path()
        lines = _lines(steps, self.marks, self.backward)
        graph: Graph = build_graph(steps, (), lines, ())
        node = graph.nodes[number]
        values = graph.values

        def show(arg: Arg) -> str:
            if isinstance(arg, Ref):
                return str(values[arg.index])
            if isinstance(arg, tuple):
                return f"[{', '.join(map(show, arg))}]"
            return "a number" if isinstance(arg, Param) else str(arg)

        shown = [show(arg) for arg in node.args]
        return node.op, tuple(shown), graph.line(number)


def _lines(steps: list[Step], marks: list[Mark | None], backward: Mark | None) -> tuple[str, ...]:
    """The user's file:line of each op; a backward op has its forward op's."""
    lines = []
    ops = [step for step in steps if step.node is not None]
    for step, mark in zip(ops, marks, strict=True):
        if step.forward >= 0 and (mark is None or mark == backward):
            mark = marks[step.forward]
        lines.append(expand(mark or backward))
    return tuple(lines)


def _open_link(config: Config) -> tuple[Link, str]:
    """The link and the type of device that the workers compute on."""
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if config.executor == "inline":
        worker = Worker(kind, max_plans=config.max_plans, inline=True)
        return InlineLink(worker), kind
    # why: an inline session needs neither sockets nor processes
    from lazygt.runtime.process_link import LinkSpec, ProcessLink

    spec = LinkSpec(
        world_size=config.workers,
        device=kind,
        threads=config.threads,
        transport=config.transport,
        frozen_after=config.frozen_after,
        start_timeout=config.start_timeout,
        max_message=config.max_message_bytes,
        environment={
            "LAZYGT_MAX_PLANS": str(config.max_plans),
            "LAZYGT_SHM_THRESHOLD": str(config.shm_threshold),
        },
    )
    return ProcessLink(spec), kind


def current() -> Session:
    """The open session.

    Raises:
        NoSession: when there is none.
    """
    session = current_session()
    if not isinstance(session, Session):
        raise NoSession("no lazygt session is open; use `with lazygt.session():`")
    return session
