"""Clients with a key of the pool's that want what is not theirs, or to harm others.

One honest client works beside each of them, and everything that was refused is counted.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import psutil
import pytest
import torch

import lazygt
from lazygt.errors import PoolError, PoolFull, ProtocolError
from lazygt.graph.meta import TensorMeta
from lazygt.pool.pool_client import Pool, answer, connect
from lazygt.pool.published import PIECE_BYTES
from lazygt.pool.requests import TO_CLIENT as FROM_POOL
from lazygt.pool.requests import (
    Admitted,
    Ask,
    DrainAll,
    EvictOne,
    Fetch,
    Forget,
    Leave,
    Ok,
    Publish,
    RequestFailed,
    Value,
    ValuePiece,
    Waits,
)
from lazygt.runtime.cluster.protocol import (
    TO_CLIENT,
    Close,
    Mirror,
    Open,
    Refill,
    Refused,
    Replace,
    Shadow,
    Tell,
    spec_of,
    spec_text,
)
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.messages import Run
from lazygt.runtime.wire import decode, encode
from tests.pool.hostile import is_dropped, opened, refused
from tests.pool.serving import SECONDS, Asker, served

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    quota = folder / "quota.toml"
    quota.write_text('[client.small]\nmemory = "256 MiB"\n')
    with served(folder, "--workers", "3", "--queue", "2", "--quota", str(quota)) as pool:
        yield pool


@contextmanager
def honest(pool):
    """A client whose session is as it was afterwards, and the slots of all others free."""
    with lazygt.session(
        pool=lazygt.PoolAccess(pool.on, key=pool.key("alice")), workers=1
    ) as session:
        value = torch.arange(8.0)
        assert value.sum().item() == 28.0
        yield session
        assert (value + 1).sum().item() == 36.0
        assert not session.recoveries
        pool.until(lambda status: status["free"] == 2 and len(status["sessions"]) == 1)
    pool.until(lambda status: status["free"] == 3)


def is_let_in(pool, key):
    """Whether the pool takes a connection with this key: those that were closed may count still."""
    try:
        with Pool(pool.on, key, SECONDS) as client:
            return client.names() == []
    except PoolError as error:
        if "connections already" not in str(error):
            raise
        return False


def test_client_may_not_administer(pool):
    with honest(pool), Pool(pool.on, pool.key("eve"), SECONDS) as eve:
        before = refused(pool, "administration")
        theirs = pool.sessions("alice")[0]["session"]
        for message in (EvictOne(theirs), EvictOne("alice-0"), DrainAll()):
            with pytest.raises(PoolError, match="may not administer"):
                eve._request(message, Ok)
        assert refused(pool, "administration") == before + 3
        told = eve.status()
        assert (told["sessions"], told["published"]) == ([], [])
        assert "refused" not in told


def test_messages_to_another_clients_workers_go_nowhere(pool):
    """Sessions, parts and workers are numbered for each connection: nobody can name another's."""
    with honest(pool), Pool(pool.on, pool.key("eve"), SECONDS) as eve:
        before = refused(pool, "foreign")
        run = [b"\x92\x02\x01"]
        to_agents = [
            (Tell(0, (0,)), run), (Close(0), []), (Replace(0, 0, 1), []), (Refill(0), []),
            (Mirror(1 << 20, 4096), [b"x" * 64]), (Open(0, spec_text(LinkSpec())), []),
        ]  # fmt: skip
        for message, frames in to_agents:
            eve._connection.send(encode(message, frames))
        eve._request(Leave(), Ok)
        assert refused(pool, "foreign") == before + len(to_agents)


NONSENSE = {
    "a worker that is not there": [(Tell(0, (7,)), [b"\x92\x02\x01"])],
    "to replace one that is not there": [(Replace(0, 7, 1), [])],
    "bytes that are not there": [(Mirror(1 << 20, 4096), [])],
    "a snapshot without bytes": [(Shadow(1, 0, 1 << 20, 4096), [])],
    "an offset beyond everything": [(Mirror(1 << 20, 1 << 62), [b"x"])],
    "memory beyond everything": [(Shadow(1, 0, 1 << 62, 1 << 61), [b"x"])],
    "a run that is none, behind one that waits": [
        (Tell(0, (0,)), encode(Run(1))),
        (Tell(0, (0,)), encode(Run(2))),
        (Tell(0, (0,)), [b"\x92\x02\xa1a"]),
    ],
    "an offset in the header": [(Mirror(1 << 20, 0), [b"x" * 8])],
}


@pytest.mark.parametrize("what", NONSENSE)
def test_malformed_agent_message_ends_session_of_its_sender(pool, what):
    with honest(pool):
        before = refused(pool, "protocol")
        asker = opened(pool)
        pids = pool.sessions("eve")[0]["pids"]
        for message, frames in NONSENSE[what]:
            asker.connection.send(encode(message, frames))
        is_dropped(asker)
        assert refused(pool, "protocol") == before + 1
        pool.until(lambda status: status["free"] == 2)
        assert len(pids) == 1
        assert not psutil.pid_exists(pids[0])


