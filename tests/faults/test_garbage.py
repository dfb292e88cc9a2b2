"""Strangers on every socket of a running session: it goes on and computes the same."""

from __future__ import annotations

import os
import socket
import struct

import pytest
import torch
import zmq

import lazygt
from lazygt.net.channel import DATA, HELLO, PING, SHUTDOWN, Keys, _version, pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
RAW = [
    b"",
    os.urandom(1 << 16),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    GREETING[:11],
    GREETING + b"\x02" + struct.pack(">Q", 1 << 62),
]
SPOKEN = [
    b"",
    b"\xff" * 100,
    struct.pack("<cII", b"D", 1, 1 << 31),
    pack(DATA, [b"run this"]),
    pack(SHUTDOWN),
    pack(PING),
    pack(HELLO, [b"lazygt\x63\x00", bytes(32)]),
    pack(HELLO, [_version(), bytes(32)]),
    b"z" * (3 << 20),
]


@pytest.mark.parametrize("transport", ["ipc", "tcp://127.0.0.1"])
def test_garbage_on_every_socket_of_a_running_session(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[Keys] = []
    generate = Keys.generate
    monkeypatch.setattr(Keys, "generate", lambda: keys.append(generate()) or keys[-1])
    with (
        lazygt.session(
            workers=lazygt.Workers(2, threads=1, transport=transport, max_message_bytes=1 << 20)
        ) as s,
        zmq.Context() as context,
    ):
        x = torch.zeros(1000)
        s.synchronize()
        rounds = 0
        peers: list[zmq.Socket[bytes]] = []
        for rank, worker in enumerate(s._link._pool.workers):  # type: ignore[attr-defined]
            for client in (worker.data, worker.control):
                key = keys[rank].public.encode() if keys else b""
                for text in RAW:
                    hang_in(client._endpoint, text)
                for text in SPOKEN:
                    peers.append(dealer(context, client._endpoint, key))
                    peers[-1].send(text)
                    x.add_(1)
                    rounds += 1
                    assert x.sum().item() == 1000 * rounds
        s.synchronize()
        assert x.sum().item() == 1000 * rounds
        for peer in peers:
            peer.close(0)


def hang_in(endpoint: str, text: bytes) -> None:
    if endpoint.startswith("ipc://"):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(endpoint[6:])
    else:
        host, _, port = endpoint[6:].rpartition(":")
        peer = socket.create_connection((host, int(port)))
    with peer:
        peer.sendall(text)


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key: bytes) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    if key:
        made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
        made.curve_serverkey = key
    made.connect(endpoint)
    return made
