"""The store in which ranks of several hosts meet: what it holds, who waits, and who is kept out."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from lazygt.errors import AccessDenied, ProtocolError, SecurityError, StoreLost
from lazygt.net import listening, reliable
from lazygt.net.channel import Keys
from lazygt.net.connection import dial
from lazygt.net.keys import derived
from lazygt.net.tcp import Versions
from lazygt.runtime.collectives import rendezvous_store
from lazygt.runtime.collectives.rendezvous_store import (
    ROLE,
    StoreAnswer,
    StoreClient,
    StoreRefusal,
    StoreRequest,
    StoreServer,
    StoreWaits,
    Table,
)
from lazygt.runtime.wire import encode
from tests.support.descriptors import descriptors_before, open_descriptors

pytestmark = pytest.mark.timeout(60)

TOKEN = bytes(range(32))
SECONDS = 20.0
HOST = "127.0.0.1"


# -- the table: requests in, replies out -----------------------------------------------------------


def asked(table: Table, client: bytes, number: int, *request: bytes) -> list[tuple[Any, ...]]:
    """Who is told what, without the number of the request."""
    op, *arguments = request
    replies = table.ask(client, StoreRequest(number, op, tuple(arguments)))
    return [
        (reply.client, type(reply.message), *getattr(reply.message, "values", ()))
        for reply in replies
    ]


def test_waiting_request_is_answered_once_all_keys_exist() -> None:
    table = Table()
    assert asked(table, b"1", 1, b"wait", b"x", b"y") == [(b"1", StoreWaits)]
    assert asked(table, b"2", 1, b"get", b"y") == [(b"2", StoreWaits)]
    assert asked(table, b"3", 1, b"set", b"y", b"why") == [
        (b"3", StoreAnswer, b""),
        (b"2", StoreAnswer, b"why"),
    ]
    assert asked(table, b"3", 2, b"set", b"x", b"") == [
        (b"3", StoreAnswer, b""),
        (b"1", StoreAnswer),
    ]
    assert not table._waiting
    assert not table._pending


def test_repeated_wait_is_answered_with_a_sign_of_life_and_then_once() -> None:
    table = Table()
    for _ in range(3):
        assert asked(table, b"1", 8, b"get", b"x") == [(b"1", StoreWaits)]
    assert asked(table, b"2", 8, b"set", b"x", b"z")[1:] == [(b"1", StoreAnswer, b"z")]
    assert asked(table, b"2", 9, b"set", b"x", b"z")[1:] == []
    assert asked(table, b"1", 8, b"get", b"x") == [(b"1", StoreAnswer, b"z")]


def test_new_request_cancels_waiting_one() -> None:
    table = Table()
    asked(table, b"1", 1, b"wait", b"x", b"y")
    assert asked(table, b"1", 2, b"check", b"x") == [(b"1", StoreAnswer, b"0")]
    assert asked(table, b"2", 1, b"set", b"x", b"") == [(b"2", StoreAnswer, b"")]
    assert not table._waiting
    assert not table._pending


def test_invalid_request_is_refused() -> None:
    table = Table()
    for request in ((b"drop",), (b"set", b"x"), (b"add", b"x", b"much"), (b"count", b"x")):
        assert asked(table, request[0], 1, *request) == [(request[0], StoreRefusal)]
    assert table.values == {}


# -- the two ends ----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[StoreServer]:
    opened = StoreServer(HOST, TOKEN)
    yield opened
    opened.close()


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    opened = StoreClient(server.endpoint, TOKEN, SECONDS)
    yield opened
    opened.close()


def test_store_matches_torchs_hash_store(client: StoreClient) -> None:
    hashed = dist.HashStore()
    for store in (client, hashed):
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert [store.add("n", 3), store.add("n", -5)] == [3, -2]
        assert store.check(["a", "n"])
        assert not store.check(["a", "b"])
        assert store.compare_set("a", "1", "2") == b"2"
        assert store.compare_set("a", "1", "3") == b"2"
        assert store.compare_set("c", "", "4") == b"4"
        assert store.compare_set("d", "5", "6") == b"5"
        store.wait(["a", "c"], timedelta(seconds=1))
        assert [store.delete_key("a"), store.delete_key("a")] == [True, False]
        assert store.num_keys() == 2
    assert client.delete_all("n") == 1
    assert not client.check(["n"])


def test_torch_process_group_forms_over_store(client: StoreClient) -> None:
    """What NCCL does with its store is done to a Python class, by way of a prefix."""
    store = dist.PrefixStore("nccl", client)
    store.set("id", "secret")
    assert store.get("id") == client.get("nccl/id") == b"secret"
    assert store.add("count", 2) == 2
    store.wait(["id"], timedelta(seconds=1))
    assert store.check(["count"])
    assert not store.check(["other"])
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(gathered, client.clone(), rank) for rank in range(2)]
        assert [rank.result(SECONDS) for rank in ranks] == [[0, 1], [0, 1]]


def test_torch_keeps_no_more_of_a_clone_than_it_needs(client: StoreClient) -> None:
    """What C++ clones is a Python object still, and closed with the store."""
    store = dist.PrefixStore("a", client).clone()
    gc.collect()
    store.set("x", "1")
    assert client.get("a/x") == b"1"


def gathered(store: StoreClient, rank: int) -> list[int]:
    """What two ranks of Gloo tell each other, over connections that they make in the store."""
    seconds = timedelta(seconds=SECONDS)
    group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, seconds)
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    group.allgather([parts], [torch.tensor([rank])]).wait()
    return [int(part) for part in parts]


def test_a_name_that_is_set_later_is_waited_for(server: StoreServer, client: StoreClient) -> None:
    other = StoreClient(server.endpoint, TOKEN, SECONDS)
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(other.get, "later"), pool.submit(other.get, b"later")]
        client.set("later", b"\x00\xff")
        assert [each.result(SECONDS) for each in late] == [b"\x00\xff"] * 2
    other.close()


def test_a_name_that_nobody_sets_is_not_waited_for_without_end(client: StoreClient) -> None:
    client.set_timeout(timedelta(seconds=0.05))
    assert client.timeout == timedelta(seconds=0.05)
    with pytest.raises(TimeoutError, match=r"nobody has set x in the store at tcp://.* 0\.05 sec"):
        client.get("x")
    with pytest.raises(TimeoutError, match="nobody has set x, y"):
        client.wait(["x", "y"], timedelta(seconds=0.05))
    assert client.add("n", 1) == 1  # who has given up goes on


def test_request_runs_once_when_its_answer_is_lost(server: StoreServer) -> None:
    """A connection breaks between the question and its answer: the network drops the latter."""
    with Relay(server.endpoint) as relay:
        client = StoreClient(relay.endpoint, TOKEN, SECONDS)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(client.add, "n", 1).result(SECONDS) == 1
            relay.mute(lambda: server.requests >= 2)
            asked = pool.submit(client.add, "n", 10)
            assert relay.swallowed.wait(SECONDS)
            relay.cut()
            assert asked.result(SECONDS) == 11
        client.close()
    assert server.requests == 2


def test_store_is_reached_again_after_it_gave_the_client_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network is down for long, and the client asks nothing meanwhile."""
    monkeypatch.setattr(rendezvous_store, "_AWAY_SECONDS", 0.2)
    server = StoreServer(HOST, TOKEN)
    with Relay(server.endpoint) as relay:
        client = StoreClient(relay.endpoint, TOKEN, SECONDS, silence=5.0)
        assert client.add("n", 1) == 1
        relay.up.clear()
        relay.cut()
        until_forgotten(server)
        relay.up.set()
        assert client.add("n", 10) == 11
        client.close()
    assert server.requests == 2
    server.close()