def test_excessive_or_mistyped_requests_are_refused(pool):
    """More ranks than memory could list, and what is of another type than it should be."""
    with honest(pool):
        asker = Asker(pool, "eve")
        asker.told()
        wishes = [
            spec_text(LinkSpec(world_size=1 << 40)),
            spec_text(LinkSpec(ranks=(0, 0))),
            spec_text(LinkSpec(ranks=(5,))),
            '{"arena_bytes": "many"}', '{"ranks": 5}', '{"ranks": [[0]]}', '[]', '7', '"x"', "{",
            '{"environment": []}', '{"token": 5}', '{"world_size": null}',
        ]  # fmt: skip
        said = []
        for number, wish in enumerate(wishes):
            asker.connection.send(encode(Open(number, wish)))
            until = time.monotonic() + SECONDS
            while len(said) == number:
                assert time.monotonic() < until
                if (frames := asker.connection.take()) is not None:
                    said.append(decode(frames, TO_CLIENT))
        assert all(isinstance(told, Refused) for told in said)
        assert pool.sessions("eve")[0]["pids"] == []
        asker.close()


@pytest.mark.parametrize(
    "text",
    ["[]", "7", '{"threads": "x"}', '{"mesh": 3}', '{"token": "zz"}', '{"frozen_after": NaN}',
     '{"frozen_after": -Infinity}', '{"mesh": "\\udcff"}', "[" * 100_000, "9" * 5000],
)  # fmt: skip
def test_worker_specification_is_validated_when_read(text):
    with pytest.raises(ProtocolError, match="cannot be read"):
        spec_of(text)


def test_a_specification_is_read_as_it_was_written():
    spec = LinkSpec(
        world_size=2, ranks=(0, 1), token=b"\x00\xff" * 8, environment={"a": "b"}, threads=3,
        frozen_after=2.5, mesh="data=2", snapshots=True,
    )  # fmt: skip
    assert spec_of(spec_text(spec)) == spec
    spec = replace(spec, frozen_after=math.inf, environment={"PATH": "/caf\udce9"})
    text = spec_text(spec)
    assert text.isascii()
    assert spec_of(text) == spec


@pytest.mark.parametrize("grace", [math.nan, -1.0, math.inf])
def test_a_grace_that_is_no_number_of_seconds_keeps_no_place_for_ever(pool, grace):
    with honest(pool):
        connection = connect(pool.on, pool.key("eve"), SECONDS)
        connection.send(encode(Ask(1, 1, grace, False)))
        answer(connection, (Admitted,), time.monotonic() + SECONDS)
        connection.close()
        pool.until(lambda status: status["free"] == 2)


def test_the_gateway_never_unpickles(pool, tmp_path):
    """Wherever bytes may stand, these would leave a file behind."""
    trace = tmp_path / "trace"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(trace),)

    bomb = pickle.dumps(Bomb())
    name = bomb.decode("latin-1")
    with honest(pool):
        before = refused(pool, "protocol")
        for frames in (
            [bomb],
            [b"\x91\x20", bomb],
            encode(Mirror(1 << 20, 0), [bomb]),
            encode(ValuePiece(), [bomb]),
            encode(Open(0, name), [bomb]),
            encode(Tell(0, (0,)), [bomb, bomb]),
        ):
            asker = Asker(pool, "eve")
            asker.told()
            asker.connection.send(frames)
            asker.connection.send([b""])
            is_dropped(asker)
        assert refused(pool, "protocol") == before + 6
        with Pool(pool.on, pool.key("eve"), SECONDS) as eve:
            flat = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
            eve.publish("bomb", flat)
            assert eve.fetch("bomb").numpy().tobytes() == bomb
            eve.forget("bomb")
    assert not trace.exists()


def test_a_frame_that_is_too_long_ends_its_connection_before_it_is_stored(pool, monkeypatch):
    limit = 1 << 30
    with honest(pool):
        before = psutil.Process(pool.process.pid).memory_info().rss
        connection = connect(pool.on, pool.key("eve"), SECONDS)
        monkeypatch.setattr(connection, "_max_message", 2 * limit)
        connection.send([bytes(limit + (1 << 20))])
        until = time.monotonic() + SECONDS
        while connection._disconnected_at is None:
            assert time.monotonic() < until
            assert connection.take() is None
            time.sleep(0.005)
        connection.close()
        assert psutil.Process(pool.process.pid).memory_info().rss - before < 100 << 20


def test_unfinished_handshakes_block_nobody(pool):
    address = pool.on.removeprefix("tcp://").split(":")
    with honest(pool):
        slow = [socket.create_connection((address[0], int(address[1]))) for _ in range(100)]
        for number, line in enumerate(slow):
            line.send(b"\xff\0\0\0\0\0\0\0\1\x7f"[: number % 10])
        with lazygt.session(pool=lazygt.PoolAccess(pool.on, key=pool.key("bob")), workers=1):
            assert torch.ones(3).sum().item() == 3.0
        for line in slow:
            line.close()


