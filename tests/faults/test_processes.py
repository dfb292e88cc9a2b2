"""Workers and clients that are killed, stopped or broken at bad moments."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import zmq

from lazygt.errors import WorkerDied, WorkerFrozen
from lazygt.net import channel
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec
from tests.support.timeouts import patience

pytestmark = [pytest.mark.slow, pytest.mark.anew, pytest.mark.timeout(120)]
WAIT = 60.0
ROOT = Path(__file__).parents[2]


def quick(**changes):
    given = {"factory": "tests.runtime.handlers:Obedient", "loads_torch": False, "threads": 1}
    return closing(ProcessLink(LinkSpec(**{**given, **changes})))


def ask(link, *frames, rank=0):
    link.send(rank, [str(frame).encode() for frame in frames])
    got = link.receive(WAIT)
    assert got is not None
    return [bytes(frame) for frame in got[1]]


def wait_for_stderr(link, text, rank=0):
    """Until the worker has written it: it is inside its order now."""
    process = link._pool.workers[rank].process
    while text not in process.stderr_tail():
        time.sleep(0.005)


# -- a worker dies -----------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, WAIT])
def test_a_worker_killed_during_a_wait(timeout):
    with quick(world_size=2) as link:
        for rank in range(2):
            ask(link, "echo", rank=rank)
        link.send(1, [b"started", b"60"])
        wait_for_stderr(link, "begun", rank=1)
        killed = time.monotonic()
        os.kill(link.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            link.receive(timeout)
        assert time.monotonic() - killed < patience(1.0)
        error = caught.value
        assert (error.rank, error.pid, error.status) == (1, link.pids[1], "signal SIGKILL")
        assert error.stderr == "begun\n"
        assert f"worker 1 (pid {link.pids[1]}) died: signal SIGKILL" in str(error)


def test_the_others_are_still_heard_after_a_death():
    with quick(world_size=2) as link:
        for rank in range(2):
            ask(link, "echo", rank=rank)
        os.kill(link.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            link.receive(None)
        assert ask(link, "echo", "alive", rank=1) == [b"alive"]
        with pytest.raises(WorkerDied):
            link.send(0, [b"echo"])
        # Never a hang, and never "nothing yet" for an answer that cannot come.
        for timeout in (None, 0.01, 0):
            with pytest.raises(WorkerDied):
                link.receive(timeout)


def test_all_workers_killed_at_once_are_each_reported():
    with quick(world_size=3) as link:
        for rank in range(3):
            ask(link, "echo", rank=rank)
        for pid in link.pids:
            os.kill(pid, signal.SIGKILL)
        seen = set()
        while len(seen) < 3:
            with pytest.raises(WorkerDied) as caught:
                link.receive(WAIT)
            seen.add(caught.value.rank)


@pytest.mark.parametrize(
    ("order", "status", "words"),
    [
        (("exit", 3), "exit code 3", "last words"),
        (("exit", 0), "exit code 0", "last words"),
        (("die", int(signal.SIGSEGV)), "signal SIGSEGV", "Segmentation fault"),
        (("die", int(signal.SIGTERM)), "signal SIGTERM", "killed by itself"),
        (("crash", "a bug in the worker"), "exit code 1", "RuntimeError: a bug in the worker"),
        (("no_such_method",), "exit code 1", "AttributeError"),
    ],
)
def test_death_reports_status_and_stderr(order, status, words):
    with quick() as link, pytest.raises(WorkerDied) as caught:
        ask(link, *order)
    assert caught.value.status == status
    assert words in caught.value.stderr


def test_a_worker_that_cannot_start():
    with (
        quick(factory="tests.runtime.handlers:Broken") as link,
        pytest.raises(WorkerDied) as caught,
    ):
        link.receive(None)
    assert "no such executor on this machine" in caught.value.stderr


def test_messages_before_death_arrive_before_error():
    with quick() as link:
        ask(link, "echo")
        link.send(0, [b"echo", b"first"])
        worker = link._pool.workers[0]
        while not worker.mailboxes.incoming.filled():
            select.select([worker.mailboxes.wakes], [], [], 0.01)
        worker.process.kill()
        assert worker.process.wait(WAIT)
        assert [bytes(frame) for frame in link.receive(WAIT)[1]] == [b"first"]
        with pytest.raises(WorkerDied):
            link.receive(None)


def test_much_stderr_is_bounded():
    with quick() as link:
        assert ask(link, "shout", 20 << 20) == [b"shouted"]
        with pytest.raises(WorkerDied) as caught:
            ask(link, "exit", 1)
    assert caught.value.stderr.endswith("last words\n")
    assert len(caught.value.stderr) <= 8 << 10


# -- a worker freezes --------------------------------------------------------------------------


def test_a_stopped_worker_is_frozen_at_the_deadline_and_recovers():
    with quick(frozen_after=1.0) as link:
        ask(link, "echo")
        os.kill(link.pids[0], signal.SIGSTOP)
        stopped = time.monotonic()
        link.send(0, [b"echo", b"awake"])
        with pytest.raises(WorkerFrozen) as caught:
            link.receive(None)
        assert 1.0 <= time.monotonic() - stopped < patience(5.0)
        error = caught.value
        assert (error.rank, error.pid, error.deadline) == (0, link.pids[0], 1.0)
        os.kill(link.pids[0], signal.SIGCONT)
        assert [bytes(frame) for frame in link.receive(WAIT)[1]] == [b"awake"]


def test_a_stopped_worker_is_ended_by_close():
    link = ProcessLink(
        LinkSpec(factory="tests.runtime.handlers:Obedient", loads_torch=False, frozen_after=0.5)
    )
    with closing(link):
        ask(link, "echo")
        os.kill(link.pids[0], signal.SIGSTOP)
    assert not psutil.pid_exists(link.pids[0])


@pytest.mark.parametrize(
    "order", [(b"sleep", b"4"), (b"kernel", b"3000")], ids=["sleep", "torch op"]
)
def test_a_long_computation_is_not_frozen(order):
    factory = "tests.runtime.handlers:Torch"
    with quick(frozen_after=0.8, factory=factory, loads_torch=True) as link:
        ask(link, "threads")
        link.send(0, list(order))
        assert link.receive(WAIT) is not None


def test_a_worker_killed_in_a_long_kernel():
    with quick(factory="tests.runtime.handlers:Torch", loads_torch=True) as link:
        ask(link, "threads")
        link.send(0, [b"kernel", b"12000"])
        wait_for_stderr(link, "begun")
    assert not psutil.pid_exists(link.pids[0])


# -- the client dies ---------------------------------------------------------------------------

CLIENT = """
import os, sys, time
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec
from tests.support.timeouts import patience
link = ProcessLink(LinkSpec(world_size=2, threads=1, **{spec!r}))
where = link._pool.workers[0].data._endpoint
print(*link.pids, flush=True)
print(where, flush=True)
{then}
"""

BUSY = """
for rank in range(2):
    link.send(rank, [b"threads"])
