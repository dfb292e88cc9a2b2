"""Key-value store in the client's process, for the rendezvous of ranks on several hosts.

Server and clients have a connection (see ``net.connection``), so every request is executed once,
even over a lossy network. Both ends' keys are derived from the session's token and never sent: who
does not know it fails in the handshake. On one host, a file replaces the store.
"""

from __future__ import annotations

import ipaddress
import os
import select
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet

import zmq
from torch.distributed.distributed_c10d import Store

from lazygt.errors import (
    AccessDenied,
    LazyGTError,
    ProtocolError,
    SecurityError,
    StoreLost,
    VersionMismatch,
)
from lazygt.net.connection import Connection, Listener, dial
from lazygt.net.keys import derived
from lazygt.runtime.wire import Count, Message, decode, encode

ROLE = "store"

_MAX_MESSAGE_BYTES = 16 << 20
#: Seconds until the server gives up a client that is away, well above the client's `SILENCE`: so a
#: connection that it has given up had no request in flight.
_AWAY_SECONDS = 60
#: Operations that wait until names are set, and those that set one.
_WAITING, _SETTING = (b"get", b"wait"), (b"set", b"add", b"compare")


class StoreRequest(Message, tag=1):
    """Request of a client, which has one at a time."""

    number: Count
    op: bytes
    arguments: tuple[bytes, ...] = ()


class StoreAnswer(Message, tag=2):
    """Result of the request of this number."""

    number: Count
    values: tuple[bytes, ...] = ()


class StoreWaits(Message, tag=3):
    """Sign of life: the request of this number waits for a name."""

    number: Count


class StoreRefusal(Message, tag=4):
    """Error of the request of this number."""

    number: Count
    why: str


_REPLIES = (StoreAnswer, StoreWaits, StoreRefusal)


class StoreReply(NamedTuple):
    """Reply to a client."""

    client: bytes
    message: StoreAnswer | StoreWaits | StoreRefusal


class Table:
    """State of the store: values and waiting clients.

    A pure state machine: requests in, replies out, without socket or clock.

    Attributes:
        values: values by name.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        #: the request of each waiting client
        self._pending: dict[bytes, StoreRequest] = {}
        #: the clients that wait for a name
        self._waiting: defaultdict[bytes, set[bytes]] = defaultdict(set)

    def ask(self, client: bytes, request: StoreRequest) -> list[StoreReply]:
        """Execute a request; return its reply, and those to clients that waited for a name."""
        self.forget(client)
        number, op, arguments = request.number, request.op, request.arguments
        if op in _WAITING:
            self._pending[client] = request
            return self._replies_if_set(client) or [StoreReply(client, StoreWaits(number))]
        try:
            result = _OPS[op](self.values, *arguments)
        except (KeyError, TypeError, ValueError) as error:
            return [StoreReply(client, StoreRefusal(number, f"{op!r}: {error}"))]
        replies = [StoreReply(client, StoreAnswer(number, (result,)))]
        if op in _SETTING:
            for waiting_client in tuple(self._waiting.pop(arguments[0], ())):
                replies += self._replies_if_set(waiting_client)
        return replies

    def forget(self, client: bytes) -> None:
        """Cancel a client's wait: it has sent another request, or has gone."""
        if self._pending.pop(client, None) is not None:
            for name in [name for name, clients in self._waiting.items() if client in clients]:
                self._waiting[name].discard(client)
                if not self._waiting[name]:
                    del self._waiting[name]

    def _replies_if_set(self, client: bytes) -> list[StoreReply]:
        """Return the reply to a waiting client if all its names are set.

        Otherwise register the wait for the first missing name.
        """
        request = self._pending[client]
        names = request.arguments
        missing = next((name for name in names if name not in self.values), None)
        if missing is not None:
            self._waiting[missing].add(client)
            return []
        del self._pending[client]
        values = [self.values[name] for name in names] if request.op == b"get" else ()
        return [StoreReply(client, StoreAnswer(request.number, tuple(values)))]


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
        requests: number of requests received, repeated ones of a wait included.

    Raises:
        OSError: the address can't be listened on.
        SecurityError: the host is no address of one interface.
    """

    def __init__(self, host: str, token: bytes, port: int = 0) -> None:
        check_interface(host)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        allowed = {derived(token, f"{ROLE} client").public: "rank"}.get
        self.requests = 0
        self._table = Table()
        self._clients: dict[bytes, Connection] = {}
        with ExitStack() as undo:
            undo.callback(self._context.term)
            self._listener = Listener(
                self._context, host, port, derived(token, ROLE), allowed, _MAX_MESSAGE_BYTES,
                grace=_AWAY_SECONDS, gone_after=_AWAY_SECONDS,
            )  # fmt: skip
            undo.callback(self._listener.close)
            self.endpoint = self._listener.address
            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
            undo.callback(os.close, self._stop_fd)
            self._thread = threading.Thread(target=self._serve, name="lazygt-store", daemon=True)
            self._thread.start()
            undo.pop_all()

    @property
    def refused(self) -> int:
        """Number of dropped handshakes and messages of strangers."""
        counts = self._listener.counts
        return sum(counts.values()) - counts["replayed"]

    def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._context.closed:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        self._listener.close("the session has ended")
        os.close(self._stop_fd)
        self._context.term()

    def _serve(self) -> None:
        """Answer requests until ``close``; runs on the server's thread."""
        poller = select.poll()
        for fd in (self._listener.fd, self._stop_fd):
            poller.register(fd, select.POLLIN)
        while all(fd != self._stop_fd for fd, _ in poller.poll()):
            while (client := self._listener.accept()) is not None:
                self._clients[client.id] = client
            for client in list(self._clients.values()):
                self._answer_all(client)

    def _answer_all(self, client: Connection) -> None:
        """Execute a client's requests that have arrived; forget a client that has gone."""
        try:
            while client.has_mail:
                request = decode(client.take() or [], (StoreRequest,))
                assert isinstance(request, StoreRequest)
                self.requests += 1
                for reply in self._table.ask(client.id, request):
                    self._send(reply)
        except ProtocolError as error:
            client.close(str(error))
        if client.closed is not None:
            self._table.forget(client.id)
            del self._clients[client.id]

    def _send(self, reply: StoreReply) -> None:
        """Send a reply; a refusal in place of an answer that is too long."""
        client, message = self._clients[reply.client], reply.message
        try:
            client.send(encode(message))
        except ValueError as error:
            client.send(encode(StoreRefusal(message.number, f"an answer: {error}")))


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


