"""Mailboxes: order, room, sleep and spin, and what makes no sense."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazygt.errors import ProtocolError, WorkerDied
from lazygt.native import Loaded, load
from lazygt.net import mailbox
from lazygt.net.mailbox import CAPACITY, Cores, Mailboxes, MailboxFiles
from lazygt.runtime.launch import process_link
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec
from tests.support.descriptors import descriptors_before, open_descriptors

pytestmark = pytest.mark.timeout(60)
WAIT = 30.0
FILES = MailboxFiles.create()
if FILES is None:
    pytest.skip("this processor has no mailboxes", allow_module_level=True)
FILES.close()


@pytest.fixture(params=["python", "extension"], autouse=True)
def spelled(request, monkeypatch):
    """Mailboxes in Python, and those of the extension."""
    if request.param == "python":
        monkeypatch.setattr(mailbox.native, "load", lambda: Loaded(None, None, "not wanted"))
    elif load().module is None:
        pytest.skip("there is no extension")


@contextmanager
def both_ends():
    """The client's end and the worker's, in one process."""
    files = MailboxFiles.create()
    client, worker = Mailboxes(files, of_worker=False), Mailboxes(files, of_worker=True)
    client.use_extension()
    worker.use_extension()
    try:
        yield client, worker
    finally:
        worker.files = MailboxFiles(*map(os.dup, files.all))  # each end closes its own
        client.close()
        worker.close()


def plain(frames):
    return None if frames is None else [bytes(frame) for frame in frames]


def woken(box):
    return bool(select.select([box.wakes], [], [], 0)[0])


# -- one mailbox -------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=60), max_size=5), max_size=150))
def test_mailbox_round_trip(messages):
    with both_ends() as (client, worker):
        for frames in messages:
            assert client.put(frames)
            assert plain(worker.take()) == frames
        assert worker.take() is None


def test_frames_may_be_views_of_other_memory():
    with both_ends() as (client, worker):
        assert worker.put([memoryview(b"abcdef")[2:4], memoryview(bytearray(3))])
        assert plain(client.take()) == [b"cd", bytes(3)]


def test_full_mailbox_refuses_message():
    with both_ends() as (client, worker):
        assert not client.put([bytes(CAPACITY - 1)])
        assert client.put([bytes(CAPACITY - 2)])
        put = 1
        while client.put([b"x"]):
            put += 1
        assert len(worker.take()[0]) == CAPACITY - 2
        assert client.put([b"y"])
        taken = [plain(worker.take()) for _ in range(put)]
        assert taken == [[b"x"]] * (put - 1) + [[b"y"]]


def test_one_that_comes_after_the_sockets_waits_for_them():
    with both_ends() as (client, worker):
        client.put([b"first"])
        client.sent += 1
        client.put([b"third"])
        assert plain(worker.take()) == [b"first"]
        assert worker.take() is None
        worker.received += 1
        assert plain(worker.take()) == [b"third"]


def test_a_message_wakes_the_other_once():
    with both_ends() as (client, worker):
        assert not woken(worker)
        client.put([b"x"])
        client.put([b"y"])
        assert woken(worker)
        assert not woken(client)
        worker.clear_wakeup()
        worker.clear_wakeup()
        assert not woken(worker)


def test_a_second_sender_at_a_time_is_sent_to_the_socket():
    with both_ends() as (client, worker), client._put_lock:
        assert not client.put([b"x"])
        assert worker.take() is None


@pytest.mark.parametrize(
    ("written", "slot"),
    [
        (200, b""),
        (1, struct.pack("<QH", 0, 65535)),
        (1, struct.pack("<QH2H", 0, 2, 60000, 60000)),
    ],
)
def test_nonsense_is_a_protocol_error(written, slot):
    with both_ends() as (client, worker):
        begin = client._ring_offsets[1] + mailbox._RING_HEADER_BYTES
        client._memory[begin : begin + len(slot)] = slot
        ring = client._ring_offsets[1]
        client._memory[ring : ring + 8] = struct.pack("<Q", written)
        with pytest.raises(ProtocolError, match="mailbox"):
            worker.take()


def test_closed_twice_and_nothing_is_left():
    before = descriptors_before()
    box = Mailboxes(MailboxFiles.create(), of_worker=False)
    box.close()
    box.close()
    assert open_descriptors() <= before


# -- spinning ----------------------------------------------------------------------------------


def test_a_spin_ends_when_something_comes_or_is_elsewhere_or_soon():
    with both_ends() as (client, worker):
        looks = []
        mailbox.spin([worker], lambda: looks.append(1))
        assert looks
        looks.clear()
        mailbox.spin([worker], lambda: looks.append(1) or True)
        assert looks == [1]
        client.put([b"x"])
        looks.clear()
        mailbox.spin([worker], lambda: looks.append(1))
        assert not looks


def test_process_without_own_core_does_not_spin():
    everywhere = os.sched_getaffinity(0)
    core = min(everywhere)
    assert not Cores((os.getpid(),), len(everywhere) + 1).enough
    assert Cores((os.getpid(),), len(everywhere)).enough
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pids = (os.getpid(), child.pid)
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(child.pid, {core})
        assert not Cores(pids, 2).enough
        if len(everywhere) > 1:  # on a core each
            os.sched_setaffinity(child.pid, everywhere - {core})
            assert Cores(pids, 2).enough
    finally:
        os.sched_setaffinity(0, everywhere)
        child.communicate(b"\n")
    assert not Cores(pids, 1).enough, "one of them has ended"


def test_a_process_that_is_moved_to_one_core_stops_spinning(monkeypatch):
    masks = {1: {0, 1}, 2: {0, 1}}
    monkeypatch.setattr(mailbox, "_RECHECK_SECONDS", 0)
    monkeypatch.setattr(mailbox.os, "sched_getaffinity", lambda pid: masks[pid])
    cores = Cores((1, 2), 2)
    assert cores.enough
    masks[1] = masks[2] = {1}
    assert not cores.enough


def test_process_under_cpu_quota_does_not_spin(monkeypatch):
    monkeypatch.setattr(mailbox.os, "sched_getaffinity", lambda pid: {0, 1})
    for quota, enough in ((None, True), (2.0, True), (1.5, False), (0.5, False)):
        monkeypatch.setattr(mailbox, "cpu_quota", lambda quota=quota: quota)
        assert Cores((1, 2), 2).enough is enough


# -- a link with mailboxes ---------------------------------------------------------------------


@contextmanager
def linked(**fields):
    spec = {"factory": "tests.runtime.handlers:Obedient", "loads_torch": False, "arena_bytes": 0}
    link = ProcessLink(LinkSpec(threads=1, **spec, **fields))
    try:
        yield link
    finally:
        link.close()


def order(link, *words, rank=0):
    link.send(rank, [word if isinstance(word, bytes) else str(word).encode() for word in words])


def answer(link):
    rank, frames = link.receive(WAIT)
    return rank, plain(frames)


def test_small_messages_never_meet_the_socket():
    with linked() as link:
        for number in range(200):
            order(link, "echo", number)
            assert answer(link) == (0, [str(number).encode()])
        boxes = link._pool.workers[0].mailboxes
        assert (boxes.sent, boxes.received) == (0, 0)


@settings(max_examples=8)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 100, CAPACITY - 6, CAPACITY, 1 << 17])),
        max_size=80,
    ),
    ahead=st.integers(1, 80),
)
def test_messages_of_all_sizes_stay_in_order(steps, ahead):
    with linked(world_size=2) as link:
        wanted = {0: [], 1: []}
        taken = {0: [], 1: []}

        def take():
            rank, (frame,) = answer(link)
            taken[rank].append(frame)

        for number, (rank, size) in enumerate(steps):
            text = str(number).encode() + bytes(size)
            wanted[rank].append(text)
            order(link, "echo", text, rank=rank)
            while sum(map(len, wanted.values())) - sum(map(len, taken.values())) >= ahead:
                take()
        while sum(map(len, taken.values())) < len(steps):
            take()
        assert taken == wanted


def test_messages_beyond_mailbox_of_stopped_worker_stay_in_order():
    with linked() as link:
        order(link, "echo", "up")
        answer(link)
        os.kill(link.pids[0], signal.SIGSTOP)
        for number in range(500):
            order(link, "echo", number)
        assert link._pool.workers[0].mailboxes.sent > 0
        os.kill(link.pids[0], signal.SIGCONT)
        assert [answer(link)[1][0] for _ in range(500)] == [b"%d" % k for k in range(500)]


def test_threads_that_send_at_once_lose_nothing():
    with linked() as link:
        threads = [
            threading.Thread(target=lambda: [order(link, "echo", "x") for _ in range(300)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for _ in range(1200):
            assert answer(link)[1] == [b"x"]
        for thread in threads:
            thread.join()


def test_nobody_spins_on_one_core(monkeypatch):
    def no_spin(boxes, elsewhere):
        raise AssertionError("spun on one core")

    everywhere = os.sched_getaffinity(0)
    monkeypatch.setattr(process_link, "spin", no_spin)
    try:
        with linked() as link:
            for pid in (0, *link.pids):
                os.sched_setaffinity(pid, {min(everywhere)})
            for number in range(20):
                order(link, "echo", number)
                answer(link)
    finally:
        os.sched_setaffinity(0, everywhere)


def test_worker_of_remote_client_does_not_spin():
    """What comes over a network takes longer, and whoever carries it wants the core."""
    with linked(client_here=False) as link:
        order(link, "do_not_spin")
        answer(link)
        for number in range(20):
            order(link, "echo", number)
            assert answer(link) == (0, [b"%d" % number])


def test_a_worker_that_is_killed_while_we_sleep_is_seen_at_once():
    with linked(frozen_after=1000.0) as link:
        order(link, "echo", "up")
        answer(link)
        order(link, "sleep", 1000)
        threading.Timer(0.2, os.kill, (link.pids[0], signal.SIGKILL)).start()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            link.receive(None)


def test_mailbox_of_dead_worker_is_delivered_first():
    with linked() as link:
        order(link, "many", 100)
        worker = link._pool.workers[0]
        order(link, "exit", 0)
        assert worker.process.wait(WAIT)
        received = [answer(link)[1] for _ in range(64)]
        assert received == [[b"%d" % k] for k in range(64)]


def test_corrupt_mailbox_is_protocol_error():
    with linked() as link:
        order(link, "echo", "up")
        answer(link)
        boxes = link._pool.workers[0].mailboxes
        struct.pack_into("<Q", boxes._memory, boxes._ring_offsets[1], 1000)
        os.eventfd_write(boxes._wakes_other, 1)
        with pytest.raises(ProtocolError, match="mailbox"):
            link.receive(None)


def test_without_mailboxes_the_socket_carries_everything(monkeypatch):
    monkeypatch.setattr(mailbox.platform, "machine", lambda: "aarch64")
    with linked() as link:
        assert link._pool.workers[0].mailboxes is None
        order(link, "echo", "x")
        assert answer(link) == (0, [b"x"])


def test_nothing_is_left_of_a_link():
    before = descriptors_before()
    with linked() as link:
        order(link, "echo", "x")
        answer(link)
    assert open_descriptors() <= before
