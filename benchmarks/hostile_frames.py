"""A listener under frames that are malformed, foreign, replayed or random: how many it accepts.

A process that holds an allowed key sends them, in turns over many TCP connections, while a client
and the host exchange numbers; another sends bytes that are not even ZMQ's. Every frame must be
counted as dropped, the client must get all its numbers in order, and memory must stay as it was.
"""

import argparse
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import zmq

from benchmarks.harness import ROOT, Report
from lazygt.net import tcp
from lazygt.net.channel import Keys
from lazygt.net.connection import Connection, Listener, dial

_MAX_MESSAGE = 1 << 20
_SECONDS = 600.0  # so long it may take at most
_A_SOCKET = 20_000  # frames from one TCP connection
_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"  # of ZMTP 3.0 (rfc.zeromq.org/spec/23)


def hostile(draw: random.Random) -> Iterator[list[bytes]]:
    """Messages of which none may be accepted, without an end."""
    hello = bytes(tcp.pack_hello(1, True, b"", 0))
    stale = bytes(tcp.pack_hello(1, False, b"", 0))  # of a connection that nobody knows
    message = bytes(tcp.pack(tcp.MESSAGE, [b"run this"]))
    while True:
        cut = draw.randrange(len(hello))
        flipped = bytearray(hello)
        # The first 16 bytes are numbers: that of a hello says nothing. The last are empty.
        flipped[draw.randrange(16, 60)] ^= 1 << draw.randrange(8)
        yield [draw.randbytes(draw.randrange(200))]
        yield [hello[:cut]]
        yield [hello, message]
        yield []
        yield [stale]
        yield [struct.pack("<QQ", draw.getrandbits(64), draw.getrandbits(64)) + message[16:]]
        yield [struct.pack("<QQ", 1, 0) + tcp.GOODBYE + b"\0\0\0\0"]
        yield [struct.pack("<QQcI", 1, 0, tcp.MESSAGE, 0xFFFFFFFF) + draw.randbytes(30)]
        yield [bytes(tcp.pack(tcp.RECEIVED, (), draw.getrandbits(32)))]
        yield [bytes(tcp.pack(bytes([draw.randrange(256) | 1]), [draw.randbytes(5)]))]
        yield [bytes(tcp.pack(tcp.HELLO, [draw.randbytes(13), hello, b""]))]
        yield [hello[:16] + bytes(draw.sample(hello[16:], len(hello) - 16))]
        yield [bytes(flipped)] if not _is_hello(bytes(flipped)) else [b""]


def _is_hello(frame: bytes) -> bool:
    """Whether it still is a hello that would be welcomed."""
    try:
        _, _, kind, view = tcp.parse(memoryview(frame))
        if kind != tcp.HELLO:
            return False
        hello, _ = tcp.read_hello(view)
        here = tcp.versions_here()
        return isinstance(hello, tcp.Hello) and not here.differences(hello.versions)
    except tcp.ProtocolError:
        return False


def attack(address: str, keys: Keys, server: str, count: int, seed: int) -> None:
    """Send ``count`` hostile messages, and wait until the listener's TCP has them."""
    draw = random.Random(seed)
    messages = hostile(draw)
    with zmq.Context() as context:
        while count:
            some = min(count, _A_SOCKET)
            with context.socket(zmq.DEALER) as sock:
                sock.setsockopt(zmq.LINGER, -1)
                sock.setsockopt(zmq.RCVTIMEO, 1000 * int(_SECONDS))
                sock.setsockopt(zmq.ROUTING_ID, b"c" + draw.randbytes(16))
                sock.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
                sock.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
                sock.setsockopt_string(zmq.CURVE_SERVERKEY, server)
                sock.connect(address)
                for message, _ in zip(messages, range(some), strict=False):
                    sock.send_multipart(message or [b""])
                # it is refused, once; a close with that unread would have the kernel reset TCP,
                # and what the listener has not read yet would be lost
                sock.recv()
            count -= some


def garbage(address: str, count: int, seed: int) -> None:
    """Open ``count`` TCP connections that say what no ZMQ says, or begin to say it."""
    draw = random.Random(seed)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    openings = [b"", b"GET / HTTP/1.1\r\n\r\n", _GREETING, _GREETING[:5]]
    openings += [_GREETING + mechanism.ljust(52, b"\0") for mechanism in (b"NULL", b"CURVE")]
    for number in range(count):
        with socket.create_connection((host, int(port)), 30) as sock, suppress(OSError):
            sock.sendall(openings[number % len(openings)] + draw.randbytes(draw.randrange(400)))
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            while sock.recv(1 << 12):
                pass


