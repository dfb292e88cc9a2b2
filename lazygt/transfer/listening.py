"""How a receiver hears its sender, also in the middle of a step that takes long."""

from __future__ import annotations

import os
import select
from collections import deque
from typing import Any

from lazygt.transfer.control import Connection, Deadline, Message
from lazygt.transfer.errors import SenderGone
from lazygt.transfer.incoming import Aborted, Incoming, Wake
from lazygt.transfer.reading import Readings

SEND_SECONDS = 10.0  # for an answer of some bytes; the sender reads them while it waits


class Listening(Readings):
    """The messages of one sender, for the transfer on its way in."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._incoming: Incoming | None = None
        self._inbox: deque[dict[str, Any]] = deque()
        self._wake = Wake()
        self._closing = False

    def _poll(self, link: Connection, seconds: float | None = None) -> None:
        """Wait for a message, the sender's end, a `Wake`, or the deadline of a transfer."""
        if seconds is None and self._incoming is not None:
            seconds = self._incoming.deadline.remaining
        poller = select.poll()
        for fd in (*link.descriptors, self._wake.fd):
            poller.register(fd, select.POLLIN)
        ready = dict(poller.poll(None if seconds is None else seconds * 1e3))
        if self._wake.fd in ready:
            os.eventfd_read(self._wake.fd)

    def _pull(self, link: Connection) -> None:
        for message in link.receive():
            if message["kind"] == "ping":
                self._answer(link, message, "pong")
            elif message["kind"] == "refuse":  # at once: the sender hangs up after it
                raise SenderGone(f"the sender turned it away: {message.get('why')}")
            else:
                self._inbox.append(message)

    def wait_or_abort(self, link: Connection, seconds: float) -> None:
        """For strategies: wait a moment in the middle of `receive`.

        Raises:
            Aborted: the sender gives the transfer up or is too late, or this receiver is closed.
            PeerGone: it has gone.
        """
        self._poll(link, seconds)
        self._pull(link)
        incoming = self._incoming
        if self._closing or incoming is None or incoming.deadline.expired:
            raise Aborted
        if any(_is_about(message, incoming, "abort") for message in self._inbox):
            raise Aborted

    def _answer(self, link: Connection, message: Message, kind: str, **more: Any) -> None:
        link.send({"kind": kind, "transfer": message["transfer"], **more}, Deadline(SEND_SECONDS))


def _is_about(message: Message, incoming: Incoming, kind: str) -> bool:
    return message["kind"] == kind and message.get("transfer") == incoming.transfer
