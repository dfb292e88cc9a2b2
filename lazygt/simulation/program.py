"""Simulation of a program: its steady step, recorded without computing, and priced.

A step is the repeated part of the program with the most time; in a training program only runs with
a backward pass count for that.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lazygt.graph.liveness import homes_of
from lazygt.graph.mesh import Mesh
from lazygt.graph.source import expand
from lazygt.host.gc_pause import gc_paused
from lazygt.machine import Machine, default_machine, machine_of
from lazygt.machine.find import requested
from lazygt.observe.explain import DRY
from lazygt.parallel.fsdp_overrides import Forced
from lazygt.runtime.client.console import Observer
from lazygt.runtime.plan import Plan
from lazygt.runtime.plan_records import PlanRecord
from lazygt.session import Session
from lazygt.settings import grouped
from lazygt.simulation.discrete_event import Rehearsal
from lazygt.simulation.node_costs import ACTIVATIONS, KnownCategories, node_seconds
from lazygt.simulation.prediction import Prediction, SimulatedRun
from lazygt.simulation.suggest import UNCHANGED, Trial, run_trials, trials
from lazygt.submit.history import Flush
from lazygt.submit.memory_categories import OTHER

#: Reasons of flushes that the program does not wait for.
_ASYNCHRONOUS = frozenset({"backward", "optimizer step", "trace too long", "flush()", "checkpoint"})
#: Reasons of flushes that the program waits for without reading a value.
_ONLY_WAITS = frozenset({"synchronize()", "memory()"})
#: Runs of a step, at most, for a loop to be found.
_MAX_PERIOD = 64
#: Factor up to which weights count as equal, because of rounding.
_EQUAL = 1 + 1e-9


class LiveValue(Observer):
    """Observer of a dry session: values that a rank holds in each run, by category.

    Attributes:
        beside: run number -> bytes by category of values that the run neither reads nor makes.
        categories: digest of a plan -> the categories of its values, as known to the client.
    """

    def __init__(self, session: Session) -> None:
        self.beside: dict[int, Counter[str]] = {}
        self.categories: dict[bytes, KnownCategories] = {}
        #: id of a value -> its category, as far as it is known
        self._category_of: dict[int, str] = {}
        #: digest of a plan -> result of ``_written``
        self._written_inputs: dict[bytes, list[tuple[int, int]]] = {}
        self._memory_kinds = session._submitter.categories
        self._store = session._link._worker.store  # type: ignore[attr-defined]
        session._client.observer = self

    def submitted(
        self, run: int, entry: PlanRecord | None, inputs: Collection[int], base: int
    ) -> None:
        """Record the categories of a run's values, and the bytes of all others.

        Args:
            inputs: ids of the run's inputs.
            base: id of its first output.
        """
        # until an optimizer steps, parameters are searched among all objects of the process
        client_categories = self._memory_kinds.by_id(everywhere=not self._memory_kinds.trains)
        outputs = range(base, base + (0 if entry is None else entry.outputs))
        if entry is not None and self._memory_kinds.trains:
            self._category_of.update(dict.fromkeys(outputs, ACTIVATIONS))
            of_inputs = list(inputs)
            for position, written in self._written(entry.plan):
                self._category_of[base + position] = self._category_of.get(
                    of_inputs[written], OTHER
                )
        self._category_of.update(client_categories)
        if entry is not None:
            retained = [position for position, key in enumerate(inputs) if key in self._store]
            categories = self._categories(inputs), self._categories(outputs)
            self.categories[entry.plan.digest] = KnownCategories(*categories, frozenset(retained))
        other_bytes, inputs_read = Counter[str](), set(inputs)
        for key, value in self._store.values.items():
            if isinstance(value, torch.Tensor) and key not in inputs_read and key not in outputs:
                other_bytes[self._category_of.get(key, OTHER)] += value.nbytes
        self.beside[run] = other_bytes

    def _written(self, plan: Plan) -> list[tuple[int, int]]:
        """Return a plan's (output, input) positions: the output is the input written in place."""
        if plan.digest not in self._written_inputs:
            graph, homes = plan.graph, homes_of(plan.graph)
            self._written_inputs[plan.digest] = [
                (position, homes[output])
                for position, output in enumerate(graph.outputs)
                if homes[output] < len(graph.inputs)
            ]
        return self._written_inputs[plan.digest]

    def _categories(self, ids: Iterable[int]) -> list[str]:
        """Return the categories of values, ``other`` if unknown."""
        return [self._category_of.get(key, OTHER) for key in ids]


