"""Key-value store in the client's process, for the rendezvous of ranks on several hosts.

The server has one socket, for peers that know the session's token. Its key is derived from the
token and never sent, so others fail in the handshake; and every request contains the token, inside
the encryption. On one host, a file replaces the store.

A request is ``token, number, op, arguments``. A client has one request at a time, and repeats it
under the same number until it is answered. So no request is executed twice, even over a lossy
network.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import zmq
from torch.distributed.distributed_c10d import Store
from zmq.utils.monitor import parse_monitor_message

from lazygt.errors import ProtocolError, SecurityError, StoreLost
from lazygt.net.channel import Address, listen_tcp, probe
from lazygt.net.keys import derived

ROLE = "store"
NUMBER = struct.Struct("<Q")
ANSWER, WAIT, REFUSED = b"a", b"w", b"r"

_MAX_FRAME_BYTES = 16 << 20  # of a frame
_HANDSHAKE_MS = 10_000
_SILENT_SECONDS = 15
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Frames = list[bytes]


class StoreReply(NamedTuple):
    """Reply to a client; ``frames`` begin with its request's number."""

    client: bytes
    frames: Frames


class Table:
    """State of the store: values and waiting clients.

    A pure state machine: requests in, replies out, without socket or clock.

    Attributes:
        values: values by name.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        #: each client's last request: its number, and the reply, None while it waits
        self._last_replies: dict[bytes, tuple[int, Frames | None]] = {}
        #: the pending request of each waiting client: op and names
        self._pending_requests: dict[bytes, tuple[bytes, Frames]] = {}
        self._waiting: defaultdict[bytes, set[bytes]] = defaultdict(set)

    def ask(self, client: bytes, number: int, op: bytes, arguments: Frames) -> list[StoreReply]:
        """Execute a request once; return its reply, and those to clients that waited for a name."""
        last_number, reply = self._last_replies.get(client, (-1, None))
        if number < last_number:
            return []
        if number == last_number:
            return [StoreReply(client, reply or [NUMBER.pack(number), WAIT])]
        self._cancel_wait(client)
        self._last_replies[client] = number, None
        if op in (b"get", b"wait"):
            self._pending_requests[client] = op, arguments
            return self._reply_if_set(client, is_new=True)
        try:
            result = _OPS[op](self.values, *arguments)
        except (KeyError, TypeError, ValueError) as error:
            return [self._reply(client, REFUSED, [f"{op!r}: {error}".encode()])]
        replies = [self._reply(client, ANSWER, [result])]
        if op in (b"set", b"add", b"compare"):
            for waiting_client in tuple(self._waiting.pop(arguments[0], ())):
                replies += self._reply_if_set(waiting_client)
        return replies

    def _reply_if_set(self, client: bytes, is_new: bool = False) -> list[StoreReply]:
        """Return the reply to a waiting client if all its names are set.

        Otherwise register the wait for the first missing name.
        """
        op, names = self._pending_requests[client]
        missing = next((name for name in names if name not in self.values), None)
        if missing is None:
            del self._pending_requests[client]
            values = [self.values[name] for name in names] if op == b"get" else []
            return [self._reply(client, ANSWER, values)]
        self._waiting[missing].add(client)
        return (
            [StoreReply(client, [NUMBER.pack(self._last_replies[client][0]), WAIT])]
            if is_new
            else []
        )

    def _reply(self, client: bytes, state: bytes, frames: Sequence[bytes]) -> StoreReply:
        number, _ = self._last_replies[client]
        reply = [NUMBER.pack(number), state, *frames]
        self._last_replies[client] = number, reply
        return StoreReply(client, reply)

    def _cancel_wait(self, client: bytes) -> None:
        """Cancel a client's wait: it has sent another request."""
        if self._pending_requests.pop(client, None) is not None:
            for name in [name for name, clients in self._waiting.items() if client in clients]:
                self._waiting[name].discard(client)
                if not self._waiting[name]:
                    del self._waiting[name]


Values = dict[bytes, bytes]


def _set(values: Values, name: bytes, value: bytes) -> bytes:
    values[name] = value
    return b""


def _add(values: Values, name: bytes, amount: bytes) -> bytes:
    """Add to a number; a missing one counts as 0.

    Numbers are decimal text, as in torch's stores.
    """
    values[name] = str(int(values.get(name, b"0")) + int(amount)).encode()
    return values[name]


def _compare(values: Values, name: bytes, expected: bytes, desired: bytes) -> bytes:
    """Do torch's ``compare_set``.

    Returns the name's value afterwards, or ``expected`` if it has none.
    """
    current = values.get(name)
    if current == expected or (current is None and not expected):
        values[name] = current = desired
    return expected if current is None else current


def _check(values: Values, *names: bytes) -> bytes:
    return b"1" if all(name in values for name in names) else b"0"


def _delete(values: Values, name: bytes) -> bytes:
    return b"0" if values.pop(name, None) is None else b"1"


