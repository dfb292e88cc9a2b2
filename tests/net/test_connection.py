"""Connections over real sockets: order, size, memory, deaths, links that are down."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from lazygt.errors import AccessDenied, ConnectionLost, LazyGTError, SecurityError, VersionMismatch
from lazygt.net import listening, reliable, tcp
from lazygt.net.channel import Keys
from lazygt.net.connection import Connection, Listener, dial
from lazygt.net.keys import derived
from tests.clusters.hosts import Hosts, missing
from tests.net.proxy import Proxy
from tests.support.descriptors import descriptors_before, open_descriptors
from tests.support.timeouts import patience

pytestmark = pytest.mark.timeout(120)

FAR_END = str(Path(__file__).with_name("far_end.py"))
MAX_MESSAGE = 256 << 20
TOKEN = "0123456789abcdef" * 2
SECONDS = 60.0


class Place:
    """A listener, its keys, and the contexts of both ends."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.contexts = zmq.Context(), zmq.Context()
        self.server, self.alice, self.bob = (Keys.generate() for _ in range(3))
        self.allowed = {self.alice.public: "alice", self.bob.public: "bob"}
        self.listener = Listener(
            self.contexts[0], host, 0, self.server, self.allowed.get, MAX_MESSAGE
        )
        self.dialed: list[Connection] = []

    def dial(self, keys: Keys | None = None, hello: bytes = b"", address: str = "") -> Connection:
        connection = dial(
            self.contexts[1], address or self.listener.address, keys or self.alice,
            self.server.public, hello, MAX_MESSAGE, SECONDS,
        )  # fmt: skip
        self.dialed.append(connection)
        return connection

    def both(
        self, keys: Keys | None = None, hello: bytes = b"", address: str = ""
    ) -> tuple[Connection, Connection]:
        """The client's end and the host's."""
        near: list[Connection] = []
        thread = threading.Thread(target=lambda: near.append(self.dial(keys, hello, address)))
        thread.start()
        far = until(self.listener.fd, self.listener.accept)
        while thread.is_alive():
            self.listener.accept()
            thread.join(0.01)
        return near[0], far

    def close(self) -> None:
        for connection in self.dialed:
            connection.close()
        self.listener.close()
        for context in self.contexts:
            context.destroy(0)


@pytest.fixture
def place() -> Iterator[Place]:
    zmq.Frame(bytes(1 << 17), copy=False)  # starts pyzmq's own thread, which stays
    before = descriptors_before()
    place = Place()
    yield place
    place.close()
    assert len(open_descriptors()) <= len(before)


