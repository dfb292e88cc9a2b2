"""TCP sockets opened by ZMQ: kernel state of the peer, and their closing in children."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple, Protocol
from weakref import WeakSet

#: Seconds; a kernel asks after one second of quiet whether the other is there.
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


def keep_from_children(holder: Holder) -> None:
    """Close the holder's socket in each child that this process forks (a DataLoader's worker).

    A child that held it would keep the connection open, and the port taken, after the end of this
    process.
    """
    _holders.add(holder)


def _close_in_child() -> None:
    for holder in [holder for holder in _holders if holder.tcp >= 0]:
        with suppress(OSError), socket.socket(fileno=holder.tcp) as inherited:
            if inherited.family not in (socket.AF_INET, socket.AF_INET6):
                inherited.detach()  # the number is another's by now
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


def word_of(tcp: int) -> Word:
    """Return the kernel's state of a TCP socket."""
    if tcp < 0:
        return Word()
    try:
        kernel = socket.socket(fileno=tcp)
    except OSError:  # it is closed, and the news of it is on its way
        return Word()
    try:
        facts = kernel.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return Word()
    finally:
        kernel.detach()
    fields = _TCP_INFO.unpack(facts)
    retransmits, probes, unacknowledged = fields[2], fields[3], fields[12]
    received, answered = fields[-2:]
    silence = min(received, answered) / 1000
    unanswered = bool(retransmits or probes) and silence >= SILENT
    return Word(silence if unanswered else 0.0, bool(unacknowledged))
