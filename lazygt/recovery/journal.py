"""Journal: messages to the workers since the last snapshot that all of them have.

Pure: takes events, and returns the messages to send again. A snapshot is cut between two runs;
messages after the cut are kept apart from those before, until every rank has taken it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lazygt.runtime.messages import Failure, Snapped
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.wire import Buffer, size_of

#: Bytes that an entry takes besides its messages.
_OVERHEAD = 200


#: A run as it was sent: its number, its plan and the message to each rank.
Ran = tuple[int, PlanRecord | None, Sequence[list[Buffer]]]


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """Entry of a swap: from here on a plan runs compiled."""

    entry: PlanRecord


@dataclass(frozen=True, slots=True)
class Renewed:
    """Entry of a new process group, with doubts in values from this id on."""

    since: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Entry of a snapshot that was taken here."""

    number: int


Entry = Ran | SwappedIn | Renewed | Cut


@dataclass(slots=True)
class Snapshot:
    """A complete snapshot: every rank has its part."""

    number: int = 0  # 0: the beginning, when there was nothing
    seq: int = 0  # the last run before it
    parts: dict[int, Snapped] = field(default_factory=dict)  # each rank's


class Journal:
    """Journal of the messages to repeat when a worker has died.

    Args:
        ranks: number of workers.

    Attributes:
        committed: the snapshot from which runs are repeated.
        entries: entries after that, oldest first; the extension adds runs here.
        cutting: a snapshot is being taken.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.committed = Snapshot()
        self.entries: list[Entry] = []
        self.cutting = False
        #: values that have failed, besides those that have in the snapshot
        self.failed: list[tuple[int, Failure]] = []
        #: bytes of the first entries, and their number
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
        """Return the plan of a run."""
        runs = (entry for entry in self.entries if isinstance(entry, tuple))
        return next((plan for number, plan, _ in runs if number == seq), None)

    def cut(self, seq: int) -> int:
        """Begin a snapshot, to be asked of every rank after this run; return its number."""
        self._numbers += 1
        self._next, self.cutting = Snapshot(self._numbers, seq), True
        self.entries.append(Cut(self._numbers))
        return self._numbers

    def took(self, rank: int, rank_snapshot: Snapped) -> bool:
        """Note that a rank has taken its part; return whether all have, and it is committed."""
        snapshot = self._next
        if snapshot is None or rank_snapshot.number != snapshot.number:
            return False
        snapshot.parts[rank] = rank_snapshot
        if len(snapshot.parts) < self._ranks:
            return False
        self.committed, self._next, self.cutting = snapshot, None, False
        self.failed.clear()
        index = self.entries.index(Cut(snapshot.number))
        self.entries = self.entries[index + 1 :]
        self._nbytes = self._measured = 0
        return True

    def give_up_cut(self) -> None:
        """Give up the snapshot that is being taken: it would contain failures."""
        self._next, self.cutting = None, False

    def rollback(
        self, seq: int, uploads: Sequence[Ran], failed: Sequence[tuple[int, Failure]]
    ) -> None:
        """Undo all runs from this one on.

        Args:
            uploads: runs with the uploads made since.
            failed: values that were made since.
        """
        index = next(index for index, entry in enumerate(self.entries) if _is_run(entry, seq))
        swaps = [entry for entry in self.entries[index:] if isinstance(entry, SwappedIn)]
        self.entries[index:] = [*swaps, *uploads]
        self.failed += failed
        if self._next is not None and self._next.seq >= seq:
            self.give_up_cut()
        self._nbytes = self._measured = 0

    def since(self, seq: int) -> list[Ran]:
        """Return the runs from this one on."""
        runs = [entry for entry in self.entries if isinstance(entry, tuple)]
        return [run for run in runs if run[0] >= seq]

    def restart(self) -> None:
        """Go back to the committed snapshot: parts of a later one are void."""
        if self._next is not None:
            self._next.parts.clear()


def _is_run(entry: Entry, seq: int) -> bool:
    return isinstance(entry, tuple) and entry[0] == seq


def _nbytes(entry: Entry) -> int:
    if not isinstance(entry, tuple):
        return _OVERHEAD
    distinct = {id(frames): frames for frames in entry[2]}
    return _OVERHEAD + sum(map(size_of, distinct.values()))
