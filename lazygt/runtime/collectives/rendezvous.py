"""Rendezvous of ranks on several hosts.

Ranks of one host use UNIX sockets, ranks of different hosts encrypted connections.

For each group, every rank publishes its host and the path of its UNIX socket in the session's
store. Of two ranks on different hosts the lower one listens, and publishes its endpoint and public
key in the store. Then each proves to the other that it knows the session's token.
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

from lazygt.net.channel import COPY_BELOW, Keys, probe
from lazygt.net.sockets import Ends, Peer, Rendezvous
from lazygt.runtime.collectives.rendezvous_store import StoreClient, check_interface

# -- encrypted connections: byte streams between two hosts, over TCP with CURVE --------------------
# Each connection is one ZMQ PAIR. The listening rank has one socket (a seat) for each expected
# connection, with a new key that only readers of the session's store know. Others fail in the
# handshake. ZMQ's own thread sends, encrypts and receives, so that a send never waits. A broken
# connection is never restored, since the data in flight is unknown.

CHUNK_BYTES = 256 << 10
"""Bytes of one ZMQ message: one is encrypted while the message before is in flight."""

_MAX_THREADS = 4  # each encrypts about 400 MB a second
_MAX_SOCKETS = 1 << 14  # a connection takes three of ZMQ's
_HANDSHAKE_MS = 30_000
_SILENT_SECONDS = 15
_NO_RECONNECT_MS = 1 << 29  # six days
_LEAVE_MESSAGE = b""  # the last message of a connection
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

_Context = zmq.Context[zmq.Socket[bytes]]


@cache
def context() -> _Context:
    """Return the ZMQ context of this process's connections to other ranks.

    It is never ended, since messages of ranks that leave may still be in flight.
    """
    cores = len(os.sched_getaffinity(0))
    shared: _Context = zmq.Context(min(max(cores // 2, 1), _MAX_THREADS))
    shared.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return shared


class EncryptedPeer(Peer):
    """Encrypted connection to a rank on another host.

    Args:
        keys: the listener's keys; the other side has only the public one.
        endpoint: endpoint at which the peer listens; None: this rank listens.
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
        #: lock of both sockets; no thread waits for data while it owns the lock
        self._lock = threading.Lock()
        self._wake_eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        for fd in (self._socket.FD, self._monitor.FD, self._wake_eventfd):
            self._poller.register(fd, select.POLLIN)
        self._arrived = memoryview(b"")
        #: descriptors of all open connections, strangers' included, and the peer's, once known
        self._open_descriptors: set[int] = set()
        self._peer_descriptor: int | None = None
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
                raise self._left_error()
            for start in range(0, len(data), CHUNK_BYTES):
                piece = data[start : start + CHUNK_BYTES]
                try:
                    copy = not given or len(piece) < COPY_BELOW
                    self._socket.send(piece, zmq.NOBLOCK, copy=copy)
                except zmq.ZMQError as error:
                    raise self._left_error() from error
                self.sent_messages += 1
                self.sent_bytes += len(piece)
            # a send may consume the descriptor's signal of arrivals
            if self._reading and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._wake()

    def receive(self, room: memoryview) -> None:
        """See `Peer`."""
        done = 0
        self.awaited = True
        try:
            while done < len(room):
                if not self._arrived and not self.arrives(self._timeout):
                    raise self._timeout_error()
                count = min(len(self._arrived), len(room) - done)
                room[done : done + count] = self._arrived[:count]
                self._arrived = self._arrived[count:]
                done += count
        finally:
            self.awaited = False

    def arrives(self, seconds: float) -> bool:
        """Wait for the peer's next bytes; return whether some have arrived.

        Raises:
            ConnectionError: the other rank has left.
        """
        deadline = time.monotonic() + seconds
        while not self._arrived:
            if self._receive_next():
                return True
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            if any(fd == self._wake_eventfd for fd, _ in self._poller.poll(remaining * 1000)):
                with suppress(OSError):  # closed: `_receive_next` notices that
                    os.eventfd_read(self._wake_eventfd)
        return True

    def close(self) -> None:
        """See `Peer`: ZMQ's thread goes on until the timeout at most."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with suppress(zmq.ZMQError):  # it has left before
                self._socket.send(_LEAVE_MESSAGE, zmq.NOBLOCK)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()
            if self._reading:
                self._wake()
            else:
                os.close(self._wake_eventfd)

    def _receive_next(self) -> bool:
        """Receive a message if there is one; return False to make the caller poll."""
        with self._lock:
            if self._closed and self._reading:
                os.close(self._wake_eventfd)
                self._reading = False
            if self._ended or self._closed:
                raise self._left_error()
            frame = self._next_frame()
            # the last messages arrive before the end, so look again after it
            if frame is None and self._has_disconnected():
                frame = self._next_frame()
                self._ended = frame is None
            if frame is not None:
                self._ended = not len(frame.buffer)
                self._arrived = memoryview(frame.buffer)
            self._reading = frame is None and not self._ended
            if self._ended:
                raise self._left_error()
            return frame is not None

    def _next_frame(self) -> zmq.Frame | None:
        """Return a message that has arrived; None if there is none."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if self._peer_descriptor is None:
            self._peer_descriptor = int(frame.get(zmq.SRCFD))
        return frame

    def _has_disconnected(self) -> bool:
        """Return whether the peer's connection has ended.

        Connections of strangers to the listening socket are ignored.
        """
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._open_descriptors.discard(event["value"])
                    if not self._listens:
                        self._peer_descriptor = event["value"]
                else:
                    self._open_descriptors.add(event["value"])
        return (
            self._peer_descriptor is not None
            and self._peer_descriptor not in self._open_descriptors
        )

    def _wake(self) -> None:
        os.eventfd_write(self._wake_eventfd, 1)


