"""Rollback of a failed step: storages get back the values from before the failed op.

An op fails on a worker when the client's program has already continued; eager torch would have
stopped at the op. So the workers are rolled back to the state before the run of the failed op, the
ops of that run before the failed one are run again, and storages get their results or their earlier
values. Tensors created later stay: failed where they depend on the op.

``Held`` is a storage's value outside of a trace: on the workers or on the client.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from lazygt.errors import ExecutionError
from lazygt.graph.alias import has_effect
from lazygt.record.recorder import Recorder
from lazygt.record.rng import SEEDS
from lazygt.record.tensor import Held, Storage, is_lazy, storage_of
from lazygt.record.trace import Shown
from lazygt.record.trie import Provenance, TrieNode, producers, sites_of
from lazygt.runtime.client.client import Client
from lazygt.submit.planner import CachedPlan, Planner, input_sharding

# -- optimizers' state in the client, saved before each step ---------------------------------------
# Steps are counted in CPU tensors (Adam's ``step``), and a first step creates a parameter's
# state. Both exist in the client only.


class StateBeforeStep(NamedTuple):
    """Copy of an optimizer's state in the client before a step."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    numbers: list[torch.Tensor]  # the optimizer's CPU tensors
    #: copies of them, stacked where all have one shape and dtype
    values: torch.Tensor | list[torch.Tensor]
    with_state: list[torch.Tensor] | None  # the parameters with a state; None: all had one

    def restore(self) -> None:
        """Restore the optimizer's state."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        with torch.no_grad():
            for number, value in zip(self.numbers, self.values, strict=True):
                number.copy_(value)
        if self.with_state is not None:
            with_state = set(map(id, self.with_state))
            for parameter in [p for p in optimizer.state if id(p) not in with_state]:
                del optimizer.state[parameter]


class OptimizerStates:
    """Saver of optimizers' states in the client, with a cache of their CPU tensors."""

    def __init__(self) -> None:
        #: optimizer -> (id of its state, length of its state, CPU tensors, whether stackable)
        self._numbers: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[int, int, list[torch.Tensor], bool]
        ] = weakref.WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer) -> StateBeforeStep:
        """Save the state in the client that a step may change."""
        state: dict[Any, Any] = optimizer.state
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        with_state = list(state) if len(state) < total else None
        numbers, is_stackable = self._numbers_of(optimizer, state)
        with torch.no_grad():
            values = torch.stack(numbers) if is_stackable else [t.clone() for t in numbers]
        return StateBeforeStep(weakref.ref(optimizer), numbers, values, with_state)

    def _numbers_of(
        self, optimizer: torch.optim.Optimizer, state: dict[Any, Any]
    ) -> tuple[list[torch.Tensor], bool]:
        """Return the CPU tensors, and True if there are any, all of one shape and dtype.

        The result is cached while the state is the same dict of the same length.
        """
        state_id, length, numbers, is_stackable = self._numbers.get(optimizer, (0, 0, [], False))
        if (state_id, length) != (id(state), len(state)):
            numbers = [
                value
                for values in state.values()
                if isinstance(values, dict)
                for value in values.values()
                if isinstance(value, torch.Tensor) and value.device.type == "cpu"
            ]
            is_stackable = len({(t.shape, t.dtype) for t in numbers}) == 1
            self._numbers[optimizer] = id(state), len(state), numbers, is_stackable
        return numbers, is_stackable


# -- rollback of a failed step ---------------------------------------------------------------------

#: Runs that are retained in addition to those that may be unanswered.
_SPARE = 64


class Recorded(NamedTuple):
    """Recorded run; the C++ extension builds these tuples, too."""

    seq: int  # number of the run
    base: int  # id of its first output
    plan: CachedPlan | None  # its plan; None for a run without ops
    provenance: Provenance  # its ops
    params: Sequence[Any]  # its run-time numbers
    inputs: Collection[int]  # ids of its inputs
    frees: Collection[int]  # ids of the values that it frees
    shown: Shown  # the storages that had its inputs and results as values

    @property
    def output_ids(self) -> range:
        """Ids of the outputs."""
        return range(self.base, self.base + (0 if self.plan is None else self.plan.entry.outputs))


class Position(NamedTuple):
    """Position in the program: an op of a run."""

    seq: int
    op: int


class Overwrite(NamedTuple):
    """Change of a storage's value by something other than a recorded op, such as an upload."""

    at: Position
    storage: weakref.ref[Storage]
    before: Held
    after: Held


@dataclass
class _Undone:
    """Values to restore in a rollback to the state before an op."""

    recomputed: dict[Storage, int]  # storage -> number of the result that is computed again for it
    earlier: dict[Storage, Held]  # other storage -> its earlier value
    written: bool  # True if any storage was written, or a random number drawn, since
    seeded: bool  # True if the random generator's state was sent to the workers since