# -- client, also as a torch Store for NCCL --------------------------------------------------------

SILENCE = 20.0
"""Seconds without an answer until the store is lost; longer than tolerated failures."""

_RETRY_SECONDS = 1.0  # until a request that waits is repeated, for a sign of life


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
        #: the connections of all threads
        self._connections: WeakSet[_StoreConnection] = WeakSet()
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
        return self._request(b"check", *map(_bytes, keys)) == (b"1",)

    def delete_key(self, key: str | bytes) -> bool:
        """Remove a name; return whether it was there."""
        return self._request(b"delete", _bytes(key)) == (b"1",)

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
        for connection in list(self._connections):
            connection.close()
        self._context.destroy(0)

    def _wait(self, op: bytes, keys: Sequence[str | bytes], seconds: float) -> tuple[bytes, ...]:
        try:
            return self._request(op, *map(_bytes, keys), seconds=seconds)
        except TimeoutError:
            names = ", ".join(_bytes(key).decode(errors="replace") for key in keys)
            raise TimeoutError(
                f"nobody has set {names} in the store at {self.endpoint} within {seconds:g} seconds"
            ) from None

    def _request(
        self, op: bytes, *arguments: bytes, seconds: float = float("inf")
    ) -> tuple[bytes, ...]:
        deadline, reply = time.monotonic() + seconds, None
        while reply is None:
            reply = self._connected().ask(op, arguments, deadline)
        if isinstance(reply, StoreRefusal):
            raise ProtocolError(f"the store refuses {reply.why}")
        return reply.values

    def _connected(self) -> _StoreConnection:
        """Return this thread's connection, a new one if it has ended."""
        connection: _StoreConnection | None = getattr(self._thread_local, "connection", None)
        if connection is None or connection.has_ended:
            connection = _StoreConnection(self._context, self.endpoint, self._token, self._silence)
            self._thread_local.connection = connection
            self._connections.add(connection)
        return connection


class _StoreConnection:
    """One thread's connection to the store."""

    def __init__(self, context: Any, endpoint: str, token: bytes, silence: float) -> None:
        self._endpoint, self._silence, self._number = endpoint, silence, 0
        self._connection: Connection | None = None
        keys, server = derived(token, f"{ROLE} client"), derived(token, ROLE)
        try:
            self._connection = dial(
                context, endpoint, keys, server.public, b"", _MAX_MESSAGE_BYTES, silence,
                grace=silence, gone_after=silence,
            )  # fmt: skip
        except (AccessDenied, VersionMismatch) as error:
            raise StoreLost(endpoint, silence, str(error)) from error
        except LazyGTError as error:
            raise StoreLost(endpoint, silence) from error

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._connection is not None:
            self._connection.close()

    def __del__(self) -> None:
        self.close()  # its thread has ended, or the store is closed

    @property
    def has_ended(self) -> bool:
        """True if there can be no more answers."""
        return self._connection is None or self._connection.closed is not None

    def ask(
        self, op: bytes, arguments: tuple[bytes, ...], deadline: float
    ) -> StoreAnswer | StoreRefusal | None:
        """Return the store's final reply to a request.

        Returns:
            None if the store had given up this connection before the request, and never got it.

        Raises:
            TimeoutError: there is none by the deadline.
            StoreLost: the store has gone, or gives no sign of life; the connection is closed.
        """
        connection = self._connection
        assert connection is not None
        self._number += 1
        request = StoreRequest(self._number, op, arguments)
        poller = select.poll()
        poller.register(connection.fd, select.POLLIN)
        connection.pump()  # after a reconnection, the hello precedes the request
        heard = sent = time.monotonic()
        connection.send(encode(request))
        while True:
            while (frames := connection.take()) is not None:
                heard, reply = time.monotonic(), decode(frames, _REPLIES)
                if isinstance(reply, StoreAnswer | StoreRefusal) and reply.number == self._number:
                    return reply
            now = time.monotonic()
            if connection.given_up:
                return None
            if now >= deadline:
                raise TimeoutError
            why = connection.closed
            if why is not None or now - heard >= self._silence:
                self.close()
                raise StoreLost(self._endpoint, self._silence, why or "")
            if op in _WAITING and now - sent >= _RETRY_SECONDS:
                connection.send(encode(request))
                sent = now
            wait = min(_RETRY_SECONDS, self._silence - (now - heard), deadline - now)
            poller.poll(max(1000 * wait, 1))


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)
