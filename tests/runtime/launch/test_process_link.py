"""The link to real worker processes: start, messages, arenas, supervision, the end."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazygt.errors import LazyGTError, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.runtime.arenas import tensor_over
from lazygt.runtime.launch import worker_pool
from lazygt.runtime.launch.launcher import TAIL_BYTES
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec
from tests.support.control_group import control_group
from tests.support.descriptors import descriptors_before, open_descriptors
from tests.support.timeouts import patience

pytestmark = pytest.mark.timeout(60)
LOCAL, TCP = "ipc", "tcp://127.0.0.1"
PATIENCE = 30.0


@pytest.fixture
def opened(monkeypatch):
    """Opens links to obedient workers (see ``handlers``) and closes them."""
    here = os.path.dirname(os.path.dirname(__file__))
    paths = (here, os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    links = []

    def start(kind="Obedient", **fields):
        fields = {"loads_torch": kind == "Torch", "arena_bytes": 0, "threads": 1} | fields
        links.append(ProcessLink(LinkSpec(factory=f"handlers:{kind}", **fields)))
        return links[-1]

    yield start
    for link in links:
        link.close()


def order(link, *words, rank=0):
    link.send(rank, [word if isinstance(word, bytes) else str(word).encode() for word in words])


def answer(link, timeout=PATIENCE):
    received = link.receive(timeout)
    assert received is not None
    return received[0], [bytes(frame) for frame in received[1]]


def ask(link, *words, rank=0):
    order(link, *words, rank=rank)
    who, frames = answer(link)
    assert who == rank
    return frames


# -- messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [LOCAL, TCP])
def test_an_order_sent_before_the_worker_runs_is_answered(opened, transport):
    link = opened(transport=transport)
    assert ask(link, "echo", "a", "", "c") == [b"a", b"", b"c"]
    pid, rank, device = ask(link, "who")
    assert (int(pid), rank, device) == (link.pids[0], b"0", b"cpu")


@pytest.mark.parametrize("transport", [LOCAL, TCP])
def test_large_frames_both_ways(opened, transport):
    link = opened(transport=transport)
    payload = os.urandom(8 << 20)
    assert ask(link, "echo", payload, b"", payload[:100]) == [payload, b"", payload[:100]]
    assert ask(link, "big", 32 << 20) == [b"x" * (32 << 20)]


def test_many_answers_to_one_order_arrive_in_order(opened):
    link = opened()
    order(link, "many", 3000)
    assert [int(answer(link)[1][0]) for _ in range(3000)] == list(range(3000))


def test_many_orders_run_ahead_of_their_answers(opened):
    link = opened()
    for number in range(3000):
        order(link, "echo", number)
    assert [int(answer(link)[1][0]) for _ in range(3000)] == list(range(3000))


def test_a_message_over_the_limit_is_refused_at_the_call(opened):
    link = opened(max_message=1 << 16)
    with pytest.raises(ValueError, match="over the limit of 65536"):
        order(link, "echo", b"x" * (1 << 16))
    assert ask(link, "echo", "still") == [b"still"]


def test_poll_returns_at_once_and_finds_arrived_answer(opened):
    link = opened()
    ask(link, "echo", "up")
    assert link.receive(0) is None
    os.kill(link.pids[0], signal.SIGSTOP)  # who waits for its answer waits for ever
    order(link, "echo", "late")
    assert link.receive(0) is None
    os.kill(link.pids[0], signal.SIGCONT)
    found = None
    while found is None:
        found = link.receive(0)
    assert bytes(found[1][0]) == b"late"


def test_a_timeout_is_kept(opened):
    link = opened()
    ask(link, "echo", "up")
    begun = time.monotonic()
    assert link.receive(0.3) is None
    assert time.monotonic() - begun >= 0.3


def test_several_workers_each_know_their_rank(opened):
    link = opened(world_size=3)
    for rank in range(3):
        order(link, "who", rank=rank)
    seen = dict(answer(link) for _ in range(3))
    assert {rank: (int(a), int(b)) for rank, (a, b, _) in seen.items()} == {
        rank: (link.pids[rank], rank) for rank in range(3)
    }


def test_a_busy_rank_does_not_starve_the_others(opened):
    link = opened(world_size=2)
    for rank in range(2):
        ask(link, "echo", "up", rank=rank)
    order(link, "many", 500, rank=0)
    order(link, "sleep", "0", rank=0)
    order(link, "many", 500, rank=1)
    order(link, "sleep", "0", rank=1)
    seen = {0: [], 1: []}
    while not all(frames and frames[-1] == b"slept" for frames in seen.values()):
        rank, (text,) = answer(link)
        seen[rank].append(text)
    for rank in range(2):
        assert [int(text) for text in seen[rank][:-1]] == list(range(500))


@settings(max_examples=10)
@given(steps=st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=300)), max_size=20))
def test_answers_belong_to_their_rank_in_order(steps):
    """Any interleaving of orders to two workers."""
    link = _shared()
    for rank, text in steps:
        order(link, "echo", text, rank=rank)
    seen = [answer(link) for _ in steps]
    for which in range(2):
        expected = [text for rank, text in steps if rank == which]
        assert [frames[0] for rank, frames in seen if rank == which] == expected


_links: list[ProcessLink] = []


def _shared() -> ProcessLink:
    if not _links:
        environment = {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
        spec = LinkSpec(
            world_size=2,
            factory="handlers:Obedient",
            loads_torch=False,
            arena_bytes=0,
            environment=environment,
        )
        _links.append(ProcessLink(spec))
    return _links[0]


@pytest.fixture(autouse=True)
def _close_shared():
    yield
    while _links:
        _links.pop().close()


def test_sends_of_many_threads_while_one_waits(opened):
    link = opened()
    ask(link, "echo", "up")

    def work():
        for _ in range(300):
            order(link, "echo", "x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(answer(link)[1] == [b"x"] for _ in range(1200))
    for thread in threads:
        thread.join()


def test_a_send_wakes_a_waiting_thread_only_to_look(opened):
    """A send can swallow the signal that an answer has come; the waiting thread still gets it."""
    link = opened()
    ask(link, "echo", "up")
    for _ in range(20):
        got = []
        waiter = threading.Thread(target=lambda got=got: got.extend([answer(link), answer(link)]))
        waiter.start()
        order(link, "echo", "1")
        order(link, "echo", "2")
        waiter.join(PATIENCE)
        assert got == [(0, [b"1"]), (0, [b"2"])]


# -- what a worker is given --------------------------------------------------------------------


def test_the_environment_and_threads_reach_the_worker(opened):
    link = opened(environment={"LAZYGT_HERE": "yes"}, threads=3)
    assert ask(link, "environment", "LAZYGT_HERE") == [b"yes"]
    assert ask(link, "environment", "OMP_NUM_THREADS") == [b"3"]
    assert ask(link, "environment", "OMP_WAIT_POLICY") == [b"PASSIVE"]


def test_secrets_stand_neither_in_the_command_line_nor_in_the_environment(opened, monkeypatch):
    token = b"secret" * 5
    monkeypatch.setattr(worker_pool, "new_token", lambda: token)
    link = opened(transport=TCP)
    ask(link, "echo", "up")
    for name in ("cmdline", "environ"):
        with open(f"/proc/{link.pids[0]}/{name}", "rb") as file:
            text = file.read()
        assert token not in text
        assert token.hex().encode() not in text


@pytest.mark.slow
def test_both_arenas_carry_tensors(opened):
    link = opened("Torch", arena_bytes=1 << 20)
    source = torch.arange(100_000, dtype=torch.float32)
    released = []
    for _ in range(3):  # the second and third growth of the arenas, and reuse
        slot = link.upload.put(source)
        where, nbytes = map(int, ask(link, "total", slot.offset, source.nbytes))
        flat = tensor_over(link.fetch_arena(0), where, nbytes, released.append)
        assert torch.equal(flat.view(torch.float32), source.cumsum(0))
        link.upload.free(slot.offset)
        del flat
        assert ask(link, "release", released.pop()) == [b"0"]
    assert link.upload.bytes_in_use == 0
    big = torch.ones(1 << 20)
    slot = link.upload.put(big)
    where, nbytes = map(int, ask(link, "total", slot.offset, big.nbytes))
    assert link.fetch_arena(0).view(where, nbytes).view(torch.float32)[-1] == 1 << 20


@pytest.mark.slow
def test_the_ranks_meet_in_one_group(opened):
    link = opened("Torch", world_size=2, device="cpu", mesh="data=2")
    for rank in range(2):
        order(link, "all_reduce", rank=rank)
    assert [answer(link)[1] for _ in range(2)] == [[b"3.0"]] * 2


# -- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "tail"),
    [
        (("exit", 7), "exit code 7", "last words"),
        (("die", int(signal.SIGKILL)), "signal SIGKILL", "killed by itself"),
        (("die", int(signal.SIGSEGV)), "signal SIGSEGV", "Segmentation fault"),
        (("crash", "a bug in the worker"), "exit code 1", "RuntimeError: a bug in the worker"),
    ],
)
def test_a_death_is_reported_with_its_cause_and_last_words(opened, words, status, tail):
    link = opened()
    order(link, *words)
    with pytest.raises(WorkerDied) as caught:
        link.receive(None)
    error = caught.value
    assert (error.rank, error.pid, error.status) == (0, link.pids[0], status)
    assert tail in error.stderr
    for text in (f"worker 0 (pid {link.pids[0]})", status, tail):
        assert text in str(error)


def test_a_dead_worker_is_said_again_at_every_use(opened):
    link = opened(world_size=2)
    order(link, "exit", 3, rank=1)
    for act in (lambda: link.receive(None), lambda: link.receive(None), lambda: link.receive(0)):
        with pytest.raises(WorkerDied, match="worker 1"):
            act()
    with pytest.raises(WorkerDied):
        order(link, "echo", "x", rank=1)
    order(link, "echo", "the living", rank=0)
    assert answer(link) == (0, [b"the living"])


def test_messages_before_death_still_arrive(opened):
    link = opened()
    order(link, "many", 200)
    worker = link._pool.workers[0]
    boxes = worker.mailboxes

    def written():
        return struct.unpack_from("<Q", boxes._memory, boxes._ring_offsets[0])[0]

    while len(worker.inbox) + written() < 201:  # and the welcome; in our memory, not yet delivered
        worker.data.take(worker.inbox)
    os.kill(link.pids[0], signal.SIGKILL)
    assert worker.process.wait(PATIENCE)
    for number in range(200):
        assert answer(link)[1] == [str(number).encode()]
    with pytest.raises(WorkerDied, match="signal SIGKILL"):
        link.receive(PATIENCE)


def test_the_tail_is_the_end_and_short(opened):
    link = opened()
    order(link, "shout", 3 << 20)
    assert answer(link)[1] == [b"shouted"]
    order(link, "exit", 1)
    with pytest.raises(WorkerDied) as caught:
        link.receive(PATIENCE)
    assert caught.value.stderr.endswith("last words\n")
    assert len(caught.value.stderr) <= TAIL_BYTES


def test_a_worker_that_cannot_start_is_a_death_with_a_reason(opened):
    link = opened("Broken")
    with pytest.raises(WorkerDied, match="no such executor on this machine"):
        link.receive(None)


def test_a_refused_message_raises_and_says_why(opened, monkeypatch):
    link = opened()
    order(link, "refuse")
    with pytest.raises(ProtocolError, match="worker 0 dropped this session: no such order"):
        link.receive(PATIENCE)
    for again in (lambda: link.receive(None), lambda: link.receive(0), lambda: order(link, "echo")):
        with pytest.raises(ProtocolError, match="no such order"):
            again()
    asked = []
    monkeypatch.setattr(link._pool.workers[0].data, "send", lambda *given: asked.append(given))
    link.close()
    assert not asked  # it no longer listens: nobody waits for it to shut down in good order


def test_a_stopped_worker_is_frozen_at_the_deadline_and_not_before(opened):
    link = opened(frozen_after=0.6)
    ask(link, "echo", "up")
    os.kill(link.pids[0], signal.SIGSTOP)
    order(link, "echo", "late")
    stopped = time.monotonic()
    with pytest.raises(WorkerFrozen, match=r"has not answered for 0\.6 s"):
        link.receive(None)
    assert time.monotonic() - stopped >= 0.6
    os.kill(link.pids[0], signal.SIGCONT)
    assert answer(link)[1] == [b"late"]


def test_a_worker_that_sleeps_in_an_op_is_not_frozen(opened):
    link = opened(frozen_after=0.3)
    assert ask(link, "sleep", "1.5") == [b"slept"]


def test_a_worker_that_keeps_the_interpreter_to_itself_is_frozen_unless_it_works(opened):
    link = opened(frozen_after=1.0)
    ask(link, "echo", "up")
    begun = time.monotonic()
    ask(link, "count", 10_000_000)
    much = int(10_000_000 * 2.0 / (time.monotonic() - begun))  # two deadlines of six
    assert ask(link, "count", much) == [str(much).encode()]
    order(link, "hold", 3)
    with pytest.raises(WorkerFrozen):
        link.receive(None)


def test_worker_that_gets_a_hundredth_of_a_processor_is_not_frozen(opened):
    link = opened(frozen_after=1.0)
    ask(link, "echo", "up")
    with control_group("cpu") as group:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("1000")
        (group / "cgroup.procs").write_text(str(link.pids[0]))
        before = throttled(group)
        try:
            order(link, "count", 1_000_000_000)
            assert link.receive(3.0) is None  # four deadlines from the ping
            assert throttled(group) > before
            os.kill(link.pids[0], signal.SIGSTOP)  # it gives no sign any more
            with pytest.raises(WorkerFrozen):
                link.receive(None)
        finally:
            link.close()


def throttled(group):
    """How often a cgroup had used up its share."""
    counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(counts["nr_throttled"])


def test_a_descriptor_beside_ends_a_wait(opened):
    link = opened()
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        assert link.receive(None, read) is None
        os.kill(link.pids[0], signal.SIGKILL)
        os.read(read, 1)
        for _ in range(2):
            with pytest.raises(WorkerDied):
                link.receive(None, read)
    finally:
        os.close(read)
        os.close(write)


def test_a_worker_stopped_in_its_start_has_the_start_timeout(opened):
    link = opened(frozen_after=0.1, start_timeout=1.0)
    os.kill(link.pids[0], signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(WorkerFrozen, match="for 1 s"):
        link.receive(None)
    assert time.monotonic() - begun >= 1.0


# -- the end -----------------------------------------------------------------------------------


def test_close_ends_the_worker_and_may_be_called_twice(opened):
    link = opened()
    ask(link, "echo", "up")
    link.close()
    with pytest.raises(ProcessLookupError):
        os.kill(link.pids[0], 0)
    link.close()
    for act in (lambda: order(link, "echo"), lambda: link.receive(0)):
        with pytest.raises(LazyGTError, match="closed"):
            act()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["fresh", "stopped", "dead", "busy", "deaf"])
def test_close_is_quick_whatever_the_worker_does(opened, how):
    link = opened(frozen_after=0.2)
    if how != "fresh":
        ask(link, "echo", "up")
    if how == "stopped":
        os.kill(link.pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerFrozen):
            link.receive(None)
    elif how == "dead":
        os.kill(link.pids[0], signal.SIGKILL)
    elif how == "busy":
        order(link, "sleep", "30")
    elif how == "deaf":
        os.kill(link.pids[0], signal.SIGSTOP)  # and nobody has noticed yet
    begun = time.monotonic()
    link.close()
    assert time.monotonic() - begun < patience(5)
    with pytest.raises(ProcessLookupError):
        os.kill(link.pids[0], 0)


def test_closing_wakes_a_waiting_thread(opened):
    link = opened()
    ask(link, "echo", "up")
    caught = []

    def wait():
        try:
            link.receive(None)
        except LazyGTError as error:
            caught.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    link.close()
    waiter.join(PATIENCE)
    assert caught == ["the link to the workers is closed"]


def test_a_link_that_is_forgotten_ends_its_worker(opened, monkeypatch):
    environment = {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
    link = ProcessLink(
        LinkSpec(
            factory="handlers:Obedient", loads_torch=False, arena_bytes=0, environment=environment
        )
    )
    ask(link, "echo", "up")
    pid = link.pids[0]
    del link
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"transport": "smoke"}, ValueError, "expected 'ipc' or 'tcp://HOST'"),
        ({"transport": "tcp://192.0.2.1"}, OSError, "Cannot assign"),
        ({"device": "cuda"}, ValueError, "torch sees no GPU"),
    ],
)
def test_a_start_that_fails_leaves_nothing_behind(fields, error, text):
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = len(descriptors_before())
    with pytest.raises(error, match=text):
        ProcessLink(LinkSpec(**fields))
    assert len(open_descriptors()) <= before


def test_no_descriptor_stays_after_close(opened):
    opened().close()  # what Python and ZMQ open once and keep
    before = len(descriptors_before())
    for _ in range(3):
        opened(world_size=2, arena_bytes=1 << 16).close()
    assert len(open_descriptors()) <= before


@pytest.mark.anew
def test_worker_process_opens_its_sockets_without_torch():
    code = "import sys, lazygt.runtime.launch.process; print('torch' in sys.modules)"
    environment = {**os.environ, "LAZYGT_WORKER": "1"}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed == "False\n"


@pytest.mark.anew
def test_a_missing_interpreter_is_an_error_of_the_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    before = len(descriptors_before())
    with pytest.raises(OSError):
        ProcessLink(LinkSpec(loads_torch=False))
    assert len(open_descriptors()) <= before
