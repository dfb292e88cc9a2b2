"""The contract of everything that carries messages: the same tests over all carriers."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import pytest
import zmq

from lazygt.net.channel import (
    DATA,
    ClientChannel,
    Keys,
    WorkerChannel,
    listen_local,
    listen_tcp,
    unpack,
)
from lazygt.net.connection import Connection, Listener, dial
from lazygt.net.mailbox import Mailboxes, MailboxFiles
from lazygt.net.sockets import Peer, PeerSocket
from lazygt.runtime.launch.session_directory import SessionDirectory
from tests.runtime.collectives.encrypted_peers import encrypted

pytestmark = pytest.mark.timeout(120)
SECONDS = 60.0
TOKEN = b"t" * 32
LENGTH = struct.Struct("<Q")
#: About the sizes at which carriers change their ways: a ring's slot, copies, chunks.
SIZES = (0, 1, 9, 4081, 4082, 4096, 1 << 16, (1 << 16) + 1, 1 << 18, (1 << 20) + 3)


class End(Protocol):
    """One end of a carrier."""

    def send(self, data: bytes | bytearray) -> None:
        """Send a message; does not wait for a reader."""

    def receive(self) -> bytes:
        """Wait for the next message."""


class Carrier:
    """Both ends, and the endpoint at which strangers may knock; "": there is none."""

    def __init__(self, near: End, far: End, endpoint: str = "") -> None:
        self.near, self.far, self.endpoint = near, far, endpoint


def waited(fd: int, ask: Callable[[], Any]) -> Any:
    """What ``ask`` says once it says something; its descriptor must ring for it."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    deadline = time.monotonic() + SECONDS
    while (answer := ask()) is None:
        assert time.monotonic() < deadline, "the descriptor never rang"
        poller.poll(1000)
    return answer


# -- ends ------------------------------------------------------------------------------------------


class ClientEnd:
    def __init__(self, channel: ClientChannel, mailboxes: Mailboxes | None) -> None:
        self._channel, self._mailboxes = channel, mailboxes
        self._inbox: deque[bytes] = deque()

    def send(self, data: bytes | bytearray) -> None:
        if self._mailboxes is None or not self._mailboxes.put([memoryview(data)]):
            self._channel.send(DATA, [memoryview(data)])

    def receive(self) -> bytes:
        poller = select.poll()
        for fd in (self._channel.fd, *([self._mailboxes.wakes] if self._mailboxes else [])):
            poller.register(fd, select.POLLIN)
        while (data := self._next()) is None:
            assert poller.poll(SECONDS * 1000)
            if self._mailboxes is not None:
                self._mailboxes.clear_wakeup()
        return data

    def _next(self) -> bytes | None:
        """The ring's messages that precede the socket's next one, and then that one."""
        while self._inbox or self._channel.take(self._inbox):
            if (data := self._next_in_ring()) is not None:
                return data
            kind, frames = unpack(self._inbox.popleft())
            if kind == DATA:  # and no WELCOME
                if self._mailboxes is not None:
                    self._mailboxes.received += 1
                return bytes(frames[0])
        return self._next_in_ring()

    def _next_in_ring(self) -> bytes | None:
        frames = None if self._mailboxes is None else self._mailboxes.take()
        return None if frames is None else bytes(frames[0])


class WorkerEnd:
    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel

    def send(self, data: bytes | bytearray) -> None:
        self._channel.reply(DATA, [memoryview(data)])

    def receive(self) -> bytes:
        while (received := self._channel.receive()) is None:
            pass
        return bytes(received[1][0])


class ConnectionEnd:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, data: bytes | bytearray) -> None:
        self._connection.send([memoryview(data)])

    def receive(self) -> bytes:
        return bytes(waited(self._connection.fd, self._connection.take)[0])


