"""Rendezvous of ranks on several hosts, for UNIX sockets and encrypted connections.

Ranks of one host use UNIX sockets, ranks of different hosts encrypted connections.

For each group anew, every rank publishes in the session's store its host, and its socket for others
of its host. Of two ranks on different hosts the lower one listens, and publishes in the store its
endpoint and key. Both then prove to each other that they know the session's token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from lazygt.runtime.collectives.rendezvous_store import StoreClient, check_interface, keep_alive
from lazygt.runtime.collectives.sockets import Ends, Peer, Rendezvous
from lazygt.runtime.launch.channel import Keys

# -- connections between two ranks on different hosts: bytes in order, over TCP, with CURVE --------
# Each connection is one ZMQ PAIR. The rank that listens has a seat (a listening socket) for each
# connection that it awaits; its key is fresh, and known only to readers of the session's store.
# Others fail in the handshake, before they get the seat. ZMQ's own thread sends, encrypts and
# receives, so that a send never waits. A broken connection is never restored: the data then in
# flight is unknown.

CHUNK_BYTES = 256 << 10
"""Of a message of ZMQ's: so much is encrypted while what came before is on its way."""

_COPY_BELOW = 64 << 10  # bytes; pyzmq's way without a copy costs more than it saves for less
_MOST_THREADS = 4  # each encrypts some 400 MB a second, of connections of its own
_MOST_SOCKETS = 1 << 14  # a connection takes three of ZMQ's
_HANDSHAKE_MS = 30_000
_NEVER_MS = 1 << 29  # six days
_LEAVES = b""  # a message: nothing follows
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

_Context = zmq.Context[zmq.Socket[bytes]]


