"""Hosts pass uploads on to one another: bytes, order, and what happens when one is lost or can't be
reached."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
import zmq

import lazygt
from lazygt.errors import AccessDenied, ProtocolError
from lazygt.net.connection import dial
from lazygt.net.keys import derived
from lazygt.runtime.cluster import upload_relay
from lazygt.runtime.cluster.protocol import Alone, Begin, Follow, Listens, Mirror
from lazygt.runtime.cluster.upload_relay import UPLOAD_BYTES, Mirrors
from tests.net.proxy import Proxy
from tests.runtime.cluster.agents import Hosts, train, wait_for

pytestmark = pytest.mark.timeout(180)

MEGABYTE = 1 << 20
#: More pieces than may be on their way at once.
LARGE = 40 * MEGABYTE


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts("127.0.0.1")
    yield hosts
    hosts.close()


def upload(nbytes: int = LARGE) -> torch.Tensor:
    return torch.arange(nbytes // 8, device="cpu")


def checksum(source: torch.Tensor) -> int:
    """Of a copy on the workers: the sum of what they have."""
    return int(source.to("lazygt").sum().item())


def sent(hosts: Hosts) -> int:
    """Bytes that the client has sent to all hosts."""
    return sum(agent.end.bytes_sent for agent in hosts.agents)


def there(hosts: Hosts) -> list[int]:
    """The number of the last piece that each host has."""
    return [agent.agent.mirrors.number for agent in hosts.agents]


def all_there(hosts: Hosts, *which: int) -> None:
    """Wait until hosts have as many pieces as the first of them."""
    wait_for(lambda: len({there(hosts)[host] for host in which}) == 1)


def same_memory(hosts: Hosts, session: lazygt.Session, *which: int) -> bool:
    """Whether hosts have what the client has, where it lies there."""
    upload = session._link.upload
    assert upload is not None
    extents = list(upload.extents(MEGABYTE))
    return bool(extents) and all(
        torch.equal(upload.view(*piece), hosts.agents[host].agent.mirrors.arena(0).view(*piece))
        for host in which
        for piece in extents
    )


def test_the_client_sends_an_upload_once_and_each_host_passes_it_on(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    source = upload()
    with on(1, 1, 1, 1) as session:
        before = sent(hosts)
        assert checksum(source) == source.sum()
        all_there(hosts, 0, 1, 2)
        assert source.nbytes <= sent(hosts) - before < 1.1 * source.nbytes
        assert there(hosts) == [LARGE // UPLOAD_BYTES] * 3
        passed = [agent.agent.mirrors.passed_bytes for agent in hosts.agents]
        assert passed == [source.nbytes, source.nbytes, 0]
        assert same_memory(hosts, session, 0, 1, 2)


def test_agents_serve_one_session_after_another(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    for megabytes in (5, 3):
        with on(0, 1, 1):
            before = sent(hosts)
            source = upload(megabytes * MEGABYTE)
            assert checksum(source) == source.sum()
            all_there(hosts, 0, 1)
            assert there(hosts) == [megabytes] * 2
            assert sent(hosts) - before < 1.1 * source.nbytes + 100_000
    wait_for(lambda: not any(agent.agent.mirrors._listener for agent in hosts.agents))


def test_training_on_three_hosts_has_the_bits_of_one(
    on: Callable[..., lazygt.Session],
) -> None:
    with lazygt.session() as session:
        expected = train(session)
    with on(0, 1, 1, 1) as session:
        assert train(session) == expected
        assert session.recoveries == []


def test_message_does_not_overtake_upload(
    on: Callable[..., lazygt.Session], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run waits on the second host, and with it what follows, until the upload is there."""
    with on(0, 1, 1):
        assert checksum(upload(MEGABYTE)) > 0  # all is set up
        first, second = (agent.agent for agent in hosts.agents)
        all_there(hosts, 0, 1)
        monkeypatch.setattr(first.mirrors, "_pass_on", lambda: None)
        source = upload(2 * MEGABYTE)
        assert checksum(source) == source.sum()  # rank 0 has it
        assert torch.ones(3).sum().item() == 3
        wait_for(lambda: len(second._deferred) >= 2)
        assert there(hosts)[0] > there(hosts)[1]
        monkeypatch.undo()
        assert checksum(source) == source.sum()
        wait_for(lambda: not second._deferred)
        all_there(hosts, 0, 1)