for rank in range(2):
    link.receive(60)
for rank in range(2):
    link.send(rank, [b"kernel", b"12000"])
for rank in range(2):
    while "begun" not in link._pool.workers[rank].process.stderr_tail():
        time.sleep(0.005)
print("ready", flush=True)
link.receive(None)
"""

FORKED = """
for rank in range(2):
    link.send(rank, [b"who"])
for rank in range(2):
    link.receive(60)
if os.fork() == 0:
    os.close(1)
    sys.stdin.read()  # as long as the test lives: a DataLoader's worker, say
    os._exit(0)
print("ready", flush=True)
link.receive(None)
"""

STARTING = """
print("ready", flush=True)
link.receive(None)
"""

FORGOTTEN = """
link.send(0, [b"who"])
link.receive(60)
print("ready", flush=True)
"""

TORCH = {"factory": "tests.runtime.handlers:Torch"}
QUICK = {"factory": "tests.runtime.handlers:Obedient", "loads_torch": False}


class Victim:
    """A client in a process of its own, with two workers."""

    def __init__(self, spec, then):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT.format(spec=spec, then=then)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        # pidfds, since an orphan stays in the process table until init gets round to it.
        self.workers = [os.pidfd_open(int(pid)) for pid in self.line().split()]
        self.directory = Path(self.line().removeprefix("ipc://")).parent
        assert self.line() == "ready"

    def line(self):
        return self.process.stdout.readline().strip()

    def workers_end_within(self, seconds):
        until = time.monotonic() + seconds
        return all(
            select.select([fd], [], [], max(until - time.monotonic(), 0))[0] for fd in self.workers
        )

    def close(self):
        for fd in self.workers:
            os.close(fd)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


# While torch's libraries are loaded no other thread of Python's runs.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "then", "seconds"),
    [(TORCH, BUSY, 2.0), (QUICK, FORKED, 2.0), (TORCH, STARTING, 10.0)],
    ids=["inside a kernel", "with a forked child alive", "while workers start"],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_go_when_the_client_is_killed(spec, then, seconds, number):
    with closing(Victim(spec, then)) as victim:
        victim.process.send_signal(number)
        victim.process.wait()
        assert victim.workers_end_within(patience(seconds))
        assert not victim.directory.exists()


def test_a_client_that_forgets_to_close():
    with closing(Victim(QUICK, FORGOTTEN)) as victim:
        assert victim.process.wait() == 0
        assert victim.workers_end_within(0)
        assert not victim.directory.exists()


def test_a_forked_child_that_exits_does_not_end_the_workers():
    with quick() as link:
        ask(link, "echo")
        pid = os.fork()
        if pid == 0:
            link._finalizer()
            os._exit(0)
        os.waitpid(pid, 0)
        assert ask(link, "echo", "still") == [b"still"]


# -- strangers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp://127.0.0.1"])
@pytest.mark.parametrize("which", ["data", "control"])
def test_strangers_on_a_real_worker(transport, which):
    with quick(transport=transport, frozen_after=0.5) as link:
        ask(link, "echo")
        endpoint = getattr(link._pool.workers[0], which)._endpoint
        context = zmq.Context()
        noise = context.socket(zmq.DEALER)
        noise.connect(endpoint)
        for message in (b"", os.urandom(1000), channel.pack(channel.PING), b"z" * (1 << 20)):
            noise.send(message)
        raw = context.socket(zmq.STREAM) if transport != "ipc" else None
        if raw is not None:
            raw.connect(endpoint)
        # Longer than the deadline: the control channel must still answer, too.
        assert ask(link, "sleep", "1.5") == [b"slept"]
        context.destroy(0)
        assert ask(link, "echo", "fine") == [b"fine"]


def test_a_pong_is_only_for_the_owner():
    with quick() as link:
        ask(link, "echo")
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(link._pool.workers[0].control._endpoint)
        stranger.send(channel.pack(channel.PING))
        assert stranger.poll(20_000)
        kind, (text,) = channel.unpack(stranger.recv())
        context.destroy(0)
        assert kind == channel.ERROR
        assert re.search("hello", bytes(text).decode())
