"""Channels: who may speak, what happens to strangers, and how messages are packed."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections import deque
from contextlib import ExitStack, closing, contextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from lazygt.errors import ProtocolError, SecurityError
from lazygt.net import channel
from lazygt.net.channel import (
    DATA,
    ERROR,
    HELLO,
    WELCOME,
    Address,
    ClientChannel,
    Keys,
    WorkerChannel,
    listen_local,
    listen_tcp,
    new_token,
    pack,
    unpack,
)
from lazygt.runtime.launch.session_directory import SessionDirectory

pytestmark = pytest.mark.timeout(60)
TOKEN = b"t" * 32
VERSION = channel._version()


# -- messages ----------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=1), st.lists(st.binary(max_size=50), max_size=10))
def test_packing_is_reversible(kind, frames):
    assert unpack(pack(kind, frames)) == (kind, frames)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(text):
    try:
        kind, frames = unpack(text)
    except ProtocolError:
        return
    assert pack(kind, frames) == text


def test_a_small_message_costs_nine_bytes():
    assert len(pack(DATA, [b"x" * 100])) == 109


# -- a server and its peers --------------------------------------------------------------------


class Bench:
    """A server on its own thread that echoes its owner's messages, and peers of any manners."""

    def __init__(self, stack: ExitStack, address: Address, keys: Keys | None, limit: int) -> None:
        self.stack, self.address, self.keys = stack, address, keys
        self.context = zmq.Context()
        self.handled: list[bytes] = []
        self._server = WorkerChannel(self.context, address, TOKEN, keys, limit)
        self._stop, stop = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._closing = stop
        stack.callback(self._close)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while self._stop not in dict(poller.poll()):
            received = self._server.receive()
            if received is None:
                continue
            kind, frames = received
            if frames and frames[0] == b"malformed":
                self._server.drop_owner("no such order")
                continue
            self.handled.extend(bytes(frame) for frame in frames)
            self._server.reply(kind, frames)

    def _close(self) -> None:
        os.write(self._closing, b"x")
        self._thread.join()
        os.close(self._closing)
        os.close(self._stop)
        self._server.close()
        self.context.destroy(0)

    def client(self, token=TOKEN, key=None):
        public = key or (self.keys.public if self.keys else None)
        made = ClientChannel(self.context, self.address.endpoint, token, public)
        self.stack.callback(made.close)
        return made

    def dealer(self):
        """A peer that speaks ZMQ but not our protocol."""
        made = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        if self.keys:
            public, secret = zmq.curve_keypair()
            made.curve_publickey, made.curve_secretkey = public, secret
            made.curve_serverkey = self.keys.public.encode()
        made.connect(self.address.endpoint)
        self.stack.callback(made.close)
        return made

    def raw(self):
        """A peer that does not even speak ZMQ."""
        if self.address.endpoint.startswith("ipc://"):
            made = socket.socket(socket.AF_UNIX)
            made.connect(self.address.endpoint[6:])
        else:
            host, _, port = self.address.endpoint[6:].rpartition(":")
            made = socket.create_connection((host, int(port)))
        made.settimeout(20)
        self.stack.callback(made.close)
        return made


@pytest.fixture(params=["ipc", "tcp"])
def bench(request, tmp_path):
    with ExitStack() as stack:
        directory = SessionDirectory()
        stack.callback(directory.close)
        keys = Keys.generate() if request.param == "tcp" else None
        address = listen_tcp("127.0.0.1", keys) if keys else listen_local(directory.path / "data0")
        yield Bench(stack, address, keys, limit=1 << 20)


def next_message(client):
    inbox: deque[bytes] = deque()
    while not client.take(inbox):
        wait_readable(client.fd)
    return unpack(inbox.popleft())


def wait_readable(fd):
    poller = zmq.Poller()
    poller.register(fd, zmq.POLLIN)
    poller.poll(10)  # the descriptor is edge-triggered: look again now and then


def echo(client, text):
    client.send(DATA, [text])
    assert next_message(client) == (DATA, [text])


