"""A gateway that is stopped for a while or for ever, and one that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import lazygt
from lazygt.errors import ConnectionLost, PoolError
from lazygt.pool import pool_client
from lazygt.pool.pool_client import Pool
from tests.pool.serving import SECONDS, Asker, served

pytestmark = pytest.mark.timeout(240)


def steps(told, at=-1, happens=lambda: None):
    """A program of six steps, in the middle of which something happens."""
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    for step in range(6):
        x = torch.tanh(x @ x.t() / 64 + step)
        if step == at:
            happens()
        told.append(x.sum().item().hex())


def workers_of(session):
    return [psutil.Process(pid) for pid in session.worker_pids]


def is_stopped(pid):
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def stop(pool):
    """Stop the gateway, and wait until it is."""
    pool.process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + SECONDS
    while not is_stopped(pool.process.pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_session_outlives_a_gateway_that_is_stopped_for_a_while(tmp_path, monkeypatch):
    """It is asked whether it is there, and the answer comes when it goes on."""
    asked = []

    class Question(pool_client.AreYouThere):
        def packed(self):
            asked.append(time.monotonic())
            return super().packed()

    monkeypatch.setattr(pool_client, "AreYouThere", Question)
    monkeypatch.setattr(pool_client, "_SILENCE_SECONDS", 0.5)
    at_home, told = [], []
    with lazygt.session(workers=1):
        steps(at_home)
    with served(tmp_path, "--workers", "1") as pool:

        def pause():
            stop(pool)
            timer = threading.Timer(5.0, pool.process.send_signal, [signal.SIGCONT])
            timer.start()

        with lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1
        ) as session:
            steps(told, 3, pause)
            assert not session.recoveries
        assert len(asked) >= 1
        pool.until(lambda status: status["free"] == 1)
    assert told == at_home


def test_permanently_stopped_gateway_is_error_for_waiting_client(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_client, "_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(pool_client, "_MIN_TIMEOUT", 2.0)
    with served(tmp_path, "--workers", "1") as pool:

        def work():
            session = lazygt.session(
                pool=lazygt.PoolAccess(pool.on, key=pool.key("alice"), grace=1.0), workers=1
            )
            with session:
                steps(told, 3, lambda: (workers.extend(workers_of(session)), stop(pool)))

        told, workers = [], []
        try:
            with pytest.raises(ConnectionLost, match="has not answered for 2 s") as lost:
                work()
            assert lost.value.endpoint == pool.on
            assert len(told) == 3
            # nor does what asks in other ways wait for ever
            with pytest.raises((ConnectionLost, PoolError)):
                Pool(pool.on, pool.server, timeout=1.0).status()
            with pytest.raises((ConnectionLost, PoolError)):
                lazygt.session(
                    pool=lazygt.PoolAccess(pool.on, key=pool.key("bob")),
                    workers=lazygt.Workers(1, start_timeout=1.0),
                )
        finally:
            pool.process.send_signal(signal.SIGCONT)
        pool.until(lambda status: status["free"] == 1)
        assert len(workers) == 1
        assert not workers[0].is_running()


def test_a_client_that_was_away_itself_asks_anew(tmp_path, monkeypatch):
    """What matters is for how long it has waited, not for how long it has not looked."""
    monkeypatch.setattr(pool_client, "_SILENCE_SECONDS", 0.0)
    now = [100.0]

    class Clock:
        @staticmethod
        def monotonic():
            return now[0]

    class Line:
        fd, closed = -1, None

        def __init__(self):
            self.sent = 0

        def send(self, frames):
            self.sent += 1

        def take(self):
            return None

    line = Line()
    monkeypatch.setattr(pool_client, "time", Clock)
    connection = pool_client.SessionConnection(line, "tcp://pool:1", 5.0)
    for _ in range(4):
        now[0] += 1.0
        assert connection.take() is None
        assert line.sent == 1
    now[0] += 3600.0
    assert connection.take() is None
    now[0] += 1.0
    assert connection.take() is None
    assert line.sent == 2
    for _ in range(4):
        now[0] += 1.0
        assert connection.take() is None
    now[0] += 1.4
    with pytest.raises(ConnectionLost, match="tcp://pool:1"):
        connection.take()
    assert connection.closed is not None


def test_a_killed_gateway_is_an_error_and_leaves_nothing(tmp_path):
    """Its sessions do not go on at their clients' homes, and all its workers end."""
    shared = set(os.listdir("/dev/shm"))
    with served(tmp_path, "--workers", "3") as pool:
        waiting = Asker(pool, "bob", 3)
        waiting.told()
        waiting.close()
        workers = []

        def work():
            session = lazygt.session(
                pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=2
            )
            with session:
                steps([], 2, lambda: kill(session))

        def kill(session):
            workers.extend(workers_of(session))
            pool.process.kill()
            pool.process.wait(SECONDS)

        pool.until(lambda status: status["free"] == 3)
        with pytest.raises(ConnectionLost) as lost:
            work()
        assert lost.value.endpoint == pool.on
        _, living = psutil.wait_procs(workers, SECONDS)
        assert living == []
        assert len(workers) == 2
    assert set(os.listdir("/dev/shm")) <= shared
    here = [str(pool.process.pid) in text for text in records()]
    assert not any(here)


def records():
    """What stands in the records of all sessions' directories."""
    bases = {Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")), Path("/tmp")}
    for base in bases:
        for path in base.glob("lazygt-*/session.json"):
            try:
                yield path.read_text()
            except OSError:
                continue