class Rollback:
    """Rollback: retains runs with outstanding answers, and undoes the ops after a failed one.

    Args:
        recorder, client, planner: those of the session.
        max_ahead: most runs that may be unanswered.
    """

    def __init__(
        self, recorder: Recorder, client: Client, planner: Planner, max_ahead: int
    ) -> None:
        self._recorder, self._client, self._planner = recorder, client, planner
        #: sent runs, oldest first
        self.runs: deque[Recorded] = deque(maxlen=max_ahead + _SPARE)
        self._watched = OptimizerStates()
        #: optimizers' steps, and overwritten storages, since the oldest of those runs
        self._steps: deque[tuple[Position, StateBeforeStep]] = deque(maxlen=max_ahead + _SPARE)
        self._overwritten: deque[Overwrite] = deque()
        recorder.on_overwritten = self._record_overwritten

    # -- retained runs -------------------------------------------------------------------

    def forget_answered(self) -> None:
        """Drop the runs that have succeeded on all ranks: they are never undone."""
        oldest = self._client.oldest_open
        while self.runs and self.runs[0].seq < oldest:
            self.runs.popleft()
        for notes in (self._steps, self._overwritten):
            while notes and notes[0][0].seq < oldest:
                notes.popleft()

    def before_step(self, optimizer: Any) -> None:
        """Save the state of an optimizer that is about to step."""
        if self._client.recovery is None or not self._has_parameters_of(optimizer):
            return
        self._steps.append((self._current_position, self._watched.before_step(optimizer)))

    def _record_overwritten(self, storage: Storage, before: Held) -> None:
        """Record an overwrite; ``before`` is the value that was replaced."""
        change = Overwrite(self._current_position, weakref.ref(storage), before, Held.of(storage))
        self._overwritten.append(change)

    @property
    def _current_position(self) -> Position:
        """Position after the last recorded op."""
        return Position(self._client.next_run, self._recorder.trace.step.ops)

    def _has_parameters_of(self, optimizer: Any) -> bool:
        """Return whether an optimizer's parameters belong to this session, by the first of them."""
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return is_lazy(first) and storage_of(first).owner is self._recorder

    # -- rollback after a failed op ------------------------------------------------------

    def undo(self) -> ExecutionError | None:
        """Roll back to the state before the first failed op, before its error is raised.

        Returns:
            That op's error; None: there is nothing to undo, or a rollback is impossible.

        Raises:
            WorkerDied, WorkerFrozen: a worker has died or hangs, and cannot be replaced.
        """
        if self._recorder.trace.step.depth:
            self._recorder.flush("an op has failed")
        self._client.synchronize()
        first = self._client.first_failed()
        if first is None:
            return None
        runs = [run for run in self.runs if run.seq >= first.seq]
        if not runs or runs[0].seq != first.seq:
            return None
        provenance = runs[0].provenance
        # each rank reports a node of its own plan; the first recorded op of these is the culprit
        op, failed = min(
            ((provenance.op_of(node, rank), (rank, node, error))
             for rank, node, error in first.nodes), key=itemgetter(0)
        )  # fmt: skip
        before = _steps_before(provenance.step.path(), op)
        position = Position(first.seq, op)
        overwritten = [change for change in self._overwritten if change.at.seq >= first.seq]
        undone = _values_to_restore(runs, before, overwritten)
        if not undone.written:
            return None
        ids = [key for run in runs for key in run.output_ids]
        if not self._client.roll_back(first.seq, ids, *failed):
            return None
        self._restore_storages(runs, before, op, undone)
        self._restore_client(position, undone)
        self.runs.clear()
        self._overwritten.clear()
        return failed[2]

    def _restore_storages(
        self, runs: Sequence[Recorded], before: list[TrieNode], op: int, undone: _Undone
    ) -> None:
        """Run the ops before the failed op again, and restore the values of storages.

        Args:
            runs: the run with the failed op, and all later runs.
            before: the steps before the failed op.
            op: number of the failed op in the run.
        """
        ids = {held.key for held in undone.earlier.values() if held.key is not None}
        freed = {key for run in runs for key in run.frees}
        values = self._client.revive(ids, freed)
        numbers = tuple(sorted(set(undone.recomputed.values())))
        if numbers or any(has_effect(step.node) for step in before if step.node is not None):
            self._run_again(runs[0], before, op, undone, numbers)
        for storage, held in undone.earlier.items():
            if held.key is not None:
                values[held.key].sharding = held.sharding
                storage.set_remote(values[held.key])
            elif held.host is not None:
                storage.set_host(held.host)

    def _run_again(
        self,
        run: Recorded,
        before: list[TrieNode],
        op: int,
        undone: _Undone,
        numbers: tuple[int, ...],
    ) -> None:
        """Run the steps before the failed op again, and set the values of storages to results.

        Args:
            numbers: numbers of the results to return, ``undone.recomputed``'s.
        """
        last, sites = before[-1], list(run.provenance.call_sites)[:op]
        params = tuple(run.params[: last.params])
        backward = run.provenance.backward
        kinds = tuple(type(value).__name__ for value in params)
        plan = self._planner.build_uncached(
            before, numbers, sites_of(before, sites, backward), kinds
        )
        provenance = Provenance(last, sites, backward, plan.origins)
        inputs = list(run.inputs)[: last.inputs]
        _, outputs = self._client.run(
            plan.entry, inputs, params, (), provenance, "an op has failed"
        )
        values = dict(zip(numbers, outputs, strict=True))
        for storage, number in undone.recomputed.items():
            position = plan.positions[number]
            values[number].sharding = plan.shardings[position]
            values[number].call_site = sites[plan.producers[position]] or backward
            storage.set_remote(values[number])
        self._planner.forget([plan])

    def _restore_client(self, first: Position, undone: _Undone) -> None:
        """Restore the optimizers' state in the client, and the client's random generator.

        Args:
            first: position of the failed op: only steps after it are undone.
        """
        for position, stepped in reversed(self._steps):
            if position > first:
                stepped.restore()
        self._steps.clear()
        if undone.seeded:
            self._recorder.generator.take_back()


