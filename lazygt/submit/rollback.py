"""Rollback of a failed step: storages get back the values from before the failed op.

Ops fail on workers when the program is already further on. Eager torch would have stopped before
the op. So the workers go back to before the run in which the op failed, the part of the run that
came before the op is done again, and storages get its results or their earlier values. Tensors made
since stay as they are: failed where they depend on the op.
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
from lazygt.record.trie import Provenance, TrieNode, makers, sites_of
from lazygt.runtime.client import Client
from lazygt.submit.planner import CachedPlan, Planner, stored

# -- optimizers' state in the client: saved before a step, for when that is undone -----------------
# Steps are counted in CPU tensors (Adam's ``step``), and a first step creates a parameter's
# state. Workers know of neither.


class Stepped(NamedTuple):
    """Optimizer's state before a step.

    Attributes:
        numbers, values: the optimizer's CPU tensors, and copies of them, stacked where all are
            alike.
        known: the parameters that had a state; None: all had.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    numbers: list[torch.Tensor]
    values: torch.Tensor | list[torch.Tensor]
    known: list[torch.Tensor] | None

    def restore(self) -> None:
        """Restore the optimizer's state."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        with torch.no_grad():
            for number, value in zip(self.numbers, self.values, strict=True):
                number.copy_(value)
        if self.known is not None:
            known = set(map(id, self.known))
            for parameter in [p for p in optimizer.state if id(p) not in known]:
                del optimizer.state[parameter]


class Watched:
    """Optimizers that step, with their tensors in the client."""

    def __init__(self) -> None:
        #: optimizer -> its state's identity and length, and the CPU tensors in it
        self._numbers: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[int, int, list[torch.Tensor], bool]
        ] = weakref.WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer) -> Stepped:
        """Save the state in the client that a step may change."""
        state: dict[Any, Any] = optimizer.state
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        known = list(state) if len(state) < total else None
        numbers, alike = self._numbers_of(optimizer, state)
        with torch.no_grad():
            values = torch.stack(numbers) if alike else [t.clone() for t in numbers]
        return Stepped(weakref.ref(optimizer), numbers, values, known)

    def _numbers_of(
        self, optimizer: torch.optim.Optimizer, state: dict[Any, Any]
    ) -> tuple[list[torch.Tensor], bool]:
        """Return the CPU tensors, and True if there are any, all of one shape and dtype."""
        identity, length, numbers, alike = self._numbers.get(optimizer, (0, 0, [], False))
        if (identity, length) != (id(state), len(state)):
            numbers = [
                value
                for values in state.values()
                if isinstance(values, dict)
                for value in values.values()
                if isinstance(value, torch.Tensor) and value.device.type == "cpu"
            ]
            alike = len({(t.shape, t.dtype) for t in numbers}) == 1
            self._numbers[optimizer] = id(state), len(state), numbers, alike
        return numbers, alike


# -- rollback of a failed step: storages get back the values from before the failed op -------------

#: Runs that are remembered beyond those that may be unanswered.
_SPARE = 64


class Recorded(NamedTuple):
    """A run as it was recorded; the extension makes such tuples, too.

    Attributes:
        seq, base: its number, and the id of its first output.
        kept: its plan; None: it had none.
        provenance: its ops.
        params: its numbers.
        inputs, frees: ids.
        shown: the storages that have shown its values.
    """

    seq: int
    base: int
    kept: CachedPlan | None
    provenance: Provenance
    params: Sequence[Any]
    inputs: Collection[int]
    frees: Collection[int]
    shown: Shown

    @property
    def promised(self) -> range:
        """The ids of its outputs."""
        return range(self.base, self.base + (0 if self.kept is None else self.kept.entry.outputs))


class Position(NamedTuple):
    """A place in the program: an op of a run."""

    seq: int
    op: int


class Overwritten(NamedTuple):
    """A storage that got another value by no op of a trace, with both values."""

    at: Position
    storage: weakref.ref[Storage]
    before: Held
    after: Held


@dataclass
class _Undone:
    """Values to bring back when all from an op on is undone.

    Attributes:
        again: storages with values of the run's part before the op -> number of the value.
        held: storages -> their other earlier values.
        written: True if anything was written, or drawn, since.
        seeded: the workers were handed the random stream since.
    """

    again: dict[Storage, int]
    held: dict[Storage, Held]
    written: bool
    seeded: bool


class Rewind:
    """Remembers runs with answers outstanding, and undoes the ops after a failed one.

    Args:
        max_ahead: runs that may be unanswered.
    """

    def __init__(
        self, recorder: Recorder, client: Client, planner: Planner, max_ahead: int
    ) -> None:
        self._recorder, self._client, self._planner = recorder, client, planner
        #: those that were sent, oldest first
        self.runs: deque[Recorded] = deque(maxlen=max_ahead + _SPARE)
        self._watched = Watched()
        #: where optimizers have stepped since the oldest of those runs, and storages got values
        self._steps: deque[tuple[Position, Stepped]] = deque(maxlen=max_ahead + _SPARE)
        self._overwritten: deque[Overwritten] = deque()
        recorder.on_overwritten = self._note_overwritten

    # -- what is remembered --------------------------------------------------------------

    def forget_answered(self) -> None:
        """Forget runs that all ranks have done well: they are not undone."""
        oldest = self._client.oldest_open
        while self.runs and self.runs[0].seq < oldest:
            self.runs.popleft()
        for notes in (self._steps, self._overwritten):
            while notes and notes[0][0].seq < oldest:
                notes.popleft()

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if self._client.recovery is None or not self._has_parameters_of(optimizer):
            return
        self._steps.append((self._here, self._watched.before_step(optimizer)))

    def _note_overwritten(self, storage: Storage, before: Held) -> None:
        row = Overwritten(self._here, weakref.ref(storage), before, Held.of(storage))
        self._overwritten.append(row)

    @property
    def _here(self) -> Position:
        return Position(self._client.next_run, self._recorder.trace.step.ops)

    def _has_parameters_of(self, optimizer: Any) -> bool:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return is_lazy(first) and storage_of(first).owner is self._recorder

    # -- an op has failed ----------------------------------------------------------------

    def undo(self) -> ExecutionError | None:
        """An error is about to be raised: have all as it was before the op that failed first.

        Returns:
            That op's error; None: there is nothing to undo, or no way back.

        Raises:
            WorkerDied, WorkerFrozen: a worker is gone, and can't be replaced.
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
        op, failed = min(
            ((provenance.op_of(node, rank), (rank, node, error))
             for rank, node, error in first.nodes), key=itemgetter(0)
        )  # fmt: skip
        before = _before(provenance.step.path(), op)
        place = Position(first.seq, op)
        overwritten = [row for row in self._overwritten if row.at.seq >= first.seq]
        undone = _undone(runs, before, overwritten)
        if not undone.written:
            return None
        ids = [key for run in runs for key in run.promised]
        if not self._client.rewind(first.seq, ids, *failed):
            return None
        self._show(runs, before, op, undone)
        self._restore_client(place, undone)
        self.runs.clear()
        self._overwritten.clear()
        return failed[2]

    def _show(
        self, runs: Sequence[Recorded], before: list[TrieNode], op: int, undone: _Undone
    ) -> None:
        """Run the part before the op again, and give storages back their values of then."""
        back = {held.key for held in undone.held.values() if held.key is not None}
        freed = {key for run in runs for key in run.frees}
        values = self._client.revive(back, freed)
        numbers = tuple(sorted(set(undone.again.values())))
        if numbers or any(has_effect(step.node) for step in before if step.node is not None):
            self._run_again(runs[0], before, op, undone, numbers)
        for storage, held in undone.held.items():
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
        last, sites = before[-1], list(run.provenance.call_sites)[:op]
        params = tuple(run.params[: last.params])
        backward = run.provenance.backward
        kinds = tuple(type(value).__name__ for value in params)
        kept = self._planner.once(before, numbers, sites_of(before, sites, backward), kinds)
        provenance = Provenance(last, sites, backward, kept.origins)
        inputs = list(run.inputs)[: last.inputs]
        _, outputs = self._client.run(
            kept.entry, inputs, params, (), provenance, "an op has failed"
        )
        values = dict(zip(numbers, outputs, strict=True))
        for storage, number in undone.again.items():
            place = kept.positions[number]
            values[number].sharding = kept.shardings[place]
            values[number].call_site = sites[kept.makers[place]] or backward
            storage.set_remote(values[number])
        self._planner.forget([kept])

    def _restore_client(self, first: Position, undone: _Undone) -> None:
        """Have optimizers, and the random stream, as they were."""
        for position, stepped in reversed(self._steps):
            if position > first:
                stepped.restore()
        self._steps.clear()
        if undone.seeded:
            self._recorder.generator.take_back()