def _delete_all(values: Values, prefix: bytes) -> bytes:
    names = [name for name in values if name.startswith(prefix)]
    for name in names:
        del values[name]
    return str(len(names)).encode()


def _count(values: Values) -> bytes:
    return str(len(values)).encode()


_OPS: dict[bytes, Callable[..., bytes]] = {
    b"set": _set,
    b"add": _add,
    b"compare": _compare,
    b"check": _check,
    b"delete": _delete,
    b"delete_all": _delete_all,
    b"count": _count,
}


class StoreServer:
    """Server of the store, on a daemon thread of its own.

    Args:
        host: the address to listen at, reachable from all hosts of the session.
        token: the session's secret.
        port: the port; 0 for a free one.

    Attributes:
        endpoint: endpoint for clients, such as ``tcp://10.0.0.1:41234``.
        requests: number of requests answered.
        refused: number of dropped handshakes and messages of strangers.

    Raises:
        OSError: the address can't be listened on.
        SecurityError: the host is no address of one interface.
    """

    def __init__(self, host: str, token: bytes, port: int = 0) -> None:
        check_interface(host)
        self._token, self._keys = token, derived(token, ROLE)
        address = listen_tcp(host, self._keys, port)
        self.endpoint = address.endpoint
        self.requests = self.refused = 0
        self._table = Table()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._listen(address)
        self._monitor = self._socket.get_monitor_socket(_FAILED_HANDSHAKES)
        self._stop_socket, stop_socket = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._stop_socket.bind("inproc://end")
        stop_socket.connect("inproc://end")
        self._thread = threading.Thread(
            target=self._serve, args=(stop_socket,), name="lazygt-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._context.closed:
            return
        self._stop_socket.send(b"")
        self._thread.join()
        self._stop_socket.close(0)
        self._context.term()

    def _listen(self, address: Address) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.ROUTER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        sock.setsockopt(zmq.IPV6, 1)
        # a client that reconnects is the same client
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
        sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        keep_alive(sock)
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.secret)
        sock.setsockopt(zmq.USE_FD, address.fd)
        sock.bind(address.endpoint)
        return sock

    def _serve(self, stop_socket: zmq.Socket[bytes]) -> None:
        """Answer requests until ``close``; runs on the server's thread."""
        poller = zmq.Poller()
        for sock in (self._socket, self._monitor, stop_socket):
            poller.register(sock, zmq.POLLIN)
        while stop_socket not in (ready := dict(poller.poll())):
            if self._monitor in ready:
                parse_monitor_message(self._monitor.recv_multipart())
                self.refused += 1
            if self._socket in ready:
                self._answer(self._socket.recv_multipart())
        self._socket.disable_monitor()
        for sock in (self._socket, self._monitor, stop_socket):
            sock.close(0)

    def _answer(self, message: Frames) -> None:
        """Check and execute a request; send the replies."""
        client, *request = message
        if len(request) < 3 or len(request[1]) != NUMBER.size:
            self.refused += 1
            return
        token, number, op, *arguments = request
        if not hmac.compare_digest(token, self._token):
            self.refused += 1
            return
        self.requests += 1
        for reply in self._table.ask(client, NUMBER.unpack(number)[0], op, arguments):
            with suppress(
                zmq.ZMQError
            ):  # disconnected; after a reconnection it repeats its request
                self._socket.send_multipart([reply.client, *reply.frames])


def check_interface(host: str) -> None:
    """Refuse to listen on all interfaces: some may lead to untrusted networks.

    Raises:
        SecurityError: the host is no address of one interface.
    """
    with suppress(ValueError):
        if not ipaddress.ip_address(host).is_unspecified:
            return
    raise SecurityError(
        f"refusing to listen on {host!r}: expected the IP address of the one interface at which "
        f"the session's other hosts reach this one, such as 10.0.0.1"
    )


def keep_alive(sock: zmq.Socket[bytes]) -> None:
    """Enable TCP keep-alive: close a connection whose peer has vanished, by a power cut, say.

    The kernel probes the peer for longer than a tolerated network failure. ZMQ's own heartbeats
    abort the process if a peer ends while its last messages are unread (libzmq issue 4364: a timer
    writes to the socket that has failed).
    """
    probe(sock, _SILENT_SECONDS)
    sock.setsockopt(zmq.TCP_MAXRT, _SILENT_SECONDS * 1000)  # while something is unacknowledged


# -- client, also as a torch Store for NCCL --------------------------------------------------------

SILENCE = 20.0
"""Seconds without an answer until the store is lost; longer than tolerated failures."""

_RETRY_SECONDS = 1.0  # until a request is repeated


