"""Journal (redo log): messages to the workers since the last snapshot that all of them have.

Pure: a journal records messages, and returns those to send again. A snapshot is taken between two
runs. Messages before it stay in the journal until every rank has taken its part of the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lazygt.runtime.messages import Failure, Snapped
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.wire import Buffer, size_of

#: Bytes that an entry takes besides its messages.
_OVERHEAD = 200


#: A run as it was sent: its number, its plan and the message to each rank (or one for all).
RunEntry = tuple[int, PlanRecord | None, Sequence[list[Buffer]]]


@dataclass(frozen=True, slots=True)
class SwapEntry:
    """Entry of a swap: from here on runs of a plan use its compiled code."""

    entry: PlanRecord


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """Entry of a new process group, after a rank has left the old one.

    Attributes:
        since: id from which on values may have failed.
    """

    since: int


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """Entry of a snapshot of this number: it has the effects of the entries before."""

    number: int


Entry = RunEntry | SwapEntry | GroupEntry | SnapshotEntry


@dataclass(slots=True)
class Snapshot:
    """A complete snapshot: every rank has its part."""

    number: int = 0  # 0: the empty state at the beginning
    seq: int = 0  # the last run before it
    parts: dict[int, Snapped] = field(default_factory=dict)  # each rank's


class Journal:
    """Journal of the messages to repeat when a worker has died.

    Args:
        ranks: number of workers.

    Attributes:
        committed: the last complete snapshot, to which a recovery rolls back.
        entries: entries after that snapshot, oldest first; the C++ extension also appends runs.
        snapshot_under_way: True while a snapshot is being taken.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.committed = Snapshot()
        self.entries: list[Entry] = []
        self.snapshot_under_way = False
        #: (id, failure) of failed values, besides those of the snapshot
        self.failed: list[tuple[int, Failure]] = []
        #: bytes of the first entries, and the number of these; the others are not counted yet
        self._nbytes, self._measured = 0, 0
        #: the snapshot that is being taken
        self._next: Snapshot | None = None
        self._numbers = 0

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory of the entries."""
        self._nbytes += sum(map(_nbytes, self.entries[self._measured :]))
        self._measured = len(self.entries)
        return self._nbytes

    def entry_of(self, seq: int) -> PlanRecord | None:
        """Return the plan of a run; None: it has none, or is not in the journal."""
        runs = (entry for entry in self.entries if isinstance(entry, tuple))
        return next((plan for number, plan, _ in runs if number == seq), None)

    def begin_snapshot(self, seq: int) -> int:
        """Begin a snapshot after this run, which the caller requests from every rank.

        Returns:
            The number of the snapshot.
        """
        self._numbers += 1
        self._next, self.snapshot_under_way = Snapshot(self._numbers, seq), True
        self.entries.append(SnapshotEntry(self._numbers))
        return self._numbers

    def add_part(self, rank: int, rank_snapshot: Snapped) -> bool:
        """Record a rank's part of the pending snapshot; return whether that commits it."""
        snapshot = self._next
        if snapshot is None or rank_snapshot.number != snapshot.number:
            return False
        snapshot.parts[rank] = rank_snapshot
        if len(snapshot.parts) < self._ranks:
            return False
        self.committed, self._next, self.snapshot_under_way = snapshot, None, False
        self.failed.clear()
        index = self.entries.index(SnapshotEntry(snapshot.number))
        self.entries = self.entries[index + 1 :]
        self._nbytes = self._measured = 0
        return True

    def abandon_snapshot(self) -> None:
        """Give up the snapshot that is being taken, since it would contain failures."""
        self._next, self.snapshot_under_way = None, False

    def rollback(
        self, seq: int, uploads: Sequence[RunEntry], failed: Sequence[tuple[int, Failure]]
    ) -> None:
        """Remove all runs from this one on; swaps stay.

        Args:
            uploads: runs that repeat the uploads since.
            failed: (id, failure) of the values computed since.
        """
        index = next(index for index, entry in enumerate(self.entries) if _is_run(entry, seq))
        swaps = [entry for entry in self.entries[index:] if isinstance(entry, SwapEntry)]
        self.entries[index:] = [*swaps, *uploads]
        self.failed += failed
        if self._next is not None and self._next.seq >= seq:
            self.abandon_snapshot()
        self._nbytes = self._measured = 0

    def since(self, seq: int) -> list[RunEntry]:
        """Return the runs from this one on."""
        runs = [entry for entry in self.entries if isinstance(entry, tuple)]
        return [run for run in runs if run[0] >= seq]

    def restart(self) -> None:
        """Drop the parts of a pending snapshot, since the ranks take it again in a replay."""
        if self._next is not None:
            self._next.parts.clear()


def _is_run(entry: Entry, seq: int) -> bool:
    """Return whether an entry is the run of this number."""
    return isinstance(entry, tuple) and entry[0] == seq


def _nbytes(entry: Entry) -> int:
    """Return the approximate bytes of an entry; ranks may share a message."""
    if not isinstance(entry, tuple):
        return _OVERHEAD
    distinct = {id(frames): frames for frames in entry[2]}
    return _OVERHEAD + sum(map(size_of, distinct.values()))