def _before(steps: list[TrieNode], op: int) -> list[TrieNode]:
    """The steps before the one of an op."""
    at = next(at for at, step in enumerate(steps) if step.node is not None and step.ops == op + 1)
    return steps[:at]


def _undone(
    runs: Sequence[Recorded], before: list[TrieNode], overwritten: Sequence[Overwritten]
) -> _Undone:
    """Find the values to bring back when all after some steps of the first run is undone.

    A storage gets back the value that it had last before the op: one of the trace, or another one.
    If it got none in that run, it gets the value with which it first entered a run since, or the
    one that was overwritten.
    """
    place = Position(runs[0].seq, before[-1].ops if before else 0)
    rows = [(storage, row) for row in overwritten if (storage := row.storage()) is not None]
    later = [(storage, row) for storage, row in rows if row.at > place]
    again, held = _got(runs[0], before, [pair for pair in rows if pair[1].at <= place])
    promised = {key for run in runs for key in run.promised}
    for storage, showed in _showed(runs, later):
        if storage not in again and showed.key not in promised and showed.known:
            held.setdefault(storage, showed)
    first = before[-1].values if before else 0
    changed = *runs[0].shown.values[first:], *(s for run in runs[1:] for s in run.shown.values)
    written = {storage for storage in changed if storage is not None}.union(s for s, _ in later)
    steps = [step for run in runs for step in run.provenance.step.path()][len(before) :]
    draws = any(step.facts is not None and step.facts.random for step in steps)
    return _Undone(
        again,
        {storage: showed for storage, showed in held.items() if storage in written},
        written=draws or not written.isdisjoint({*again, *held}),
        seeded=any(map(_seeds, steps)),
    )