def test_store_is_reached_again_after_it_was_lost(server: StoreServer) -> None:
    """The server drops what comes on a connection that it has given up while TCP lives."""
    client = StoreClient(server.endpoint, TOKEN, SECONDS, silence=0.5)
    client.set("x", "1")
    (connection,) = server._clients.values()
    with server._listener.lock:
        connection.end("given up")
    until_forgotten(server)
    with pytest.raises(StoreLost, match=r"has said nothing for 0\.5 seconds"):
        client.get("x")
    assert client.get("x") == b"1"
    client.close()


def until_forgotten(server: StoreServer) -> None:
    """Wait until the server has no clients."""
    deadline = time.monotonic() + SECONDS
    while server._clients:
        assert time.monotonic() < deadline
        os.sched_yield()


def test_answer_that_is_too_long_is_refused(client: StoreClient) -> None:
    for name in "ab":
        client.set(name, bytes(10 << 20))
    with pytest.raises(ProtocolError, match=r"the store refuses an answer: a message of \d+ "):
        client._wait(b"get", ["a", "b"], SECONDS)
    assert client.get("a") == bytes(10 << 20)


class Relay:
    """Passes bytes on between a client and the store, and can stop to.

    Attributes:
        swallowed: an answer was not passed on.
        up: new connections are passed on; until it is set they wait.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self.swallowed, self._mute = threading.Event(), False
        self._done: Callable[[], bool] = bool
        self.up = threading.Event()
        self.up.set()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def mute(self, done: Callable[[], bool]) -> None:
        """Answers of the store reach nobody until the connection is cut; ``swallowed`` is set when
        one has come since ``done``."""
        self._done, self._mute = done, True

    def cut(self) -> None:
        """Break all connections; new ones are passed on."""
        self._mute = False
        for end in self._ends:
            with suppress(OSError):  # either end has closed it
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.up.wait()
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with source, suppress(OSError):  # the connection was cut
            while data := source.recv(1 << 16):
                if answers and self._mute:
                    if self._done():
                        self.swallowed.set()
                else:
                    target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def test_a_store_that_has_gone_is_lost_and_says_so(server: StoreServer) -> None:
    client = StoreClient(server.endpoint, TOKEN, SECONDS, silence=0.2)
    client.set("x", "1")
    server.close()
    with pytest.raises(StoreLost, match=r"store at tcp://.* is lost: .*: the session has ended$"):
        client.get("x")
    with pytest.raises(StoreLost, match=r"store at tcp://.* has said nothing for 0\.2 seconds"):
        client.set("x", "2")
    client.close()


def test_lost_store_of_other_versions_says_so(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "versions_here", lambda: Versions("9.9", "1.0", "2.7"))
    client = StoreClient(server.endpoint, TOKEN, SECONDS)
    with pytest.raises(StoreLost, match=r"is lost: .* runs other versions: .* and 9\.9 there"):
        client.set("x", "1")
    client.close()


@pytest.mark.parametrize("why", ["", "the session has ended"])
def test_lost_store_survives_pickling(why: str) -> None:
    error = StoreLost("tcp://10.0.0.1:7", 20.0, why)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    assert (str(again), again.why) == (str(error), why)


def test_client_with_another_token_is_refused_and_counted(
    server: StoreServer, client: StoreClient
) -> None:
    stranger = StoreClient(server.endpoint, bytes(32), SECONDS)
    with pytest.raises(StoreLost, match=r"does not have the key .* same LAZYGT_TOKEN"):
        stranger.set("x", "mine")
    stranger.close()
    assert not client.check(["x"])
    assert client.num_keys() == 0
    assert server.refused >= 1


def test_repeated_messages_of_clients_are_not_counted_as_refused(server: StoreServer) -> None:
    server._listener.counts["replayed"] += 1
    assert server.refused == 0
    server._listener.counts["foreign"] += 1
    assert server.refused == 1


def test_client_with_servers_key_but_without_token_is_refused(
    server: StoreServer, client: StoreClient
) -> None:
    """The public key of the store alone opens nothing: the client's own is derived, too."""
    server_public = derived(TOKEN, ROLE).public
    with zmq.Context() as context, pytest.raises(AccessDenied):
        dial(context, server.endpoint, Keys.generate(), server_public, b"", 1 << 20, SECONDS)
    client.set("x", "1")
    assert server.refused >= 1
    assert client.num_keys() == 1