def _pair(timeout: float, ipv6: bool) -> zmq.Socket[bytes]:
    """Create a PAIR socket with the options of both ends."""
    pair = context().socket(zmq.PAIR)
    pair.setsockopt(zmq.LINGER, round(timeout * 1000))
    pair.setsockopt(zmq.SNDHWM, 0)
    pair.setsockopt(zmq.RCVHWM, 0)
    pair.setsockopt(zmq.IPV6, ipv6)
    pair.setsockopt(zmq.MAXMSGSIZE, 2 * CHUNK_BYTES)
    pair.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    pair.setsockopt(zmq.RECONNECT_IVL, _NO_RECONNECT_MS)  # -1 would drop unread messages
    _keep_alive(pair)
    return pair


def _keep_alive(sock: zmq.Socket[bytes]) -> None:
    """Enable TCP keep-alive: close a connection whose peer has vanished, by a power cut, say.

    The kernel probes the peer for longer than a tolerated network failure. ZMQ's own heartbeats
    abort the process if a peer ends while its last messages are unread (libzmq issue 4364: a timer
    writes to the socket that has failed).
    """
    probe(sock, _SILENT_SECONDS)
    sock.setsockopt(zmq.TCP_MAXRT, _SILENT_SECONDS * 1000)  # while something is unacknowledged


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


# -- rendezvous ------------------------------------------------------------------------------------

_POLL_SECONDS = 0.5  # between two checks that an awaited rank has not joined a later group
_CONNECTION_INDICES = range(len(Ends._fields))
_PROOF_BYTES = 32


class RankAddress(NamedTuple):
    """Location of a rank."""

    host: str  # id of its host
    door: str  # path of its UNIX socket for other ranks of its host
    address: str  # IP address at which it listens for other hosts
    backend: str  # name of its backend, see ``backends``


