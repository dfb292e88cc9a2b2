"""A connection between client and agent without a network, which can be cut."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from lazygt.runtime.cluster.agent import Agent

Frame = bytes | memoryview


class End:
    """One end: what is sent at one comes at the other."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.other: End
        self.closed: str | None = None
        self.sent = 0
        self.bytes_sent = 0
        self._came: deque[list[bytes]] = deque()

    def send(self, frames: Sequence[Frame]) -> None:
        if self.closed is not None or self.other.closed is not None:
            return
        copies = [bytes(frame) for frame in frames]
        self.sent += 1
        self.bytes_sent += sum(map(len, copies))
        self.other._came.append(copies)
        os.eventfd_write(self.other.fd, 1)

    def take(self) -> list[memoryview] | None:
        if not self._came:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                return None
            if not self._came:
                return None
        return [memoryview(frame) for frame in self._came.popleft()]

    def close(self, reason: str) -> None:
        self.cut(reason)

    def cut(self, why: str) -> None:
        """Nothing goes either way any more."""
        for end in (self, self.other):
            end.closed = why
            os.eventfd_write(end.fd, 1)


def wire() -> tuple[End, End]:
    """Two ends of one connection."""
    ends = End(), End()
    ends[0].other, ends[1].other = ends[1], ends[0]
    return ends


class AgentThread(threading.Thread):
    """An agent in this process; its workers are processes all the same."""

    def __init__(self, end: End) -> None:
        super().__init__(name="agent", daemon=True)
        self.end, self.agent = end, Agent(end)
        self.start()

    def run(self) -> None:
        self.agent.serve()

    @property
    def pids(self) -> list[int]:
        return [
            pid
            for part in list(self.agent.parts.values())
            if part._link is not None
            for pid in part._link.pids
        ]
