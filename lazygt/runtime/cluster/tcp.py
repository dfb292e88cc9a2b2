"""What the kernel knows of a TCP connection: whether the other end still answers."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

#: Seconds; a kernel asks after one second of quiet whether the other is there.
SILENT = 2.0
#: struct tcp_info of linux/tcp.h: 8 bytes of flags; rto, ato, snd_mss, rcv_mss, unacked, sacked,
#: lost, retrans, fackets; and ms since data and acknowledgements were last sent and received.
_TCP_INFO = struct.Struct("@8B13I")


class Word(NamedTuple):
    """What the kernel knows of a TCP connection.

    Attributes:
        silence: seconds since the peer's kernel answered; 0.0 if nothing is unanswered.
        waits: whether something is on its way.
    """

    silence: float = 0.0
    waits: bool = False


def word_of(tcp: int) -> Word:
    """The kernel's word on a TCP socket."""
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