def test_malformed_request_ends_the_connection_of_its_sender(
    server: StoreServer, client: StoreClient
) -> None:
    keys, server_public = derived(TOKEN, f"{ROLE} client"), derived(TOKEN, ROLE).public
    for frames in ([], [b""], [b"\xff" * 9], encode(StoreWaits(1)), [b"\x93\x01\xa1x\xc4\x00"]):
        with zmq.Context() as context:
            stranger = dial(context, server.endpoint, keys, server_public, b"", 1 << 20, SECONDS)
            stranger.send(frames)
            poller = select.poll()
            poller.register(stranger.fd, select.POLLIN)
            while stranger.closed is None:
                assert stranger.take() is None
                poller.poll(100)
            assert "message" in stranger.closed
            stranger.close()
        client.set("x", "1")
    assert client.num_keys() == 1


def test_malformed_connections_to_store_are_ignored(
    server: StoreServer, client: StoreClient
) -> None:
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 4096):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
    client.set("x", "1")
    assert client.get("x") == b"1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "", "nowhere"])
def test_nobody_listens_on_all_interfaces(host: str) -> None:
    with pytest.raises(SecurityError, match="expected the IP address of the one interface"):
        StoreServer(host, TOKEN)


def test_refusal_by_store_is_protocol_error(client: StoreClient) -> None:
    with pytest.raises(ProtocolError, match="the store refuses b'add'"):
        client._request(b"add", b"x", b"much")


@pytest.mark.parametrize(
    ("module", "failing"),
    [(listening, "Guard"), (reliable, "Monitor"), (reliable, "Alarm"), (os, "eventfd")],
)
def test_server_that_cannot_open_gives_everything_back(
    module: ModuleType, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the socket is open, as of a process that has all its descriptors."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "no descriptors left")

    monkeypatch.setattr(module, failing, fail)
    before, threads = descriptors_before(), set(threading.enumerate())
    with pytest.raises(OSError, match="no descriptors left"):
        StoreServer(HOST, TOKEN)
    assert open_descriptors() <= before
    assert set(threading.enumerate()) <= threads


def test_both_ends_give_everything_back() -> None:
    before, threads = descriptors_before(), set(threading.enumerate())
    for _ in range(3):
        server = StoreServer(HOST, TOKEN)
        client = StoreClient(server.endpoint, TOKEN, SECONDS)
        client.set("x", "1")
        client.close()
        client.close()
        server.close()
        server.close()
    assert open_descriptors() <= before
    assert set(threading.enumerate()) <= threads


def test_many_threads_count_together(client: StoreClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = sorted(pool.map(lambda _: client.add("n", 1), range(200)))
    assert numbers == list(range(1, 201))