class Target:
    """A listener, and a client of it that does honest work all the while."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.server, self.alice, self.mallory = (Keys.generate() for _ in range(3))
        allowed = {self.alice.public: "alice", self.mallory.public: "mallory"}
        self.listener = Listener(
            self.context, "127.0.0.1", 0, self.server, allowed.get, _MAX_MESSAGE
        )
        self.accepted: list[Connection] = []
        self._poller = select.poll()
        self._poller.register(self.listener.fd, select.POLLIN)

    def serve(self, seconds: float) -> None:
        """Send back what comes, for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._poller.poll(1000 * left)
            while (connection := self.listener.accept()) is not None:
                self.accepted.append(connection)
            for connection in self.accepted:
                while (message := connection.take()) is not None:
                    connection.send(message)

    def serve_until(self, dropped: int, enemies: "list[subprocess.Popen[str]]") -> None:
        """Until so many frames were dropped in all, and all who send them have ended."""
        until = time.monotonic() + _SECONDS
        while self.dropped < dropped or any(enemy.poll() is None for enemy in enemies):
            if any(enemy.poll() for enemy in enemies) or time.monotonic() > until:
                raise SystemExit(f"{self.dropped} of {dropped} frames were dropped, and then none")
            self.serve(0.2)

    @property
    def dropped(self) -> int:
        counts = self.listener.counts
        return sum(counts[name] for name in ("foreign", "malformed", "replayed", "version"))

    def close(self) -> None:
        self.listener.close()
        self.context.destroy(0)  # also what a failed test has left open


def honest(address: str, keys: Keys, server: str) -> None:
    """Send numbers one by one and want each back, until standard input ends."""
    with zmq.Context() as context:
        connection = dial(context, address, keys, server, b"", _MAX_MESSAGE, 60)
        poller = select.poll()
        poller.register(connection.fd, select.POLLIN)
        number = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            connection.send([b"%d" % number])
            while (message := connection.take()) is None and connection.closed is None:
                poller.poll(1000)
            if message is None or int(bytes(message[0])) != number:
                raise SystemExit(f"{number} came back as {message}: {connection.closed}")
            number += 1
        print(number)
        connection.close()


def process(*words: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.hostile_frames", *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)  # type: ignore[call-overload,no-any-return]


def run(count: int, connections: int) -> Report:
    target, own = Target(), psutil.Process()
    report = Report(
        "hostile frames",
        "Frames that are malformed, foreign, replayed or random, sent with an allowed key, and TCP "
        "connections that are not ZMQ's, while a client and the host exchange numbers.",
        ("sent", "dropped", "accepted", "handshakes failed", "crashes", "RSS before", "RSS after",
         "seconds", "numbers exchanged meanwhile"),
    )  # fmt: skip
    address, server = target.listener.address, target.server.public
    client = process("honest", address, target.alice.public, target.alice.secret, server)
    warm = min(count, 50_000)
    words = address, target.mallory.public, target.mallory.secret, server
    first = process("attack", *words, warm, 1)
    target.serve_until(warm, [first])
    before, begin = own.memory_info().rss, time.monotonic()
    enemies = [process("attack", *words, count, 2), process("garbage", address, connections, 3)]
    target.serve_until(warm + count, enemies)
    seconds, after = time.monotonic() - begin, own.memory_info().rss
    assert client.stdin is not None
    client.stdin.close()
    while client.poll() is None:
        target.serve(0.05)
    crashes = sum(bool(ended.wait()) for ended in (client, first, *enemies))
    assert client.stdout is not None
    report.add(
        f"{count:,} frames, {connections:,} connections", f"{target.dropped - warm:,}",
        str(len(target.accepted) - 1), f"{target.listener.counts['handshake']:,}", str(crashes),
        f"{before / 2**20:.1f} MiB", f"{after / 2**20:.1f} MiB", f"{seconds:.0f}",
        client.stdout.read().strip(),
    )  # fmt: skip
    counts = ", ".join(f"{name} {value:,}" for name, value in target.listener.counts.items())
    report.remarks.append(f"Counted, with {warm:,} frames before: {counts}.")
    target.close()
    return report


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--frames", type=int, default=10**6)
    arguments.add_argument("--connections", type=int, default=2000)
    arguments.add_argument("--save", action="store_true", help="keep the table in RESULTS.md")
    given = arguments.parse_args()
    run(given.frames, given.connections).finish(save=given.save)


if __name__ == "__main__":
    role, *rest = [*sys.argv[1:], ""]
    if role == "attack":
        address, public, secret, server, count, seed, _ = rest
        attack(address, Keys(public, secret), server, int(count), int(seed))
    elif role == "garbage":
        garbage(rest[0], int(rest[1]), int(rest[2]))
    elif role == "honest":
        honest(rest[0], Keys(rest[1], rest[2]), rest[3])
    else:
        main()
