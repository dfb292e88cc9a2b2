"""The agent of a host: starts workers there for a client elsewhere, and passes on what they say.

Its workers are started as any session's are on its own host: by a `ProcessLink`, in shared memory,
watched by it. Between client and agent there is one connection, which outlives a lost network.
"""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from lazygt.errors import LazyGTError, ProtocolError
from lazygt.runtime.cluster import protocol
from lazygt.runtime.cluster.host_part import HostPart
from lazygt.runtime.cluster.passing import Mirrors, write
from lazygt.runtime.cluster.protocol import (
    TO_AGENT,
    Begin,
    Close,
    Closed,
    Follow,
    Look,
    Mirror,
    Open,
    Refill,
    Refused,
    Replace,
    Seen,
    Shadow,
    Tell,
)
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.shared_memory import Arena, create_memory
from lazygt.runtime.wire import Part, encode, size_of

_log = logging.getLogger("lazygt")

#: Seconds between two looks whether anything has come.
_LOOK_SECONDS = 0.5


class Connected(Protocol):
    """What an agent asks of its connection."""

    @property
    def closed(self) -> str | None:
        """Why no message will come any more; None while one may."""

    @property
    def fd(self) -> int:
        """Can be read when something has come."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a message; its frames are copied. Does not wait. From any thread."""

    def take(self) -> list[memoryview] | None:
        """The next message, if there is one."""

    def close(self, reason: str = "done") -> None:
        """Say goodbye, and why."""


class Agent:
    """What one client's connection asks of this host.

    Args:
        connection: to the client.
        adapt: what workers are to be by the client -> by this host, which may refuse it by raising
            LazyGTError.
        address: at which the agents of other hosts reach this one; "": they don't.

    Attributes:
        mirrors: of what the client uploads.
    """

    def __init__(
        self,
        connection: Connected,
        adapt: Callable[[LinkSpec], LinkSpec] = lambda spec: spec,
        address: str = "",
    ) -> None:
        self._connection, self._adapt = connection, adapt
        #: what the client's last message to workers was
        self._told: list[memoryview] = []
        self.mirrors = Mirrors(address, self._say)
        #: what waits for pieces of uploads that other hosts pass on, and what came after that
        self._held: deque[tuple[Part, list[memoryview]]] = deque()
        self._shadows: dict[tuple[int, int], Arena] = {}
        self.parts: dict[int, HostPart] = {}

    def serve(self) -> str:
        """Do what the client asks until the connection has ended; why it has."""
        poller = select.poll()
        for descriptor in (self._connection.fd, *self.mirrors.descriptors):
            poller.register(descriptor, select.POLLIN)
        try:
            while self._connection.closed is None:
                self.pump()
                poller.poll(1_000 * _LOOK_SECONDS)
        except ProtocolError as error:
            self._connection.close(f"what the client sent makes no sense: {error}")
        finally:
            self.close()
        return self._connection.closed or ""

    def pump(self) -> None:
        """Do what the client has asked by now.

        Raises:
            ProtocolError: it can't be done, or makes no sense.
        """
        while (frames := self._connection.take()) is not None:
            message = protocol.read(frames, TO_AGENT)
            try:
                self._heard(message, frames[1:])
            except (OSError, ValueError, OverflowError, MemoryError) as error:
                raise ProtocolError(f"{type(message).__name__} can't be done: {error}") from error
        self.mirrors.pump()
        while self._held and not self._waits(self._held[0][0]):
            self._act(*self._held.popleft())
        for number in [number for number, part in self.parts.items() if not part.is_alive()]:
            self.parts.pop(number).close()

    @property
    def held(self) -> int:
        """Bytes of memory that the client has filled here."""
        waiting = sum(size_of(rest) for _, rest in self._held)
        shadows = sum(arena.held for arena in self._shadows.values())
        return waiting + self.mirrors.held + shadows

    def close(self) -> None:
        """End all workers, at once: nobody waits for what they do. Takes seconds at most."""
        for part in self.parts.values():
            part.end(at_once=True)
        for part in self.parts.values():
            part.close()
        self.parts.clear()
        for arena in self._shadows.values():
            arena.close()
        self.mirrors.close()

    def _say(self, message: Part, frames: Sequence[Frame] = ()) -> None:
        self._connection.send(encode(message, list(frames)))

    def _heard(self, message: Part, rest: list[memoryview]) -> None:
        """Do what the client says, in order, but for what uploads are waited for by."""
        match message:
            case Mirror():
                self.mirrors.take(message, _only(rest))
            case Begin():
                self._held.clear()  # of a session that has ended
                self.mirrors.begin(message)
            case Follow():
                self.mirrors.follow(message)
            case Close(part):
                self._end(part)
            case Look(part, seconds):
                there = self.parts.get(part)
                pages = () if there is None else there.look(seconds)
                self._say(Seen(part), [msgspec.msgpack.encode(pages)])
            case _ if self._held or self._waits(message):
                self._held.append((message, rest))
            case _:
                self._act(message, rest)

    def _end(self, number: int) -> None:
        """End a part, which need not have been opened yet."""
        kept = [held for held in self._held if getattr(held[0], "part", None) != number]
        self._held = deque(kept)
        if number in self.parts:
            self.parts[number].end()
        else:
            self._say(Closed(number))

    def _waits(self, message: Part) -> bool:
        """Whether it speaks of uploads that are not here yet."""
        return isinstance(message, Tell) and message.mirrors > self.mirrors.number

    def _act(self, message: Part, rest: list[memoryview]) -> None:
        match message:
            case Tell(part, workers):
                self._told = rest or self._told
                if (there := self.parts.get(part)) is not None:
                    there.tell(workers, self._told)
            case Shadow():
                self._shadow(message, _only(rest))
            case Open(part, text):
                self._open(part, text)
            case Replace(part, worker, number) if part in self.parts:
                self.parts[part].replace(worker, number)
            case Refill(part) if part in self.parts:
                self.parts[part].refill()

    def _open(self, number: int, text: str) -> None:
        try:
            spec = self._adapt(protocol.spec_of(text))
        except LazyGTError as error:
            self._say(Refused(number, str(error)))
            return
        upload = self.mirrors.arena(spec.arena_bytes) if spec.arena_bytes else None
        shadows = [
            self._shadows.pop((number, worker))
            for worker in range(len(spec.here))
            if (number, worker) in self._shadows
        ]
        self.parts[number] = HostPart(number, spec, self._say, upload, shadows)
        self.parts[number].start()
        for arena in shadows:
            arena.close()

    def _shadow(self, told: Shadow, data: Frame) -> None:
        key = told.part, told.worker
        if key not in self._shadows:
            self._shadows[key] = Arena.own(create_memory(told.first))
        write(self._shadows[key], told.offset, data)


def _only(frames: list[memoryview]) -> memoryview:
    if len(frames) != 1:
        raise ProtocolError(f"expected one frame of bytes, not {len(frames)}")
    return frames[0]
