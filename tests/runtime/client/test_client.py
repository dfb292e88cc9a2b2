"""What the client keeps account of: plans, uploads, fetched values, failures. No worker runs."""

from __future__ import annotations

import gc

import pytest
import torch

from lazygt.errors import CollectiveMismatch, ExecutionError, ProtocolError
from lazygt.graph import Graph, Node, Ref
from lazygt.graph.meta import contiguous_stride, intern
from lazygt.runtime import wire
from lazygt.runtime.arenas import Arena
from lazygt.runtime.client.client import Client
from lazygt.runtime.client.failures import Failures
from lazygt.runtime.messages import COLLECTIVE_ERROR, MISMATCH, TO_WORKER, Done, Failure, Fetched
from lazygt.runtime.plan import Plan
from lazygt.runtime.plan_records import PlanRecords
from lazygt.runtime.values import Fetches, Uploads, wanted
from lazygt.runtime.wire import decode

META = intern((4,), contiguous_stride((4,)), torch.float32)


def plan(op: str) -> Plan:
    return Plan(Graph((META,), (), (Node(f"aten.{op}.default", (Ref(0),), (), (META,)),), (1,)))


class Link:
    """Two ranks, of which only rank 1 has an arena."""

    world_size = 2
    pids = (1, 2)
    upload = None

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def fetch_arena(self, rank: int) -> Arena | None:
        return self.arena if rank == 1 else None


@pytest.fixture
def arena():
    made = Arena.create(initial_bytes=1 << 20)
    yield made
    made.close()


# -- plans ------------------------------------------------------------------------------------


def forgotten(frames: list[wire.Buffer]) -> tuple[bytes, ...]:
    return decode(frames, TO_WORKER).forget  # type: ignore[attr-defined]


def test_one_entry_for_the_same_content() -> None:
    entries = PlanRecords(2)
    entry = entries.of([plan("exp")])
    assert entries.of([plan("exp")]) is entry
    assert list(entries) == [entry]


def test_a_rank_forgets_under_the_name_it_knows() -> None:
    entries = PlanRecords(2)
    old, new = entries.of([plan("exp"), plan("sin")]), entries.of([plan("cos")])
    assert old.name(0) != old.name(1)
    entries.forget([old, old])
    assert list(entries) == [new]
    [frames, same] = entries.plan_messages(new)
    assert same is frames
    assert forgotten(frames) == (old.name(0),)
    later = entries.of([plan("tan"), plan("tan")])
    assert [forgotten(each) for each in entries.plan_messages(later)] == [(), ()]


def test_a_swap_ends_with_the_last_ranks_answer() -> None:
    entries = PlanRecords(2)
    entry = entries.of([plan("exp"), plan("sin")])
    entry.swap = ((), ())
    entries.swap_messages(entry)
    entries.swapped(1, entry.name(1))
    assert entries.swapping
    entries.swapped(0, entry.name(0))
    assert not entries.swapping


# -- uploads ----------------------------------------------------------------------------------


def test_an_upload_keeps_its_room_until_every_worker_has_read_it(arena) -> None:
    uploads = Uploads(arena, readers=2, threshold=META.nbytes)
    uploads.add(7, torch.arange(4.0), META)
    [put], buffers = uploads.take()
    assert not uploads
    assert buffers == []
    assert arena.view(put.offset, META.nbytes).view(torch.float32).tolist() == [0, 1, 2, 3]
    uploads.was_read(put.offset, 0, 1)
    assert arena.bytes_in_use > 0
    with pytest.raises(ProtocolError, match="nothing lies"):
        uploads.was_read(put.offset, 0, 1)
    uploads.was_read(put.offset, 1, 1)
    assert arena.bytes_in_use == 0