def _got(
    run: Recorded, before: list[TrieNode], overwritten: Iterable[tuple[Storage, Overwritten]]
) -> tuple[dict[Storage, int], dict[Storage, Held]]:
    """Find the last values of storages before the op: of the trace, and others."""
    got = {
        storage: (op, number)
        for number, (storage, op) in enumerate(zip(run.shown.values, makers(before), strict=False))
        if storage is not None
    }
    held = {}
    for storage, row in overwritten:
        if row.at.op > got.get(storage, (-1, 0))[0]:
            got.pop(storage, None)
            held[storage] = row.after
    return {storage: number for storage, (_, number) in got.items()}, held


def _showed(
    runs: Sequence[Recorded], overwritten: Iterable[tuple[Storage, Overwritten]]
) -> Iterable[tuple[Storage, Held]]:
    """List the values of storages as they entered a run or were overwritten, in order."""
    rows = [(row.at, 0, storage, row.before) for storage, row in overwritten]
    rows += [(at, 1, storage, held) for run in runs for at, storage, held in _entered(run)]
    return [(storage, held) for _, _, storage, held in sorted(rows, key=itemgetter(0, 1))]


def _entered(run: Recorded) -> Iterable[tuple[Position, Storage, Held]]:
    """Yield the storages that were inputs of a run: position, storage and value."""
    steps = [step for step in run.provenance.step.path() if step.input is not None]
    for storage, key, step in zip(run.shown.inputs, run.inputs, steps, strict=True):
        if storage is not None:
            yield Position(run.seq, step.ops), storage, Held(key, stored(step), None)


def _seeds(step: TrieNode) -> bool:
    return step.node is not None and step.node.op in SEEDS
