"""Ranks on several hosts meet: by UNIX sockets on a host, encrypted between; and no one else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lazygt.errors import SecurityError, StoreLost
from lazygt.net.channel import Keys, listen_local
from lazygt.net.sockets import Ends, PeerSocket
from lazygt.runtime.collectives.rendezvous import EncryptedPeer, Meeting, RankAddress
from lazygt.runtime.collectives.rendezvous_store import StoreClient, StoreServer
from lazygt.runtime.launch.start_plan import LinkSpec, StartPlan, nccl_interface

pytestmark = pytest.mark.timeout(60)

TOKEN = bytes(range(32))
HOST = "127.0.0.1"
SECONDS = 20.0
BACKEND = "host"

Meetings = Callable[..., list[Meeting]]


@pytest.fixture
def server() -> Iterator[StoreServer]:
    opened = StoreServer(HOST, TOKEN)
    yield opened
    opened.close()


@pytest.fixture
def meetings(server: StoreServer, tmp_path: Path) -> Iterator[Meetings]:
    """Makes the meetings of ranks, from a letter for the host of each."""
    opened: list[Meeting] = []

    def make(hosts: str, timeout: float = SECONDS) -> list[Meeting]:
        for rank, host in enumerate(hosts):
            opened.append(meeting(rank, host, server, tmp_path, timeout))
        return opened

    yield make
    for rank in opened:
        rank.close()


def meeting(rank: int, host: str, server: StoreServer, place: Path, timeout: float) -> Meeting:
    door = place / host / f"rendezvous{rank}"
    door.parent.mkdir(exist_ok=True)
    door.unlink(missing_ok=True)
    store = StoreClient(server.endpoint, TOKEN, timeout)
    where = RankAddress(host, str(door), HOST, BACKEND)
    return Meeting(rank, where, listen_local(door).fd, store, TOKEN, timeout)


def meet_all(ranks: list[Meeting], number: int = 0) -> list[dict[int, Ends]]:
    numbers = range(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(
            pool.map(lambda r: ranks[r].meet(number, [o for o in numbers if o != r]), numbers)
        )


def leave(met: list[dict[int, Ends]]) -> None:
    for ends in met:
        for peers in ends.values():
            for peer in peers:
                peer.close()


@pytest.mark.parametrize("hosts", ["aa", "ab", "aabb", "aaab", "abab"])
def test_ranks_of_a_host_meet_there_and_others_between_hosts(
    meetings: Meetings, server: StoreServer, hosts: str
) -> None:
    ranks = meetings(hosts)
    for number in (0, 1, 5):
        met = meet_all(ranks, number)
        for rank, ends in enumerate(met):
            for other, peers in ends.items():
                kind = PeerSocket if hosts[rank] == hosts[other] else EncryptedPeer
                for which, peer in enumerate(peers):
                    assert (type(peer), peer.rank) == (kind, other)
                    peer.send_text(f"{number}, {rank} to {other}, {which}")
        for rank, ends in enumerate(met):
            for other, peers in ends.items():
                for which, peer in enumerate(peers):
                    assert peer.receive_text() == f"{number}, {other} to {rank}, {which}"
        leave(met)
    assert server.refused == 0


def test_records_of_earlier_groups_are_removed(meetings: Meetings, server: StoreServer) -> None:
    ranks = meetings("abb")
    leave(meet_all(ranks, 0))
    left = ranks[0].store.num_keys()
    for number in range(1, 4):
        leave(meet_all(ranks, number))
    assert ranks[0].store.num_keys() == left == 3 + 3 + 1  # places, latest, and seats of rank 0


def test_a_rank_may_come_back_on_another_host(
    meetings: Meetings, server: StoreServer, tmp_path: Path
) -> None:
    ranks = meetings("aab")
    leave(meet_all(ranks, 0))
    ranks[1].close()
    ranks[1] = meeting(1, "b", server, tmp_path, SECONDS)
    met = meet_all(ranks, 1)
    assert isinstance(met[0][1].small, EncryptedPeer)
    assert isinstance(met[1][2].small, PeerSocket)
    met[2][1].single.send_text("here")
    assert met[1][2].single.receive_text() == "here"
    leave(met)


@pytest.mark.parametrize("hosts", ["ab", "aa"])
def test_early_rank_waits_for_later_group(meetings: Meetings, hosts: str) -> None:
    first, second = meetings(hosts)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(second.meet, 1, [0])
        with pytest.raises(ConnectionError, match="rank 1 came for a later group"):
            first.meet(0, [1])
        met = [first.meet(1, [1]), early.result(SECONDS)]
    met[0][1].small.send_text("welcome")
    assert met[1][0].small.receive_text() == "welcome"
    leave(met)


def test_rank_that_died_after_announcing_is_not_awaited(
    meetings: Meetings, server: StoreServer, tmp_path: Path
) -> None:
    """The other has read where the dead one listened, or listens for it; then it comes again."""
    for dead in (0, 1):
        ranks = meetings("ab")[-2:]
        ranks[dead]._publish_location(dead * 2)
        if dead == 0:
            public = Keys.generate().public
            ranks[0]._publish("seats/0/0", (public, {1: [f"tcp://{HOST}:1"] * 3}))
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(ranks[1 - dead].meet, dead * 2, [dead])
            ranks[dead]._publish_location(dead * 2 + 1)
            with pytest.raises(ConnectionError, match=f"rank {dead} came for a later group"):
                waits.result(SECONDS)


@pytest.mark.parametrize("hosts", ["ab", "aa"])
def test_a_rank_that_does_not_come_is_not_waited_for_without_end(
    meetings: Meetings, hosts: str
) -> None:
    for rank, alone in enumerate(meetings(hosts, 0.05)):
        with pytest.raises(TimeoutError, match=rf"rank {1 - rank} did not come within 0\.05"):
            alone.meet(rank, [1 - rank])


def test_a_store_that_has_gone_is_said_to_be_lost(meetings: Meetings, server: StoreServer) -> None:
    (rank,) = meetings("a")
    rank.store._silence = 0.3
    server.close()
    with pytest.raises(StoreLost):
        rank.meet(0, [1])


def test_stranger_without_token_joins_no_group(meetings: Meetings) -> None:
    """Not even one who knows where a rank listens and with which key."""
    (rank,) = meetings("a")
    rank.store.set("place/0/1", json.dumps(RankAddress("b", "", HOST, BACKEND)))
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(rank.meet, 0, [1])
        public, endpoints = json.loads(rank.store.get("seats/0/0"))
        strangers = [
            EncryptedPeer(0, SECONDS, Keys(public, ""), endpoint) for endpoint in endpoints["1"]
        ]
        for stranger in strangers:
            stranger.send(memoryview(bytes(32)))
        with pytest.raises(ConnectionError, match="who came as rank 1 does not know the session's"):
            met.result(SECONDS)
    for stranger in strangers:
        with pytest.raises(ConnectionError, match="rank 0 has left"):
            stranger.receive(memoryview(bytearray(1)))
        stranger.close()


def test_strangers_at_rank_endpoint_are_ignored(meetings: Meetings) -> None:
    """Strangers come before the rank and after it, and leave while it is there."""
    first, second = meetings("ab")
    first.store.set("place/0/1", json.dumps(second._location))
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(first.meet, 0, [1])]
        _, endpoints = json.loads(first.store.get("seats/0/0"))
        strangers = [noise(endpoint) for endpoint in endpoints["1"] for _ in range(3)]
        met.append(pool.submit(second.meet, 0, [0]))
        (ends, others) = (each.result(SECONDS) for each in met)
        strangers += [noise(endpoint) for endpoint in endpoints["1"]]
    for which in range(3):
        ends[1][which].send_text("still")
        assert others[0][which].receive_text() == "still"
    for stranger in strangers:
        stranger.close()
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(ends[1].small.receive_text)
        others[0].small.send_text("here")
        assert heard.result(SECONDS) == "here"
    leave([ends, others])


def noise(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    stranger = socket.create_connection((host, int(port)))
    stranger.sendall(b"\xff" * 512)
    return stranger


def test_blocked_reader_wakes_when_this_rank_leaves(meetings: Meetings) -> None:
    met = meet_all(meetings("ab"))
    reading = threading.Event()
    peer = met[0][1].large
    assert isinstance(peer, EncryptedPeer)
    with ThreadPoolExecutor(1) as pool:

        def read() -> None:
            reading.set()
            peer.receive(memoryview(bytearray(1)))

        waits = pool.submit(read)
        assert reading.wait(SECONDS)
        peer.close()
        with pytest.raises(ConnectionError, match="rank 1 has left"):
            waits.result(SECONDS)
    leave(met)


def test_ranks_that_would_talk_through_different_things_do_not_wait(meetings: Meetings) -> None:
    first, second = meetings("ab")
    second._location = second._location._replace(backend="nccl")
    with pytest.raises(ConnectionError, match="rank 0 on host a talks through 'host', rank 1 on"):
        meet_all([first, second])


@pytest.mark.parametrize("address", ["0.0.0.0", "::", ""])
def test_no_rank_listens_on_all_interfaces(
    address: str, server: StoreServer, tmp_path: Path
) -> None:
    store = StoreClient(server.endpoint, TOKEN, SECONDS)
    with pytest.raises(SecurityError, match="one interface"):
        Meeting(0, RankAddress("a", "", address, BACKEND), -1, store, TOKEN, SECONDS)
    store.close()


# -- what a host's workers are told ----------------------------------------------------------------


def test_a_worker_alone_on_its_host_has_a_group_where_there_are_others(tmp_path: Path) -> None:
    spec = LinkSpec(2, mesh="workers=2", ranks=(1,), store="tcp://10.0.0.1:7", host="b",
                    address="10.0.0.2", token=TOKEN)  # fmt: skip
    group = StartPlan(spec, tmp_path, TOKEN)._group()
    assert group is not None
    assert (group.store, group.host, group.address, group.token) == (
        "tcp://10.0.0.1:7", "b", "10.0.0.2", TOKEN.hex(),
    )  # fmt: skip
    assert "0102" not in repr(spec) + repr(group)  # nor in a log
    alone = StartPlan(LinkSpec(2, mesh="workers=2"), tmp_path, TOKEN)._group()
    assert alone is not None
    assert (alone.store, alone.token) == ("", "")


def test_nccl_listens_where_the_other_ranks_are() -> None:
    assert nccl_interface("") == "=lo"
    assert nccl_interface("127.0.0.1") == "=lo"
    assert nccl_interface("192.0.2.1") == ""  # nobody's here (RFC 5737): NCCL chooses
