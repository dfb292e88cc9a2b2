"""What reading a number costs: messages, bytes and wake-ups counted; and what stays the same."""

from __future__ import annotations

import gc
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazygt
from lazygt.net.mailbox import CAPACITY, Mailboxes
from lazygt.runtime import wire
from lazygt.runtime.launch import process_link
from lazygt.runtime.messages import Run
from lazygt.settings import grouped

pytestmark = pytest.mark.timeout(120)
SETTINGS = ({"workers": 1, "threads": 1}, {"launcher": "inline"})
IDS = ("process", "inline")
NUMBERS = {
    torch.float32: 1 / 3, torch.float64: 1 / 3, torch.float16: 0.1, torch.bfloat16: 0.1,
    torch.int64: -(2**63), torch.int32: 2**31 - 1, torch.int16: -5, torch.int8: -128,
    torch.uint8: 255, torch.bool: True, torch.complex64: 1 - 2j,
}  # fmt: skip


@pytest.fixture(scope="module", params=SETTINGS, ids=IDS)
def s(request: pytest.FixtureRequest) -> Iterator[lazygt.Session]:
    with lazygt.session(**grouped(request.param)) as session:
        yield session


def bits(number: object) -> object:
    return struct.pack("d", number) if isinstance(number, float) else number


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_item_has_type_and_bits_of_eager(s: lazygt.Session, dtype: torch.dtype) -> None:
    there = torch.tensor(NUMBERS[dtype], dtype=dtype, device="cpu")
    for eager in (there, there.expand(1, 1, 1), torch.stack([there, there])[1]):
        lazy = eager.to("lazygt")
        assert type(lazy.item()) is type(eager.item())
        assert bits(lazy.item()) == bits(eager.item())
        assert bits(lazy.clone().item()) == bits(eager.item())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -0.0, 1e-45])
def test_odd_numbers_keep_their_bits(s: lazygt.Session, number: float) -> None:
    for dtype in (torch.float32, torch.float64):
        eager = torch.tensor([number, 1.0], dtype=dtype, device="cpu")
        assert bits(eager.to("lazygt")[0].item()) == bits(eager[0].item())


def test_lazy_signs_and_conjugates_are_resolved(s: lazygt.Session) -> None:
    z = torch.tensor([1 - 2j], device="cpu")
    assert z.to("lazygt").conj().item() == z.conj().item()
    assert z.to("lazygt").conj().imag.item() == z.conj().imag.item()


def test_several_elements_are_refused_as_by_torch(s: lazygt.Session) -> None:
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        torch.ones(2).item()


@pytest.mark.parametrize("pass_on", [wire.encode, wire.hand_over])
def test_a_number_that_no_message_can_carry_is_refused(pass_on: Callable[[Run], Any]) -> None:
    for number in (-(2**63), 2**64 - 1, 1e300, True, 1j):
        pass_on(Run(1, params=(number,)))
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(RuntimeError, match="int64_t without overflow"):
            pass_on(Run(1, params=(0.5, number)))


def test_reading_a_number_is_one_message_each_way(s: lazygt.Session) -> None:
    x = torch.arange(4.0)
    for _ in range(4):
        x.sum().item()
    before = s.stats()
    for _ in range(10):
        assert x.sum().item() == 6.0
    after = s.stats()
    assert after["messages_sent"] - before["messages_sent"] == 10
    assert after["messages_received"] - before["messages_received"] == 10
    assert after["fetches"] - before["fetches"] == 10


def test_ten_thousand_numbers_leave_nothing(s: lazygt.Session) -> None:
    x = torch.arange(4.0)
    for _ in range(100):
        x.sum().item()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(10_000):
        x.sum().item()
    if (recovery := s._client.recovery) is not None:  # keeps them until the next snapshot
        s._client._snap(recovery)
        x.sum().item()
        assert len(recovery.journal.entries) == 1
    gc.collect()
    # flushes are remembered, up to a number of them
    assert len(gc.get_objects()) - before < 3_000