def _steps_before(steps: list[TrieNode], op: int) -> list[TrieNode]:
    """Return the steps of a trace before the step of op number ``op``.

    Steps are ops and, before their first use, inputs.
    """
    index = next(
        index for index, step in enumerate(steps) if step.node is not None and step.ops == op + 1
    )
    return steps[:index]


def _values_to_restore(
    runs: Sequence[Recorded], before: list[TrieNode], overwritten: Sequence[Overwrite]
) -> _Undone:
    """Find the values to restore when all steps of the runs after ``before`` are undone.

    A storage gets the last value that it had before the failed op. If it got no value in the first
    run, that is the value with which it first entered a run, or the value before an overwrite.

    Args:
        runs: the run with the failed op, and all later runs.
        before: the steps of the first run before the failed op.
        overwritten: changes of storages by something other than an op.
    """
    position = Position(runs[0].seq, before[-1].ops if before else 0)
    changes = [
        (storage, change) for change in overwritten if (storage := change.storage()) is not None
    ]
    later = [(storage, change) for storage, change in changes if change.at > position]
    recomputed, earlier = _last_values(
        runs[0], before, [pair for pair in changes if pair[1].at <= position]
    )
    output_ids = {key for run in runs for key in run.output_ids}
    for storage, value in _earlier_values(runs, later):
        if storage not in recomputed and value.key not in output_ids and value.known:
            earlier.setdefault(storage, value)
    first = before[-1].values if before else 0
    changed = *runs[0].shown.values[first:], *(s for run in runs[1:] for s in run.shown.values)
    written = {storage for storage in changed if storage is not None}.union(s for s, _ in later)
    steps = [step for run in runs for step in run.provenance.step.path()][len(before) :]
    draws = any(step.facts is not None and step.facts.random for step in steps)
    return _Undone(
        recomputed,
        {storage: value for storage, value in earlier.items() if storage in written},
        written=draws or not written.isdisjoint({*recomputed, *earlier}),
        seeded=any(map(_sends_seed, steps)),
    )


def _last_values(
    run: Recorded, before: list[TrieNode], overwritten: Iterable[tuple[Storage, Overwrite]]
) -> tuple[dict[Storage, int], dict[Storage, Held]]:
    """Find the last value of each storage before the op, in the run of the failed op.

    Args:
        before: the steps before the failed op.
        overwritten: overwrites before the failed op.

    Returns:
        storage -> number of a result of an op; storage -> a value from an overwrite.
    """
    last = {
        storage: (op, number)
        for number, (storage, op) in enumerate(
            zip(run.shown.values, producers(before), strict=False)
        )
        if storage is not None
    }
    held = {}
    for storage, change in overwritten:
        if change.at.op > last.get(storage, (-1, 0))[0]:
            last.pop(storage, None)
            held[storage] = change.after
    return {storage: number for storage, (_, number) in last.items()}, held


def _earlier_values(
    runs: Sequence[Recorded], overwritten: Iterable[tuple[Storage, Overwrite]]
) -> Iterable[tuple[Storage, Held]]:
    """Return the values of storages when they entered a run or were overwritten, in order."""
    events = [(change.at, 0, storage, change.before) for storage, change in overwritten]
    events += [
        (position, 1, storage, held)
        for run in runs
        for position, storage, held in _input_values(run)
    ]
    return [(storage, held) for _, _, storage, held in sorted(events, key=itemgetter(0, 1))]


def _input_values(run: Recorded) -> Iterable[tuple[Position, Storage, Held]]:
    """Yield (position, storage, value) of the inputs of a run."""
    steps = [step for step in run.provenance.step.path() if step.input is not None]
    for storage, key, step in zip(run.shown.inputs, run.inputs, steps, strict=True):
        if storage is not None:
            yield Position(run.seq, step.ops), storage, Held(key, input_sharding(step), None)


def _sends_seed(step: TrieNode) -> bool:
    """Return whether a step sends the random generator's state to the workers."""
    return step.node is not None and step.node.op in SEEDS
