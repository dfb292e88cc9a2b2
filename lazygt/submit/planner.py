"""Planner: builds the plans of the ranks from a recorded trace, once for each new trace.

Plans are cached in the trie, at the last step of their trace. A plan of the same program in other
sizes (a smaller batch) is *resized* from an earlier one, without running the passes again.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from lazygt.config import Config
from lazygt.errors import GatherWarning, PipelineWarning
from lazygt.graph.mesh import Sharding, VirtualMesh
from lazygt.graph.node import Graph, verify
from lazygt.graph.placement import Replicate
from lazygt.graph.recent import Recent
from lazygt.graph.source import CallSite, expand
from lazygt.host.gc_pause import gc_paused
from lazygt.machine import Machine
from lazygt.passes import PIPELINE, priced
from lazygt.passes.base import by_class, classes
from lazygt.passes.sharding.marks import MARKS, without_places
from lazygt.passes.template import Steps, Template, outline_key
from lazygt.record.bridge import shown_of
from lazygt.record.recorder import Recorder
from lazygt.record.trace import Trace
from lazygt.record.trie import TrieNode, build_graph, flags_of, line_of, producers, sites_of
from lazygt.runtime.client.client import Client
from lazygt.runtime.compiling.tiers import Tiers
from lazygt.runtime.plan import Plan
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.values import RemoteValue
from lazygt.submit.history import History, Miss, newly_alive

if TYPE_CHECKING:
    from lazygt.passes.sharding.axis import AxisStep
    from lazygt.passes.sharding.gathers import Gather

Stages = tuple[tuple[str, Graph], ...]
#: The user's frame of each op.
Sites = tuple[CallSite | None, ...]

#: Most cached traces with the same ops that differ in more than sizes, or in the passes' decisions.
_MOST_ALIKE = 8


class CachedPlan(NamedTuple):
    """Plans of a trace, as cached in the trie.

    *Outputs* are the values that the workers keep after the run, in the order of the plan.
    """

    entry: PlanRecord  # the plan of each rank, or the one plan of all
    positions: dict[int, int]  # number of a value of the trace -> position among the outputs
    #: for each plan of the entry, its node -> number of the recorded op (empty: the same numbers)
    origins: tuple[tuple[int, ...], ...]
    producers: tuple[int, ...]  # output -> number of the recorded op that computes it
    shardings: tuple[Sharding | None, ...]  # the sharding of each output; None: replicated
    #: for each output the positions of its blocks among the outputs of the plans
    slots: tuple[range, ...]
    shown: Any  # the C++ recorder's own form of the outputs; see ``bridge.shown_of``
    stages: Stages  # see ``Session.stages``; empty unless requested
    decided: tuple[AxisStep, ...]  # see ``Session.decided``; empty unless requested

    def grouped(self, blocks: list[RemoteValue]) -> list[RemoteValue]:
        """Group blocks by output; return each output's first block, which refers to the others."""
        for slot in self.slots:
            blocks[slot.start].rest = blocks[slot.start + 1 : slot.stop]
        return [blocks[slot.start] for slot in self.slots]


class _PlannedTrace(NamedTuple):
    """Planned trace, from which plans of the same program in other sizes are derived."""

    template: Template[Plan]  # the result of the passes
    sites: Sites  # the user's frames of its ops
    lines: tuple[str, ...]  # the same as text
    plan: CachedPlan  # its plan

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        return self.plan.entry.nbytes + self.template.nbytes