# -- with a worker process ---------------------------------------------------------------------


def boxes_of(session: lazygt.Session) -> Mailboxes:
    boxes = session._link._pool.mailboxes  # type: ignore[attr-defined]
    if not boxes:
        pytest.skip("this processor has no mailboxes")
    return boxes[0]


def test_numbers_and_large_values_never_meet_the_socket() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as session:
        boxes = boxes_of(session)
        x = torch.arange(4.0)
        x.sum().item()
        before = boxes.sent, boxes.received
        for _ in range(50):
            x.sum().item()
        large = torch.ones(1 << 18, device="cpu").to("lazygt") + 1
        assert large.cpu().sum().item() == 2 << 18
        assert (boxes.sent - before[0], boxes.received - before[1]) == (0, 0)


def test_values_of_all_sizes_arrive(s: lazygt.Session) -> None:
    for count in (0, 1, 2, CAPACITY // 4 - 20, CAPACITY // 4, 4095, 4096, 4097, 100_000):
        eager = torch.rand(count, device="cpu")
        fetched = eager.to("lazygt").cpu()
        assert torch.equal(fetched, eager)
        fetched.add_(1)  # it is the user's own
        assert torch.equal(eager.to("lazygt").cpu(), eager)


def test_a_worker_on_our_only_core_is_waited_for_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_spin(boxes: object, elsewhere: object) -> None:
        raise AssertionError("spun on one core")

    everywhere = os.sched_getaffinity(0)
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as session:
        x = torch.arange(4.0)
        monkeypatch.setattr(process_link, "spin", no_spin)
        try:
            for pid in (0, *session.worker_pids):
                os.sched_setaffinity(pid, {min(everywhere)})
            session._link._pool.cores._judge_at = 0.0  # type: ignore[attr-defined]
            assert [x.sum().item() for _ in range(20)] == [6.0] * 20
        finally:
            os.sched_setaffinity(0, everywhere)
            monkeypatch.undo()


def test_a_worker_killed_while_a_number_is_awaited_is_seen() -> None:
    def reads_from_one_that_is_killed() -> None:
        settings = {"workers": 1, "threads": 1, "frozen_after": 1000.0, "recovery": "off"}
        with lazygt.session(**grouped(settings)) as session:
            x = torch.arange(4.0)
            x.sum().item()
            os.kill(session.worker_pids[0], signal.SIGSTOP)
            threading.Timer(0.2, os.kill, (session.worker_pids[0], signal.SIGKILL)).start()
            x.sum().item()

    with pytest.raises(lazygt.WorkerDied, match="SIGKILL"):
        reads_from_one_that_is_killed()


def test_two_sessions_have_mailboxes_of_their_own() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as outer:
        a = torch.arange(4.0)
        with lazygt.session(workers=lazygt.Workers(1, threads=1)) as inner:
            b = torch.arange(5.0)
            assert [b.sum().item() for _ in range(20)] == [10.0] * 20
            assert boxes_of(inner) is not boxes_of(outer)
        assert [a.sum().item() for _ in range(20)] == [6.0] * 20


def test_a_forked_child_leaves_the_mailbox_alone() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1)):
        x = torch.arange(4.0)
        assert x.sum().item() == 6.0
        child = os.fork()
        if not child:
            try:
                x.sum().item()
            except lazygt.NoSession:
                os._exit(7)
            os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert [x.sum().item() for _ in range(20)] == [6.0] * 20


# -- without one -------------------------------------------------------------------------------


def test_an_inline_session_encodes_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(value: object) -> bytes:
        raise AssertionError(f"{value!r} was encoded")

    with lazygt.session(launcher="inline") as session:
        x = torch.arange(4.0)
        for _ in range(3):
            x.sum().item()
        x.tolist()
        monkeypatch.setattr(wire, "pack", refused)
        monkeypatch.setattr(wire, "unpack", refused)
        assert [x.sum().item() for _ in range(5)] == [6.0] * 5
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
        monkeypatch.undo()
        assert session.stats()["last_run_message"] == 0