def test_upload_is_kept_until_snapshot_covers_its_reader(arena) -> None:
    uploads = Uploads(arena, readers=2, threshold=META.nbytes, retains=True)
    offsets = []
    for key in (7, 8):
        uploads.add(key, torch.arange(4.0), META)
        [put], _ = uploads.take()
        offsets.append(put.offset)
    held = arena.bytes_in_use
    uploads.was_read(offsets[0], 0, 1)
    uploads.was_read(offsets[0], 1, 2)
    uploads.was_read(offsets[1], 1, 2)
    assert uploads.retained_bytes == META.nbytes
    uploads.free_up_to(1)
    assert arena.bytes_in_use == held
    uploads.read_again(offsets[0], 0, 1)  # once more after a recovery: it is known
    uploads.read_again(offsets[1], 1, 2)
    uploads.free_up_to(2)
    assert (arena.bytes_in_use, uploads.retained_bytes) == (held // 2, 0)
    uploads.read_again(offsets[1], 0, 3)
    uploads.stop_retaining()
    assert (arena.bytes_in_use, uploads.retained_bytes) == (0, 0)


def test_a_small_upload_travels_with_the_run(arena) -> None:
    uploads = Uploads(arena, readers=2, threshold=META.nbytes + 1)
    uploads.add(7, torch.arange(4.0), META)
    [put], [data] = uploads.take()
    assert put.offset is None
    assert bytes(data) == torch.arange(4.0).numpy().tobytes()


# -- fetched values ---------------------------------------------------------------------------


def left_in(arena: Arena, values: torch.Tensor) -> Fetched:
    slot = arena.allocate(META.nbytes)
    arena.view(slot.offset, META.nbytes).view(META.dtype).copy_(values)
    return Fetched(META, slot.offset)


def test_value_is_joined_from_messages_and_arenas(arena) -> None:
    fetches = Fetches(Link(arena))
    beside = memoryview(torch.arange(4.0).numpy().tobytes())
    lying = left_in(arena, torch.arange(4.0, 8.0))
    answers = {0: (Done(1, fetched=[Fetched(META)]), [beside]), 1: (Done(1, fetched=[lying]), [])}
    whole = intern((8,), (1,), torch.float32)
    regions = {0: [(slice(0, 4),)], 1: [(slice(4, 8),)]}
    assert fetches.value(answers, whole, regions).tolist() == list(range(8))
    gc.collect()
    assert fetches.releases(1) == (lying.offset,)
    assert fetches.releases(1) == ()


def test_blocks_that_nobody_asked_for_are_not_looked_at() -> None:
    answers = {0: (Done(1, fetched=[Fetched(META), Failure(0, "KeyError", "no such value")]), [])}
    assert wanted(answers, None) == [(0, Fetched(META))]
    assert wanted(answers, {0: [(slice(0, 4),)]}) == [(0, Fetched(META))]


def test_when_a_block_failed_the_others_give_their_room_back(arena) -> None:
    client = Client(Link(arena), 8, 1 << 20)
    lying = left_in(arena, torch.zeros(4))
    failed = Failure(0, "RuntimeError", "out of luck", seq=1)
    answers = {0: (Done(1, fetched=[failed]), []), 1: (Done(1, fetched=[lying]), [])}
    regions = {0: [(slice(0, 4),)], 1: [(slice(4, 8),)]}
    with pytest.raises(ExecutionError, match="out of luck"):
        client.fetched(answers, intern((8,), (1,), torch.float32), regions)
    assert client._fetches.releases(1) == (lying.offset,)


# -- failures ---------------------------------------------------------------------------------


def describe(node: int, rank: int) -> tuple[str, tuple[str, ...], str]:
    return f"aten.op{node}", (), f"user.py:{node}"


def test_the_same_failure_on_two_ranks_is_one_error_that_is_raised_once() -> None:
    failures, errors = Failures(), []
    failure = Failure(3, "RuntimeError", "bad", seq=1)
    for rank in (1, 0):
        failures.note(1, rank, failure, describe, errors)
    error = failures.error(0, failure)
    assert failures.error(1, failure) is error
    assert failures.resolve(error) is error
    assert failures.first is None
    failures.note(1, 2, failure, describe, errors)  # a rank that answers late
    assert failures.first is None


def test_the_cause_is_raised_in_place_of_its_consequence() -> None:
    failures, errors = Failures(), []
    stuck, cause = Failure(5, COLLECTIVE_ERROR, "it left", 1), Failure(2, "KeyError", "bad", 1)
    failures.note(1, 0, stuck, describe, errors)
    failures.note(1, 1, cause, describe, errors)
    assert failures.first is failures.error(0, stuck)
    assert failures.resolve(failures.first) is failures.error(1, cause)
    assert failures.first is None


def test_a_collective_after_ranks_have_parted_names_why_they_did() -> None:
    failures = Failures()
    early, late = (Failure(5, COLLECTIVE_ERROR, "it left", seq) for seq in (7, 8))
    failures.note(8, 0, late, describe, [])  # rank 0 is ahead of the others' answers
    errors: list[ExecutionError] = []
    failures.note(7, 1, early, describe, errors)
    failures.note(7, 2, Failure(2, "KeyError", "bad", seq=7), describe, errors)
    raised = failures.resolve(failures.error(0, late))
    assert (raised.op, raised.where, raised.rank) == ("aten.op5", "user.py:5", 0)
    assert "since aten.op2 failed on worker 2, recorded at user.py:2: KeyError: bad" in str(raised)
    assert raised.__cause__ is failures.error(2, Failure(2, "KeyError", "bad", seq=7))
    assert failures.first is raised.__cause__


def test_a_failure_that_parts_ranks_in_a_later_run_is_still_their_cause() -> None:
    failures = Failures()
    cause = Failure(2, "KeyError", "bad", seq=1)
    failures.note(1, 1, cause, describe, [])
    known = failures.resolve(failures.error(1, cause))
    errors: list[ExecutionError] = []
    stuck = Failure(2, COLLECTIVE_ERROR, "it left", seq=4)
    failures.note(4, 0, stuck, describe, errors)
    failures.note(4, 1, cause, describe, errors)  # told again: rank 1 parts with the others
    assert failures.resolve(failures.error(0, stuck)) is known
    assert failures.first is None


def test_ranks_that_meet_again_may_part_for_another_reason() -> None:
    failures = Failures()

    def parted(seq: int, why: str) -> list[ExecutionError]:
        errors: list[ExecutionError] = []
        failures.note(seq, 0, Failure(5, COLLECTIVE_ERROR, "it left", seq), describe, errors)
        failures.note(seq, 1, Failure(2, why, "bad", seq), describe, errors)
        return errors

    stuck, cause = parted(3, "KeyError")
    failures.group_renewed()
    late, other = parted(6, "IndexError")
    assert failures.resolve(late) is other
    assert failures.resolve(stuck) is cause
    failures.group_renewed()
    told: list[ExecutionError] = []
    failures.note(9, 0, Failure(5, COLLECTIVE_ERROR, "it left", 3), describe, told)
    failures.note(9, 1, Failure(7, COLLECTIVE_ERROR, "it left", 9), describe, told)
    assert failures.resolve(told[1]) is cause, "a value of the first break was used in the third"
    assert not failures.mismatched


def test_after_a_mismatch_a_collective_says_that_the_session_is_over() -> None:
    failures = Failures()
    failures.note(1, 0, Failure(3, MISMATCH, "other shapes", seq=1), describe, [])
    late = Failure(5, COLLECTIVE_ERROR, "it left", seq=2)
    failures.note(2, 0, late, describe, [])
    assert failures.mismatched
    with pytest.raises(ExecutionError, match="Open a new session to run collectives again"):
        raise failures.resolve(failures.error(0, late))


def test_a_failure_can_be_reported_in_another_way() -> None:
    failures = Failures()
    failure = Failure(3, MISMATCH, "other shapes", seq=1)
    failures.note(1, 0, failure, describe, [])
    error = failures.first
    assert isinstance(error, CollectiveMismatch)
    assert failures.error(0, failure) is error
    failures.drop(error)
    assert failures.first is None
