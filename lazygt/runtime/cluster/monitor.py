"""What ZMQ tells of the TCP connections of a socket."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import zmq
from zmq.utils.monitor import parse_monitor_message

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_names = count()


class Monitor:
    """The events of one socket.

    Attributes:
        fd: readable when there are some.
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
        """What happened, and its value: a descriptor, an interval or an error number."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._socket.recv_multipart())
            yield int(event["event"]), int(event["value"])

    def close(self) -> None:
        self._watched.disable_monitor()
        self._socket.close(0)