def until(fd: int, ask: Callable[[], Any]) -> Any:
    """What ``ask`` says, once it says something; its descriptor must ring for it."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    deadline = time.monotonic() + SECONDS
    while (answer := ask()) is None:
        assert time.monotonic() < deadline, "the descriptor never rang"
        poller.poll(SECONDS * 1000)
    return answer


def taken(connection: Connection) -> list[bytes]:
    return [bytes(frame) for frame in until(connection.fd, connection.take)]


def settle(*connections: Connection) -> None:
    """Until all that was sent is acknowledged."""
    deadline = time.monotonic() + SECONDS
    while any(connection.pending for connection in connections):
        assert time.monotonic() < deadline
        for connection in connections:
            connection.pump()
        select.select([connection.fd for connection in connections], [], [], 0.05)


# -- messages ----------------------------------------------------------------------------------


def test_both_ends_know_each_other(place: Place) -> None:
    near, far = place.both(place.bob, b"who I am")
    assert (far.peer, far.hello, near.peer) == ("bob", b"who I am", place.listener.address)
    assert near.id == far.id
    assert near.closed is far.closed is None
    assert near.away == far.away == 0.0


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1, 0, 7), (70_000,), (64 << 20,)], ids=lambda sizes: f"{sum(sizes)}"
)
def test_messages_go_both_ways(place: Place, sizes: tuple[int, ...]) -> None:
    near, far = place.both()
    message = [os.urandom(size) for size in sizes]
    near.send(message)
    assert taken(far) == message
    far.send(message)
    assert taken(near) == message
    settle(near, far)
    assert near.take() is far.take() is None


def test_order_is_kept_and_memory_is_freed(place: Place) -> None:
    near, far = place.both()
    for number in range(5000):
        near.send([b"%d" % number])
    assert [taken(far) for _ in range(5000)] == [[b"%d" % number] for number in range(5000)]
    assert far.take() is None
    settle(near)
    assert near.pending == 0


def test_a_message_over_the_limit_is_refused(place: Place) -> None:
    near, _ = place.both()
    with pytest.raises(ValueError, match=f"over the limit of {MAX_MESSAGE - 21}"):
        near.send([bytes(MAX_MESSAGE)])
    assert near.pending == 0


def test_any_thread_may_send(place: Place) -> None:
    near, far = place.both()

    def send(thread: int) -> None:
        for number in range(300):
            near.send([b"%d" % thread, b"%d" % number])

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    messages = [taken(far) for _ in range(1200)]
    for thread in threads:
        thread.join()
    for number in range(4):
        its = [int(second) for first, second in messages if int(first) == number]
        assert its == list(range(300))


def test_a_send_in_the_middle_of_a_send_keeps_the_order(place: Place) -> None:
    """As a finalizer may, which garbage collection calls anywhere."""
    near, far = place.both()
    transmit = near._carrier.transmit

    def interrupted(connection: Connection, message: bytes | bytearray) -> bool:
        if nested:
            near.send([nested.pop()])
        return transmit(connection, message)

    nested = [b"2"]
    near._carrier.transmit = interrupted  # type: ignore[method-assign]
    near.send([b"1"])
    near.send([b"3"])
    assert [taken(far) for _ in range(3)] == [[b"1"], [b"2"], [b"3"]]


def test_a_send_does_not_swallow_the_signal(place: Place) -> None:
    near, far = place.both()
    settle(near, far)
    for number in range(200):
        far.send([b"%d" % number])
        near.send([b""])
        assert taken(near) == [b"%d" % number]


def test_many_clients_share_a_listener(place: Place) -> None:
    pairs = [place.both(place.alice if number % 2 else place.bob) for number in range(6)]
    for number, (near, _) in enumerate(pairs):
        near.send([b"%d" % number])
    assert [taken(far) for _, far in pairs] == [[b"%d" % number] for number in range(6)]


def test_connection_over_ipv6() -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("there is no IPv6 here")
    place = Place("::1")
    assert place.listener.address.startswith("tcp://[::1]:")
    near, far = place.both()
    near.send([b"six"])
    assert taken(far) == [b"six"]
    place.close()


# -- the end -----------------------------------------------------------------------------------


def test_a_goodbye_says_why_and_comes_last(place: Place) -> None:
    near, far = place.both()
    near.send([b"last"])
    near.close("enough")
    assert until(far.fd, lambda: far.pump() or far.closed).endswith(": enough")
    assert taken(far) == [b"last"]
    assert far.take() is None
    far.send([b"to nobody"])
    assert near.closed == "closed here: enough"


def test_closing_host_sends_its_reason(place: Place) -> None:
    near, far = place.both()
    far.send([b"last"])
    place.listener.close("night")
    assert until(near.fd, lambda: near.pump() or near.closed).endswith(": night")
    assert taken(near) == [b"last"]


# -- who is refused ----------------------------------------------------------------------------


def refused(place: Place, keys: Keys, server: str, timeout: float = SECONDS) -> LazyGTError:
    context = place.contexts[1]
    with pytest.raises(LazyGTError) as caught:
        dial(context, place.listener.address, keys, server, b"", MAX_MESSAGE, timeout)
    assert place.listener.accept() is None
    return caught.value


def test_a_key_that_is_not_known_is_refused(place: Place) -> None:
    error = refused(place, Keys.generate(), place.server.public)
    assert isinstance(error, AccessDenied)
    assert "does not know our key" in str(error)
    assert "LAZYGT_TOKEN" in str(error)


def test_a_host_with_another_key_is_not_trusted(place: Place) -> None:
    error = refused(place, place.alice, Keys.generate().public)
    assert isinstance(error, AccessDenied)
    assert "does not have the key that we expect" in str(error)


def test_malformed_key_is_refused(place: Place) -> None:
    assert isinstance(refused(place, place.alice, "short"), SecurityError)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:9", "nonsense"])
def test_nobody_there_is_said_in_time(place: Place, endpoint: str) -> None:
    with pytest.raises(ConnectionLost, match=f"no connection to {endpoint}"):
        dial(
            place.contexts[1], endpoint, place.alice, place.server.public, b"", MAX_MESSAGE, 0.3
        )  # fmt: skip


def pumped(place: Place, call: Callable[[], object]) -> object:
    """What a call in a thread gives or raises, with the listener served meanwhile."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except LazyGTError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        assert place.listener.accept() is None
        thread.join(0.01)
    return results[0]