class StoreClient(Store):
    """Session's store, from another process. Each thread has a connection of its own.

    Args:
        endpoint: endpoint of the ``StoreServer``.
        token: the session's secret.
        timeout: seconds to wait for a name to be set.
        silence: seconds of silence until the store counts as lost.
    """

    def __init__(
        self, endpoint: str, token: bytes, timeout: float, silence: float = SILENCE
    ) -> None:
        super().__init__()
        self.endpoint, self._token, self._silence = endpoint, token, silence
        self._timeout_seconds = timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread_local = threading.local()
        self._clones: list[StoreClient] = []

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Set a name's value.

        Raises:
            StoreLost: the store does not answer; all other methods raise this, too.
        """
        self._request(b"set", _bytes(key), _bytes(value))

    def get(self, key: str | bytes) -> bytes:
        """Return a name's value, once it is set.

        Raises:
            TimeoutError: it was not set in time.
        """
        return self._wait(b"get", [key], self._timeout_seconds)[0]

    def wait(self, keys: Sequence[str | bytes], timeout: timedelta | None = None) -> None:
        """Wait until all of these names are set.

        Raises:
            TimeoutError: they were not in time.
        """
        self._wait(
            b"wait", keys, self._timeout_seconds if timeout is None else timeout.total_seconds()
        )

    def add(self, key: str | bytes, amount: int) -> int:
        """Add to a number, 0 if missing; return the sum."""
        return int(self._request(b"add", _bytes(key), str(amount).encode())[0])

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Return whether all of these names are set."""
        return self._request(b"check", *map(_bytes, keys)) == [b"1"]

    def delete_key(self, key: str | bytes) -> bool:
        """Remove a name; return whether it was there."""
        return self._request(b"delete", _bytes(key)) == [b"1"]

    def delete_all(self, prefix: str) -> int:
        """Remove all names with this prefix; return their number."""
        return int(self._request(b"delete_all", prefix.encode())[0])

    def compare_set(self, key: str | bytes, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a name if it has the expected value (empty: or none); return its value then."""
        return self._request(b"compare", *map(_bytes, (key, expected, desired)))[0]

    def num_keys(self) -> int:
        """Return the number of names."""
        return int(self._request(b"count")[0])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time to wait for a name to be set."""
        self._timeout_seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """Time to wait for a name to be set."""
        return timedelta(seconds=self._timeout_seconds)

    def clone(self) -> StoreClient:
        """Return a second client of the store, closed with this one.

        This client keeps the clone alive: torch's C++ would drop its Python object.
        """
        self._clones.append(
            StoreClient(self.endpoint, self._token, self._timeout_seconds, self._silence)
        )
        return self._clones[-1]

    def close(self) -> None:
        """Close the connections; no thread may have a request. Idempotent."""
        for clone in self._clones:
            clone.close()
        self._context.destroy(0)

    def _wait(self, op: bytes, keys: Sequence[str | bytes], seconds: float) -> Frames:
        try:
            return self._request(op, *map(_bytes, keys), seconds=seconds)
        except TimeoutError:
            names = ", ".join(_bytes(key).decode(errors="replace") for key in keys)
            raise TimeoutError(
                f"nobody has set {names} in the store at {self.endpoint} within {seconds:g} seconds"
            ) from None

    def _request(self, op: bytes, *arguments: bytes, seconds: float = float("inf")) -> Frames:
        connection: _StoreConnection | None = getattr(self._thread_local, "asking", None)
        if connection is None:
            connection = self._thread_local.asking = _StoreConnection(
                self._context, self.endpoint, self._token
            )
        state, *frames = connection.ask([op, *arguments], seconds, self._silence)
        if state == REFUSED:
            raise ProtocolError(f"the store refuses {frames[0].decode(errors='replace')}")
        return frames


class _StoreConnection:
    """One thread's connection to the store."""

    def __init__(self, context: Any, endpoint: str, token: bytes) -> None:
        self._endpoint, self._token, self._number = endpoint, token, 0
        keys, server = derived(token, f"{ROLE} client"), derived(token, ROLE)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.ROUTING_ID, b"s" + secrets.token_bytes(16))
        keep_alive(self._socket)
        self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
        self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, server.public)
        self._socket.connect(endpoint)

    def __del__(self) -> None:
        self._socket.close(0)  # its thread has ended, or the store is closed

    def ask(self, request: Frames, seconds: float, silence: float) -> Frames:
        """Return the store's final reply: its state, answered or refused, and the frames."""
        self._number += 1
        message = [self._token, NUMBER.pack(self._number), *request]
        last_answer = start = time.monotonic()
        self._socket.send_multipart(message)
        while True:
            now = time.monotonic()
            if now - start >= seconds:
                raise TimeoutError
            if now - last_answer >= silence:
                raise StoreLost(self._endpoint, silence)
            wait_seconds = min(
                _RETRY_SECONDS, silence - (now - last_answer), seconds - (now - start)
            )
            if not self._socket.poll(max(round(wait_seconds * 1000), 1)):
                self._socket.send_multipart(message)
                continue
            number, *answer = self._socket.recv_multipart()
            last_answer = time.monotonic()
            if number == message[1] and answer[0] in (ANSWER, REFUSED):
                return answer


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)
