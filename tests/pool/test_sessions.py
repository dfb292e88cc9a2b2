"""Sessions in a pool: a real gateway on this machine, with real workers."""

from __future__ import annotations

import hashlib
import os
import signal
import time

import psutil
import pytest
import torch
from torch import nn

import lazygt
from lazygt.errors import (
    AccessDenied,
    ConnectionLost,
    GangTooLarge,
    OverQuota,
    PoolDraining,
    PoolError,
    PoolFull,
    SecurityError,
    SessionEnded,
)
from lazygt.graph.meta import TensorMeta
from lazygt.net.keys import Keyring
from lazygt.pool.pool_client import Pool, answer, connect
from lazygt.pool.requests import Admitted, Ask, Ok, Publish, RequestFailed, Waits
from lazygt.runtime.cluster.protocol import TO_CLIENT, Open, Refused, Tell, spec_text
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.wire import decode, encode
from tests.pool.serving import SECONDS, Asker, served, start_client
from tests.support.timeouts import patience

pytestmark = pytest.mark.timeout(240)

TRAIN = """
def train(torch, nn, hashlib):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        loss = model(torch.randn(16, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    told = hashlib.sha256()
    for value in (loss, *model.parameters()):
        told.update(value.detach().cpu().numpy().tobytes())
    return told.hexdigest()
"""
exec(TRAIN)
CLIENT = (
    TRAIN
    + """
import hashlib, sys, torch, lazygt
from torch import nn
with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2]),
                    workers=int(sys.argv[3])) as s:
    print(train(torch, nn, hashlib), *s.worker_pids, flush=True)
"""
)
HOLDS = """
import sys, torch, lazygt
with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2]), workers=1) as s:
    kept = torch.ones(int(sys.argv[3]) << 18)
    s.synchronize()
    print(*s.worker_pids, flush=True)
    for _ in range(100_000):
        kept.add_(1.0).sum().item()
"""


def digest():
    return train(torch, nn, hashlib)  # noqa: F821 - see TRAIN


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    quota = folder / "quota.toml"
    quota.write_text(
        '[default]\nworkers = 4\n[client.small]\nworkers = 1\nsessions = 1\nmemory = "600 MiB"\n'
    )
    with served(folder, "--workers", "4", "--queue", "2", "--quota", str(quota)) as pool:
        yield pool


def all_free(pool):
    return pool.until(lambda status: status["free"] == 4 and not status["sessions"])


def test_two_concurrent_clients_match_local_results(pool):
    with lazygt.session(workers=2):
        at_home = digest()
    other = start_client(CLIENT, pool.on, pool.key("bob"), 2)
    with lazygt.session(
        pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=2
    ) as session:
        assert digest() == at_home
        mine = set(session.worker_pids)
    told, *theirs = other.stdout.readline().split()
    assert told == at_home
    assert mine.isdisjoint(map(int, theirs))
    assert len(mine) == len(theirs) == 2
    assert other.wait(SECONDS) == 0
    other.stdout.close()
    all_free(pool)
    assert not any(map(psutil.pid_exists, mine | set(map(int, theirs))))


def test_the_memory_of_a_killed_client_is_free_soon_and_nobody_else_sees_anything(pool):
    with lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1):
        kept = torch.arange(1000.0)
        victim = start_client(HOLDS, pool.on, pool.key("victim"), 64)
        pids = [int(pid) for pid in victim.stdout.readline().split()]
        assert all(map(psutil.pid_exists, pids))
        before = kept.sum().item()
        victim.kill()
        victim.wait(SECONDS)
        victim.stdout.close()
        gone = time.monotonic()
        psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], SECONDS)
        took = time.monotonic() - gone
        assert not any(map(psutil.pid_exists, pids))
        assert took < patience(2.0)
        assert kept.sum().item() == before
        pool.until(lambda status: status["free"] == 3)
        assert [row["client"] for row in pool.status()["sessions"]] == ["alice"]
    all_free(pool)


def test_answers_do_not_wait_for_the_gateways_next_look(pool):
    with lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1):
        value = torch.ones(3)
        assert value.sum().item() == 3.0
        begin = time.monotonic()
        for _ in range(40):
            assert (value + 1).sum().item() == 6.0
        assert time.monotonic() - begin < 40 * 0.25  # it looks four times a second
    all_free(pool)


