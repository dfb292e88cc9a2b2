"""Connections between ranks, on a host and between hosts: what is sent arrives in order, a send
never waits, an end is seen.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from lazygt.net.channel import listen_local
from lazygt.net.sockets import (
    Ends,
    Peer,
    PeerSocket,
    Rendezvous,
    first_to_leave,
)
from lazygt.runtime.collectives.rendezvous import _connect
from tests.runtime.collectives.encrypted_peers import encrypted
from tests.support.descriptors import descriptors_before, open_descriptors
from tests.support.forking import ROOT

pytestmark = pytest.mark.timeout(60)

SECONDS = 20.0
LARGE = 8 << 20  # more than any socket takes without a reader


Pair = tuple[Peer, Peer]


@pytest.fixture(params=["sockets", "encrypted"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Ranks 0 and 1, each as the other sees it: first what is at rank 0's end."""
    peers = encrypted(SECONDS) if request.param == "encrypted" else connected(SECONDS)
    yield peers
    for peer in peers:
        peer.close()


def connected(timeout: float) -> tuple[PeerSocket, PeerSocket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return PeerSocket(ends[0], 1, timeout), PeerSocket(ends[1], 0, timeout)


def received(peer: PeerSocket, nbytes: int) -> bytes:
    room = bytearray(nbytes)
    peer.receive(memoryview(room))
    return bytes(room)


def test_messages_arrive_in_sending_order(
    pair: Pair,
) -> None:
    here, there = pair
    here.send(memoryview(b"abc"))
    here.send(memoryview(b""))
    here.send_text("größer")
    here.send(memoryview(b"d"))
    assert received(there, 3) == b"abc"
    assert there.receive_text() == "größer"
    assert received(there, 1) == b"d"


def test_a_send_waits_for_no_reader_and_keeps_a_copy(pair: Pair) -> None:
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


def test_departed_peer_is_named_after_its_last_message(pair: Pair) -> None:
    here, there = pair
    here.send(memoryview(b"last"))
    here.close()
    assert received(there, 4) == b"last"
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        received(there, 1)
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        there.send(memoryview(b"too late"))


def test_close_delivers_pending_messages(
    pair: Pair,
) -> None:
    here, there = pair
    data = os.urandom(LARGE)
    here.send(memoryview(data))
    here.close()  # does not wait for the reader
    assert received(there, LARGE) == data
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        received(there, 1)


def test_close_does_not_wait_for_reader() -> None:
    here, there = connected(SECONDS)
    here.send(memoryview(bytes(LARGE)))
    here.close()
    there.close()
    assert here._thread is not None
    here._thread.join(SECONDS)
    assert not here._thread.is_alive()


@pytest.mark.parametrize("make", [connected, encrypted])
def test_silent_peer_times_out(make: Callable[[float], Pair]) -> None:
    here, there = make(0.05)
    with pytest.raises(TimeoutError, match=r"rank 1 sent nothing for 0\.05 seconds"):
        received(here, 1)
    for peer in (here, there):
        peer.close()


Doors = Callable[..., list[Rendezvous]]


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    """Makes the doors of so many ranks."""
    made: list[Rendezvous] = []

    def place(rank: int) -> str:
        return str(tmp_path / f"rendezvous{rank}")

    def make(count: int, timeout: float = SECONDS) -> list[Rendezvous]:
        for rank in range(count):
            listener = listen_local(Path(place(rank))).fd
            made.append(Rendezvous(rank, listener, place, timeout))
        return made

    yield make
    for rendezvous in made:
        rendezvous.close()


def meet_all(doors: list[Rendezvous], number: int = 0) -> list[dict[int, Ends]]:
    ranks = range(len(doors))
    with ThreadPoolExecutor(len(doors)) as pool:
        return list(
            pool.map(lambda rank: doors[rank].meet(number, [r for r in ranks if r != rank]), ranks)
        )


def leave(met: list[dict[int, Ends]]) -> None:
    for ends in met:
        for peers in ends.values():
            for peer in peers:
                peer.close()


@pytest.mark.parametrize("numbers", [[0], [0, 1, 5]])
def test_ranks_meet_at_their_doors(doors: Doors, numbers: list[int]) -> None:
    there = doors(3)
    for number in numbers:
        met = meet_all(there, number)
        for rank, ends in enumerate(met):
            for other, peers in ends.items():
                for which, peer in enumerate(peers):
                    assert peer.rank == other
                    peer.send_text(f"{number}, {rank} to {other}, {which}")
        for rank, ends in enumerate(met):
            for other, peers in ends.items():
                for which, peer in enumerate(peers):
                    assert peer.receive_text() == f"{number}, {other} to {rank}, {which}"
        leave(met)


def test_early_rank_waits_for_later_group(doors: Doors) -> None:
    first, second = doors(2)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(second.meet, 1, [0])
        with pytest.raises(ConnectionError, match="rank 1 came for a later group"):
            first.meet(0, [1])
        met = [first.meet(1, [1]), early.result(SECONDS)]
    met[0][1].small.send_text("welcome")
    assert met[1][0].small.receive_text() == "welcome"
    leave(met)


def test_rank_coming_for_abandoned_group_is_told(doors: Doors) -> None:
    first, second = doors(2)
    end = second._connect(3, 0, 0)
    first._timeout = 0.05
    with pytest.raises(TimeoutError):
        first.meet(4, [1])
    with end, pytest.raises(ConnectionError, match="rank 0 has left"):
        second._await_welcome(end, 0)


def test_ranks_of_failed_group_leave_no_descriptors(doors: Doors) -> None:
    first, *others = made = doors(3, timeout=0.5)
    before = descriptors_before()
    with ThreadPoolExecutor(2) as pool:  # the second rank stays away
        late = [pool.submit(rendezvous.meet, 0, ranks) for rendezvous, ranks in
                [(first, [1, 2]), (others[1], [0])]]  # fmt: skip
        assert all(isinstance(each.exception(), TimeoutError) for each in late)
    leave(meet_all(made, 1))
    assert open_descriptors() <= before


def test_a_rank_that_does_not_come_is_not_waited_for_without_end(doors: Doors) -> None:
    first, second = doors(2, 0.05)
    for rendezvous, other in ((first, 1), (second, 0)):
        with pytest.raises(TimeoutError, match=rf"rank {other} did not come within 0\.05 seconds"):
            rendezvous.meet(0, [other])


def test_ranks_queue_at_a_door_that_has_no_room(doors: Doors) -> None:
    there = doors(5)
    for rendezvous in there:
        rendezvous._listener.listen(0)
    met = meet_all(there)
    for rank, ends in enumerate(met):
        for peers in ends.values():
            peers.large.send_text(f"from {rank}")
    for ends in met:
        assert [peers.large.receive_text() for peers in ends.values()] == [
            f"from {rank}" for rank in ends
        ]
    leave(met)


def test_full_rendezvous_socket_times_out(doors: Doors) -> None:
    first, second = doors(2, 0.05)
    first._listener.listen(0)
    waiting = second._connect(0, 0, 0)
    with waiting, pytest.raises(TimeoutError, match="rank 0 did not come"):
        second.meet(0, [0])


def test_strangers_at_rendezvous_are_ignored(doors: Doors, tmp_path: Path) -> None:
    first, second = doors(2)
    for said in (b"", b"hello", bytes(16)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(tmp_path / "rendezvous0"))
            stranger.sendall(said)
    met = meet_all([first, second])
    met[0][1].single.send_text("you")
    assert met[1][0].single.receive_text() == "you"
    leave(met)


def test_descriptors_are_sent_between_ranks() -> None:
    here, there = connected(SECONDS)
    read, write = os.pipe()
    here.send_descriptor(write)
    mine = there.receive_descriptor()
    assert not os.get_inheritable(mine)
    os.write(mine, b"through")
    assert os.read(read, 7) == b"through"
    for fd in (read, write, mine):
        os.close(fd)
    here.close()
    with pytest.raises(ConnectionError, match="rank 0 has left"):
        there.receive_descriptor()
    there.close()


def test_peer_that_dies_with_messages_unread_does_not_abort_the_one_that_closed() -> None:
    """ZMQ's heartbeats did: their timer wrote to the socket that had failed (libzmq issue 4364)."""
    command = [sys.executable, "-m", "tests.runtime.collectives.closing_rank"]
    with (
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as rank,
        zmq.Context() as context,
        context.socket(zmq.PAIR) as peer,
    ):
        assert rank.stdin is not None
        assert rank.stdout is not None
        endpoint, public = rank.stdout.readline().rstrip("\n").split(" ", 1)
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.SNDHWM, 1)
        peer.setsockopt(zmq.LINGER, 0)
        _connect(peer, endpoint, public)
        peer.send(b"1")
        assert rank.stdout.readline() == "closed\n"
        while peer.poll(1_000, zmq.POLLOUT):  # until nobody takes it there
            peer.send(bytes(1 << 16))
        peer.close()
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(5)  # the heartbeats came each 2 s
        rank.stdin.write("\n")
        rank.stdin.close()
        assert rank.wait(30) == 0


def test_the_first_rank_to_leave_is_told() -> None:
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    peers = [PeerSocket(end, rank, 10.0) for rank, end in enumerate(ours, 1)]
    assert first_to_leave(peers, lambda: True) is None
    theirs[0].send(b"no farewell")
    theirs[1].close()
    assert first_to_leave(peers, lambda: False) == 2
    for each in (*peers, theirs[0]):
        each.close()