class Meeting:
    """Connector of this rank to others on any host, in this group and all later ones.

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
        location: RankAddress,
        listener: int,
        store: StoreClient,
        token: bytes,
        timeout: float,
    ) -> None:
        check_interface(location.address)
        self.store = store
        self._rank, self._location, self._token, self._timeout = rank, location, token, timeout
        self._socket_paths: dict[int, str] = {}
        self._local = Rendezvous(rank, listener, self._socket_paths.__getitem__, timeout)
        self._published_names: list[str] = []

    def meet(self, number: int, others: Collection[int]) -> dict[int, Ends]:
        """Connect with other ranks, all of which do the same for the group of this number.

        Raises:
            OSError: a rank could not be reached, or did not come in time; or the store was lost.
        """
        self._publish_location(number)
        locations = self._locations(number, others)
        self._check_backends(locations)
        self._socket_paths.clear()
        self._socket_paths.update({rank: location.door for rank, location in locations.items()})
        local_ranks = [rank for rank in others if locations[rank].host == self._location.host]
        remote_ranks = [rank for rank in others if rank not in local_ranks]
        with ExitStack() as undo:
            connections = self._meet_remote_ranks(number, remote_ranks, undo)
            connections |= self._local.meet(number, local_ranks)
            undo.pop_all()
        return connections

    def close(self) -> None:
        """Stop accepting other ranks. Idempotent."""
        self._local.close()
        self.store.close()

    # -- locations -------------------------------------------------------------------------------

    def _publish_location(self, number: int) -> None:
        """Publish this rank's location, and delete its entries of earlier groups."""
        for name in self._published_names:
            self.store.delete_key(name)
        self._published_names.clear()
        self._publish(f"place/{number}/{self._rank}", self._location)
        self.store.set(f"latest/{self._rank}", str(number))

    def _publish(self, name: str, value: Any) -> None:
        """Set a name in the store to a JSON value."""
        self._published_names.append(name)
        self.store.set(name, json.dumps(value))

    def _locations(self, number: int, others: Collection[int]) -> dict[int, RankAddress]:
        """Wait for the locations of other ranks; return them by rank."""
        values = self._wait_for_names(number, {rank: f"place/{number}/{rank}" for rank in others})
        return {rank: RankAddress(*fields) for rank, fields in values.items()}

    def _wait_for_names(self, number: int, names: dict[int, str]) -> dict[int, Any]:
        """Wait until all of these names are set in the store; return the values by rank."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self.store.wait(list(names.values()), timedelta(seconds=_POLL_SECONDS))
                break
            except TimeoutError:
                missing = [rank for rank, name in names.items() if not self.store.check([name])]
                self._check_current(number, missing)
                if missing and time.monotonic() >= deadline:
                    raise self._late_error(missing[0]) from None
        return {rank: json.loads(self.store.get(name)) for rank, name in names.items()}

    def _check_backends(self, locations: dict[int, RankAddress]) -> None:
        """Raise ConnectionError if ranks have different backends: they would never meet.

        That happens if one host has too few GPUs for NCCL.
        """
        backend = self._location.backend
        for rank, location in locations.items():
            if location.backend != backend:
                raise ConnectionError(
                    f"rank {self._rank} on host {self._location.host} talks through {backend!r}, "
                    f"rank {rank} on host {location.host} through {location.backend!r}: every host "
                    f"needs a GPU for each of its workers, or none may have that"
                )

    def _check_current(self, number: int, ranks: Iterable[int]) -> None:
        """Raise ConnectionError if one of the ranks is in a later group."""
        for rank in ranks:
            name = f"latest/{rank}"
            if self.store.check([name]) and int(self.store.get(name)) > number:
                raise ConnectionError(f"rank {rank} came for a later group: it had died before")

    def _late_error(self, rank: int) -> TimeoutError:
        return TimeoutError(f"rank {rank} did not come within {self._timeout:g} seconds")

    # -- ranks of other hosts --------------------------------------------------------------------

    def _meet_remote_ranks(
        self, number: int, others: Collection[int], undo: ExitStack
    ) -> dict[int, Ends]:
        """Connect with ranks on other hosts; ``undo`` closes the connections."""
        higher = [rank for rank in others if rank > self._rank]
        connections = self._listen_for(number, higher, undo)
        lower = {rank: f"seats/{number}/{rank}" for rank in others if rank < self._rank}
        for rank, (public, endpoints) in self._wait_for_names(number, lower).items():
            for index, endpoint in zip(
                _CONNECTION_INDICES, endpoints[str(self._rank)], strict=True
            ):
                keys = Keys(public, "")
                connection = EncryptedPeer(rank, self._timeout, keys, endpoint)
                undo.callback(connection.close)
                connection.send(memoryview(self._proof(number, self._rank, rank, index, endpoint)))
                connections[rank, index] = connection
        for (rank, index), connection in connections.items():
            if rank > self._rank:
                self._check_proof(number, connection, index)
                proof = self._proof(number, self._rank, rank, index, connection.endpoint)
                connection.send(memoryview(proof))
        for (rank, index), connection in connections.items():
            if rank < self._rank:
                self._check_proof(number, connection, index)
        return {
            rank: Ends(*(connections[rank, index] for index in _CONNECTION_INDICES))
            for rank in others
        }

    def _listen_for(
        self, number: int, ranks: Collection[int], undo: ExitStack
    ) -> dict[tuple[int, int], EncryptedPeer]:
        """Listen for these ranks, and publish the endpoints."""
        if not ranks:
            return {}
        keys, connections = Keys.generate(), {}
        for rank, index in product(ranks, _CONNECTION_INDICES):
            connection = EncryptedPeer(rank, self._timeout, keys, address=self._location.address)
            undo.callback(connection.close)
            connections[rank, index] = connection
        endpoints = {
            rank: [connections[rank, index].endpoint for index in _CONNECTION_INDICES]
            for rank in ranks
        }
        self._publish(f"seats/{number}/{self._rank}", (keys.public, endpoints))
        return connections

    def _proof(self, number: int, prover: int, listener: int, index: int, endpoint: str) -> bytes:
        """Return a keyed hash (BLAKE2b with the token) of one connection and direction."""
        message = json.dumps([number, prover, listener, index, endpoint]).encode()
        return hashlib.blake2b(message, key=self._token, digest_size=_PROOF_BYTES).digest()

    def _check_proof(self, number: int, peer: EncryptedPeer, index: int) -> None:
        """Receive and check the peer's proof of the session's token."""
        deadline = time.monotonic() + self._timeout
        while not peer.arrives(_POLL_SECONDS):
            self._check_current(number, [peer.rank])
            if time.monotonic() >= deadline:
                raise self._late_error(peer.rank)
        proof = bytearray(_PROOF_BYTES)
        peer.receive(memoryview(proof))
        expected = self._proof(number, peer.rank, self._rank, index, peer.endpoint)
        if not hmac.compare_digest(bytes(proof), expected):
            raise ConnectionError(f"who came as rank {peer.rank} does not know the session's token")
