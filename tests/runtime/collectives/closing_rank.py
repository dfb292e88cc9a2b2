"""A rank that leaves while much of what it sent is unread; a line on stdin ends it."""

from __future__ import annotations

import sys

from lazygt.net.channel import Keys
from lazygt.runtime.collectives.rendezvous import EncryptedPeer
from tests.runtime.collectives.encrypted_peers import HOST

UNREAD = 64 << 20  # bytes; more than sockets and queues of the other end take


def main() -> None:
    keys = Keys.generate()
    peer = EncryptedPeer(1, 60.0, keys, address=HOST)
    print(peer.endpoint, keys.public, flush=True)
    peer.receive(memoryview(bytearray(1)))
    peer.send(memoryview(bytes(UNREAD)), given=True)
    peer.close()
    print("closed", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
