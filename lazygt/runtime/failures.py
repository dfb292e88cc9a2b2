"""Failures: what went wrong on the workers, each to be raised once, causes before consequences."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from lazygt.errors import CollectiveMismatch, ExecutionError
from lazygt.runtime import wire
from lazygt.runtime.wire import Failure

#: Answers "what is node n of a rank's run?": (op, inputs as text, the user's file:line).
Describe = Callable[[int, int], tuple[str, tuple[str, ...], str]]

#: Kinds of failures that come from several ranks at once, for one reason.
SHARED = frozenset({wire.COLLECTIVE_ERROR, wire.MISMATCH})
_KEPT = 1_000
#: What stands for an op that nobody remembers.
_UNKNOWN: tuple[str, tuple[str, ...], str] = ("an earlier op", (), "?")


class Failures:
    """The failures that are still to be raised, and the errors made of those before."""

    def __init__(self) -> None:
        self._unraised: deque[ExecutionError] = deque()
        #: by run, rank and node
        self._errors: OrderedDict[tuple[int, int, int], ExecutionError] = OrderedDict()

    @property
    def first(self) -> ExecutionError | None:
        """The oldest that has not been raised yet."""
        return self._unraised[0] if self._unraised else None

    def error(self, rank: int, failure: Failure, describe: Describe | None) -> ExecutionError:
        """The error that stands for a failure: always the same one."""
        known = self._errors.get((failure.seq, rank, failure.node))
        if known is None:
            op, inputs, where = describe(failure.node, rank) if describe else _UNKNOWN
            kind = CollectiveMismatch if failure.kind == wire.MISMATCH else ExecutionError
            known = kind(op, inputs, where, failure.kind, failure.detail, rank)
            self._errors[failure.seq, rank, failure.node] = known
            if len(self._errors) > _KEPT:
                self._errors.popitem(last=False)
        return known

    def known(self, seq: int, node: int) -> ExecutionError | None:
        """The error of a node of rank 0's, if it is remembered."""
        return self._errors.get((seq, 0, node))

    def add(self, error: ExecutionError, failed: set[tuple[str, str, str]]) -> None:
        """Note a failure, unless another rank's is the same or its cause.

        Args:
            failed: (op, line, kind) of what has failed in the same run; gets this one.
        """
        follows = error.kind in SHARED and failed
        # of one op, one rank may fail to make the result and another to receive it
        what = error.op, error.where, error.kind
        if not follows and what not in failed:
            self._unraised.append(error)
        failed.add(what)

    def take(self, error: ExecutionError) -> ExecutionError:
        """The failure to raise for this one: itself, or the one on another rank that is its cause.

        Neither is to be raised again.
        """
        if error.kind in SHARED:
            causes = (e for e in self._unraised if e.kind != wire.COLLECTIVE_ERROR)
            error = next(causes, error)
        self._unraised = deque(e for e in self._unraised if e is not error and e.kind not in SHARED)
        return error

    def drop(self, error: ExecutionError | None) -> None:
        """Do not raise this one: the caller reports it in another way."""
        if error is not None and error in self._unraised:
            self._unraised.remove(error)