class DryRun:
    """Dry sessions of one run of a program, which are recorded for predictions.

    Attributes:
        observed: the sessions, in the order in which they were opened, with their values.
    """

    def __init__(self) -> None:
        self.observed: list[tuple[Session, LiveValue]] = []

    def on_session_opened(self, session: Session) -> None:
        """Record a new session, and observe its values from here on."""
        self.observed.append((session, LiveValue(session)))

    def longest(self, compiled: bool = True, machine: Machine | None = None) -> Prediction:
        """Predict a step of the session with the longest one; see ``predict``."""
        predictions = [
            predict(session, machine or session.machine, living, compiled=compiled)
            for session, living in self.observed
        ]
        return max(predictions, key=lambda prediction: prediction.step_seconds)


def simulate(
    program: Callable[[], object],
    *,
    mesh: Mapping[str, int] | str | None = None,
    machine: str | os.PathLike[str] | None = None,
    device: str | None = None,
    compiled: bool = True,
    gpus: str | None = None,
    hosts: int | None = None,
) -> Prediction:
    """Predict a step of a program on a machine that need not be there.

    The program is recorded once, with nothing computed; values that it reads are zeros.

    Args:
        program: function to simulate, called in a new session; should train two or three steps.
        mesh: mesh of the ranks, such as ``data=8,model=4``; None: one rank.
        machine: a name such as ``h100``, or a machine file; None: the default of
            ``lazygt.session``.
        device: ``cuda`` or ``cpu``; None: the machine's.
        compiled: True if each fused group is one kernel; else each of its ops is one.
        gpus: number and kind of GPUs, such as ``8xB200``: the machine ``b200``, and a mesh of 8
            ranks (without ``mesh`` all on the axis ``data``).
        hosts: number of hosts, with equally many GPUs each; None: as few as hold all GPUs.

    Raises:
        MachineError: there is no such machine, or its file is invalid.
        ValueError: the program runs nothing, or the mesh is invalid or does not match the GPUs.
    """
    mesh, machine = requested(gpus, hosts, mesh, machine)
    priced = default_machine(device or "cpu") if machine is None else machine_of(machine)
    settings = {**DRY, "device": device or priced.device, "mesh": mesh, "machine": machine}

    def run_once(trial: Trial) -> tuple[Prediction, Forced]:
        """Record and predict the program with a change, in a session of its own."""
        changed = settings if trial.mesh is None else {**settings, "mesh": str(trial.mesh)}
        session_settings: dict[str, Any] = {k: v for k, v in changed.items() if v is not None}
        recording = DryRun()
        with trial.applied() as forced, Session(**grouped(session_settings)) as session:
            recording.on_session_opened(session)
            program()
        return recording.longest(compiled, priced), forced

    now, forced = run_once(UNCHANGED)
    changes = trials(now.mesh, forced.calls > 0)
    return replace(now, tries=lambda: run_trials(changes, lambda trial: run_once(trial)[0]))


