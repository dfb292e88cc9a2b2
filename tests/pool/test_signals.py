"""Ctrl-C and SIGTERM, to a client and to who serves: nobody hangs, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from tests.pool.serving import SECONDS, Asker, served

pytestmark = pytest.mark.timeout(240)

BOTH = [signal.SIGINT, signal.SIGTERM]
#: It says what ended it; SIGTERM ends it without a word.
STEPS = """
import sys, torch, lazygt
try:
    with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2]), workers=2) as session:
        value = torch.ones(1 << 18)
        session.synchronize()
        print(*session.worker_pids, flush=True)
        while True:
            value.mul_(0.5).sum().item()
except BaseException as error:
    print(type(error).__name__, error, flush=True)
    raise SystemExit(3)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where processes of this test have their sockets and files, and nobody else."""
    place = tmp_path / "temporary"
    place.mkdir()
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(place))
    return place


class Client:
    """A program in the pool; it runs when this is made."""

    def __init__(self, pool, name):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(STEPS), pool.on, str(pool.key(name))],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        said = self.process.stdout.readline()
        assert re.fullmatch(r"\d+ \d+\n", said), said
        self.workers = [psutil.Process(int(pid)) for pid in said.split()]

    def ended(self):
        """Its last words, and how it ended."""
        try:
            words, _ = self.process.communicate(timeout=SECONDS)
        except BaseException:
            self.process.kill()
            self.process.communicate()
            raise
        _, alive = psutil.wait_procs(self.workers, SECONDS)
        assert alive == []
        return words.strip(), self.process.returncode


def memory_left():
    return {name for name in os.listdir("/dev/shm") if name.startswith("lazygt")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", BOTH)
def test_a_client_that_is_ended_leaves_its_places(number, folder, tmp_path):
    before = memory_left()
    with served(tmp_path, "--workers", "2") as pool:
        client = Client(pool, "alice")
        client.process.send_signal(number)
        words, code = client.ended()
        expected = ("KeyboardInterrupt", 3) if number == signal.SIGINT else ("", -number)
        assert (words, code) == expected
        pool.until(lambda status: status["free"] == 2 and not status["sessions"])
        again = Client(pool, "bob")  # who finds them free
        again.process.send_signal(number)
        again.ended()
    assert list(folder.glob("lazygt-*")) == []
    assert memory_left() <= before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", BOTH)
def test_a_pool_that_is_ended_tells_its_clients(number, folder, tmp_path):
    with served(tmp_path, "--workers", "2") as pool:
        client = Client(pool, "alice")
        waiting = Asker(pool, "bob", 2)
        waiting.told()
        pool.process.send_signal(number)
        assert pool.process.wait(SECONDS) == 0
        words, code = client.ended()
        assert code == 3
        assert words.startswith("SessionEnded ")
        waiting.close()
    assert list(folder.glob("lazygt-*")) == []


def test_ctrl_c_in_the_terminal_of_a_pool(folder, tmp_path):
    """The terminal sends it to the pool and to all of its workers; twice, if one is impatient."""
    with served(tmp_path, "--workers", "2", start_new_session=True) as pool:
        client = Client(pool, "alice")
        for _ in range(2):
            os.killpg(pool.process.pid, signal.SIGINT)
        assert pool.process.wait(SECONDS) == 0
        words, _ = client.ended()
        assert words.startswith("SessionEnded ")
        assert "Traceback" not in pool.process.stdout.read()


def test_ctrl_c_while_a_client_waits_for_workers(tmp_path):
    with served(tmp_path, "--workers", "2") as pool:
        first = Asker(pool, "alice", 2)
        first.told()
        second = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(STEPS), pool.on, str(pool.key("bob"))],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        pool.until(lambda status: len(status["sessions"]) == 2)
        second.send_signal(signal.SIGINT)
        words, _ = second.communicate(timeout=SECONDS)
        assert words.strip() == "KeyboardInterrupt"
        pool.until(lambda status: [row["client"] for row in status["sessions"]] == ["alice"])
        first.close()