def test_other_versions_are_said_on_both_sides(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tcp.Versions("9.9", "1.0", "2.7")
    monkeypatch.setattr(listening, "versions_here", lambda: theirs)
    error = pumped(place, place.dial)
    assert isinstance(error, VersionMismatch)
    here = tcp.versions_here()
    assert error.differences == [
        ("lazygt", here.lazygt, "9.9"), ("torch", here.torch, "1.0"), ("python", here.python, "2.7")
    ]  # fmt: skip
    assert f"torch is {here.torch} here and 1.0 there" in str(error)
    assert place.listener.counts["version"] == 1


def test_another_protocol_is_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "read_hello", lambda view: (7, b""))
    error = pumped(place, place.dial)
    assert isinstance(error, VersionMismatch)
    assert "protocol version 1, and this client 7" in str(error)


def test_a_revoked_client_is_sent_away_at_once(place: Place) -> None:
    near, far = place.both()
    bob, at_bobs = place.both(place.bob)
    del place.allowed[place.alice.public]
    assert until(far.fd, lambda: far.pump() or far.closed) == "the key of alice was revoked"
    assert "the key of alice was revoked" in until(near.fd, lambda: near.pump() or near.closed)
    near.send([b"still there?"])
    assert far.take() is None
    bob.send([b"I am"])
    assert taken(at_bobs) == [b"I am"]
    assert isinstance(refused(place, place.alice, place.server.public), AccessDenied)


def test_listeners_of_a_context_have_clients_of_their_own(place: Place) -> None:
    """And a socket that asks nobody is as it is without them."""
    carol, server = Keys.generate(), Keys.generate()
    other = Listener(
        place.contexts[0], "127.0.0.1", 0, server, {carol.public: "carol"}.get, MAX_MESSAGE
    )
    assert isinstance(refused(place, carol, place.server.public), AccessDenied)
    with pytest.raises(AccessDenied):
        dial(
            place.contexts[1], other.address, place.alice, server.public, b"", MAX_MESSAGE, SECONDS
        )  # fmt: skip
    other.close()
    near, far = place.both()
    near.send([b"still here"])
    assert taken(far) == [b"still here"]
    with place.contexts[0].socket(zmq.PAIR) as bound, place.contexts[1].socket(zmq.PAIR) as pair:
        for sock in (bound, pair):
            sock.setsockopt(zmq.LINGER, 0)
        bound.setsockopt(zmq.CURVE_SERVER, 1)
        bound.setsockopt_string(zmq.CURVE_SECRETKEY, server.secret)
        port = bound.bind_to_random_port("tcp://127.0.0.1")
        pair.setsockopt_string(zmq.CURVE_PUBLICKEY, carol.public)
        pair.setsockopt_string(zmq.CURVE_SECRETKEY, carol.secret)
        pair.setsockopt_string(zmq.CURVE_SERVERKEY, server.public)
        pair.connect(f"tcp://127.0.0.1:{port}")
        pair.send(b"no domain")
        assert bound.poll(SECONDS * 1000)
        assert bound.recv() == b"no domain"


# -- processes that end, links that break ------------------------------------------------------


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, FAR_END, *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


Start = Callable[..., "subprocess.Popen[str]"]


def called(context: zmq.Context[zmq.Socket[bytes]], address: str, grace: float = 30) -> Connection:
    token = TOKEN.encode()
    keys, server = derived(token, "client"), derived(token, "agent").public
    return dial(context, address, keys, server, b"", MAX_MESSAGE, SECONDS, grace=grace)


def test_a_killed_host_is_noticed_in_two_seconds(started: Start) -> None:
    host = started("listen", "127.0.0.1", 0, TOKEN)
    with zmq.Context() as context:
        near = called(context, line_of(host))
        near.send([b"there?"])
        assert taken(near) == [b"there?"]
        begin = time.monotonic()
        host.send_signal(signal.SIGKILL)
        why = until(near.fd, lambda: near.pump() or near.closed)
        assert time.monotonic() - begin < patience(2.0)
        assert "is gone: its process has ended" in why
        near.close()