def test_a_key_has_so_many_connections_and_no_more(pool):
    key = pool.key("mallory")  # nobody else's: connections of other tests may not have ended yet
    with honest(pool), ExitStack() as ends:
        before = refused(pool, "connections")
        for _ in range(64):
            ends.callback(connect(pool.on, key, SECONDS).close)
        one_more = connect(pool.on, key, SECONDS)
        ends.callback(one_more.close)
        with pytest.raises(PoolError, match="mallory has 64 connections already"):
            answer(one_more, (Ok,), time.monotonic() + SECONDS)
        with Pool(pool.on, pool.key("bob"), SECONDS) as bob:
            assert bob.names() == []
        assert refused(pool, "connections") == before + 1
        ends.close()
        pool.until(lambda _: is_let_in(pool, key))


def test_a_flood_of_sessions_takes_no_place_in_the_queue_from_others(pool):
    with honest(pool), ExitStack() as ends:
        flood = [Asker(pool, "eve", 2) for _ in range(4)]
        other = Asker(pool, "bob")
        for asker in (*flood, other):
            ends.callback(asker.close)
        assert isinstance(flood[0].told(), Admitted)
        assert flood[1].told() == Waits(0)
        assert isinstance(other.told(), Waits)
        # the queue has room for two: the flood has made it
        for asker in flood[2:]:
            with pytest.raises(PoolFull):
                answer(asker.connection, (Admitted,), time.monotonic() + SECONDS)
        flood[0].close()
        assert isinstance(flood[1].told(), Admitted)
        flood[1].close()
        assert isinstance(other.told(), Admitted)


def test_unread_fetches_are_bounded_in_memory(pool):
    nbytes = 64 << 20
    with honest(pool), Pool(pool.on, pool.key("eve"), SECONDS) as eve:
        eve.publish("large", torch.zeros(nbytes, dtype=torch.uint8))
        gateway = psutil.Process(pool.process.pid)
        reader = connect(pool.on, pool.key("eve"), SECONDS)
        for _ in range(17):
            reader.send(encode(Fetch("large")))
        # all are heard once that of another connection is, and the last is one too many
        assert len(eve.names()) == 1
        got, errors = 0, 0
        peak = gateway.memory_info().rss
        until = time.monotonic() + SECONDS
        while got < 16 * nbytes or not errors:
            try:
                message, frames = answer(reader, (Value, ValuePiece), until)
            except PoolError as error:
                assert "16 values are on their way" in str(error)  # noqa: PT017 - one of many
                errors += 1
                continue
            got += sum(map(len, frames)) if isinstance(message, ValuePiece) else 0
            peak = max(peak, gateway.memory_info().rss)
        assert (got, errors) == (16 * nbytes, 1)
        reader.close()
        eve.forget("large")
        assert nbytes == 4 * PIECE_BYTES


def test_names_are_names_and_no_paths_and_not_too_many(pool):
    meta = TensorMeta.of(torch.empty(0))
    with honest(pool), Pool(pool.on, pool.key("eve"), SECONDS) as eve:
        tricks = ["../../etc/passwd", "/tmp/x", "a\0b", "..", "", "~root"]
        for name in tricks:
            eve.publish(name, torch.ones(2))
            assert eve.fetch(name).tolist() == [1.0, 1.0]
        assert [row.name for row in eve.names()] == tricks
        files = {path.name for path in pool.folder.rglob("*")}
        assert not files & {"passwd", "x"}
        with pytest.raises(PoolError, match="256 at most"):
            eve.publish("x" * 257, torch.ones(2))
        numbers = range(1000 - len(tricks))
        for number in numbers:
            eve._connection.send(encode(Publish(f"name{number}", (("", meta),))))
        for _ in numbers:
            eve._answer(Ok)  # it may come
            eve._answer(Ok)  # it is there
        with pytest.raises(PoolError, match="1000 values are published"):
            eve.publish("another", torch.ones(2))
        eve.publish("name0", torch.ones(2))
        rows = eve.names()
        assert len(rows) == 1000
        for row in rows:
            eve._connection.send(encode(Forget(row.name)))
        for _ in rows:
            eve._answer(Ok)
    for name in ("../alice", "a/b", "", ".hidden", "a\n"):
        with pytest.raises(ValueError, match="is no name of a client"):
            pool.ring.new(name)


def test_uploads_without_a_worker_count_for_the_quota(pool):
    with honest(pool):
        asker = Asker(pool, "small")
        asker.told()
        with pytest.raises(PoolError, match="of memory"):
            upload(asker, 1 << 30)
        asker.close()


def upload(asker, nbytes):
    """Fill the memory of uploads, step by step."""
    step = 8 << 20
    for offset in range(4096, nbytes, step):
        asker.connection.send(encode(Mirror(nbytes, offset), [b"x" * step]))
        answer_or_none(asker)


def answer_or_none(asker):
    """Raise what the pool has said, if it has; and do not run ahead of it."""
    until = time.monotonic() + SECONDS
    while asker.connection.pending > 32 << 20:
        assert time.monotonic() < until
        asker.connection.pump()
        time.sleep(0.005)
    frames = asker.connection.take()
    if frames is not None:
        message = decode(frames[:1], FROM_POOL)
        if isinstance(message, RequestFailed):
            raise message.error()
