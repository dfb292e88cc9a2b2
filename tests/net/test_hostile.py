"""What strangers, thieves and fuzzers send to a listener: dropped, counted, and without effect."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from benchmarks.hostile_frames import Target, attack, garbage
from lazygt.errors import SecurityError
from lazygt.net import tcp
from lazygt.net.channel import Keys
from lazygt.net.connection import Connection, Listener, dial
from lazygt.net.keys import Keyring
from tests.net.proxy import Proxy

pytestmark = pytest.mark.timeout(300)
SECONDS = 120.0


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.close()


def raw(target: Target, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, id: bytes) -> Raw:
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.ROUTING_ID, id)
    sock.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    sock.setsockopt_string(zmq.CURVE_SERVERKEY, target.server.public)
    sock.connect(target.listener.address)
    return sock


Raw = zmq.Socket[bytes]


def numbered(number: int, content: bytes) -> bytes:
    message = tcp.pack(tcp.MESSAGE, [content])
    tcp.set_number(message, number, 0)
    return bytes(message)


def until_counted(target: Target, name: str, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while target.listener.counts[name] < count:
        assert time.monotonic() < deadline, target.listener.counts
        assert target.listener.accept() is None
        select.select([target.listener.fd], [], [], 0.1)


def accepted(target: Target) -> Connection:
    deadline = time.monotonic() + SECONDS
    while (connection := target.listener.accept()) is None:
        assert time.monotonic() < deadline
        select.select([target.listener.fd], [], [], 0.1)
    return connection


def connected(
    target: Target, context: zmq.Context[zmq.Socket[bytes]], address: str
) -> tuple[Connection, Connection]:
    """Alice's end and the host's."""
    ends: list[Connection] = []
    arguments = target.alice, target.server.public, b"", 1 << 20, SECONDS
    thread = threading.Thread(target=lambda: ends.append(dial(context, address, *arguments)))
    thread.start()
    far = accepted(target)
    while thread.is_alive():
        target.listener.accept()
        thread.join(0.01)
    return ends[0], far


def taken(target: Target, connection: Connection) -> bytes:
    deadline = time.monotonic() + SECONDS
    while (message := connection.take()) is None:
        assert time.monotonic() < deadline
        target.listener.accept()
        select.select([connection.fd], [], [], 0.1)
    return bytes(message[0])


@pytest.mark.slow
def test_hostile_frames_are_dropped_and_leave_nothing(target: Target) -> None:
    address, own = target.listener.address, psutil.Process()
    count = 100_000
    sizes = []
    for turn, number in enumerate((count // 4, count)):
        arguments = address, target.mallory, target.server.public, number, turn
        enemy = threading.Thread(target=attack, args=arguments)
        before = target.dropped
        enemy.start()
        deadline = time.monotonic() + SECONDS
        while enemy.is_alive() or target.dropped < before + number:
            assert time.monotonic() < deadline, target.listener.counts
            target.serve(0.1)
        assert target.dropped == before + number
        sizes.append(own.memory_info().rss)
    assert target.accepted == []
    assert sizes[1] - sizes[0] < 32 << 20


def test_non_zmq_traffic_is_survived(target: Target) -> None:
    enemy = threading.Thread(target=garbage, args=(target.listener.address, 120, 5))
    enemy.start()
    while enemy.is_alive():
        target.serve(0.05)
    assert target.accepted == []
    with zmq.Context() as context, raw(target, context, target.alice, b"c" + bytes(16)) as sock:
        sock.send(tcp.pack_hello(1, True, b"still there?", 0))
        assert accepted(target).hello == b"still there?"


def test_replayed_frames_of_a_connection_are_dropped(target: Target) -> None:
    with zmq.Context() as context, raw(target, context, target.alice, b"c" + bytes(16)) as sock:
        hello = tcp.pack_hello(1, True, b"", 0)
        sock.send(hello)
        sock.send(numbered(1, b"pay"))
        connection = accepted(target)
        assert taken(target, connection) == b"pay"
        for _ in range(100):
            sock.send(hello)
            sock.send(numbered(1, b"pay"))
        sock.send(numbered(2, b"again"))
        assert taken(target, connection) == b"again"
        assert target.listener.counts["replayed"] == 200
        assert connection.take() is None
        connection.close("enough")
        sock.send(hello)
        sock.send(numbered(1, b"pay"))
        until_counted(target, "replayed", 202)


def test_a_recorded_tcp_connection_can_not_be_played_again(target: Target) -> None:
    """CURVE: both sides' session keys are new each time."""
    proxy = Proxy(target.listener.address)
    with zmq.Context() as context:
        near, connection = connected(target, context, proxy.address)
        near.send([b"pay"])
        assert taken(target, connection) == b"pay"
        recorded = bytes(proxy.recorded[0])
        assert len(recorded) > 500
        assert b"pay" not in recorded
        host, _, port = target.listener.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(recorded)
            until_counted(target, "handshake", 1)
        assert connection.take() is None
        assert connection.closed is None
        near.close()
    proxy.close()


def test_a_stolen_id_is_worth_nothing_without_the_key(target: Target) -> None:
    """Who knows the id of a connection can end it, but not speak for it."""
    with zmq.Context() as context:
        near, connection = connected(target, context, target.listener.address)
        near.send([b"1"])
        assert taken(target, connection) == b"1"
        with raw(target, context, target.mallory, connection.id) as sock:
            for number in range(2, 12):
                sock.send(numbered(number, b"forged"))
            until_counted(target, "replayed", 9)
            assert target.listener.counts["foreign"] == 1
            assert connection.take() is None
            assert connection.closed == "somebody with another key came with alice's id"
        near.close()


def test_frames_in_several_parts_are_malformed(target: Target) -> None:
    with zmq.Context() as context, raw(target, context, target.alice, b"c" + bytes(16)) as sock:
        sock.send_multipart([bytes(tcp.pack_hello(1, True, b"", 0)), b"more"])
        until_counted(target, "malformed", 1)
        sock.send(tcp.pack_hello(1, True, b"", 0)[:-4] + os.urandom(4))
        until_counted(target, "malformed", 2)


def test_acknowledgement_of_unsent_message_is_malformed(target: Target) -> None:
    with zmq.Context() as context, raw(target, context, target.alice, b"c" + bytes(16)) as sock:
        sock.send(tcp.pack_hello(1, True, b"", 0))
        connection = accepted(target)
        connection.send([b"kept"])
        sock.send(tcp.pack(tcp.RECEIVED, (), 2))
        until_counted(target, "malformed", 1)
        assert connection.pending > 0


def test_nothing_listens_without_keys(target: Target) -> None:
    with pytest.raises(SecurityError, match=r"refusing to listen on '127.0.0.1' without CURVE"):
        Listener(target.context, "127.0.0.1", 0, None, str, 1 << 20)  # type: ignore[arg-type]


def test_a_keyring_opens_and_shuts_a_listener(target: Target, tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    alice = ring.new("alice")
    target.listener.close()
    target.server, target.alice = ring.server, alice.keys
    target.listener = Listener(target.context, "127.0.0.1", 0, ring.server, ring.allows, 1 << 20)
    with zmq.Context() as context:
        near, far = connected(target, context, target.listener.address)
        assert far.peer == "alice"
        ring.revoke("alice")
        deadline = time.monotonic() + SECONDS
        while near.closed is None:
            assert time.monotonic() < deadline
            far.pump()
            near.pump()
            select.select([far.fd, near.fd], [], [], 0.05)
        assert far.closed == "the key of alice was revoked"
        near.close()
