"""The journal and suspected failures as state machines, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lazygt.recovery.journal import GroupEntry, Journal, SnapshotEntry
from lazygt.recovery.recover import RollbackRecovery
from lazygt.recovery.suspected import Notification, SuspectedFailures
from lazygt.runtime.messages import COLLECTIVE_ERROR, Done, Failure, Snapped


class JournalMachine(RuleBasedStateMachine):
    """A journal beside a plain list of all that ever happened."""

    @initialize(ranks=st.integers(1, 3))
    def begin(self, ranks: int) -> None:
        self.ranks, self.journal = ranks, Journal(ranks)
        self.history: list[Any] = []
        self.seq, self.number = 0, 0
        #: ranks that have taken their part of the snapshot under way
        self.taken: set[int] = set()
        self.committed = 0

    @rule(size=st.integers(0, 100))
    def run(self, size: int) -> None:
        self.seq += 1
        self.note((self.seq, None, [[bytes(size)]] * self.ranks))

    @rule(since=st.integers(0, 9))
    def renew(self, since: int) -> None:
        self.note(GroupEntry(since))

    def note(self, entry: Any) -> None:
        self.journal.entries.append(entry)
        self.history.append(entry)

    @precondition(lambda self: not self.journal.snapshot_under_way)
    @rule()
    def cut(self) -> None:
        self.number += 1
        self.taken = set()
        assert self.journal.begin_snapshot(self.seq) == self.number
        self.history.append(SnapshotEntry(self.number))

    @precondition(lambda self: self.journal.snapshot_under_way)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(set(range(self.ranks)) - self.taken)))
        self.taken.add(rank)
        whole = self.journal.add_part(rank, Snapped(self.number))
        assert whole == (len(self.taken) == self.ranks)
        if whole:
            self.committed = self.number

    @rule()
    def die(self) -> None:
        self.journal.restart()
        self.taken = set()

    @rule(rank=st.integers(0, 2))
    def an_old_part_changes_nothing(self, rank: int) -> None:
        before = self.journal.committed.number
        assert not self.journal.add_part(rank, Snapped(self.number + 1))
        assert self.journal.committed.number == before

    @invariant()
    def what_is_done_again_is_what_came_after_the_snapshot(self) -> None:
        if not hasattr(self, "journal"):
            return
        assert self.journal.committed.number == self.committed
        begin = self.history.index(SnapshotEntry(self.committed)) + 1 if self.committed else 0
        assert self.journal.entries == self.history[begin:]
        runs = [entry for entry in self.journal.entries if isinstance(entry, tuple)]
        seqs = [seq for seq, _, _ in runs]
        assert seqs == list(range(self.journal.committed.seq + 1, self.seq + 1))
        assert set(self.journal.committed.parts) == (
            set(range(self.ranks)) if self.committed else set()
        )
        assert self.journal.nbytes >= sum(len(messages[0][0]) for _, _, messages in runs)


TestJournal = pytest.mark.timeout(120)(JournalMachine.TestCase)


def answer(rank: int, seq: int, fails: bool = False) -> Notification:
    failures = [Failure(0, COLLECTIVE_ERROR, "")] if fails else []
    return Notification(rank, Done(seq, failures), [])


class Ranks:
    """Who has not answered what."""

    def __init__(self, count: int, runs: int) -> None:
        self.waiting = {seq: set(range(count)) for seq in range(1, runs + 1)}
        self.suspected = SuspectedFailures(lambda seq: self.waiting.get(seq, set()))

    def tell(self, told: Notification) -> list[Notification]:
        believed = []
        for each in self.suspected.add(told):
            assert isinstance(each.message, Done)
            self.waiting[each.message.seq].discard(each.rank)
            believed.append(each)
        return believed


def test_a_failed_collective_is_believed_once_all_have_answered_its_run() -> None:
    ranks = Ranks(3, 3)
    said = [answer(0, 1), answer(0, 2, True), answer(1, 1), answer(1, 2), answer(2, 1)]
    assert [ranks.tell(each) for each in said] == [[said[0]], [], [], [], []]
    last = answer(2, 2)
    assert ranks.tell(last) == [*said[1:], last]
    assert ranks.tell(answer(0, 3, True)) == []


def test_a_collective_that_fails_when_its_run_is_done_again_is_in_doubt() -> None:
    """Its first answer was believed, so the client waits for none; a rank may be dying anew."""
    client = SimpleNamespace(waiting_for=lambda seq: set())
    link = SimpleNamespace(world_size=2)
    recovery = RollbackRecovery(client, link, cost=0.1, journal_bytes=1 << 20)  # type: ignore[arg-type]
    for rank in (0, 1):
        recovery.record_answer(rank, 5)  # what the snapshot covers
    failed = answer(0, 6, True)
    inherited = Notification(0, Done(7, fetched=[Failure(0, COLLECTIVE_ERROR, "", 6)]), [])
    assert list(recovery.suspected.add(failed)) == []
    assert list(recovery.suspected.add(inherited)) == []
    assert recovery.suspected.take() == [failed, inherited]


def test_held_answers_may_be_suspected_too() -> None:
    ranks = Ranks(2, 2)
    said = [answer(0, 1, True), answer(0, 2, True), answer(1, 1)]
    assert [ranks.tell(each) for each in said[:2]] == [[], []]
    assert ranks.tell(said[2]) == [said[0]]
    assert ranks.suspected.take() == [said[1], said[2]]


def test_a_rank_alone_and_other_failures_are_not_in_doubt() -> None:
    alone = answer(0, 1, True)
    assert Ranks(1, 1).tell(alone) == [alone]
    other = Notification(0, Done(1, [Failure(0, "IndexError", "")]), [])
    assert Ranks(2, 1).tell(other) == [other]
