"""Sockets between ranks: what is sent arrives in order, a send never waits, an end is seen."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from lazygt.runtime.direct import Door, Peer

pytestmark = pytest.mark.timeout(60)

SECONDS = 20.0
LARGE = 8 << 20  # more than any socket takes without a reader


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    peers = Peer(ends[0], 1, SECONDS), Peer(ends[1], 0, SECONDS)
    yield peers
    for peer in peers:
        peer.close()


def received(peer: Peer, nbytes: int) -> bytes:
    room = bytearray(nbytes)
    peer.receive(memoryview(room))
    return bytes(room)


def test_messages_come_in_the_order_in_which_they_were_sent(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    here.send(memoryview(b"abc"))
    here.send(memoryview(b""))
    here.send_text("größer")
    here.send(memoryview(b"d"))
    assert received(there, 3) == b"abc"
    assert there.receive_text() == "größer"
    assert received(there, 1) == b"d"


def test_a_send_waits_for_no_reader_and_keeps_a_copy(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    data = bytearray(os.urandom(LARGE))
    sent = bytes(data)
    for peer in pair:  # both send before either reads
        peer.send(memoryview(data))
        peer.send(memoryview(b"and more"))
    data[:] = bytes(LARGE)
    for peer in (there, here):
        assert received(peer, LARGE) == sent
        assert received(peer, 8) == b"and more"
    here.send(memoryview(b"later"))
    assert received(there, 5) == b"later"


def test_who_has_left_is_named_after_what_it_sent(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    here.send(memoryview(b"last"))
    here.close()
    assert received(there, 4) == b"last"
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        received(there, 1)
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        there.send(memoryview(b"too late"))


def test_who_leaves_while_much_is_on_its_way_has_sent_all_of_it(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    data = os.urandom(LARGE)
    here.send(memoryview(data))
    here.close()  # does not wait for the reader
    assert received(there, LARGE) == data
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        received(there, 1)


def test_who_leaves_does_not_wait_for_one_who_never_reads(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    here.send(memoryview(bytes(LARGE)))
    here.close()
    there.close()
    assert here._thread is not None
    here._thread.join(SECONDS)
    assert not here._thread.is_alive()


def test_who_sends_nothing_is_not_waited_for_without_end() -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    here, there = Peer(ends[0], 1, 0.05), Peer(ends[1], 0, SECONDS)
    with pytest.raises(TimeoutError, match=r"rank 1 sent nothing for 0\.05 seconds"):
        received(here, 1)
    for peer in (here, there):
        peer.close()


def test_ranks_meet_at_their_doors() -> None:
    ranks = range(3)
    doors = [Door(rank, SECONDS) for rank in ranks]
    met: dict[int, dict[int, Peer]] = {}

    def meet(rank: int) -> None:
        others = [other for other in ranks if other != rank]
        met[rank] = doors[rank].meet(others, lambda other: doors[other].name)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for rank in ranks:
        for other, peer in met[rank].items():
            assert peer.rank == other
            peer.send_text(f"{rank} to {other}")
    for rank in ranks:
        for other, peer in met[rank].items():
            assert peer.receive_text() == f"{other} to {rank}"
    for peers in met.values():
        for peer in peers.values():
            peer.close()


def test_a_rank_that_does_not_come_is_not_waited_for_without_end() -> None:
    with pytest.raises(TimeoutError):
        Door(0, 0.05).meet([1], str)