def owner_of(bench):
    made = bench.client()
    assert next_message(made) == (WELCOME, [])
    return made


@contextmanager
def watched(sock, events):
    """A socket on which the events of another one arrive."""
    monitor = sock.get_monitor_socket(events)
    try:
        yield monitor
    finally:
        sock.disable_monitor()
        monitor.close()


def refusal(dealer):
    assert dealer.poll(20_000)
    kind, (text,) = unpack(dealer.recv())
    assert kind == ERROR
    return bytes(text).decode()


def is_dropped(stranger):
    """Hang up our half and wait until the server has hung up, too; else a timeout is raised."""
    try:
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            continue
    except OSError as error:
        # It closed with our bytes unread (a reset), or so long ago that we are not connected.
        return error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)
    return True


def test_the_owner_is_welcomed_and_served(bench):
    echo(owner_of(bench), b"hello")


def test_messages_sent_before_server_exists_are_delivered():
    with ExitStack() as stack:
        directory = SessionDirectory()
        stack.callback(directory.close)
        address = listen_local(directory.path / "data0")
        context = zmq.Context()
        stack.callback(context.destroy, 0)
        early = ClientChannel(context, address.endpoint, TOKEN)
        early.send(DATA, [b"early"])
        bench = Bench(stack, address, None, 1 << 20)
        assert next_message(early) == (WELCOME, [])
        assert next_message(early) == (DATA, [b"early"])
        assert bench.handled == [b"early"]


def test_a_written_eventfd_ends_the_wait_for_a_message():
    with closing(SessionDirectory()) as directory, zmq.Context() as context:
        address = listen_local(directory.path / "data0")
        server, eventfd = WorkerChannel(context, address, TOKEN), os.eventfd(0)
        server.watch(eventfd)
        client = ClientChannel(context, address.endpoint, TOKEN)
        assert server.receive() is None, "the hello"
        os.eventfd_write(eventfd, 1)
        assert server.receive() is None
        client.send(DATA, [b"x"])
        kind, (frame,) = server.receive()
        assert (kind, bytes(frame)) == (DATA, b"x"), "the eventfd has been read"
        client.close()
        server.close()
        os.close(eventfd)


def test_a_message_may_have_more_frames_than_16_bits_count():
    frames = [bytes([index % 251]) for index in range(70_000)]
    kind, received = unpack(pack(DATA, frames))
    assert kind == DATA
    assert list(map(bytes, received)) == frames


