"""Planner: from a recorded trace to the plans that the ranks run, once for each new trace."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lazygt.config import Config
from lazygt.errors import GatherWarning, PipelineWarning
from lazygt.graph.mesh import Sharding, VirtualMesh
from lazygt.graph.node import Graph
from lazygt.graph.placement import Replicate
from lazygt.graph.recent import Recent
from lazygt.graph.sizes import Sizes
from lazygt.graph.source import CallSite, expand
from lazygt.host.gc_pause import gc_paused
from lazygt.machine import Machine
from lazygt.passes import PIPELINE, priced
from lazygt.passes.classes import by_class, classes
from lazygt.passes.sharding.marks import MARKS, without_places
from lazygt.passes.template import Optimised, Template, Templates
from lazygt.record.bridge import shown_of
from lazygt.record.outline import Outline, outline_key
from lazygt.record.recorder import Recorder
from lazygt.record.trace import Trace
from lazygt.record.trie import TrieNode, build_graph, flags_of, line_of, makers, sites_of
from lazygt.runtime.client import Client
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

#: Of traces with the same ops so many are kept that differ in more than sizes.
_MOST_ALIKE = 4


class CachedPlan(NamedTuple):
    """A plan as the trie keeps it.

    Attributes:
        positions: number of a value of the trace -> position among the outputs.
        origins: for each plan of the entry, step -> recorded op (empty: the same numbers).
        makers: output -> recorded op.
        shardings: the sharding of each output; None: replicated.
        slots: of each output the places of its blocks among those of the plans.
        shown: the native recorder's part of this.
        stages, decided: see ``Session.stages`` and ``Session.decided``; empty unless asked for.
    """

    entry: PlanRecord
    positions: dict[int, int]
    origins: tuple[tuple[int, ...], ...]
    makers: tuple[int, ...]
    shardings: tuple[Sharding | None, ...]
    slots: tuple[range, ...]
    shown: Any
    stages: Stages
    decided: tuple[AxisStep, ...]

    def grouped(self, blocks: list[RemoteValue]) -> list[RemoteValue]:
        """The first block of each output, which keeps the others."""
        for slot in self.slots:
            blocks[slot.start].rest = blocks[slot.start + 1 : slot.stop]
        return [blocks[slot.start] for slot in self.slots]


class _Earlier(NamedTuple):
    """A trace that was planned, for others that are it in other sizes.

    Attributes:
        template, sizes: the result of the passes.
        sites, lines: of its ops.
    """

    outline: Outline
    template: Template[Plan]
    sizes: Sizes
    sites: Sites
    lines: list[str]
    kept: CachedPlan

    @property
    def nbytes(self) -> int:
        """Its memory in bytes, about."""
        return self.kept.entry.nbytes + self.template.nbytes


class Planner:
    """Runs the passes on a trace that has no plan yet.

    Args:
        mesh: the ranks that plans are made for, on the workers there are.
        machine: the cost model of a rank.
        history: gets misses and gathers.
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
        self.templates = Templates(
            priced(PIPELINE, machine), config.max_plans, config.max_plan_bytes, Plan
        )
        self._outlines: Recent[tuple[Any, ...], tuple[_Earlier, ...]] = Recent(
            config.max_plans, config.max_plan_bytes
        )
        self._config, self._mesh, self._machine = config, mesh, machine
        self._recorder, self._client, self._tiers = recorder, client, tiers
        self._history = history
        self._told_of_turns = False

    def build(self, trace: Trace, outputs: tuple[int, ...], reason: str) -> CachedPlan:
        """The plan of a trace that needs ``outputs``, from now on in the trie."""
        plan = self._build(trace, outputs, reason)
        dropped = self._recorder.trie.keep(trace.step, outputs, plan, plan.entry.nbytes)
        self.forget(dropped)
        return plan

    def once(
        self,
        steps: list[TrieNode],
        outputs: tuple[int, ...],
        sites: Sites,
        kinds: tuple[str, ...],
    ) -> CachedPlan:
        """The plan of some steps that the trie does not keep; ``forget`` it afterwards."""
        return self._planned(steps, outputs, sites, kinds)

    def forget(self, dropped: Sequence[CachedPlan]) -> None:
        """Forget plans that the trie has dropped, unless another node of it has them."""
        if dropped:
            used = {id(plan.entry) for plan in self.kept()}
            entries = [plan.entry for plan in dropped if id(plan.entry) not in used]
            self._client.entries.forget(entries)

    def kept(self) -> list[CachedPlan]:
        """The plans there are, least recently used first."""
        return self._recorder.trie.kept()

    # -- a new plan ----------------------------------------------------------------------

    def _build(self, trace: Trace, outputs: tuple[int, ...], reason: str) -> CachedPlan:
        begin = time.monotonic_ns()
        steps = trace.step.path()
        sites = sites_of(steps, trace.call_sites, self._recorder.backward_call_site)
        kinds = tuple(type(value).__name__ for value in trace.params)
        kept = self._resized(steps, outputs, sites, kinds)
        resized = kept is not None
        if kept is None:
            kept = self._planned(steps, outputs, sites, kinds)
        miss = self._why_missed(trace, outputs, sites, reason)
        miss.resized = resized
        self._history.missed(miss, kept.entry.plan, begin)
        if not kept.entry.sent:
            self._history.plans_built += 1
        self._tiers.built(kept.entry)
        return kept

    def _resized(
        self,
        steps: list[TrieNode],
        outputs: tuple[int, ...],
        sites: Sites,
        kinds: tuple[str, ...],
    ) -> CachedPlan | None:
        """The plan of a trace that is an earlier one in other sizes; None: it is not."""
        if self._config.keep_stages or steps[-1].placed:
            return None
        for earlier in self._outlines.get((outputs, kinds, outline_key(steps))) or ():
            if sites != earlier.sites and list(map(expand, sites)) != earlier.lines:
                continue
            new = earlier.outline.resized(steps)
            if new is None:
                continue
            sizes = tuple([new[size] for size in earlier.sizes])
            plan = self.templates.resize(earlier.template, sizes, self._config.check_passes)
            if plan is not None:
                plan = plan.recorded(earlier.kept.entry.plan.backward, flags_of(steps))
                entry = self._client.entries.of((plan,))
                return earlier.kept._replace(entry=entry, origins=(plan.origins,))
        return None

    @gc_paused()
    def _planned(
        self,
        steps: list[TrieNode],
        outputs: tuple[int, ...],
        sites: Sites,
        kinds: tuple[str, ...],
    ) -> CachedPlan:
        """The plan of a trace, as the passes make it."""
        lines = tuple(map(expand, sites))
        recorded = build_graph(steps, outputs, lines, kinds)
        keep = self._config.keep_stages
        stages = [("recorded", recorded)] if keep else None
        decided: list[AxisStep] = []
        plans, shardings, optimised = self._plans(recorded, steps, stages, decided)
        makers_of = makers(steps)
        made_by = tuple([makers_of[index] for index in outputs])
        kept = CachedPlan(
            self._client.entries.of(plans),
            positions={index: position for position, index in enumerate(outputs)},
            origins=tuple([plan.origins for plan in plans]),
            makers=made_by,
            shardings=shardings,
            slots=self._mesh.slots(shardings),
            shown=shown_of(outputs, made_by, shardings),
            stages=tuple(stages or ()),
            decided=tuple(decided) if keep else (),
        )
        if optimised is not None and not steps[-1].placed:
            outline = Outline(steps)
            self._note(
                (outputs, kinds, outline_key(steps)),
                _Earlier(outline, optimised.template, optimised.sizes, sites, list(lines), kept),
            )
        return kept

    def _note(self, key: tuple[Any, ...], earlier: _Earlier) -> None:
        """Keep a trace for others that are it in other sizes."""
        known = (earlier, *(self._outlines.get(key) or ()))[:_MOST_ALIKE]
        self._outlines.keep(key, known, sum(each.nbytes for each in known))

    def _why_missed(
        self, trace: Trace, outputs: tuple[int, ...], sites: Sites, reason: str
    ) -> Miss:
        if trace.first_miss is not None:
            return Miss.at(reason, trace.first_miss, line_of)
        plans, lines = trace.step.plans, tuple(map(expand, sites))
        recorded = build_graph(trace.step.path(), outputs, lines, ())
        return Miss(reason, None, ended=bool(plans), alive=newly_alive(recorded, outputs, plans))

    def _plans(
        self,
        recorded: Graph,
        steps: list[TrieNode],
        stages: list[tuple[str, Graph]] | None,
        decided: list[AxisStep],
    ) -> tuple[tuple[Plan, ...], tuple[Sharding | None, ...], Optimised[Plan] | None]:
        """Build each rank's plan, or the one that all run, and the shardings of the outputs.

        The third result is the template for other sizes, unless the plan depends on the mesh.

        Args:
            steps: that the graph was recorded in.
            stages: gets the graph after each pass, if it is a list.
            decided: gets how each axis of the mesh was decided.
        """
        given = [stored(step) for step in steps if step.input is not None]
        marked = any(node.op in MARKS for node in recorded.nodes)
        if self._mesh.ranks.world_size > 1 and (marked or any(given)):
            return *self._sharded(recorded, steps, given, stages, decided), None
        if marked:
            recorded = without_places(recorded, MARKS)
        optimised = self.templates.optimised(recorded, self._config.check_passes, stages)
        plan = optimised.plan.recorded(_backward(steps), flags_of(steps))
        return (plan,), (None,) * len(recorded.outputs), optimised

    def _sharded(
        self,
        recorded: Graph,
        steps: list[TrieNode],
        given: list[Sharding | None],
        stages: list[tuple[str, Graph]] | None,
        decided: list[AxisStep],
    ) -> tuple[tuple[Plan, ...], tuple[Sharding | None, ...]]:
        """The same, of a graph of which something is placed on the mesh.

        Args:
            given: how its inputs lie there.
        """
        # why: the rules of every op take a while to load, and few sessions shard
        from lazygt.passes.sharding.gathers import gathers
        from lazygt.passes.sharding.programs import programs

        config, ranks = self._config, self._mesh.ranks
        asked = config.bucket_cap_mb
        backward = _backward(steps)
        ranked = programs(
            recorded,
            ranks,
            given,
            self._machine,
            config.check_passes,
            stages,
            decided,
            self._mesh if config.invariant else None,
            bucket_bytes=None if asked is None else int(asked * (1 << 20)),
            backward=backward,
        )
        self._gathered(gathers(decided))
        self._in_turn(ranked.why_in_turn)
        workers = self._mesh.workers
        flags = flags_of(steps)
        plans = by_class(
            lambda graph: Plan(graph, mesh=workers).recorded(backward, flags), ranked.graphs
        )
        whole = Sharding((Replicate(),) * len(workers.names))
        shardings = tuple([None if each == whole else each for each in ranked.outputs])
        alike = len(classes(ranked.graphs)) == 1
        return tuple(plans[:1] if alike else plans), shardings

    def _gathered(self, gathers: Sequence[Gather]) -> None:
        """Warn once for each op and line whose sharded operands were gathered."""
        for gather in gathers:
            key = gather.op, gather.line
            if key not in self._history.gathers:
                self._history.gathers[key] = gather
                told = f"{gather}. The numbers are right. {gather.instead}"
                file, _, number = gather.line.rpartition(":")
                line = int(number) if number.isdigit() else 1
                warnings.warn_explicit(told, GatherWarning, file or "<unknown>", line)

    def _in_turn(self, why: str) -> None:
        """Say once that the stages of a pipeline wait for each other."""
        if why and not self._told_of_turns:
            self._told_of_turns = True
            warnings.warn(
                f"the stages of this pipeline take one microbatch after the other, and each waits "
                f"while the others work, since {why}. The numbers are right.",
                PipelineWarning,
                stacklevel=2,
            )


def _backward(steps: Sequence[TrieNode]) -> frozenset[int]:
    """The ops that autograd ran, by number."""
    ops = [step for step in steps if step.node is not None]
    return frozenset(number for number, step in enumerate(ops) if step.backward)


def stored(step: TrieNode) -> Sharding | None:
    """Return the sharding of the input that enters at a step; see ``Trace.enter``."""
    sharding: Sharding | None = step.key[1] if type(step.key) is tuple else None
    return sharding