def test_a_host_that_does_not_keep_up_takes_no_memory_of_the_one_before(
    on: Callable[..., lazygt.Session], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on(0, 1, 1):
        assert checksum(upload(MEGABYTE)) > 0
        all_there(hosts, 0, 1)
        first, second = (agent.agent.mirrors for agent in hosts.agents)
        goes_on, take = threading.Event(), second.take

        def wait(*piece: Any) -> None:
            assert goes_on.wait(100)
            take(*piece)

        monkeypatch.setattr(second, "take", wait)
        source = upload()
        assert checksum(source) == source.sum()
        (follower,) = first._followers
        wait_for(lambda: there(hosts)[0] == 1 + LARGE // UPLOAD_BYTES)
        assert follower.number is not None
        assert follower.number < there(hosts)[0]
        most = upload_relay.WINDOW_BYTES + UPLOAD_BYTES + 10_000
        assert 0 < follower.connection.pending < most
        goes_on.set()
        all_there(hosts, 0, 1)
        assert checksum(source) == source.sum()


def test_the_host_in_the_middle_is_lost_in_the_midst_of_an_upload(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    """The one behind it has the rest from elsewhere, and recovery's replay has the same bits."""
    with lazygt.session() as session:
        expected = train(session)
    with on(0, 1, 1, 1) as session:
        assert checksum(upload(MEGABYTE)) > 0
        all_there(hosts, 0, 1, 2)
        middle = hosts.agents[1].agent.mirrors
        take, last = middle.take, middle.number + 10

        def lose(told: Mirror, data: Any) -> None:
            if told.number <= last:  # a dead host takes nothing
                take(told, data)
            if told.number == last:
                hosts.lose(1)

        middle.take = lose  # type: ignore[method-assign]
        source = upload()
        assert checksum(source) == source.sum()
        session.synchronize()  # rank 0 may have had the sum before the loss was heard of
        assert there(hosts)[1] == last
        all_there(hosts, 0, 2)
        assert len(session.recoveries) == 1
        assert "host2 is lost" in session.recoveries[0].why
        assert train(session) == expected
        assert same_memory(hosts, session, 0, 2)
        # the chain is whole again: the last host follows the first
        before = sent(hosts)
        again = torch.full((LARGE // 8,), 3, device="cpu")
        assert int(again.to("lazygt").sum().item()) == again.sum()
        all_there(hosts, 0, 2)
        assert sent(hosts) - before < 1.1 * LARGE


def test_the_first_host_is_lost(on: Callable[..., lazygt.Session], hosts: Hosts) -> None:
    """Then the client sends to the next one, from what that has."""
    with on(0, 1, 1, 1) as session:
        assert checksum(upload(MEGABYTE)) > 0
        all_there(hosts, 0, 1, 2)
        hosts.lose(0)
        source = upload()
        before = sent(hosts)
        assert checksum(source) == source.sum()
        session.synchronize()
        all_there(hosts, 1, 2)
        assert len(session.recoveries) == 1
        assert sent(hosts) - before < 1.1 * LARGE
        assert same_memory(hosts, session, 1, 2)


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proxy]]:
    """What agents reach each other through, by the host that is followed."""
    with ExitStack() as undo:
        proxies: list[Proxy] = []
        listen = Mirrors._listen

        def through_a_proxy(mirrors: Mirrors, secret: str) -> str:
            proxies.append(Proxy(listen(mirrors, secret)))
            undo.callback(proxies[-1].close)
            return proxies[-1].address

        monkeypatch.setattr(Mirrors, "_listen", through_a_proxy)
        yield proxies


def before_pieces(mirrors: Mirrors, numbers: list[int], act: Callable[[], object]) -> None:
    """Do something just before a host takes certain pieces."""
    take = mirrors.take

    def hooked(told: Mirror, data: Any) -> None:
        if told.number in numbers:
            numbers.remove(told.number)
            act()
        take(told, data)

    mirrors.take = hooked  # type: ignore[method-assign]


def test_a_connection_between_agents_that_breaks_is_made_again(
    on: Callable[..., lazygt.Session], hosts: Hosts, proxies: list[Proxy]
) -> None:
    with on(0, 1, 1):
        assert checksum(upload(MEGABYTE)) > 0
        all_there(hosts, 0, 1)
        before = sent(hosts)
        cuts = [6, 21]
        before_pieces(
            hosts.agents[1].agent.mirrors, cuts, lambda: [proxy.cut() for proxy in proxies]
        )
        source = upload()
        assert checksum(source) == source.sum()
        all_there(hosts, 0, 1)
        assert cuts == []
        assert sent(hosts) - before < 1.1 * LARGE


def test_a_connection_between_agents_that_is_gone_for_good_is_done_without(
    on: Callable[..., lazygt.Session], hosts: Hosts, proxies: list[Proxy]
) -> None:
    """The client sends the rest, and what comes later; the session waits for nobody."""
    with on(0, 1, 1) as session:
        assert checksum(upload(MEGABYTE)) > 0
        all_there(hosts, 0, 1)
        before = sent(hosts)
        before_pieces(
            hosts.agents[1].agent.mirrors, [11], lambda: [proxy.close() for proxy in proxies]
        )
        source = upload()
        assert checksum(source) == source.sum()
        # who waits for an answer hears that the second host is alone
        wait_for(lambda: checksum(upload(MEGABYTE)) > 0 and len(set(there(hosts))) == 1)
        assert sent(hosts) - before > 1.3 * LARGE
        assert same_memory(hosts, session, 0, 1)
        assert session.recoveries == []


def test_hosts_that_can_not_reach_each_other_have_uploads_from_the_client(
    on: Callable[..., lazygt.Session],
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(upload_relay, "MEET_SECONDS", 0.3)
    listen = Mirrors._listen

    def elsewhere(mirrors: Mirrors, secret: str) -> str:
        assert listen(mirrors, secret)
        return "tcp://127.0.0.1:1"

    monkeypatch.setattr(Mirrors, "_listen", elsewhere)
    with caplog.at_level(logging.WARNING, "lazygt"), on(0, 1, 1, 1) as session:
        before = sent(hosts)
        source = upload()
        assert checksum(source) == source.sum()
        # who waits for an answer finds out that nobody can be followed
        wait_for(lambda: checksum(upload(MEGABYTE)) > 0 and len(set(there(hosts))) == 1)
        assert sent(hosts) - before > 3 * LARGE
        assert same_memory(hosts, session, 0, 1, 2)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert re.match(r"host host[23] can't reach host host[12] .*firewall", warnings[0])


def test_agents_without_listeners_get_uploads_from_client(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    hosts.address = ""
    source = upload(4 * MEGABYTE)
    with on(0, 1, 1) as session:
        assert checksum(source) == source.sum()
        all_there(hosts, 0, 1)
        assert sent(hosts) > 2 * source.nbytes
        assert same_memory(hosts, session, 0, 1)


# -- an agent's side alone -------------------------------------------------------------------


class Told:
    """A host's copy of uploads, and what it says to the client."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.said: list[Any] = []
        self.mirrors = Mirrors(address, lambda message, frames: self.said.append(message))

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        self.mirrors.close()


def test_pieces_count_once_and_in_order() -> None:
    with Told() as host:
        host.mirrors.begin(Begin(1, 7, "ab" * 32))
        host.mirrors.take(Mirror(MEGABYTE, 4096, 8), b"eight")
        host.mirrors.take(Mirror(MEGABYTE, 4096, 8), b"again")
        assert bytes(host.mirrors.arena(0).view(4096, 5).numpy()) == b"eight"
        with pytest.raises(ProtocolError, match="piece 10 of the uploads came after 8"):
            host.mirrors.take(Mirror(MEGABYTE, 4096, 10), b"early")
        host.mirrors.take(Mirror(MEGABYTE, 4096), b"uncounted")
        assert host.mirrors.number == 8


def test_follower_without_token_is_denied() -> None:
    with Told() as host:
        host.mirrors.begin(Begin(1, 0, "ab" * 32))
        (listens,) = host.said
        assert isinstance(listens, Listens)
        stranger, server = derived(b"another", "follower"), derived(b"\xab" * 32, "source").public
        with pytest.raises(AccessDenied):
            dial(zmq.Context.instance(), listens.endpoint, stranger, server, b"", MEGABYTE, 30)
        host.mirrors.begin(Begin(1))  # the session is over, and nothing listens any more
        with suppress(AccessDenied), pytest.raises(lazygt.errors.ConnectionLost):
            dial(zmq.Context.instance(), listens.endpoint, stranger, server, b"", MEGABYTE, 0.3)


def test_an_agent_without_an_address_neither_listens_nor_follows() -> None:
    """That of a pool: its clients don't choose where it connects."""
    with Told("") as host:
        assert host.mirrors.descriptors == ()
        for secret in ("ab" * 32, "no secret at all"):
            host.said.clear()
            host.mirrors.begin(Begin(1, 0, secret))
            host.mirrors.follow(Follow(3, "tcp://127.0.0.1:1"))
            assert host.said == [Listens(1, ""), Alone(1, 3, 0, True, "")]


# -- the way back ------------------------------------------------------------------------------


def test_a_fetched_value_comes_from_the_clients_own_host(
    on: Callable[..., lazygt.Session], hosts: Hosts
) -> None:
    """Whole, or in blocks of which others have copies."""
    mesh = {"data": 2, "model": 2}
    source = upload(4 * MEGABYTE)
    with on(2, 2, mesh=mesh) as session:
        value = source.to("lazygt") + 1
        block = lazygt.distribute(value, {"model": lazygt.Shard(0)})
        before = hosts.agents[0].end.other.bytes_sent
        assert torch.equal(value.cpu(), source + 1)
        assert torch.equal((block * 2).cpu(), 2 * source + 2)
        assert hosts.agents[0].end.other.bytes_sent - before < 100_000
        assert session.recoveries == []