def test_a_session_recovers_from_the_death_of_its_worker(pool):
    with lazygt.session(
        pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1
    ) as session:
        value = torch.arange(10.0)
        assert value.sum().item() == 45.0
        os.kill(session.worker_pids[0], signal.SIGKILL)
        assert (value * 2).sum().item() == 90.0
        assert len(session.recoveries) == 1
    all_free(pool)


def test_the_device_is_the_pools(pool):
    with lazygt.session(
        pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1, device="cuda"
    ) as session:
        assert session.device_type == session.config.device == "cpu"
        assert session.machine.device == "cpu"
        assert torch.randn(4).abs().sum().item() > 0


def test_a_gang_that_can_never_fit_is_refused_at_once(pool):
    with pytest.raises(GangTooLarge, match=r"5 worker\(s\) can never fit: the pool has 4"):
        lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=5)
    all_free(pool)


def test_a_full_pool_queues_and_then_refuses(pool):
    first = Asker(pool, "alice", 4)
    assert isinstance(first.told(), Admitted)
    waiting = [Asker(pool, "bob", 1), Asker(pool, "carol", 4)]
    assert [asker.told() for asker in waiting] == [Waits(0), Waits(1)]
    with pytest.raises(PoolFull, match=r"2 session\(s\) wait already") as refused:
        lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("dora")), workers=1)
    assert refused.value.waiting == 2
    first.close()
    assert isinstance(waiting[0].told(), Admitted)
    waiting[0].close()
    assert isinstance(waiting[1].told(), Admitted)
    waiting[1].close()
    all_free(pool)


def test_start_timeout_names_sessions_ahead(pool):
    first = Asker(pool, "alice", 4)
    first.told()
    with pytest.raises(PoolError, match=r"no 1 worker\(s\) free within 0.5 s: 0 session"):
        lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=pool.key("bob")),
            workers=lazygt.Workers(1, start_timeout=0.5),
        )
    pool.until(lambda status: len(status["sessions"]) == 1)
    first.close()
    all_free(pool)


def test_a_quota_of_workers_and_of_sessions(pool):
    with pytest.raises(OverQuota, match="quota of 1 workers: this session takes 2"):
        lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("small")), workers=2)
    first = Asker(pool, "small", 1)
    first.told()
    with pytest.raises(OverQuota, match="quota of 1 sessions"):
        lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("small")), workers=1)
    first.close()
    all_free(pool)


def test_memory_quota_error_names_numbers(pool):
    kept = []

    def fill():
        with lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("small")), workers=1):
            while True:
                kept.append(torch.ones(16 << 18))
                kept[-1].sum().item()

    with pytest.raises(OverQuota, match="quota of 629,145,600 bytes of memory") as ended:
        fill()
    assert ended.value.wanted > 600 << 20
    assert len(kept) < 60
    all_free(pool)


def test_published_values_outlive_their_session_and_others_do_not_see_them(pool):
    model = nn.Linear(4, 3)
    with lazygt.session(
        pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1
    ) as session:
        session.publish("weights", torch.arange(6.0).reshape(2, 3).t() * 2)
        session.publish("everybody", {"a": torch.ones(2, dtype=torch.bfloat16)}, shared=True)
    all_free(pool)
    with Pool(pool.on, pool.key("alice")) as alice, Pool(pool.on, pool.key("bob")) as bob:
        assert alice.fetch("weights").tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
        assert [row.name for row in alice.names()] == ["weights", "everybody"]
        (row,) = bob.names()
        assert (row.name, row.nbytes, row.client, row.shared) == ("everybody", 4, "alice", True)
        assert torch.equal(bob.fetch("everybody")["a"], torch.ones(2, dtype=torch.bfloat16))
        with pytest.raises(PoolError, match="nothing is published as 'weights' for this key"):
            bob.fetch("weights")
        with pytest.raises(PoolError, match="this key has published nothing"):
            bob.forget("everybody")
        bob.publish("weights", model.state_dict())
        theirs = bob.fetch("weights")
        assert {key: t.tolist() for key, t in theirs.items()} == {
            key: t.tolist() for key, t in model.state_dict().items()
        }
        assert alice.fetch("weights").shape == (3, 2)
        for who, name in ((alice, "weights"), (alice, "everybody"), (bob, "weights")):
            who.forget(name)
        assert alice.names() == bob.names() == []


def test_a_value_of_many_pieces_and_one_of_nothing(pool):
    large = torch.arange(9 << 20)
    with Pool(pool.on, pool.key("alice"), SECONDS) as alice:
        alice.publish("large", large)
        assert torch.equal(alice.fetch("large"), large)
        alice.publish("large", torch.empty(0, 3))
        assert alice.fetch("large").shape == (0, 3)
        alice.forget("large")


