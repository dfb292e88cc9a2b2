"""Agent in the client's own process, for ranks that move to its host from a lost one.

Client and agent exchange messages in memory, without a network.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from lazygt.runtime.cluster.agent import Agent
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.launch.start_plan import LinkSpec


class End:
    """One end of an in-process connection.

    Attributes:
        fd: descriptor that is readable when a message has come.
        closed: reason for the end of messages, or None.
        messages_sent, bytes_sent: totals so far.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.other: End
        self.closed: str | None = None
        self.messages_sent = self.bytes_sent = 0
        self._inbox: deque[list[bytes]] = deque()
        weakref.finalize(self, os.close, self.fd)

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a copy for the other end; does nothing once the connection is closed."""
        if self.closed is not None:
            return
        copies = [bytes(frame) for frame in frames]
        self.messages_sent += 1
        self.bytes_sent += sum(map(len, copies))
        self.other._inbox.append(copies)
        os.eventfd_write(self.other.fd, 1)

    def take(self) -> list[memoryview] | None:
        """Return the next message, or None if there is none."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        with suppress(IndexError):
            message = self._inbox.popleft()
            if self._inbox:
                os.eventfd_write(self.fd, 1)
            return [memoryview(frame) for frame in message]
        return None

    def close(self, reason: str = "done") -> None:
        """Close both ends."""
        for end in (self, self.other):
            end.closed = end.closed or reason
            os.eventfd_write(end.fd, 1)


def ends() -> tuple[End, End]:
    """Return both ends of a new connection."""
    here, there = End(), End()
    here.other, there.other = there, here
    return here, there


class AgentThread(threading.Thread):
    """Agent of this host on a thread of this process; its workers are processes.

    Attributes:
        end: the client's end of the connection to it.
        agent: the agent that the thread runs.
    """

    def __init__(
        self, adapt: Callable[[LinkSpec], LinkSpec] = lambda spec: spec, address: str = ""
    ) -> None:
        super().__init__(name="lazygt-agent", daemon=True)
        self.end, there = ends()
        self.agent = Agent(there, adapt, address)
        self.start()

    def run(self) -> None:
        self.agent.serve()
