"""Connections between ranks of different hosts, both ends of them in this process."""

from __future__ import annotations

from lazygt.net.channel import Keys
from lazygt.net.sockets import Peer
from lazygt.runtime.collectives.rendezvous import EncryptedPeer

HOST = "127.0.0.1"
Rows = list[list[Peer | None]]


def encrypted(
    timeout: float, first: int = 0, second: int = 1
) -> tuple[EncryptedPeer, EncryptedPeer]:
    """Two ranks that have met: the second at the first one's end, and the first at the second's."""
    keys = Keys.generate()
    listening = EncryptedPeer(second, timeout, keys, address=HOST)
    connecting = EncryptedPeer(first, timeout, Keys(keys.public, ""), listening.endpoint)
    for sender, receiver in ((connecting, listening), (listening, connecting)):
        sender.send(memoryview(b"w"))
        assert receiver.arrives(60)
        receiver.receive(memoryview(bytearray(1)))
    return listening, connecting
