"""Store for the rendezvous of ranks on several hosts, in the client's process.

It maps names to bytes.

It replaces the file in a shared folder on one host. It has one socket, for peers that know the
session's token: the server's key is derived from the token and never sent, so others fail in the
handshake; and every request carries the token, inside the encryption.

A request is ``token, number, op, arguments``. A client has one request at a time, and repeats it
while there is no answer, under the same number: so no request is executed twice, even over a lossy
network.
"""

from __future__ import annotations

import hmac
import ipaddress
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from lazygt.errors import SecurityError
from lazygt.runtime.cluster.keys import derived
from lazygt.runtime.launch.channel import Address, listen_tcp, probe

ROLE = "store"
NUMBER = struct.Struct("<Q")
ANSWER, WAIT, REFUSED = b"a", b"w", b"r"

_MOST_BYTES = 16 << 20  # of a frame
_HANDSHAKE_MS = 10_000
_SILENT_SECONDS = 15
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Frames = list[bytes]


class Reply(NamedTuple):
    """Reply to a client; ``frames`` begin with its request's number."""

    client: bytes
    frames: Frames


class Table:
    """State of the store: values and waiting clients.

    It is pure: requests in, replies out; no socket, no clock.

    Attributes:
        values: values by name.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        #: each client's last request: its number, and the reply, None while it waits
        self._last: dict[bytes, tuple[int, Frames | None]] = {}
        #: the pending request of each waiting client: op and names
        self._wanted: dict[bytes, tuple[bytes, Frames]] = {}
        self._waiting: defaultdict[bytes, set[bytes]] = defaultdict(set)

    def ask(self, client: bytes, number: int, op: bytes, arguments: Frames) -> list[Reply]:
        """Execute a request once; return the replies to it and to clients that waited for it."""
        known, reply = self._last.get(client, (-1, None))
        if number < known:
            return []
        if number == known:
            return [Reply(client, reply or [NUMBER.pack(number), WAIT])]
        self._forget(client)
        self._last[client] = number, None
        if op in (b"get", b"wait"):
            self._wanted[client] = op, arguments
            return self._look(client, waits=True)
        try:
            result = _OPS[op](self.values, *arguments)
        except (KeyError, TypeError, ValueError) as error:
            return [self._reply(client, REFUSED, [f"{op!r}: {error}".encode()])]
        replies = [self._reply(client, ANSWER, [result])]
        if op in (b"set", b"add", b"compare"):
            for waiting in tuple(self._waiting.pop(arguments[0], ())):
                replies += self._look(waiting)
        return replies

    def _look(self, client: bytes, waits: bool = False) -> list[Reply]:
        """Return the reply to a waiting client if all its names are set.

        Otherwise it waits for the first missing one.
        """
        op, names = self._wanted[client]
        missing = next((name for name in names if name not in self.values), None)
        if missing is None:
            del self._wanted[client]
            values = [self.values[name] for name in names] if op == b"get" else []
            return [self._reply(client, ANSWER, values)]
        self._waiting[missing].add(client)
        return [Reply(client, [NUMBER.pack(self._last[client][0]), WAIT])] if waits else []

    def _reply(self, client: bytes, state: bytes, frames: Sequence[bytes]) -> Reply:
        number, _ = self._last[client]
        reply = [NUMBER.pack(number), state, *frames]
        self._last[client] = number, reply
        return Reply(client, reply)

    def _forget(self, client: bytes) -> None:
        """Cancel a client's wait: it has sent another request."""
        if self._wanted.pop(client, None) is not None:
            for name in [name for name, who in self._waiting.items() if client in who]:
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
    there = [name for name in values if name.startswith(prefix)]
    for name in there:
        del values[name]
    return str(len(there)).encode()


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
        self._end, end = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._end.bind("inproc://end")
        end.connect("inproc://end")
        self._thread = threading.Thread(
            target=self._serve, args=(end,), name="lazygt-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._context.closed:
            return
        self._end.send(b"")
        self._thread.join()
        self._end.close(0)
        self._context.term()

    def _listen(self, address: Address) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.ROUTER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
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

    def _serve(self, end: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for sock in (self._socket, self._monitor, end):
            poller.register(sock, zmq.POLLIN)
        while end not in (ready := dict(poller.poll())):
            if self._monitor in ready:
                parse_monitor_message(self._monitor.recv_multipart())
                self.refused += 1
            if self._socket in ready:
                self._answer(self._socket.recv_multipart())
        self._socket.disable_monitor()
        for sock in (self._socket, self._monitor, end):
            sock.close(0)

    def _answer(self, message: Frames) -> None:
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
            with suppress(zmq.ZMQError):  # it has gone; if it reconnects, it asks again
                self._socket.send_multipart([reply.client, *reply.frames])


def check_interface(host: str) -> None:
    """Refuse to listen on all interfaces: some may lead to foreign networks.

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
    """Close a connection after the silent loss of the other end, by a power cut, say.

    The kernel probes it, for longer than a tolerated network failure. ZMQ's own heartbeats abort
    the process if a peer ends while its last messages are unread (libzmq issue 4364: a timer writes
    to the socket that has failed).
    """
    probe(sock, _SILENT_SECONDS)
    sock.setsockopt(zmq.TCP_MAXRT, _SILENT_SECONDS * 1000)  # while something is unacknowledged