@cache
def context() -> _Context:
    """Return the ZMQ context of this process's connections to other ranks.

    It is never ended, since messages of ranks that leave may still be in flight.
    """
    cores = len(os.sched_getaffinity(0))
    shared: _Context = zmq.Context(min(max(cores // 2, 1), _MOST_THREADS))
    shared.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
    return shared


class EncryptedPeer(Peer):
    """Rank of another host.

    Args:
        keys: the listener's keys; the other side has only the public one.
        endpoint: endpoint at which the other listens; None: this rank listens.
        address: the IP address at which this rank listens.

    Attributes:
        endpoint: endpoint of the listener.
        sent_messages, sent_bytes: totals so far.
    """

    def __init__(
        self, rank: int, timeout: float, keys: Keys, endpoint: str | None = None, address: str = ""
    ) -> None:
        super().__init__(rank, timeout)
        self.sent_messages = self.sent_bytes = 0
        self._listens = endpoint is None
        self._socket = _pair(timeout, ipv6=":" in address or "[" in (endpoint or ""))
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_EVENTS)
        #: held for each use of either socket, which is short: no wait happens under it
        self._lock = threading.Lock()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        for fd in (self._socket.FD, self._monitor.FD, self._wakes):
            self._poller.register(fd, select.POLLIN)
        self._arrived = memoryview(b"")
        #: descriptors of the connections there are, strangers' too; and the peer's, once it spoke
        self._open: set[int] = set()
        self._peers: int | None = None
        self._reading = self._ended = self._closed = False
        try:
            self.endpoint = _listen(self._socket, address, keys) if endpoint is None else endpoint
            if endpoint is not None:
                _connect(self._socket, endpoint, keys.public)
        except BaseException:
            self.close()
            raise

    def send(self, data: memoryview, *, given: bool = False) -> None:
        """See `Peer`: ZMQ's thread sends."""
        with self._lock:
            if self._ended or self._closed:
                raise self._left()
            for start in range(0, len(data), CHUNK_BYTES):
                piece = data[start : start + CHUNK_BYTES]
                try:
                    self._socket.send(
                        piece, zmq.NOBLOCK, copy=not given or len(piece) < _COPY_BELOW
                    )
                except zmq.ZMQError as error:
                    raise self._left() from error
                self.sent_messages += 1
                self.sent_bytes += len(piece)
            # a send may swallow the descriptor's signal of arrivals
            if self._reading and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._wake()

    def receive(self, room: memoryview) -> None:
        """See `Peer`."""
        done = 0
        self.awaited = True
        try:
            while done < len(room):
                if not self._arrived and not self.arrives(self._timeout):
                    raise self._silent()
                count = min(len(self._arrived), len(room) - done)
                room[done : done + count] = self._arrived[:count]
                self._arrived = self._arrived[count:]
                done += count
        finally:
            self.awaited = False

    def arrives(self, seconds: float) -> bool:
        """Wait for the other's next bytes; return whether some have arrived.

        Raises:
            ConnectionError: the other rank has left.
        """
        until = time.monotonic() + seconds
        while not self._arrived:
            if self._take():
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            if any(fd == self._wakes for fd, _ in self._poller.poll(left * 1000)):
                with suppress(OSError):  # closed: `_take` notices that
                    os.eventfd_read(self._wakes)
        return True

    def close(self) -> None:
        """See `Peer`: ZMQ's thread goes on until the timeout at most."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with suppress(zmq.ZMQError):  # it has left before
                self._socket.send(_LEAVES, zmq.NOBLOCK)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()
            if self._reading:
                self._wake()
            else:
                os.close(self._wakes)

    def _take(self) -> bool:
        """Take a message if there is one; otherwise prepare to wait for it."""
        with self._lock:
            if self._closed and self._reading:
                os.close(self._wakes)
                self._reading = False
            if self._ended or self._closed:
                raise self._left()
            frame = self._received()
            # the last messages come before the connection's end, and are looked for after it
            if frame is None and self._is_gone():
                frame = self._received()
                self._ended = frame is None
            if frame is not None:
                self._ended = not len(frame.buffer)
                self._arrived = memoryview(frame.buffer)
            self._reading = frame is None and not self._ended
            if self._ended:
                raise self._left()
            return frame is not None

    def _received(self) -> zmq.Frame | None:
        try:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if self._peers is None:
            self._peers = int(frame.get(zmq.SRCFD))
        return frame

    def _is_gone(self) -> bool:
        """Return whether the connection has ended.

        Strangers' connections at a seat come and go, too.
        """
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._open.discard(event["value"])
                    if not self._listens:
                        self._peers = event["value"]
                else:
                    self._open.add(event["value"])
        return self._peers is not None and self._peers not in self._open

    def _wake(self) -> None:
        os.eventfd_write(self._wakes, 1)


def _pair(timeout: float, ipv6: bool) -> zmq.Socket[bytes]:
    pair = context().socket(zmq.PAIR)
    pair.setsockopt(zmq.LINGER, round(timeout * 1000))
    pair.setsockopt(zmq.SNDHWM, 0)
    pair.setsockopt(zmq.RCVHWM, 0)
    pair.setsockopt(zmq.IPV6, ipv6)
    pair.setsockopt(zmq.MAXMSGSIZE, 2 * CHUNK_BYTES)
    pair.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    pair.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)  # -1 would drop unread messages
    keep_alive(pair)
    return pair


def _listen(pair: zmq.Socket[bytes], address: str, keys: Keys) -> str:
    """Listen at a free port; return the endpoint."""
    pair.setsockopt(zmq.CURVE_SERVER, 1)
    pair.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    pair.bind(f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*")
    return str(pair.getsockopt_string(zmq.LAST_ENDPOINT))


def _connect(pair: zmq.Socket[bytes], endpoint: str, public: str) -> None:
    keys = Keys.generate()
    pair.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    pair.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    pair.setsockopt_string(zmq.CURVE_SERVERKEY, public)
    pair.connect(endpoint)


# -- rendezvous of ranks on several hosts, for UNIX sockets and encrypted connections --------------

_LOOK_SECONDS = 0.5  # between two checks that an awaited rank has not joined a later group
_WHICH = range(len(Ends._fields))
_PROOF_BYTES = 32


class Place(NamedTuple):
    """Location of a rank.

    Attributes:
        host: id of its host.
        door: path of its UNIX socket for other ranks of its host.
        address: IP address at which it listens for other hosts.
        backend: name of its backend, see ``backends``.
    """

    host: str
    door: str
    address: str
    backend: str


class Meeting:
    """Rendezvous of this rank with others on any host, in this group and all later ones.

    Args:
        place: location of this rank.
        listener: a descriptor of the socket at ``place.door``, closed with this.
        store: the session's store, closed with this.
        token: the session's secret.
        timeout: seconds to wait for another rank.

    Raises:
        SecurityError: the address is not that of one interface.
    """

    def __init__(
        self,
        rank: int,
        place: Place,
        listener: int,
        store: StoreClient,
        token: bytes,
        timeout: float,
    ) -> None:
        check_interface(place.address)
        self.store = store
        self._rank, self._place, self._token, self._timeout = rank, place, token, timeout
        self._doors: dict[int, str] = {}
        self._local = Rendezvous(rank, listener, self._doors.__getitem__, timeout)
        self._told: list[str] = []

    def meet(self, number: int, others: Collection[int]) -> dict[int, Ends]:
        """Connect with other ranks, all of which do the same for the group of this number.

        Raises:
            OSError: a rank could not be reached, or did not come in time; or the store was lost.
        """
        self._tell(number)
        places = self._places(number, others)
        self._check_backends(places)
        self._doors.clear()
        self._doors.update({rank: place.door for rank, place in places.items()})
        here = [rank for rank in others if places[rank].host == self._place.host]
        there = [rank for rank in others if rank not in here]
        with ExitStack() as undo:
            ends = self._meet_others(number, there, undo)
            ends |= self._local.meet(number, here)
            undo.pop_all()
        return ends

    def close(self) -> None:
        """Stop accepting other ranks. Idempotent."""
        self._local.close()
        self.store.close()

    # -- locations -------------------------------------------------------------------------------

    def _tell(self, number: int) -> None:
        """Publish this rank's location, and delete its entries of earlier groups."""
        for name in self._told:
            self.store.delete_key(name)
        self._told.clear()
        self._say(f"place/{number}/{self._rank}", self._place)
        self.store.set(f"latest/{self._rank}", str(number))

    def _say(self, name: str, what: Any) -> None:
        self._told.append(name)
        self.store.set(name, json.dumps(what))

    def _places(self, number: int, others: Collection[int]) -> dict[int, Place]:
        said = self._said(number, {rank: f"place/{number}/{rank}" for rank in others})
        return {rank: Place(*what) for rank, what in said.items()}

    def _said(self, number: int, names: dict[int, str]) -> dict[int, Any]:
        """Wait until all of these names are set in the store; return the values by rank."""
        until = time.monotonic() + self._timeout
        while True:
            try:
                self.store.wait(list(names.values()), timedelta(seconds=_LOOK_SECONDS))
                break
            except TimeoutError:
                late = [rank for rank, name in names.items() if not self.store.check([name])]
                self._check_current(number, late)
                if late and time.monotonic() >= until:
                    raise self._too_late(late[0]) from None
        return {rank: json.loads(self.store.get(name)) for rank, name in names.items()}

    def _check_backends(self, places: dict[int, Place]) -> None:
        """Raise ConnectionError if ranks have different backends: they would never meet.

        That happens if one host has too few GPUs for NCCL.
        """
        backend = self._place.backend
        for rank, place in places.items():
            if place.backend != backend:
                raise ConnectionError(
                    f"rank {self._rank} on host {self._place.host} talks through {backend!r}, rank "
                    f"{rank} on host {place.host} through {place.backend!r}: every host needs a "
                    f"GPU for each of its workers, or none may have that"
                )

    def _check_current(self, number: int, ranks: Iterable[int]) -> None:
        """Raise ConnectionError if one of the ranks is in a later group."""
        for rank in ranks:
            name = f"latest/{rank}"
            if self.store.check([name]) and int(self.store.get(name)) > number:
                raise ConnectionError(f"rank {rank} came for a later group: it had died before")

    def _too_late(self, rank: int) -> TimeoutError:
        return TimeoutError(f"rank {rank} did not come within {self._timeout:g} seconds")

    # -- ranks of other hosts --------------------------------------------------------------------

    def _meet_others(
        self, number: int, others: Collection[int], undo: ExitStack
    ) -> dict[int, Ends]:
        """Connect with ranks on other hosts; ``undo`` closes the connections."""
        higher = [rank for rank in others if rank > self._rank]
        seats = self._seats(number, higher, undo)
        lower = {rank: f"seats/{number}/{rank}" for rank in others if rank < self._rank}
        for rank, (public, endpoints) in self._said(number, lower).items():
            for which, endpoint in zip(_WHICH, endpoints[str(self._rank)], strict=True):
                keys = Keys(public, "")
                seat = EncryptedPeer(rank, self._timeout, keys, endpoint)
                undo.callback(seat.close)
                seat.send(memoryview(self._proof(number, self._rank, rank, which, endpoint)))
                seats[rank, which] = seat
        for (rank, which), seat in seats.items():
            if rank > self._rank:
                self._check_proof(number, seat, which)
                proof = self._proof(number, self._rank, rank, which, seat.endpoint)
                seat.send(memoryview(proof))
        for (rank, which), seat in seats.items():
            if rank < self._rank:
                self._check_proof(number, seat, which)
        return {rank: Ends(*(seats[rank, which] for which in _WHICH)) for rank in others}

    def _seats(
        self, number: int, ranks: Collection[int], undo: ExitStack
    ) -> dict[tuple[int, int], EncryptedPeer]:
        """Listen for these ranks, and publish the endpoints."""
        if not ranks:
            return {}
        keys, seats = Keys.generate(), {}
        for rank, which in product(ranks, _WHICH):
            seat = EncryptedPeer(rank, self._timeout, keys, address=self._place.address)
            undo.callback(seat.close)
            seats[rank, which] = seat
        endpoints = {rank: [seats[rank, which].endpoint for which in _WHICH] for rank in ranks}
        self._say(f"seats/{number}/{self._rank}", (keys.public, endpoints))
        return seats

    def _proof(self, number: int, teller: int, listener: int, which: int, endpoint: str) -> bytes:
        """Return proof of knowing the token, for one connection in one direction."""
        about = json.dumps([number, teller, listener, which, endpoint]).encode()
        return hashlib.blake2b(about, key=self._token, digest_size=_PROOF_BYTES).digest()

    def _check_proof(self, number: int, peer: EncryptedPeer, which: int) -> None:
        until = time.monotonic() + self._timeout
        while not peer.arrives(_LOOK_SECONDS):
            self._check_current(number, [peer.rank])
            if time.monotonic() >= until:
                raise self._too_late(peer.rank)
        room = bytearray(_PROOF_BYTES)
        peer.receive(memoryview(room))
        expected = self._proof(number, peer.rank, self._rank, which, peer.endpoint)
        if not hmac.compare_digest(bytes(room), expected):
            raise ConnectionError(f"who came as rank {peer.rank} does not know the session's token")
