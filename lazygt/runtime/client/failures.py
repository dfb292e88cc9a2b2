"""Failures of workers as errors: each is raised once, causes before consequences.

An op that fails on one rank keeps that rank from its next collective, in which the other ranks then
fail: a *break* of the process group. Its cause is the error of the op.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lazygt.errors import CollectiveMismatch, ExecutionError, execution_error
from lazygt.runtime.messages import COLLECTIVE_ERROR, MISMATCH, Failure

#: Describes a node of a rank's run: (op, inputs as text, the user's file:line).
Describe = Callable[[int, int], tuple[str, tuple[str, ...], str]]

#: Kinds of failures that come from several ranks at once, for one reason.
SHARED = frozenset({COLLECTIVE_ERROR, MISMATCH})
_MAX_ERRORS = 1_000
#: Description of an op of a forgotten run.
_UNKNOWN_OP: tuple[str, tuple[str, ...], str] = ("an earlier op", (), "?")


@dataclass(slots=True)
class _Break:
    """Break of a process group: the first run in which its ranks did not meet in a collective."""

    seq: int
    errors: list[ExecutionError]  # errors of the run; more come while ranks still answer

    @property
    def cause(self) -> ExecutionError:
        """The error that broke the group: the first one of no collective, if there is one."""
        return next((e for e in self.errors if e.kind != COLLECTIVE_ERROR), self.errors[0])


class FirstFailed(NamedTuple):
    """The failures of the oldest run in which anything has failed."""

    seq: int
    nodes: list[tuple[int, int, ExecutionError]]  # (rank, node, error) of each failure


class Failures:
    """Failures to raise, and the error objects of earlier failures."""

    def __init__(self) -> None:
        #: oldest first
        self.unraised: deque[ExecutionError] = deque()
        #: by run, rank and node
        self._errors: OrderedDict[tuple[int, int, int], ExecutionError] = OrderedDict()
        #: break of the current process group
        self._break: _Break | None = None
        #: id of an error -> the break that is its reason
        self._breaks: dict[int, _Break] = {}
        #: run -> its failures, until one is reported to the user or they are undone
        self._origins: dict[int, FirstFailed] = {}
        #: True if ranks were found to hold different plans
        self.mismatched = False

    @property
    def first(self) -> ExecutionError | None:
        """The oldest error that has not been raised yet."""
        return self.unraised[0] if self.unraised else None

    def error(self, rank: int, failure: Failure) -> ExecutionError:
        """Return the error object of a failure: the same one in every call."""
        known = self._errors.get((failure.seq, rank, failure.node))
        return known or _execution_error(rank, failure, _UNKNOWN_OP)

    def note(
        self,
        seq: int,
        rank: int,
        failure: Failure,
        describe: Describe | None,
        errors: list[ExecutionError],
    ) -> None:
        """Record a failure that a rank has reported, unless an equal one or its cause is recorded.

        Args:
            seq: number of the run. A failure of an earlier run is reported again if that failure
                kept the rank from a collective.
            describe: describes the run's nodes.
            errors: errors of the same run, of all ranks so far; this one is added.
        """
        key = failure.seq, rank, failure.node
        known = self._errors.get(key)
        if known is None and failure.seq == seq:
            known = self._new(key, failure, describe, errors)
        error = known or _execution_error(rank, failure, _UNKNOWN_OP)
        if not any(e is error for e in errors):
            errors.append(error)
        if error.kind in SHARED:
            self.mismatched = self.mismatched or error.kind == MISMATCH
            broken = self._note_break(seq, errors)
            if known is not None:
                self._breaks.setdefault(id(known), broken)

    def note_for_all(
        self,
        rank: int,
        failure: Failure,
        describe: Describe | None,
        errors: list[ExecutionError],
        ranks: int,
    ) -> None:
        """Record a rank's failure that all ranks will report for the run.

        Args:
            describe, errors: as for ``note``.
            ranks: number of ranks.
        """
        self.note(failure.seq, rank, failure, describe, errors)
        error = self._errors[failure.seq, rank, failure.node]
        for other in range(ranks):
            self._errors[failure.seq, other, failure.node] = error

    def _note_break(self, seq: int, errors: list[ExecutionError]) -> _Break:
        """Record that ranks did not meet in a run; keep the earliest such run."""
        if self._break is None:
            self._break = _Break(seq, errors)
        elif seq < self._break.seq:
            self._break.seq, self._break.errors = seq, errors
        return self._break

    def group_renewed(self) -> None:
        """Forget the current break: the ranks have a new process group."""
        self._break = None

    def _new(
        self,
        key: tuple[int, int, int],
        failure: Failure,
        describe: Describe | None,
        errors: list[ExecutionError],
    ) -> ExecutionError:
        """Return the error of a new failure: a new object, or an equal one of another rank."""
        _, rank, node = key
        description = _UNKNOWN_OP if describe is None or node < 0 else describe(node, rank)
        error = _execution_error(rank, failure, description)
        # of one op, one rank may fail to make the result and another to receive it
        same = [e for e in errors if (e.op, e.where, e.kind) == (error.op, error.where, error.kind)]
        is_consequence = error.kind in SHARED and errors
        if not same and not is_consequence:
            self.unraised.append(error)
        if error.kind not in SHARED:
            origin = self._origins.setdefault(key[0], FirstFailed(key[0], []))
            origin.nodes.append((rank, node, error))
        self._errors[key] = error = next((e for e in same if e.rank != rank), error)
        if len(self._errors) > _MAX_ERRORS:
            _, forgotten = self._errors.popitem(last=False)
            self._breaks.pop(id(forgotten), None)
        return error

    def resolve(self, error: ExecutionError) -> ExecutionError:
        """Return the error to raise for ``error``, its root cause; mark all involved as raised.

        The result is ``error``, its cause on another rank, or an error that names the failure that
        broke the process group in an earlier run.
        """
        broken, root_cause = self._breaks.get(id(error)), error
        if broken is not None and error.kind == COLLECTIVE_ERROR:
            same_run = any(e is error for e in broken.errors)
            cause = self._cause(broken)
            root_cause = cause if same_run else _consequence(error, cause)
        if error.kind in SHARED or (
            self._break is not None and root_cause is self._cause(self._break)
        ):
            self.unraised = deque(e for e in self.unraised if e.kind not in SHARED)
        self.drop(root_cause)
        return root_cause

    def _cause(self, broken: _Break) -> ExecutionError:
        """Return the root cause of a break, following the chain of earlier breaks."""
        earlier = self._breaks.get(id(broken.cause), broken)
        return broken.cause if earlier is broken else self._cause(earlier)

    def first_failed(self) -> FirstFailed | None:
        """Return the failures of the oldest run that has unreported ones."""
        return self._origins[min(self._origins)] if self._origins else None

    def mark_reported(self) -> None:
        """Forget the origins of failures: the user has seen an error, so no run is rolled back."""
        self._origins.clear()

    def undone(self, seq: int, node: int, error: ExecutionError, ranks: int) -> None:
        """Drop all failures but that of one op; every rank that reports it gets ``error``."""
        for rank in range(ranks):
            self._errors[(seq, rank, node)] = error
        self._origins.clear()
        self.unraised.clear()

    def drop(self, error: ExecutionError) -> None:
        """Drop a failure that the caller reports in another way: it is not raised."""
        self.unraised = deque(e for e in self.unraised if e is not error)
        for seq, origin in list(self._origins.items()):
            origin.nodes[:] = [item for item in origin.nodes if item[2] is not error]
            if not origin.nodes:
                del self._origins[seq]


def _execution_error(
    rank: int, failure: Failure, description: tuple[str, tuple[str, ...], str]
) -> ExecutionError:
    error_class = CollectiveMismatch if failure.kind == MISMATCH else execution_error
    return error_class(*description, failure.kind, failure.detail, rank)


def _consequence(error: ExecutionError, cause: ExecutionError) -> ExecutionError:
    """Return the error of a collective that found its group broken by an earlier run's cause."""
    advice = "This was on its way already. The workers form a new group for what comes next"
    if cause.kind == MISMATCH:
        advice = "Open a new session to run collectives again"
    detail = (
        f"rank {error.rank} had left its process group, since {cause.op} failed on worker "
        f"{cause.rank}, recorded at {cause.where}: {cause.kind}: {cause.detail}. {advice}"
    )
    consequence = ExecutionError(
        error.op, error.inputs, error.where, error.kind, detail, error.rank
    )
    consequence.__cause__ = cause
    return consequence