class Planner:
    """Planner of a session: runs the passes on traces without a plan.

    Args:
        config: limits of the caches.
        mesh: the ranks for which plans are built, and the workers.
        machine: the cost model of a rank.
        recorder: owner of the trie that caches the plans.
        client: sends the workers the plans that they may drop.
        tiers: notified of each new plan; they compile the hot ones.
        history: records misses and gathers.
    """

    def __init__(
        self,
        config: Config,
        mesh: VirtualMesh,
        machine: Machine,
        recorder: Recorder,
        client: Client,
        tiers: Tiers,
        history: History,
    ) -> None:
        self._passes = priced(PIPELINE, machine)
        #: (outputs, types of numbers, outline key: ops and dtypes without sizes) -> planned traces,
        #: last used first: candidates for a resize
        self._planned_traces: Recent[tuple[Any, ...], list[_PlannedTrace]] = Recent(
            config.max_plans, config.max_plan_bytes
        )
        #: number of plans derived from a cached one of the same program in other sizes
        self.resized = 0
        self._config, self._mesh, self._machine = config, mesh, machine
        self._recorder, self._client, self._tiers = recorder, client, tiers
        self._history = history
        self._warned_of_sequential_stages = False

    def build(self, trace: Trace, outputs: tuple[int, ...], reason: str) -> CachedPlan:
        """Build the plan of a trace with these outputs, and add it to the trie.

        Args:
            outputs: numbers of the values to keep.
            reason: the sync point, for the history.
        """
        plan = self._build(trace, outputs, reason)
        dropped = self._recorder.trie.keep(trace.step, outputs, plan, plan.entry.nbytes)
        self.forget(dropped)
        return plan

    def build_uncached(
        self,
        steps: list[TrieNode],
        outputs: tuple[int, ...],
        sites: Sites,
        kinds: tuple[str, ...],
    ) -> CachedPlan:
        """Build the plan of some steps outside of the trie; ``forget`` it afterwards.

        Args:
            kinds: names of the types of the run-time numbers.
        """
        return self._planned(steps, outputs, sites, kinds)

    def forget(self, dropped: Sequence[CachedPlan]) -> None:
        """Remove plans that the trie has dropped, unless another node of the trie has them."""
        if dropped:
            used = {id(plan.entry) for plan in self.cached_plans()}
            entries = [plan.entry for plan in dropped if id(plan.entry) not in used]
            self._client.entries.forget(entries)

    def cached_plans(self) -> list[CachedPlan]:
        """Return all cached plans, least recently used first."""
        return self._recorder.trie.plans()

    # -- a new plan ----------------------------------------------------------------------

    def _build(self, trace: Trace, outputs: tuple[int, ...], reason: str) -> CachedPlan:
        """Build a plan, by resizing a cached one if possible, and record the miss."""
        begin = time.monotonic_ns()
        steps = trace.step.path()
        sites = sites_of(steps, trace.call_sites, self._recorder.backward_call_site)
        kinds = tuple(type(value).__name__ for value in trace.params)
        plan = self._resized(steps, outputs, sites, kinds)
        resized = plan is not None
        if plan is None:
            plan = self._planned(steps, outputs, sites, kinds)
        miss = self._why_missed(trace, outputs, sites, reason)
        miss.resized = resized
        self._history.record_new_plan(miss, plan.entry.plan, begin)
        if not plan.entry.sent:
            self._history.plans_built += 1
        self._tiers.on_new_plan(plan.entry)
        return plan

    def _resized(
        self,
        steps: list[TrieNode],
        outputs: tuple[int, ...],
        sites: Sites,
        kinds: tuple[str, ...],
    ) -> CachedPlan | None:
        """Return a plan derived from a cached one of the same program in other sizes, or None.

        A candidate must have the same lines of the user's program, and its passes the same answers
        to their questions about sizes (the template's guards).

        Args:
            sites: the user's frames of the ops.
            kinds: names of the types of the run-time numbers.
        """
        if self._config.keep_stages or self._is_sharded(steps):
            return None
        recorded = _program(steps)
        candidates = self._planned_traces.get((outputs, kinds, outline_key(recorded))) or []
        for position, earlier in enumerate(candidates):
            if sites != earlier.sites and tuple(map(expand, sites)) != earlier.lines:
                continue
            plan = earlier.template.resized(recorded)
            if plan is not None:
                candidates.insert(0, candidates.pop(position))
                self.resized += 1
                if self._config.check_passes:
                    verify(plan.graph)
                plan = plan.recorded(earlier.plan.entry.plan.backward, flags_of(steps))
                entry = self._client.entries.of((plan,))
                return earlier.plan._replace(entry=entry, origins=(plan.origins,))
        return None

    def _is_sharded(self, steps: list[TrieNode]) -> bool:
        """Return whether the plan of a trace depends on the mesh."""
        return steps[-1].placed and self._mesh.ranks.world_size > 1

    @gc_paused()
    def _planned(
        self,
        steps: list[TrieNode],
        outputs: tuple[int, ...],
        sites: Sites,
        kinds: tuple[str, ...],
    ) -> CachedPlan:
        """Build a plan by running the passes.

        Args:
            outputs: numbers of the values to keep.
            sites: the user's frames of the ops.
            kinds: names of the types of the run-time numbers.
        """
        lines = tuple(map(expand, sites))
        recorded = build_graph(steps, outputs, lines, kinds)
        keep = self._config.keep_stages
        stages = [("recorded", recorded)] if keep else None
        decided: list[AxisStep] = []
        template = None
        if self._is_sharded(steps):
            plans, shardings = self._sharded(recorded, steps, stages, decided)
        else:
            template = self._template(recorded, steps, stages)
            plans = (template.plan.recorded(_backward(steps), flags_of(steps)),)
            shardings = (None,) * len(outputs)
        producers_of = producers(steps)
        made_by = tuple([producers_of[index] for index in outputs])
        cached = CachedPlan(
            self._client.entries.of(plans),
            positions={index: position for position, index in enumerate(outputs)},
            origins=tuple([plan.origins for plan in plans]),
            producers=made_by,
            shardings=shardings,
            slots=self._mesh.slots(shardings),
            shown=shown_of(outputs, made_by, shardings),
            stages=tuple(stages or ()),
            decided=tuple(decided) if keep else (),
        )
        if template is not None and not keep:
            key = outputs, kinds, outline_key(_program(steps))
            self._cache_for_resizing(key, _PlannedTrace(template, sites, lines, cached))
        return cached

    def _cache_for_resizing(self, key: tuple[Any, ...], earlier: _PlannedTrace) -> None:
        """Cache a planned trace for the same program in other sizes (LRU).

        ``max_plan_bytes`` also bounds the traces of one program, but for the last one.
        """
        traces = [earlier, *(self._planned_traces.get(key) or [])][:_MOST_ALIKE]
        nbytes = list(accumulate(trace.nbytes for trace in traces))
        fitting = max(bisect_right(nbytes, self._config.max_plan_bytes), 1)
        self._planned_traces.keep(key, traces[:fitting], nbytes[fitting - 1])

    def _why_missed(
        self, trace: Trace, outputs: tuple[int, ...], sites: Sites, reason: str
    ) -> Miss:
        """Return the miss: the first new step, or new outputs of a known trace."""
        if trace.first_miss is not None:
            return Miss.at(reason, trace.first_miss, line_of)
        plans, lines = trace.step.plans, tuple(map(expand, sites))
        recorded = build_graph(trace.step.path(), outputs, lines, ())
        return Miss(reason, None, ended=bool(plans), alive=newly_alive(recorded, outputs, plans))

    def _template(
        self, recorded: Graph, steps: list[TrieNode], stages: list[tuple[str, Graph]] | None
    ) -> Template[Plan]:
        """Run the passes on a recorded graph whose plan does not depend on the mesh.

        Marks of placements and stages are removed: they have no effect on one rank.
        """
        if any(node.op in MARKS for node in recorded.nodes):
            recorded = without_places(recorded, MARKS)
        check = self._config.check_passes
        return Template.of(recorded, _program(steps), self._passes, Plan, check, stages)

    def _sharded(
        self,
        recorded: Graph,
        steps: list[TrieNode],
        stages: list[tuple[str, Graph]] | None,
        decided: list[AxisStep],
    ) -> tuple[tuple[Plan, ...], tuple[Sharding | None, ...]]:
        """Build each rank's plan of a sharded graph, and the shardings of the outputs.

        Args:
            steps: the steps of the recorded graph.
            stages: list to which the graph after each pass is appended; None: not requested.
            decided: list to which the decisions on each axis of the mesh are appended.
        """
        # why: the rules of every op take a while to load, and few sessions shard
        from lazygt.passes.sharding.gathers import gathers
        from lazygt.passes.sharding.programs import programs

        config, ranks = self._config, self._mesh.ranks
        bucket_cap = config.bucket_cap_mb
        backward = _backward(steps)
        ranked = programs(
            recorded,
            ranks,
            [input_sharding(step) for step in steps if step.input is not None],
            self._machine,
            config.check_passes,
            stages,
            decided,
            self._mesh if config.invariant else None,
            bucket_bytes=None if bucket_cap is None else int(bucket_cap * (1 << 20)),
            backward=backward,
        )
        self._warn_of_gathers(gathers(decided))
        self._warn_in_order(ranked.why_in_turn)
        workers = self._mesh.workers
        flags = flags_of(steps)
        plans = by_class(
            lambda graph: Plan(graph, mesh=workers).recorded(backward, flags), ranked.graphs
        )
        replicated = Sharding((Replicate(),) * len(workers.names))
        shardings = tuple(
            [None if sharding == replicated else sharding for sharding in ranked.outputs]
        )
        alike = len(classes(ranked.graphs)) == 1
        return tuple(plans[:1] if alike else plans), shardings

    def _warn_of_gathers(self, gathers: Sequence[Gather]) -> None:
        """Warn once for each op and line with an unrequested gather."""
        for gather in gathers:
            key = gather.op, gather.line
            if key not in self._history.gathers:
                self._history.gathers[key] = gather
                message = f"{gather}. The numbers are right. {gather.instead}"
                file, _, number = gather.line.rpartition(":")
                line = int(number) if number.isdigit() else 1
                warnings.warn_explicit(message, GatherWarning, file or "<unknown>", line)

    def _warn_in_order(self, why: str) -> None:
        """Warn once that the stages of a pipeline wait for each other."""
        if why and not self._warned_of_sequential_stages:
            self._warned_of_sequential_stages = True
            warnings.warn(
                f"the stages of this pipeline take one microbatch after the other, and each waits "
                f"while the others work, since {why}. The numbers are right.",
                PipelineWarning,
                stacklevel=2,
            )


def _program(steps: Sequence[TrieNode]) -> Steps:
    """Return the program of a trace: the metas of its inputs, and its ops."""
    return [step.input if step.node is None else step.node for step in steps]  # type: ignore[misc]


def _backward(steps: Sequence[TrieNode]) -> frozenset[int]:
    """Return the numbers of the ops that autograd ran."""
    ops = [step for step in steps if step.node is not None]
    return frozenset(number for number, step in enumerate(ops) if step.backward)


def input_sharding(step: TrieNode) -> Sharding | None:
    """Return the sharding of the input that a step adds; None: replicated. See ``Trace.enter``."""
    sharding: Sharding | None = step.key[1] if type(step.key) is tuple else None
    return sharding
