"""TCP sockets opened by ZMQ: kernel state of the peer, and their closing in children."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakSet

import zmq
from zmq.utils.monitor import parse_monitor_message

# -- ZMQ's events of a socket's TCP connections ----------------------------------------------------

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MAX_REMEMBERED = 1024  # addresses of strangers
_names = count()


class Monitor:
    """Event stream of one socket.

    Attributes:
        fd: descriptor that is readable when there are events.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], monitored: zmq.Socket[bytes], events: int
    ) -> None:
        endpoint = f"inproc://lazygt-monitor-{next(_names)}"
        monitored.monitor(endpoint, events)
        self._monitored = monitored
        self._socket = context.socket(zmq.PAIR)
        # No limit: at a limit ZMQ's own thread would wait for the reader.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield pending events and their values: a descriptor, an interval or an error number."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._socket.recv_multipart())
            yield int(event["event"]), int(event["value"])

    def close(self) -> None:
        """Stop monitoring."""
        self._monitored.disable_monitor()
        self._socket.close(0)


class Strangers:
    """Peers of a listener that have proved no key, as its `Monitor` reports.

    ZMQ reports a failed handshake without an address, and right after it the end of that TCP
    connection.

    Attributes:
        addresses: address of the peer, "" if the connection ended before its address was read ->
            True if a peer there used CURVE with another key than the listener's, as a host with
            another token does.
    """

    def __init__(self) -> None:
        self.addresses: dict[str, bool] = {}
        #: descriptor of an open TCP connection -> the peer's address
        self._open: dict[int, str] = {}
        self._failed: int | None = None

    @property
    def accepted(self) -> Collection[str]:
        """Addresses of all peers that are connected, or were a moment ago."""
        return self._open.values()

    def handle_event(self, event: int, value: int) -> None:
        """Record one event of the monitor, also of peers with a key."""
        if event == zmq.EVENT_ACCEPTED:
            self._open[value] = _address_of(value)
        elif event & FAILED:
            self._failed = value
        elif event == zmq.EVENT_DISCONNECTED:
            address = self._open.pop(value, "")
            failed, self._failed = self._failed, None
            if failed is not None and len(self.addresses) < _MAX_REMEMBERED:
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


# -- kernel state of TCP sockets -------------------------------------------------------------------

#: Seconds without an answer after which a peer is silent; the kernel's keepalive probes come after
#: one second.
SILENT = 2.0
#: struct tcp_info of linux/tcp.h: 8 bytes of flags; rto, ato, snd_mss, rcv_mss, unacked, sacked,
#: lost, retrans, fackets; and ms since data and acknowledgements were last sent and received.
_TCP_INFO = struct.Struct("@8B13I")


class Holder(Protocol):
    """Owner of a TCP socket.

    Attributes:
        tcp: descriptor of the socket; -1: none.
    """

    tcp: int


_holders: WeakSet[Holder] = WeakSet()


def close_in_children(holder: Holder) -> None:
    """Close the holder's socket in each child that this process forks (a DataLoader's worker).

    A child that held it would keep the connection open, and the port taken, after the end of this
    process.
    """
    _holders.add(holder)


def _close_in_child() -> None:
    """Close the sockets of all holders in a forked child."""
    for holder in [holder for holder in _holders if holder.tcp >= 0]:
        with suppress(OSError), socket.socket(fileno=holder.tcp) as inherited:
            if inherited.family not in (socket.AF_INET, socket.AF_INET6):
                inherited.detach()  # the number is another file's by now
        holder.tcp = -1


os.register_at_fork(after_in_child=_close_in_child)


class Word(NamedTuple):
    """Kernel state of a TCP connection.

    Attributes:
        silence: seconds since the peer's kernel answered; 0.0 if nothing is unanswered.
        waits: True if sent data is unacknowledged.
    """

    silence: float = 0.0
    waits: bool = False


def kernel_state(tcp: int) -> Word:
    """Return the kernel's state of a TCP socket."""
    if tcp < 0:
        return Word()
    try:
        kernel = socket.socket(fileno=tcp)
    except OSError:  # ZMQ has closed the socket, and its event has not been read yet
        return Word()
    try:
        info = kernel.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return Word()
    finally:
        kernel.detach()
    fields = _TCP_INFO.unpack(info)
    retransmits, probes, unacknowledged = fields[2], fields[3], fields[12]
    received, answered = fields[-2:]
    silence = min(received, answered) / 1000
    unanswered = bool(retransmits or probes) and silence >= SILENT
    return Word(silence if unanswered else 0.0, bool(unacknowledged))
