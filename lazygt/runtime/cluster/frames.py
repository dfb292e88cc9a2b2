"""What goes over a connection between hosts: one ZMQ frame a message.

    | number | acknowledged | kind, count, lengths, frames as of `channel.pack` |

Both numbers have 8 bytes, and are those of `stream.Stream`. A hello has three frames: the version
of the protocol, which every version can read; a `Hello`; and what the user of the connection says.
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
#: Bytes that a frame has beside its contents, and 4 for each of these.
OVERHEAD = _NUMBERS.size + 5


class Versions(msgspec.Struct, frozen=True):
    """What client and host must have in common, since code and values go from one to the other."""

    lazygt: str
    torch: str
    python: str

    def differences(self, other: Versions) -> list[tuple[str, str, str]]:
        """What differs: its name, ours, theirs."""
        return [
            (name, getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


def versions_here() -> Versions:
    """Of torch without what follows the ``+``: a client without a GPU may use hosts with them."""
    python = ".".join(platform.python_version_tuple()[:2])
    return Versions(VERSION, str(torch.__version__).partition("+")[0], python)


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a TCP connection.

    Attributes:
        versions: of the one who calls.
        turn: counts the TCP connections of one connection, from 1; so an old hello is told.
        fresh: the caller was never welcomed.
    """

    versions: Versions
    turn: int
    fresh: bool


class Refusal(msgspec.Struct, frozen=True):
    """Why a connection is not served: ``version``, ``access`` or ``over``."""

    kind: str
    why: str
    versions: Versions | None = None


#: What a decoder raises for bytes of a stranger's.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_hello_of = msgspec.msgpack.Decoder(Hello)
_refusal_of = msgspec.msgpack.Decoder(Refusal)


def pack(kind: bytes, frames: Sequence[Frame] = (), acknowledged: int = 0) -> bytearray:
    """A message that has no number yet."""
    views = [memoryview(frame).cast("B") for frame in frames]
    head = struct.pack(f"<cI{len(views)}I", kind, len(views), *(len(view) for view in views))
    return bytearray().join((_NUMBERS.pack(0, acknowledged), head, *views))


def give_number(message: bytearray, number: int, acknowledged: int) -> None:
    _NUMBERS.pack_into(message, 0, number, acknowledged)


def parse(frame: memoryview) -> tuple[int, int, bytes, list[memoryview]]:
    """Number, acknowledged number, kind, and frames that are views into ``frame``.

    Raises:
        ProtocolError: it was not made by `pack`.
    """
    if len(frame) < _NUMBERS.size:
        raise ProtocolError(f"a message of {len(frame)} bytes is cut short")
    number, acknowledged = _NUMBERS.unpack_from(frame)
    return number, acknowledged, *unpack(frame[_NUMBERS.size :])


def pack_hello(turn: int, fresh: bool, said: bytes, received: int) -> bytearray:
    hello = msgspec.msgpack.encode(Hello(versions_here(), turn, fresh))
    return pack(HELLO, (_MARK + struct.pack("<H", PROTOCOL_VERSION), hello, said), received)


def read_hello(frames: Sequence[memoryview]) -> tuple[Hello | int, bytes]:
    """The hello and what was said in it; a number is the other's version of the protocol.

    Raises:
        ProtocolError: it is none.
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
    return pack(REFUSED, (msgspec.msgpack.encode(refusal),))


def read_refusal(frames: Sequence[memoryview]) -> Refusal:
    """Raises ProtocolError if it is none."""
    try:
        return _refusal_of.decode(frames[0])
    except (*_UNREADABLE, IndexError) as error:
        raise ProtocolError(f"not a refusal: {error}") from error