@gc_paused()
def predict(
    session: Session, machine: Machine, living: LiveValue, *, compiled: bool = True
) -> Prediction:
    """Predict a step of a dry session's program.

    Args:
        machine: the cost model.
        living: the observer of the session's values.
        compiled: True if each fused group is one kernel; else each of its ops is one.

    Raises:
        ValueError: nothing has been run.
    """
    entries: dict[bytes | None, PlanRecord] = {
        entry.plan.digest: entry for entry in session.entries()
    }
    flushes = [flush for flush in session.history.recent if flush.digest in entries]
    if not flushes:
        raise ValueError("the program has run no plan on device lazygt: nothing is to be simulated")
    digests = [flush.digest for flush in flushes if flush.digest is not None]
    weights = _weights({name: entries[name].plan for name in digests}, machine)
    first, length = repeated(digests, [weights[name] for name in digests])
    looped = length < len(digests)
    step = flushes[first : first + length] if looped else _last_step(flushes, entries)
    mesh = session.mesh
    runs = [
        _simulated_run(entries[flush.digest], flush.run, living, mesh, machine, compiled)
        for flush in step
    ]
    return Prediction(
        machine,
        mesh if mesh.world_size > 1 else None,
        tuple(runs),
        sum(flush.ops * machine.host.record + machine.host.message for flush in step),
        any(flush.reason not in _ASYNCHRONOUS for flush in step),
        looped,
        sum(_tokens(session, entries[flush.digest].plan) for flush in step),
        _reads(session.history.recent),
    )


def _reads(flushes: Iterable[Flush]) -> tuple[str, ...]:
    """Return the lines that read results, with the reasons of their flushes."""
    reads = [
        flush for flush in flushes if flush.reason.split(":")[0] not in _ASYNCHRONOUS | _ONLY_WAITS
    ]
    return tuple(dict.fromkeys([
        f"{expand(flush.call_site)} ({flush.reason})" for flush in reads if flush.call_site
    ]))  # fmt: skip


def _tokens(session: Session, plan: Plan) -> int:
    """Return the number of rows that a run looks up in its most used embedding, on all ranks."""
    recorded = dict(session.stages(plan)).get("recorded")
    if recorded is None:
        return 0
    metas, lookups = recorded.values, Counter[int]()
    for node in recorded.nodes:
        if node.op == "aten.embedding.default":
            table, index = node.refs()
            meta = metas[index]
            lookups[table] += 0 if meta is None else meta.numel
    return max(lookups.values(), default=0)


def _last_step(flushes: list[Flush], entries: Mapping[bytes | None, PlanRecord]) -> list[Flush]:
    """Return the flushes after the second-to-last backward up to the last; all without two."""
    backward_flushes = [n for n, flush in enumerate(flushes) if entries[flush.digest].plan.backward]
    return (
        flushes[backward_flushes[-2] + 1 : backward_flushes[-1] + 1]
        if len(backward_flushes) > 1
        else flushes
    )


def _weights(plans: Mapping[bytes, Plan], machine: Machine) -> dict[bytes, float]:
    """Return digest -> seconds of a run, as its weight in the search for a step.

    In a training program plans without a backward pass weigh nothing.
    """
    trains = any(plan.backward for plan in plans.values())
    return {
        name: 0.0 if trains and not plan.backward else sum(node_seconds(plan.graph, machine))
        for name, plan in plans.items()
    }


def repeated(names: Sequence[Any], weights: Sequence[float]) -> tuple[int, int]:
    """Find the heaviest repetition in a sequence: (start of its last period, period).

    Each period is tried with a scan for runs of equal names at that distance. Of equally heavy
    repetitions the shortest period wins. Without a repetition, return the full sequence.
    """
    heaviest, best = 0.0, (0, len(names))
    prefix_sums = [0.0, *itertools.accumulate(weights)]
    for period in range(1, min(_MAX_PERIOD, len(names) // 2) + 1):
        repeats = 0
        for end in range(period, len(names)):
            repeats = repeats + 1 if names[end] == names[end - period] else 0
            weight = prefix_sums[end + 1] - prefix_sums[end + 1 - repeats - period]
            if repeats >= period and weight > heaviest * _EQUAL:
                heaviest, best = weight, (end - period + 1, period)
    return best


def _simulated_run(
    entry: PlanRecord, run: int, living: LiveValue, mesh: Mesh, machine: Machine, compiled: bool
) -> SimulatedRun:
    """Simulate a run of a plan on all ranks."""
    categories = living.categories.get(entry.plan.digest, KnownCategories())
    simulated = Rehearsal(entry.plans, mesh, compiled=compiled, categories=categories).on(machine)
    return SimulatedRun(entry.plan.digest.hex()[:12], simulated, living.beside.get(run, {}))