class PeerEnd:
    """A stream of bytes, with the length before each message."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def send(self, data: bytes | bytearray) -> None:
        self._peer.send(memoryview(LENGTH.pack(len(data))))
        self._peer.send(memoryview(data))

    def receive(self) -> bytes:
        length = bytearray(LENGTH.size)
        self._peer.receive(memoryview(length))
        data = bytearray(*LENGTH.unpack(length))
        self._peer.receive(memoryview(data))
        return bytes(data)


# -- carriers --------------------------------------------------------------------------------------


def channel(stack: ExitStack, keys: Keys | None = None, ring: bool = False) -> Carrier:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, 0)
    directory = SessionDirectory()
    stack.callback(directory.close)
    address = listen_tcp("127.0.0.1", keys) if keys else listen_local(directory.path / "data0")
    boxes: list[Mailboxes | None] = [None, None]
    if ring:
        files = MailboxFiles.create()
        if files is None:
            pytest.skip("no mailboxes on this machine")
        others = MailboxFiles(*map(os.dup, files.all))
        boxes = [Mailboxes(files, of_worker=False), Mailboxes(others, of_worker=True)]
        for box in boxes:
            stack.callback(box.close)  # type: ignore[union-attr]
    worker = WorkerChannel(context, address, TOKEN, keys, mailboxes=boxes[1])
    stack.callback(worker.close)
    public = keys.public if keys else None
    client = ClientChannel(context, address.endpoint, TOKEN, public, mailboxes=boxes[0])
    stack.callback(client.close)
    assert worker.receive() is None  # the hello
    return Carrier(ClientEnd(client, boxes[0]), WorkerEnd(worker), address.endpoint)


def connection(stack: ExitStack) -> Carrier:
    contexts = zmq.Context(), zmq.Context()
    for context in contexts:
        stack.callback(context.destroy, 0)
    server, client = Keys.generate(), Keys.generate()
    allowed = {client.public: "client"}.get
    listener = Listener(contexts[0], "127.0.0.1", 0, server, allowed, 16 << 20)
    stack.callback(listener.close)
    arguments = listener.address, client, server.public, b"", 16 << 20, SECONDS
    dialed: list[Connection] = []
    thread = threading.Thread(target=lambda: dialed.append(dial(contexts[1], *arguments)))
    thread.start()
    far = waited(listener.fd, listener.accept)
    while thread.is_alive():
        listener.accept()
        thread.join(0.01)
    stack.callback(dialed[0].close)
    return Carrier(ConnectionEnd(dialed[0]), ConnectionEnd(far), listener.address)


def unix_sockets(stack: ExitStack) -> Carrier:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    peers = PeerSocket(ends[0], 1, SECONDS), PeerSocket(ends[1], 0, SECONDS)
    for peer in peers:
        stack.callback(peer.close)
    return Carrier(*map(PeerEnd, peers))


def encrypted_sockets(stack: ExitStack) -> Carrier:
    peers = encrypted(SECONDS)
    for peer in peers:
        stack.callback(peer.close)
    return Carrier(*map(PeerEnd, peers), peers[0].endpoint)


CARRIERS: dict[str, Callable[[ExitStack], Carrier]] = {
    "UNIX socket": channel,
    "UNIX socket and ring": lambda stack: channel(stack, ring=True),
    "TCP": lambda stack: channel(stack, Keys.generate()),
    "reliable TCP": connection,
    "ranks of a host": unix_sockets,
    "ranks of several hosts": encrypted_sockets,
}


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    with ExitStack() as stack:
        yield CARRIERS[request.param](stack)


# -- the contract ----------------------------------------------------------------------------------


def test_messages_of_any_size_arrive_whole_and_in_order(carrier: Carrier) -> None:
    for sender, receiver in ((carrier.near, carrier.far), (carrier.far, carrier.near)):
        sent = [os.urandom(size) for size in (*SIZES, *reversed(SIZES))]
        for data in sent:
            sender.send(data)
        assert [receiver.receive() for _ in sent] == sent


def test_both_ends_send_before_either_reads(carrier: Carrier) -> None:
    """A send waits for no reader, so two that send to each other do not wait for ever."""
    sent = [bytes([number]) * (1 << 16) for number in range(64)]
    for data in sent:
        carrier.near.send(data)
        carrier.far.send(data)
    for end in (carrier.near, carrier.far):
        assert [end.receive() for _ in sent] == sent


@pytest.mark.parametrize("size", [100, 1 << 19])
def test_sender_may_overwrite_sent_bytes(carrier: Carrier, size: int) -> None:
    data = bytearray(os.urandom(size))
    sent = bytes(data)
    for sender, receiver in ((carrier.near, carrier.far), (carrier.far, carrier.near)):
        data[:] = sent
        sender.send(data)
        data[:] = bytes(size)
        assert receiver.receive() == sent


def test_answers_follow_requests(carrier: Carrier) -> None:
    for number in range(200):
        carrier.near.send(LENGTH.pack(number))
        carrier.far.send(carrier.far.receive() * 2)
        assert carrier.near.receive() == LENGTH.pack(number) * 2


# -- fuzz ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_drawn_conversations_arrive_as_they_were_sent(carrier: Carrier, seed: int) -> None:
    """Sends and reads of either end in any order, with messages of any size."""
    draw = random.Random(seed)
    ends = carrier.near, carrier.far
    waiting: tuple[deque[bytes], deque[bytes]] = deque(), deque()
    for _ in range(300):
        end = draw.randrange(2)
        if waiting[end] and draw.random() < 0.5:
            assert ends[end].receive() == waiting[end].popleft()
        else:
            size = draw.choice([draw.randrange(64), draw.randrange(9000), draw.choice(SIZES)])
            data = draw.randbytes(size)
            ends[end].send(data)
            waiting[1 - end].append(data)
    for end in range(2):
        while waiting[end]:
            assert ends[end].receive() == waiting[end].popleft()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def test_strangers_disturb_no_conversation(carrier: Carrier) -> None:
    """Bytes that are no protocol's, a greeting cut short, one without CURVE, and what is drawn."""
    if not carrier.endpoint:
        pytest.skip("it has no address that a stranger could reach")
    draw = random.Random(7)
    texts = [b"", bytes(64), b"GET / HTTP/1.1\r\n\r\n", GREETING[:11], GREETING + bytes(100)]
    texts += [draw.randbytes(draw.choice([1, 10, 64, 1000, 1 << 16])) for _ in range(20)]
    for number, text in enumerate(texts):
        knock(carrier.endpoint, text)
        carrier.near.send(LENGTH.pack(number))
        assert carrier.far.receive() == LENGTH.pack(number)
        carrier.far.send(text)
        assert carrier.near.receive() == text


def knock(endpoint: str, text: bytes) -> None:
    """Connect as a stranger, send bytes, and leave."""
    if endpoint.startswith("ipc://"):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(endpoint.removeprefix("ipc://"))
    else:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        stranger = socket.create_connection((host.strip("[]"), int(port)))
    with stranger, suppress(OSError):  # it may have been hung up on
        stranger.sendall(text)