def test_a_killed_client_is_noticed_in_two_seconds(started: Start) -> None:
    token = TOKEN.encode()
    allowed = {derived(token, "client").public: "client"}
    with zmq.Context() as context:
        keys = derived(token, "agent")
        listener = Listener(context, "127.0.0.1", 0, keys, allowed.get, MAX_MESSAGE)
        client = started("dial", "127.0.0.1", listener.address.rpartition(":")[2], TOKEN)
        far = until(listener.fd, listener.accept)
        assert [taken(far) for _ in range(1000)] == [[b"%d" % number] for number in range(1000)]
        begin = time.monotonic()
        client.send_signal(signal.SIGKILL)
        assert "client is gone" in until(far.fd, lambda: far.pump() or far.closed)
        assert time.monotonic() - begin < patience(2.0)
        listener.close()


def test_a_killed_client_is_noticed_while_a_child_that_it_forked_lives(started: Start) -> None:
    token = TOKEN.encode()
    allowed = {derived(token, "client").public: "client"}
    with zmq.Context() as context:
        keys = derived(token, "agent")
        listener = Listener(context, "127.0.0.1", 0, keys, allowed.get, MAX_MESSAGE)
        client = started("fork", "127.0.0.1", listener.address.rpartition(":")[2], TOKEN)
        far = until(listener.fd, listener.accept)
        child = int(line_of(client))
        client.send_signal(signal.SIGKILL)
        try:
            assert "client is gone" in until(far.fd, lambda: far.pump() or far.closed)
        finally:
            os.kill(child, signal.SIGKILL)
        listener.close()