def test_publishing_counts_for_the_quota(pool):
    with Pool(pool.on, pool.key("small"), SECONDS) as small:
        with pytest.raises(OverQuota, match="memory") as refused:
            small.publish("w", torch.empty(601 << 20, dtype=torch.uint8))
        assert refused.value.wanted == 601 << 20
        assert small.names() == []
        # what another connection of the same key is sending counts, too
        half = ("", TensorMeta.of(torch.empty(400 << 20, dtype=torch.uint8)))
        other = connect(pool.on, pool.key("small"), SECONDS)
        other.send(encode(Publish("half", (half,))))
        answer(other, (Ok,), time.monotonic() + SECONDS)
        with pytest.raises(OverQuota) as refused:
            small.publish("w", torch.empty(300 << 20, dtype=torch.uint8))
        assert refused.value.used == 400 << 20
        other.close()


def test_detached_session_runs_until_evicted(pool):
    with lazygt.session(
        pool=lazygt.PoolAccess(pool.on, key=pool.key("alice"), detach=True), workers=1
    ) as session:
        session.publish("later", torch.ones(3))
        (pid,) = session.worker_pids
    pool.until(lambda status: [r["state"] for r in status["sessions"]] == ["alone"])
    assert psutil.pid_exists(pid)
    (row,) = pool.sessions("alice")
    assert row["expires_in"] > 80_000
    with Pool(pool.on, pool.key("alice")) as alice:
        assert alice.fetch("later").tolist() == [1.0, 1.0, 1.0]
        alice.forget("later")
    with (
        Pool(pool.on, pool.key("bob")) as bob,
        pytest.raises(PoolError, match="may not administer"),
    ):
        bob.evict(row["session"])
    with Pool(pool.on, pool.server) as server:
        server.evict(row["session"])
    all_free(pool)
    assert not psutil.pid_exists(pid)


def test_an_evicted_session_is_told(pool):
    def work():
        with lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1):
            value = torch.ones(3)
            assert value.sum().item() == 3.0
            rows.extend(pool.sessions("alice"))
            with Pool(pool.on, pool.server) as server:
                server.evict(rows[0]["session"])
            while True:
                (value + 1).sum().item()

    rows = []
    with pytest.raises(SessionEnded, match="evicted"):
        work()
    all_free(pool)
    assert not any(map(psutil.pid_exists, rows[0]["pids"]))


def test_a_key_of_another_pool_and_one_that_was_revoked_and_no_pool_at_all(pool, tmp_path):
    Keyring(tmp_path / "other").new("alice").write(tmp_path / "alice.key")
    with pytest.raises(AccessDenied):
        lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=tmp_path / "alice.key"),
            workers=lazygt.Workers(start_timeout=SECONDS),
        )
    eve = pool.key("eve")
    pool.ring.revoke("eve")
    with pytest.raises(AccessDenied):
        lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=eve), workers=lazygt.Workers(start_timeout=SECONDS)
        )
    with pytest.raises(ConnectionLost):
        lazygt.session(
            pool=lazygt.PoolAccess("tcp://127.0.0.1:9", key=eve),
            workers=lazygt.Workers(start_timeout=0.5),
        )
    with pytest.raises(SecurityError, match="there is no "):
        lazygt.session(pool=lazygt.PoolAccess(pool.on, key=tmp_path / "nothing.key"))
    all_free(pool)


def test_invalid_client_messages_are_refused(pool):
    """Messages to an agent without a session go nowhere; workers are lazygt's own, and as many as
    were granted."""
    asker = Asker(pool, "alice", 1)
    asker.told()
    stranger = connect(pool.on, pool.key("bob"), SECONDS)
    stranger.send(encode(Tell(0, (0,)), [b"\x92\x02\x01"]))
    stranger.send(encode(Open(0, spec_text(LinkSpec()))))
    wrong = [
        LinkSpec(world_size=2), LinkSpec(factory="os:system"), LinkSpec(copier="os:system"),
        LinkSpec(transport="tcp://0.0.0.0"), LinkSpec(arena_bytes=1 << 50),
    ]  # fmt: skip
    for number, spec in enumerate(wrong):
        asker.connection.send(encode(Open(number, spec_text(spec))))
    refusals = []
    until = time.monotonic() + SECONDS
    while len(refusals) < len(wrong):
        assert time.monotonic() < until
        if (frames := asker.connection.take()) is not None:
            refusals.append(decode(frames, TO_CLIENT))
    assert all(isinstance(refusal, Refused) for refusal in refusals)
    assert [row["pids"] for row in pool.sessions("alice")] == [[]]
    asker.close()
    stranger.close()
    all_free(pool)


