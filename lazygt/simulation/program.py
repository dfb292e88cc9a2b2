"""Simulation of a program: its steady step, recorded without computing, and priced.

A step is the part of the program that is repeated, in which most of the time is spent; in a program
that trains, most of the time of runs with a backward pass.
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
from lazygt.machine import Gpus, Machine, default_machine, machine_of
from lazygt.parallel.fsdp_overrides import Forced
from lazygt.runtime.console import Observer
from lazygt.runtime.plan import Plan
from lazygt.runtime.plan_records import PlanRecord
from lazygt.session import Session
from lazygt.simulation.discrete_event import Rehearsal
from lazygt.simulation.node_times import node_seconds
from lazygt.simulation.prediction import Prediction, SimulatedRun
from lazygt.simulation.rank_memory import ACTIVATIONS, Told
from lazygt.simulation.suggest import AS_IT_IS, Trial, trials, tried
from lazygt.submit.history import Flush
from lazygt.submit.memory import OTHER

#: Settings of a session that records and plans, and computes nothing.
DRY = {"launcher": "dry", "compile": "off", "keep_stages": True}
#: Flushes that the program does not wait for.
_GOES_ON = frozenset({"backward", "optimizer step", "trace too long", "flush()", "checkpoint"})
#: Flushes that it waits for, and gets nothing from.
_ONLY_WAITS = frozenset({"synchronize()", "memory()"})
#: Runs of a step at most, for a loop to be seen.
_LONGEST = 64
#: Weights are equal up to rounding.
_EQUAL = 1 + 1e-9


class Living(Observer):
    """Observer of a dry session: values that a rank holds in each run, by category.

    Attributes:
        beside: bytes by kind that a run neither reads nor makes, by its number.
        told: the client's knowledge of plans, by their names.
    """

    def __init__(self, session: Session) -> None:
        self.beside: dict[int, Counter[str]] = {}
        self.told: dict[bytes, Told] = {}
        self._kinds: dict[int, str] = {}
        self._versions: dict[bytes, list[tuple[int, int]]] = {}
        self._tells = session._submitter.kinds
        self._store = session._link._worker.store  # type: ignore[attr-defined]
        session._client.observer = self

    def submitted(
        self, run: int, entry: PlanRecord | None, inputs: Collection[int], base: int
    ) -> None:
        """See ``Observer``."""
        # parameters that no optimizer has stay where they were before the first step
        known = self._tells.by_id(everywhere=not self._tells.trains)
        outputs = range(base, base + (0 if entry is None else entry.outputs))
        if entry is not None and self._tells.trains:
            self._kinds.update(dict.fromkeys(outputs, ACTIVATIONS))
            of_inputs = list(inputs)
            for place, written in self._written(entry.plan):
                self._kinds[base + place] = self._kinds.get(of_inputs[written], OTHER)
        self._kinds.update(known)
        if entry is not None:
            kept = [place for place, key in enumerate(inputs) if key in self._store]
            kinds = self._of(inputs), self._of(outputs)
            self.told[entry.plan.digest] = Told(*kinds, frozenset(kept))
        held, read = Counter[str](), set(inputs)
        for key, value in self._store.values.items():
            if isinstance(value, torch.Tensor) and key not in read and key not in outputs:
                held[self._kinds.get(key, OTHER)] += value.nbytes
        self.beside[run] = held

    def _written(self, plan: Plan) -> list[tuple[int, int]]:
        """Return a plan's (output, input) positions: the output is the input written in place."""
        if plan.digest not in self._versions:
            graph, homes = plan.graph, homes_of(plan.graph)
            self._versions[plan.digest] = [
                (place, homes[output])
                for place, output in enumerate(graph.outputs)
                if homes[output] < len(graph.inputs)
            ]
        return self._versions[plan.digest]

    def _of(self, ids: Iterable[int]) -> list[str]:
        return [self._kinds.get(key, OTHER) for key in ids]


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
        program: called in a session of its own; two or three steps of a training are best.
        mesh: the ranks, such as ``data=8,model=4``; None: one.
        machine: a name such as ``h100``, or a machine file; None: as ``lazygt.session`` has it.
        device: ``cuda`` or ``cpu``; None: the machine's.
        compiled: True if fused groups are one kernel each, else one for each of their ops.
        gpus: such as ``8xB200``: the machine ``b200``, and a mesh of 8 ranks (without ``mesh`` all
            on the axis ``data``).
        hosts: on which the GPUs are, as many on each; None: each has as many as it has room for.

    Raises:
        MachineError: there is no such machine, or its file is wrong.
        ValueError: the program runs nothing; the mesh is none, or not of as many ranks as GPUs.
    """
    if gpus is not None:
        ranks = Gpus.parse(gpus, hosts, None if machine is None else os.fspath(machine))
        mesh = ranks.mesh(mesh if mesh is None or isinstance(mesh, str) else str(Mesh.of(mesh)))
        machine = ranks.machine
    elif hosts is not None:
        raise ValueError("hosts says where GPUs are: give gpus, too")
    priced = default_machine(device or "cpu") if machine is None else machine_of(machine)
    settings = {**DRY, "device": device or priced.device, "mesh": mesh, "machine": machine}

    def once(trial: Trial) -> tuple[Prediction, Forced]:
        changed = settings if trial.mesh is None else {**settings, "mesh": str(trial.mesh)}
        given: dict[str, Any] = {k: v for k, v in changed.items() if v is not None}
        with trial.made() as forced, Session(**given) as session:
            living = Living(session)
            program()
        return predict(session, priced, living, compiled=compiled), forced

    now, forced = once(AS_IT_IS)
    others = trials(now.mesh, forced.calls > 0)
    return replace(now, tries=lambda: tried(others, lambda trial: once(trial)[0]))


@gc_paused()
def predict(
    session: Session, machine: Machine, living: Living, *, compiled: bool = True
) -> Prediction:
    """Predict a step of a dry session's program.

    Raises:
        ValueError: nothing has been run.
    """
    entries: dict[bytes | None, PlanRecord] = {
        entry.plan.digest: entry for entry in session.entries()
    }
    flushes = [flush for flush in session.history.recent if flush.digest in entries]
    if not flushes:
        raise ValueError("the program has run no plan on device lazygt: nothing is to be simulated")
    names = [flush.digest for flush in flushes if flush.digest is not None]
    spent = _spent({name: entries[name].plan for name in names}, machine)
    first, length = repeated(names, [spent[name] for name in names])
    looped = length < len(names)
    step = flushes[first : first + length] if looped else _last_turn(flushes, entries)
    mesh = session.mesh
    runs = [
        _run(entries[flush.digest], flush.run, living, mesh, machine, compiled) for flush in step
    ]
    return Prediction(
        machine,
        mesh if mesh.world_size > 1 else None,
        tuple(runs),
        sum(flush.ops * machine.host.record + machine.host.message for flush in step),
        any(flush.reason not in _GOES_ON for flush in step),
        looped,
        sum(_tokens(session, entries[flush.digest].plan) for flush in step),
        _reads(session.history.recent),
    )


def _reads(flushes: Iterable[Flush]) -> tuple[str, ...]:
    """Return the lines that have read results, with the reasons."""
    reads = [flush for flush in flushes if flush.reason.split(":")[0] not in _GOES_ON | _ONLY_WAITS]
    return tuple(dict.fromkeys([
        f"{expand(flush.call_site)} ({flush.reason})" for flush in reads if flush.call_site
    ]))  # fmt: skip


def _tokens(session: Session, plan: Plan) -> int:
    """Return the rows that a run looks up in its most used table, on all ranks."""
    recorded = dict(session.stages(plan)).get("recorded")
    if recorded is None:
        return 0
    metas, rows = recorded.values, Counter[int]()
    for node in recorded.nodes:
        if node.op == "aten.embedding.default":
            table, index = node.refs()
            meta = metas[index]
            rows[table] += 0 if meta is None else meta.numel
    return max(rows.values(), default=0)


def _last_turn(flushes: list[Flush], entries: Mapping[bytes | None, PlanRecord]) -> list[Flush]:
    """Return the flushes from after the last backward but one to the last; all without two."""
    trained = [n for n, flush in enumerate(flushes) if entries[flush.digest].plan.backward]
    return flushes[trained[-2] + 1 : trained[-1] + 1] if len(trained) > 1 else flushes


def _spent(plans: Mapping[bytes, Plan], machine: Machine) -> dict[bytes, float]:
    """Return the seconds that a run of each plan counts for in the search for a step."""
    trains = any(plan.backward for plan in plans.values())
    return {
        name: 0.0 if trains and not plan.backward else sum(node_seconds(plan.graph, machine))
        for name, plan in plans.items()
    }


def repeated(names: Sequence[Any], weights: Sequence[float]) -> tuple[int, int]:
    """Find the heaviest repetition in a sequence: start of its last period, and the period.

    Of equal ones it is the shortest. Without a repetition it is the whole sequence.
    """
    heaviest, place = 0.0, (0, len(names))
    until = [0.0, *itertools.accumulate(weights)]
    for period in range(1, min(_LONGEST, len(names) // 2) + 1):
        stretch = 0
        for at in range(period, len(names)):
            stretch = stretch + 1 if names[at] == names[at - period] else 0
            weight = until[at + 1] - until[at + 1 - stretch - period]
            if stretch >= period and weight > heaviest * _EQUAL:
                heaviest, place = weight, (at - period + 1, period)
    return place


def _run(
    entry: PlanRecord, run: int, living: Living, mesh: Mesh, machine: Machine, compiled: bool
) -> SimulatedRun:
    told = living.told.get(entry.plan.digest, Told())
    simulated = Rehearsal(entry.plans, mesh, compiled=compiled, told=told).on(machine)
    return SimulatedRun(entry.plan.digest.hex()[:12], simulated, living.beside.get(run, {}))
