"""A program at the far end: ``python far_end.py listen|dial|fork HOST PORT TOKEN [BUSY [GRACE]]``.

The listener prints its address and sends back whatever comes. The dialer sends 1,000 numbers and
says when they are back. Both say why the connection ended. With BUSY both hold Python's lock for so
many seconds once they are connected. With ``fork`` the dialer has a child, says its process id, and
waits for it.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time

import zmq

from lazygt.net.connection import Connection, Listener, dial
from lazygt.net.keys import derived

MAX_MESSAGE = 256 << 20


def be_busy(seconds: float) -> None:
    """Never let another thread run: matching is one call, which holds the lock."""
    until = time.monotonic() + seconds
    sys.setswitchinterval(1000)
    while time.monotonic() < until:
        re.fullmatch(r"(a|aa)+b", "a" * 26)
    sys.setswitchinterval(0.005)


def listen(host: str, port: int, token: bytes, busy: float = 0, grace: float = 30) -> None:
    known = derived(token, "client").public
    keys = derived(token, "agent")
    listener = Listener(
        zmq.Context(), host, port, keys, {known: "client"}.get, MAX_MESSAGE, grace=grace
    )
    print(listener.address, flush=True)
    connections: list[Connection] = []
    poller = select.poll()
    poller.register(listener.fd, select.POLLIN)
    while not connections or any(connection.closed is None for connection in connections):
        poller.poll()
        while (new := listener.accept()) is not None:
            connections.append(new)
            be_busy(busy)
        for connection in connections:
            while (frames := connection.take()) is not None:
                connection.send(frames)
    print(connections[0].closed, flush=True)
    listener.close()


def call(host: str, port: int, token: bytes, busy: float = 0, grace: float = 30) -> None:
    connection = dial(
        zmq.Context(), f"tcp://{host}:{port}", derived(token, "client"),
        derived(token, "agent").public, b"far end", MAX_MESSAGE, 60, grace=grace,
    )  # fmt: skip
    for number in range(1000):
        connection.send([b"%d" % number])
    print("sent", flush=True)
    be_busy(busy)
    poller = select.poll()
    poller.register(connection.fd, select.POLLIN)
    while connection.closed is None:
        poller.poll()
        while (frames := connection.take()) is not None:
            if frames and frames[0] == b"999":
                print("all came back", flush=True)
    print(connection.closed, flush=True)
    connection.close()


def fork(host: str, port: int, token: bytes) -> None:
    connection = dial(
        zmq.Context(), f"tcp://{host}:{port}", derived(token, "client"),
        derived(token, "agent").public, b"far end", MAX_MESSAGE, 60,
    )  # fmt: skip
    if (child := os.fork()) == 0:
        time.sleep(1000)
    print(child, flush=True)
    os.waitpid(child, 0)
    connection.close()


if __name__ == "__main__":
    role, host, port, token, *rest = sys.argv[1:]
    {"listen": listen, "dial": call, "fork": fork}[role](
        host, int(port), token.encode(), *map(float, rest)
    )
