"""A TCP relay that can cut what goes through it, and remembers what clients sent."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Relays to an address, until it is closed.

    Attributes:
        address: where to connect instead.
        recorded: the bytes of each TCP connection, from the client's side.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded: list[bytearray] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    pair = near, socket.create_connection(self._target)
                except OSError:
                    near.close()
                    raise
                self._pairs.append(pair)
                self.recorded.append(bytearray())
                for source, target, record in (
                    (*pair, self.recorded[-1]), (*pair[::-1], bytearray()),
                ):  # fmt: skip
                    thread = threading.Thread(target=_relay, args=(source, target, record))
                    self._threads.append(thread)
                    thread.start()

    def cut(self) -> None:
        """Reset all connections, with what is on its way."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()


def _relay(source: socket.socket, target: socket.socket, record: bytearray) -> None:
    with suppress(OSError):
        while part := source.recv(1 << 16):
            record += part
            target.sendall(part)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
    source.close()