def test_a_killed_hosts_port_is_free_while_a_child_that_it_forked_lives() -> None:
    program = (
        "import os, sys, time, zmq\n"
        "from lazygt.net.connection import Listener\n"
        "from lazygt.net.channel import Keys\n"
        "listener = Listener(zmq.Context(), '127.0.0.1', 0, Keys.generate(), {}.get, 1 << 20)\n"
        "child = os.fork()\n"
        "if child: print(child, listener.address.rpartition(':')[2], flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        child, port = map(int, host.stdout.readline().split())
        host.kill()
        host.wait()
        try:
            with socket.socket() as again:
                again.bind(("127.0.0.1", port))
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_busy_host_is_not_reported_away(started: Start) -> None:
    """It lets no other thread of its own run, for longer than a dead link would be borne, and reads
    less than it is sent; and yet it is neither away nor gone."""
    host = started("listen", "127.0.0.1", 0, TOKEN, 8, 2)
    with zmq.Context() as context:
        near = called(context, line_of(host), grace=2)
        content = bytes(10_000)
        for number in range(3000):
            near.send([b"%d" % number, content])
        for number in range(3000):
            assert taken(near) == [b"%d" % number, content]
            assert near.away == 0.0
        assert near.closed is None
        near.close()


@pytest.mark.slow
def test_stopped_host_is_not_reported_away(started: Start) -> None:
    """Its kernel answers for it."""
    host = started("listen", "127.0.0.1", 0, TOKEN)
    with zmq.Context() as context:
        near = called(context, line_of(host))
        host.send_signal(signal.SIGSTOP)
        while psutil.Process(host.pid).status() != psutil.STATUS_STOPPED:
            os.sched_yield()
        near.send([b"there?"])
        until_then = time.monotonic() + 4
        while (left := until_then - time.monotonic()) > 0:
            select.select([near.fd], [], [], left)
            assert near.take() is None
            assert near.away == 0.0
            assert near.closed is None
        host.send_signal(signal.SIGCONT)
        assert taken(near) == [b"there?"]
        near.close()


def test_a_new_tcp_connection_loses_nothing(place: Place) -> None:
    proxy = Proxy(place.listener.address)
    near, far = place.both(address=proxy.address)
    for turn in range(4):
        for number in range(500):
            near.send([b"%d %d" % (turn, number), bytes(10_000)])
            far.send([b"%d %d" % (turn, number), bytes(10_000)])
            if number == 250:
                proxy.cut()
        for _ in range(500):
            near.pump()
            far.pump()
        expected = [b"%d %d" % (turn, number) for number in range(500)]
        assert both_take(near, far, 500) == [expected, expected]
    assert near.take() is far.take() is None
    assert near.closed is far.closed is None
    assert len(proxy.recorded) == 5
    settle(near, far)
    proxy.close()
    assert "is gone" in until(near.fd, lambda: near.pump() or near.closed)
    assert "is gone" in until(far.fd, lambda: far.pump() or far.closed)


def test_client_of_a_host_that_was_started_anew_is_told(place: Place) -> None:
    """Also one that has received messages, of which the new host knows nothing."""
    near, far = place.both()
    far.send([b"1"])
    assert taken(near) == [b"1"]
    with place.listener.lock:
        del place.listener._connections[far.id]
    address, port = place.listener.address, int(place.listener.address.rpartition(":")[2])
    place.listener.close()
    place.listener = Listener(
        place.contexts[0], "127.0.0.1", port, place.server, place.allowed.get, MAX_MESSAGE
    )
    assert place.listener.address == address
    until(place.listener.fd, lambda: place.listener.accept() or near.pump() or near.closed)
    assert near.closed == (
        f"no connection to {address}: the host has given this connection up, or was started anew"
    )
    assert near.given_up


def test_host_that_another_process_replaces_is_given_up(place: Place) -> None:
    """Several handshakes have failed by the time that the client looks."""
    proxy = Proxy(place.listener.address)
    near, _ = place.both(address=proxy.address)
    other = Listener(
        place.contexts[0], "127.0.0.1", 0, Keys.generate(), place.allowed.get, MAX_MESSAGE
    )
    proxy._target = "127.0.0.1", int(other.address.rpartition(":")[2])
    proxy.cut()
    until(other.fd, lambda: other.accept() or (other.counts["handshake"] >= 5 or None))
    assert "does not have the key that we expect" in until(
        near.fd, lambda: near.pump() or near.closed
    )
    near.send([b"to nobody"])
    assert near.take() is None
    other.close()
    proxy.close()


def both_take(near: Connection, far: Connection, count: int) -> list[list[bytes]]:
    """The first frames of as many messages at both ends, which need each other to go on."""
    got: list[list[bytes]] = [[], []]
    deadline = time.monotonic() + SECONDS
    while any(len(messages) < count for messages in got):
        assert time.monotonic() < deadline, [len(messages) for messages in got]
        select.select([near.fd, far.fd], [], [], 1.0)
        for connection, messages in zip((near, far), got, strict=True):
            while (frames := connection.take()) is not None:
                messages.append(bytes(frames[0]))
    return got


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.clusters
def test_a_link_that_is_down_for_five_seconds_loses_nothing() -> None:
    token, path = TOKEN, str(Path(__file__).parents[2])
    with Hosts(2) as hosts:
        environment = {**os.environ, "PYTHONPATH": path}
        options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
        far = [sys.executable, FAR_END, "listen", hosts.addresses[1], "0", token]
        listening_host = hosts.start(1, far, **options)
        address = line_of(listening_host)
        near = [sys.executable, str(Path(__file__).with_name("through_a_cut.py")), address, token]
        client = hosts.start(0, near, stdin=subprocess.PIPE, **options)
        assert line_of(client) == "half"
        hosts.cut(1)
        time.sleep(5)  # what is tested is a time
        assert client.stdin is not None
        client.stdin.write("\n")
        client.stdin.flush()
        away = float(line_of(client))
        hosts.mend(1)
        assert line_of(client) == "2000 in order, once"
        assert client.wait(SECONDS) == 0
        assert away >= 2.0
        assert line_of(listening_host) == "the other end closed the connection: all is here"


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.clusters
def test_a_link_that_stays_down_is_given_up_at_both_ends() -> None:
    """Nothing is on its way but what says that all came: the kernels ask, and nobody answers."""
    with Hosts(2) as hosts:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
        far = [sys.executable, FAR_END, "listen", hosts.addresses[1], "0", TOKEN, "0", "3"]
        listening_host = hosts.start(1, far, **options)
        port = line_of(listening_host).rpartition(":")[2]
        near = [sys.executable, FAR_END, "dial", hosts.addresses[1], port, TOKEN, "0", "3"]
        client = hosts.start(0, near, **options)
        assert [line_of(client), line_of(client)] == ["sent", "all came back"]
        hosts.cut(1)
        given_up = r"{} (is gone|did not answer for 3 s: the link is down)"
        host = re.escape(f"tcp://{hosts.addresses[1]}:{port}")
        assert re.match(given_up.format(host), line_of(client))
        assert re.match(given_up.format("client"), line_of(listening_host))


@pytest.mark.clusters
def test_a_link_that_stays_down_is_given_up_while_something_is_on_its_way(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, _ = place.both()
    silent = {near.tcp: tcp.Word(61.0, waits=True)}
    monkeypatch.setattr(reliable, "kernel_state", lambda socket: silent.get(socket, tcp.Word()))
    near.send([b"unheard"])
    why = until(near.fd, lambda: near.pump() or near.closed)
    assert why == f"{place.listener.address} did not answer for 60 s: the link is down"