def test_nonsense_ends_the_connection_that_says_it_and_nothing_else(pool):
    with lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1):
        value = torch.ones(3)
        assert value.sum().item() == 3.0
        for frames in ([b""], [b"\x91\xcc"], [b"\x91\x20"], [b"\x91\x23"], [b"\x93" * 40]):
            asker = Asker(pool, "bob")
            asker.told()
            asker.connection.send(frames)
            with pytest.raises(PoolError):
                answer(asker.connection, (Ask,), time.monotonic() + SECONDS)
            asker.close()
        assert (value + 1).sum().item() == 6.0
    all_free(pool)


def test_a_pool_that_is_drained_ends_with_its_last_session(tmp_path):
    with served(tmp_path, "--workers", "1") as pool:
        first, second = Asker(pool, "alice"), Asker(pool, "bob")
        assert isinstance(first.told(), Admitted)
        assert isinstance(second.told(), Waits)
        with Pool(pool.on, pool.server) as server:
            server.drain()
        with pytest.raises(PoolDraining):
            second.told()
        third = Asker(pool, "carol")
        with pytest.raises(PoolDraining):
            third.told()
        assert pool.process.poll() is None
        first.close()
        assert pool.process.wait(SECONDS) == 0
        for asker in (second, third):
            asker.close()


def test_a_pool_that_ends_ends_its_workers_and_tells_their_client(tmp_path):
    def work():
        with lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1
        ) as session:
            value = torch.ones(3)
            assert value.sum().item() == 3.0
            (pid,) = session.worker_pids
            pool.process.send_signal(signal.SIGTERM)
            assert pool.process.wait(SECONDS) == 0
            assert not psutil.pid_exists(pid)
            while True:
                (value + 1).sum().item()

    with served(tmp_path, "--workers", "1") as pool, pytest.raises(SessionEnded):
        work()


def test_failed_messages_of_another_version_are_still_errors():
    assert str(RequestFailed("Nonsense", (1, "a")).error()) == "Nonsense: 1, a"
    assert str(RequestFailed("PoolFull", (1,)).error()) == "PoolFull: 1"
    assert (
        str(RequestFailed("OverQuota", ("memory", "a", 0, 1)).error())
        == "OverQuota: memory, a, 0, 1"
    )
    assert isinstance(RequestFailed.of(GangTooLarge(5, 4)).error(), GangTooLarge)


@pytest.mark.slow
def test_pool_caches_compiled_code_per_client(tmp_path, monkeypatch):
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(tmp_path / "mine"))
    with served(tmp_path, "--workers", "2") as pool:
        with lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=2, compile="now"
        ) as session:
            found = compiled_chain(session)
        with lazygt.session(workers=lazygt.Workers(2, threads=1), compile="now") as session:
            expected = compiled_chain(session)
    assert torch.equal(found, expected)
    there = list((tmp_path / "cache" / "clients").glob("*/*.so"))
    here = {path.name: path.read_bytes() for path in (tmp_path / "mine").glob("*.so")}
    assert {path.name: path.read_bytes() for path in there} == here != {}
    assert {path.parent.name for path in there} == {"alice"}
    assert {path.stat().st_mode & 0o077 for path in there} == {0}


def compiled_chain(session: lazygt.Session) -> torch.Tensor:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).to("lazygt")
    for step in range(5):
        if step == 4:
            assert session.compiled(timeout=200)
            assert {made.tier for made in session.compiles()} == {"compiled"}
        x = (x + 0.25).abs().sin() * 0.5
        x.sum().item()
    return x.cpu()


def test_flags_of_torch_hold_in_a_pool_for_the_client_that_set_them(pool) -> None:
    tiny = 2.0**-1022  # of float64: half of it is a denormal number
    try:
        with lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("anna")), workers=1) as s:
            x = torch.full((3,), tiny, dtype=torch.float64)
            kept = x * 0.5
            torch.set_flush_denormal(True)
            flushed = x * 0.5
            assert (kept.tolist(), flushed.tolist()) == ([tiny / 2] * 3, [0.0] * 3)
            assert s.stats()["flushes"]["torch flag changed"] == 1
            torch.set_flush_denormal(False)
            assert (x * 0.5).tolist() == [tiny / 2] * 3
    finally:
        torch.set_flush_denormal(False)
