"""Monitoring of a socket's TCP connections by ZMQ events."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from itertools import count

import zmq
from zmq.utils.monitor import parse_monitor_message

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REMEMBERED = 1024  # addresses of strangers
_names = count()


class Monitor:
    """Event stream of one socket.

    Attributes:
        fd: descriptor that is readable when there are events.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int
    ) -> None:
        place = f"inproc://lazygt-monitor-{next(_names)}"
        watched.monitor(place, events)
        self._watched = watched
        self._socket = context.socket(zmq.PAIR)
        # Without a limit: where there is one, ZMQ's own thread waits for the reader.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(place)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield pending events and their values: a descriptor, an interval or an error number."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._socket.recv_multipart())
            yield int(event["event"]), int(event["value"])

    def close(self) -> None:
        self._watched.disable_monitor()
        self._socket.close(0)


class Strangers:
    """Peers of a listener that have proved no key, as its `Monitor` reports.

    ZMQ reports a failed handshake without an address, and right after it the end of that TCP
    connection.

    Attributes:
        addresses: their address, "" if a connection ended before it was looked at -> True if a peer
            there spoke CURVE to another key than the listener's, as a host with another token does.
    """

    def __init__(self) -> None:
        self.addresses: dict[str, bool] = {}
        #: addresses by descriptor, of TCP connections that have not ended
        self._open: dict[int, str] = {}
        self._failed: int | None = None

    @property
    def accepted(self) -> Collection[str]:
        """Addresses of all peers that are connected, or were a moment ago."""
        return self._open.values()

    def happened(self, event: int, value: int) -> None:
        """Record one event of the monitor, also of peers with a key."""
        if event == zmq.EVENT_ACCEPTED:
            self._open[value] = _address_of(value)
        elif event & FAILED:
            self._failed = value
        elif event == zmq.EVENT_DISCONNECTED:
            address = self._open.pop(value, "")
            failed, self._failed = self._failed, None
            if failed is not None and len(self.addresses) < _REMEMBERED:
                other_key = failed == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
                self.addresses[address] = other_key or self.addresses.get(address, False)


def _address_of(tcp: int) -> str:
    """Return the peer's address; "" if the connection has ended by now."""
    try:
        kernel = socket.socket(fileno=tcp)
    except OSError:
        return ""
    try:
        return str(kernel.getpeername()[0])
    except OSError:
        return ""
    finally:
        kernel.detach()
