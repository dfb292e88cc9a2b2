"""Journal: what the workers were sent since the last snapshot that all of them have.

Pure: events in, and what is to be sent again out. A snapshot is cut between two runs; what comes
after the cut is kept apart from what came before, until every rank has taken it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lazygt.runtime.messages import Failure, Snapped
from lazygt.runtime.plan_records import PlanRecord
from lazygt.runtime.wire import Buffer, size_of

#: Bytes that an entry takes besides its messages.
_OVERHEAD = 200


#: A run, as each rank was told of it: its number, its plan and the messages.
Ran = tuple[int, PlanRecord | None, Sequence[list[Buffer]]]


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """From here on a plan runs compiled."""

    entry: PlanRecord


@dataclass(frozen=True, slots=True)
class Renewed:
    """The ranks formed a new process group, with doubts in values from this id on."""

    since: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot was taken here."""

    number: int


Entry = Ran | SwappedIn | Renewed | Cut


@dataclass(slots=True)
class Snapshot:
    """A snapshot of which every rank has its part.

    Attributes:
        number: 0: the beginning, when there was nothing.
        seq: the last run before it.
        parts: each rank's.
    """

    number: int = 0
    seq: int = 0
    parts: dict[int, Snapped] = field(default_factory=dict)


class Journal:
    """What is to be done again when a worker has died.

    Args:
        ranks: how many workers there are.

    Attributes:
        committed: where doing it again begins.
        entries: what came after that, oldest first; the extension adds runs here.
        cutting: whether a snapshot is being taken.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.committed = Snapshot()
        self.entries: list[Entry] = []
        self.cutting = False
        #: values that have failed, besides those of which the snapshot says so
        self.failed: list[tuple[int, Failure]] = []
        #: bytes of the first entries, and of how many
        self._nbytes, self._counted = 0, 0
        #: the snapshot that is being taken
        self._next: Snapshot | None = None
        self._numbers = 0

    @property
    def nbytes(self) -> int:
        """What is kept takes of memory, about."""
        self._nbytes += sum(map(_nbytes, self.entries[self._counted :]))
        self._counted = len(self.entries)
        return self._nbytes

    def entry_of(self, seq: int) -> PlanRecord | None:
        """The plan of a run."""
        runs = (entry for entry in self.entries if isinstance(entry, tuple))
        return next((plan for number, plan, _ in runs if number == seq), None)

    def cut(self, seq: int) -> int:
        """A snapshot is about to be asked of every rank, after this run; its number."""
        self._numbers += 1
        self._next, self.cutting = Snapshot(self._numbers, seq), True
        self.entries.append(Cut(self._numbers))
        return self._numbers

    def took(self, rank: int, part: Snapped) -> bool:
        """A rank has taken its part of a snapshot; whether all have, and it is committed."""
        taken = self._next
        if taken is None or part.number != taken.number:
            return False
        taken.parts[rank] = part
        if len(taken.parts) < self._ranks:
            return False
        self.committed, self._next, self.cutting = taken, None, False
        self.failed.clear()
        at = self.entries.index(Cut(taken.number))
        self.entries = self.entries[at + 1 :]
        self._nbytes = self._counted = 0
        return True

    def give_up_cut(self) -> None:
        """The snapshot that is being taken is not wanted: it would have what has failed."""
        self._next, self.cutting = None, False

    def rewind(
        self, seq: int, uploads: Sequence[Ran], failed: Sequence[tuple[int, Failure]]
    ) -> None:
        """All is undone from a run on.

        Args:
            uploads: what was uploaded since.
            failed: values that were made since.
        """
        at = next(at for at, entry in enumerate(self.entries) if _is_run(entry, seq))
        swaps = [entry for entry in self.entries[at:] if isinstance(entry, SwappedIn)]
        self.entries[at:] = [*swaps, *uploads]
        self.failed += failed
        if self._next is not None and self._next.seq >= seq:
            self.give_up_cut()
        self._nbytes = self._counted = 0

    def since(self, seq: int) -> list[Ran]:
        """The runs from one on."""
        runs = [entry for entry in self.entries if isinstance(entry, tuple)]
        return [run for run in runs if run[0] >= seq]

    def restart(self) -> None:
        """The ranks go back to the committed snapshot: what they took of a later one is void."""
        if self._next is not None:
            self._next.parts.clear()


def _is_run(entry: Entry, seq: int) -> bool:
    return isinstance(entry, tuple) and entry[0] == seq


def _nbytes(entry: Entry) -> int:
    if not isinstance(entry, tuple):
        return _OVERHEAD
    different = {id(frames): frames for frames in entry[2]}
    return _OVERHEAD + sum(map(size_of, different.values()))