GARBAGE = {
    "nothing": (b"", "cut short"),
    "noise": (b"\xff" * 100, "cut short"),
    "long": (b"\x00" * 500_000, "contradicts"),
    "lengths that lie": (struct.pack("<cII", b"D", 1, 1 << 31), "contradicts"),
    "too many frames": (struct.pack("<cI", b"D", 1 << 31), "cut short"),
    "no hello": (pack(DATA, [b"run this"]), "must be a hello"),
    "a hello too short": (pack(HELLO, [VERSION]), "must be a hello"),
    "a wrong version": (pack(HELLO, [b"lazygt\x63\x00", TOKEN]), "protocol version 1"),
    "a wrong token": (pack(HELLO, [VERSION, b"u" * 32]), "token"),
    "an empty token": (pack(HELLO, [VERSION, b""]), "token"),
    "a second owner": (pack(HELLO, [VERSION, TOKEN]), "already has an owner"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_stranger_gets_one_error_and_is_ignored(bench, name):
    message, reason = GARBAGE[name]
    owner, stranger = owner_of(bench), bench.dealer()
    stranger.send(message)
    assert reason in refusal(stranger)
    stranger.send(pack(HELLO, [VERSION, TOKEN]))
    stranger.send(pack(DATA, [b"stranger"]))
    echo(owner, b"still here")
    assert not stranger.poll(0)
    assert b"stranger" not in bench.handled


def test_a_message_of_several_zmq_frames_is_refused(bench):
    owner, stranger = owner_of(bench), bench.dealer()
    stranger.send_multipart([pack(HELLO, [VERSION, TOKEN]), b"and more"])
    assert "one frame, not 2" in refusal(stranger)
    echo(owner, b"still here")


RAW = {
    "noise": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a greeting cut short": b"\xff" + bytes(8) + b"\x7f\x03",
    "an unknown mechanism": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00"
    + b"EVIL".ljust(20, b"\0")
    + bytes(32),
    "a huge length": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00"
    + b"NULL".ljust(20, b"\0")
    + bytes(32)
    + b"\x02"
    + struct.pack(">Q", 1 << 62),
}


@pytest.mark.parametrize("name", RAW)
def test_a_peer_that_does_not_speak_zmq_harms_nobody(bench, name):
    owner, stranger = owner_of(bench), bench.raw()
    stranger.sendall(RAW[name])
    echo(owner, b"still here")
    assert is_dropped(stranger)
    echo(owner, b"and still")


def test_a_message_over_the_limit_disconnects_its_sender_only(bench):
    owner, stranger = owner_of(bench), bench.dealer()
    with watched(stranger, zmq.EVENT_DISCONNECTED) as monitor:
        stranger.send(b"z" * (2 << 20))
        assert monitor.poll(20_000)
    echo(owner, b"still here")


def test_the_client_refuses_a_message_over_the_limit(bench):
    owner = ClientChannel(bench.context, bench.address.endpoint, TOKEN, max_message=100)
    with pytest.raises(ValueError, match="over the limit of 100"):
        owner.send(DATA, [b"x" * 200])
    owner.close()


def test_an_owner_that_is_malformed_is_dropped_and_may_be_followed(bench):
    owner = owner_of(bench)
    owner.send(DATA, [b"malformed"])
    assert next_message(owner) == (ERROR, [b"no such order"])
    owner.send(DATA, [b"ignored"])
    echo(owner_of(bench), b"the next owner")
    assert bench.handled == [b"the next owner"]


def test_many_threads_send_over_one_client(bench):
    owner = owner_of(bench)
    threads = [
        threading.Thread(target=lambda: [owner.send(DATA, [b"x"]) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(800):
        assert next_message(owner) == (DATA, [b"x"])
    for thread in threads:
        thread.join()


def test_a_wrong_curve_key_gets_nothing():
    with ExitStack() as stack:
        keys = Keys.generate()
        bench = Bench(stack, listen_tcp("127.0.0.1", keys), keys, 1 << 20)
        stranger = bench.client(key=Keys.generate().public)
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        with watched(stranger._socket, failed | zmq.EVENT_DISCONNECTED) as monitor:
            assert monitor.poll(20_000)
        echo(owner_of(bench), b"the real one")
        assert not stranger.take(deque())


def test_a_peer_without_curve_gets_nothing():
    with ExitStack() as stack:
        keys = Keys.generate()
        bench = Bench(stack, listen_tcp("127.0.0.1", keys), keys, 1 << 20)
        bench.keys = None
        stranger = bench.dealer()
        stranger.send(pack(HELLO, [VERSION, TOKEN]))
        bench.keys = keys
        echo(owner_of(bench), b"the real one")
        assert not stranger.poll(0)


# -- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "192.0.2.7", "::", "*", "example.com", "", "127.0.0.1", "localhost", "::1"]
)
def test_an_address_needs_keys(host):
    """Also that of the loopback interface: other users of the machine reach it."""
    with pytest.raises(SecurityError, match="without CURVE keys"):
        listen_tcp(host, None)


def test_a_server_checks_the_address_again():
    context = zmq.Context()
    with pytest.raises(SecurityError, match=r"'0\.0\.0\.0'"):
        WorkerChannel(context, Address("tcp://0.0.0.0:5555", -1), TOKEN)
    context.destroy(0)


def test_tokens_and_keys_are_fresh():
    assert len(new_token()) == 32
    assert new_token() != new_token()
    assert Keys.generate() != Keys.generate()
