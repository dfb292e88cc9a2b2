"""Messages on a connection between hosts: one ZMQ frame each.

    | number | acknowledged | kind, count, lengths, frames as of `channel.pack` |

Both numbers have 8 bytes, and are sequence numbers of `reliable.Stream`. A hello has three frames:
the version of the protocol, which every version can read; a `Hello`; and the user's data.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence

import msgspec
import torch

from lazygt.config import VERSION
from lazygt.errors import ProtocolError
from lazygt.runtime.launch.channel import unpack
from lazygt.runtime.launch.mailbox import Frame

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
    """First message of a TCP connection.

    Attributes:
        versions: the caller's versions.
        turn: number of this TCP connection within the connection, from 1; marks old hellos.
        fresh: True if the caller was never welcomed.
    """

    versions: Versions
    turn: int
    fresh: bool


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
