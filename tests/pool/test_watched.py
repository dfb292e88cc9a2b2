"""`lazygt top tcp://HOST:PORT`: what the sessions of a pool do, for whom it may concern."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

import lazygt
from lazygt.errors import NoSession, PoolError
from lazygt.net.status_file import ClientPage, Page
from lazygt.observe.top.sources import PoolSource, open_source
from lazygt.observe.top.status import PoolStatus
from lazygt.pool.requests import Doing
from lazygt.runtime.wire import encode
from tests.pool.serving import SECONDS, Asker, served

pytestmark = pytest.mark.timeout(240)

CLIENT = """
import sys, torch, lazygt
with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2])):
    print(torch.ones(3).sum().item(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    quota = folder / "quota.toml"
    quota.write_text('[client.alice]\nmemory = "4 GiB"\n')
    with served(folder, "--workers", "4", "--at-once", "4", "--quota", str(quota)) as pool:
        yield pool


@pytest.fixture
def session(pool):
    with lazygt.session(
        pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")),
        workers=lazygt.Workers(2, frozen_after=200.0),
    ) as session:
        yield session


@pytest.fixture
def source(pool):
    source = PoolSource(pool.on, pool.key("alice"))
    yield source
    source.close()


def seen(source: PoolSource, what: Callable[[PoolStatus], object]) -> PoolStatus:
    """A status that is so; it is looked for until then."""
    until = time.monotonic() + SECONDS
    while True:
        status = source.snapshot()
        try:
            if what(status):
                return status
        except (KeyError, ValueError):  # its session is not there yet
            pass
        assert time.monotonic() < until, status
        time.sleep(0.05)


def only(status: PoolStatus):
    (session,) = status.sessions.values()
    return session


def train(steps: int) -> nn.Module:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    lazygt.current().synchronize()
    return model


def test_a_session_is_seen_whole_by_its_own_key(pool, session, source) -> None:
    kept = train(5)
    status = seen(source, lambda status: only(status).session.runs == session._client.next_run - 1)
    seen(source, lambda status: [rank.state for rank in only(status).ranks] == ["idle"] * 2)
    status = seen(source, lambda status: all(rank.resident for rank in only(status).ranks))
    (row,) = status.report["sessions"]
    assert (row["client"], row["workers"], row["quota"]["memory"]) == ("alice", 2, 4 << 30)
    told, stats = only(status), session.stats()
    assert told.client == "running"
    assert told.session.name == row["session"] == session._link.name
    assert (told.session.pid, told.session.steps) == (os.getpid(), 5)
    assert (told.session.hits, told.session.misses) == (stats["plan_hits"], stats["plans_built"])
    assert told.session.line.startswith(f"{__file__}:")
    assert told.memory["parameters"] == 4 * (8 * 4 + 4)
    assert [rank.pid for rank in told.ranks] == session.worker_pids
    del kept


def test_the_same_session_is_seen_on_its_clients_machine(pool, session) -> None:
    assert torch.ones(3).sum().item() == 3
    source = open_source(str(os.getpid()))  # another pool may have a session of this name
    until = time.monotonic() + SECONDS
    while {rank.state for rank in source.snapshot().ranks} != {"idle"}:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert {rank.host for rank in source.snapshot().ranks} == {pool.on}
    source.close()


def test_nobody_is_asked_unless_somebody_watches(pool, session, source) -> None:
    asked = []
    doing = session._link._pool.status_page
    session._link._pool.status_page = lambda: asked.append(1) or doing()
    assert torch.ones(3).sum().item() == 3
    for _ in range(3):
        pool.status()
    pool.until(lambda status: status["sessions"])
    assert asked == []
    seen(source, lambda status: only(status).session.pid)
    assert asked


def test_a_frozen_rank_and_a_frozen_client_are_named(pool, source) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, pool.on, str(pool.key("alice"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdin is not None
    try:
        assert client.stdout.readline() == "3.0\n"
        status = seen(source, lambda status: only(status).ranks[0].state == "idle")
        (row,) = status.report["sessions"]
        os.kill(row["pids"][0], signal.SIGSTOP)
        status = seen(source, lambda status: only(status).stuck == (0,))
        assert only(status).ranks[0].state == "frozen"
        os.kill(row["pids"][0], signal.SIGCONT)
        seen(source, lambda status: not only(status).stuck)
        client.send_signal(signal.SIGSTOP)
        seen(source, lambda status: only(status).client == "silent")
        client.send_signal(signal.SIGCONT)
        seen(source, lambda status: only(status).client == "running")
    finally:
        client.send_signal(signal.SIGCONT)
        client.communicate("", timeout=SECONDS)
    assert client.returncode == 0


def test_others_are_a_number_and_the_pools_own_key_sees_all(pool, session, source) -> None:
    assert torch.ones(3).sum().item() == 3
    asker = Asker(pool, "bob", 3)
    asker.told()
    status = seen(source, lambda status: only(status).session.pid)
    assert status.report["others"] == {"sessions": 0, "workers": 0, "waiting": 1}
    assert "bob" not in json.dumps(msgspec.to_builtins(status))
    everything = PoolSource(pool.on, pool.server)
    status = everything.settled(SECONDS)
    rows = {row["client"]: row for row in status.report["sessions"]}
    assert set(rows) == {"alice", "bob"}
    assert (rows["bob"]["state"], rows["bob"]["before"]) == ("waits", 0)
    assert rows["bob"]["session"] not in status.sessions
    everything.close()
    asker.close()


def test_a_client_that_says_nonsense_of_itself_is_sent_away(pool) -> None:
    good = Page(1, 0.0, "S", msgspec.msgpack.encode(ClientPage("x", 1, 1, "cpu", "w=1", 0.0)))
    for page in (b"nonsense", msgspec.msgpack.encode(Page(1, 0.0, "S", b"nonsense")),
                 msgspec.msgpack.encode(Page(1, 0.0, "S", bytes(10_000))),
                 msgspec.msgpack.encode(good).replace(b"\xa1S", b"\xa1\xff"), None):  # fmt: skip
        asker = Asker(pool, "mallory")
        asker.told()
        asker.connection.send(encode(Doing(), [msgspec.msgpack.encode(good)]))
        asker.connection.send(encode(Doing(), [] if page is None else [page]))
        with pytest.raises(PoolError, match=r"makes no sense|of nobody's"):
            asker.told()
        asker.close()
    pool.until(lambda status: status["free"] == 4)


def test_the_command_prints_a_pool_once(pool, session) -> None:
    assert torch.ones(3).sum().item() == 3
    command = "import sys; sys.argv[0] = 'lazygt'; from lazygt.cli.__main__ import main; main()"
    words = [sys.executable, "-c", command, "top", pool.on, "--key", str(pool.key("alice"))]
    done = subprocess.run(
        [*words, "--json"], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    told = json.loads(done.stdout)
    (row,) = told["sessions"]
    assert (told["workers"], told["free"], row["session"]) == (4, 2, session._link.name)
    assert row["status"]["session"]["pid"] == os.getpid()
    assert len(row["status"]["ranks"]) == 2
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.startswith(f"{pool.on}  2 of 4 workers taken, 4 run at once")
    assert session._link.name in done.stdout
    done = subprocess.run(
        [*words[:4], "1234", *words[5:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--key is for a pool" in done.stderr


def test_a_pool_that_ends_is_said(tmp_path) -> None:
    with served(tmp_path, "--workers", "1") as pool:
        source = PoolSource(pool.on, pool.key("alice"))
        source.snapshot()
    with pytest.raises(NoSession, match="is not there any more"):
        source.snapshot()
    source.close()
