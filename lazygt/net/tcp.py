"""TCP sockets opened by ZMQ: kernel state of the peer, and their closing in children."""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakSet

import msgspec
import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from lazygt.config import VERSION
from lazygt.errors import ProtocolError
from lazygt.net.channel import unpack
from lazygt.net.mailbox import Frame

# -- messages on a connection between hosts: one ZMQ frame each ------------------------------------
# | number | acknowledged | kind, count, lengths, frames as of `channel.pack` |
#
# Both numbers have 8 bytes, and are sequence numbers of `reliable.Stream`. A hello has three
# frames: the version of the protocol, which every version can read; a `Hello`; and the user's
# data.

PROTOCOL_VERSION = 1
_MARK = b"lazygt-host"

HELLO, WELCOME, REFUSED, MESSAGE, GOODBYE, RECEIVED = (bytes([code]) for code in b"HWRMGK")

_NUMBERS = struct.Struct("<QQ")
#: Bytes of a message besides its frames, plus 4 for each frame.
OVERHEAD = _NUMBERS.size + 5


class Versions(msgspec.Struct, frozen=True):
    """Versions that client and host must share to exchange code and values."""

    lazygt: str
    torch: str
    python: str

    def differences(self, other: Versions) -> list[tuple[str, str, str]]:
        """Return (name, ours, theirs) of each version that differs."""
        return [
            (name, getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


def versions_here() -> Versions:
    """Return this process's versions, without torch's local suffix after the ``+``.

    Without the suffix a client with a CPU build may use hosts with GPU builds.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return Versions(VERSION, str(torch.__version__).partition("+")[0], python)


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First message of a TCP connection."""

    versions: Versions  # the caller's versions
    turn: int  # number of this TCP connection within the connection, from 1; marks old hellos
    fresh: bool  # True if the caller was never welcomed


class Refusal(msgspec.Struct, frozen=True):
    """Reason for refusing a connection: ``version``, ``access`` or ``over``."""

    kind: str
    why: str
    versions: Versions | None = None


#: Exceptions that a decoder raises for invalid bytes.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_hello_of = msgspec.msgpack.Decoder(Hello)
_refusal_of = msgspec.msgpack.Decoder(Refusal)


def pack(kind: bytes, frames: Sequence[Frame] = (), acknowledged: int = 0) -> bytearray:
    """Encode a message; `set_number` adds the number before it is sent."""
    views = [memoryview(frame).cast("B") for frame in frames]
    head = struct.pack(f"<cI{len(views)}I", kind, len(views), *(len(view) for view in views))
    return bytearray().join((_NUMBERS.pack(0, acknowledged), head, *views))


def set_number(message: bytearray, number: int, acknowledged: int) -> None:
    """Write a message's number, and the acknowledged number, into its header."""
    _NUMBERS.pack_into(message, 0, number, acknowledged)


def parse(frame: memoryview) -> tuple[int, int, bytes, list[memoryview]]:
    """Return number, acknowledged number, kind, and frames as views into ``frame``.

    Raises:
        ProtocolError: the frame was not made by `pack`.
    """
    if len(frame) < _NUMBERS.size:
        raise ProtocolError(f"a message of {len(frame)} bytes is cut short")
    number, acknowledged = _NUMBERS.unpack_from(frame)
    return number, acknowledged, *unpack(frame[_NUMBERS.size :])


def pack_hello(turn: int, is_first: bool, user_data: bytes, received: int) -> bytearray:
    """Encode a hello that acknowledges the messages up to ``received``; see `Hello`."""
    hello = msgspec.msgpack.encode(Hello(versions_here(), turn, is_first))
    return pack(HELLO, (_MARK + struct.pack("<H", PROTOCOL_VERSION), hello, user_data), received)


def read_hello(frames: Sequence[memoryview]) -> tuple[Hello | int, bytes]:
    """Return the hello and its user data.

    If the protocol differs, the hello is the other's protocol version, a number.

    Raises:
        ProtocolError: the frames are no hello.
    """
    if not frames or bytes(frames[0][:-2]) != _MARK:
        raise ProtocolError("a hello must begin with the mark of lazygt")
    (protocol,) = struct.unpack("<H", frames[0][-2:])
    if protocol != PROTOCOL_VERSION:
        return int(protocol), b""
    if len(frames) != 3:
        raise ProtocolError(f"a hello has 3 frames, not {len(frames)}")
    try:
        return _hello_of.decode(frames[1]), bytes(frames[2])
    except _UNREADABLE as error:
        raise ProtocolError(f"not a hello: {error}") from error


def pack_refusal(refusal: Refusal) -> bytearray:
    """Encode a refusal."""
    return pack(REFUSED, (msgspec.msgpack.encode(refusal),))


def read_refusal(frames: Sequence[memoryview]) -> Refusal:
    """Decode a refusal; raise ProtocolError for other frames."""
    try:
        return _refusal_of.decode(frames[0])
    except (*_UNREADABLE, IndexError) as error:
        raise ProtocolError(f"not a refusal: {error}") from error


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
    """Owner of a TCP socket."""

    tcp: int  # descriptor of the socket; -1: none


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
    """Kernel state of a TCP connection."""

    silence: float = 0.0  # seconds since the peer's kernel answered; 0.0 if nothing is unanswered
    waits: bool = False  # True if sent data is unacknowledged


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
