"""Agent of a host: starts workers there for a remote client, and relays their messages.

A `ProcessLink` starts and watches the workers, with shared memory, as in a session on one host.
Client and agent share one connection, which survives network failures. An agent is a process of a
job, a thread of the client's own process, or a process started for one session: ``python -m`` this
module.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from lazygt.errors import LazyGTError, ProtocolError
from lazygt.net.channel import Keys
from lazygt.net.connection import Connection, dial
from lazygt.net.mailbox import Frame
from lazygt.runtime.arenas import Arena, create_memory
from lazygt.runtime.cluster import protocol
from lazygt.runtime.cluster.host_part import HostPart
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
from lazygt.runtime.cluster.upload_relay import Mirrors, write
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.wire import Message, decode, encode, size_of

_log = logging.getLogger("lazygt")

#: Seconds between two checks for messages.
_LOOK_SECONDS = 0.5


class Connected(Protocol):
    """Interface of an agent's connection; see `Connection`."""

    @property
    def closed(self) -> str | None: ...
    @property
    def fd(self) -> int: ...
    def send(self, frames: Sequence[Frame]) -> None: ...
    def take(self) -> list[memoryview] | None: ...
    def close(self, reason: str = "done") -> None: ...


class Agent:
    """Server of one client's requests on this host.

    Args:
        connection: connection to the client.
        adapt: converts the client's `LinkSpec` to this host's; raises LazyGTError to refuse it.
        address: address at which the agents of other hosts reach this one; "": there is none.

    Attributes:
        mirrors: this host's copy of the client's uploads.
    """

    def __init__(
        self,
        connection: Connected,
        adapt: Callable[[LinkSpec], LinkSpec] = lambda spec: spec,
        address: str = "",
    ) -> None:
        self._connection, self._adapt = connection, adapt
        #: frames of the client's last message to workers
        self._last_frames: list[memoryview] = []
        self.mirrors = Mirrors(address, self._send)
        #: messages that need pieces of uploads still on their way, and all later messages
        self._deferred: deque[tuple[Message, list[memoryview]]] = deque()
        #: (part, worker) -> snapshot memory received from a lost host, until the part is opened
        self._snapshots: dict[tuple[int, int], Arena] = {}
        self.parts: dict[int, HostPart] = {}

    def serve(self) -> str:
        """Serve the client until the connection has ended; return the reason of the end."""
        poller = select.poll()
        for descriptor in (self._connection.fd, *self.mirrors.descriptors):
            poller.register(descriptor, select.POLLIN)
        try:
            while self._connection.closed is None:
                self.pump()
                poller.poll(1_000 * _LOOK_SECONDS)
        except ProtocolError as error:
            self._connection.close(f"a message of the client's makes no sense: {error}")
        finally:
            self.close()
        return self._connection.closed or ""

    def pump(self) -> None:
        """Handle all of the client's messages that have arrived.

        Raises:
            ProtocolError: a message is invalid, or its request can't be done.
        """
        while (frames := self._connection.take()) is not None:
            message = decode(frames, TO_AGENT)
            try:
                self._handle(message, frames[1:])
            except (OSError, ValueError, OverflowError, MemoryError) as error:
                raise ProtocolError(f"{type(message).__name__} can't be done: {error}") from error
        self.mirrors.pump()
        while self._deferred and not self._needs_uploads(self._deferred[0][0]):
            self._execute(*self._deferred.popleft())
        for number in [number for number, part in self.parts.items() if not part.is_alive()]:
            self.parts.pop(number).close()

    @property
    def held(self) -> int:
        """Bytes of memory here that hold data of the client's."""
        waiting = sum(size_of(frames) for _, frames in self._deferred)
        snapshots = sum(arena.held for arena in self._snapshots.values())
        return waiting + self.mirrors.held + snapshots

    def close(self) -> None:
        """End all workers at once, without letting them finish. Takes seconds at most."""
        for part in self.parts.values():
            part.end(at_once=True)
        for part in self.parts.values():
            part.close()
        self.parts.clear()
        for arena in self._snapshots.values():
            arena.close()
        self.mirrors.close()

    def _send(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Send the client a message."""
        self._connection.send(encode(message, list(frames)))

    def _handle(self, message: Message, frames: list[memoryview]) -> None:
        """Handle a message at once, or defer it until the uploads that it needs have arrived.

        Args:
            frames: the frames after the message's header.
        """
        match message:
            case Mirror():
                self.mirrors.take(message, _single_frame(frames))
            case Begin():
                self._deferred.clear()  # these are of a session that has ended
                self.mirrors.begin(message)
            case Follow():
                self.mirrors.follow(message)
            case Close(part):
                self._end_part(part)
            case Look(part, seconds):
                host_part = self.parts.get(part)
                pages = () if host_part is None else host_part.look(seconds)
                self._send(Seen(part), [msgspec.msgpack.encode(pages)])
            case _ if self._deferred or self._needs_uploads(message):
                self._deferred.append((message, frames))
            case _:
                self._execute(message, frames)

    def _end_part(self, number: int) -> None:
        """End a part, which may not have been opened yet."""
        remaining = [entry for entry in self._deferred if getattr(entry[0], "part", None) != number]
        self._deferred = deque(remaining)
        if number in self.parts:
            self.parts[number].end()
        else:
            self._send(Closed(number))

    def _needs_uploads(self, message: Message) -> bool:
        """Return whether a message needs uploads that have not arrived yet."""
        return isinstance(message, Tell) and message.mirrors > self.mirrors.number

    def _execute(self, message: Message, frames: list[memoryview]) -> None:
        """Execute a request for which all uploads have arrived."""
        match message:
            case Tell(part, workers):
                self._last_frames = frames or self._last_frames
                if (host_part := self.parts.get(part)) is not None:
                    host_part.tell(workers, self._last_frames)
            case Shadow():
                self._store_snapshot(message, _single_frame(frames))
            case Open(part, text):
                self._open(part, text)
            case Replace(part, worker, number) if part in self.parts:
                self.parts[part].replace(worker, number)
            case Refill(part) if part in self.parts:
                self.parts[part].refill()

    def _open(self, number: int, text: str) -> None:
        """Start the workers of a part, with their snapshot memory if it was received."""
        try:
            spec = self._adapt(protocol.spec_of(text))
        except LazyGTError as error:
            self._send(Refused(number, str(error)))
            return
        upload = self.mirrors.arena(spec.arena_bytes) if spec.arena_bytes else None
        snapshots = [
            self._snapshots.pop((number, worker))
            for worker in range(len(spec.here))
            if (number, worker) in self._snapshots
        ]
        self.parts[number] = HostPart(number, spec, self._send, upload, snapshots)
        self.parts[number].start()
        for arena in snapshots:
            arena.close()

    def _store_snapshot(self, message: Shadow, data: Frame) -> None:
        """Write a piece of a worker's snapshots into memory for the part to be opened."""
        key = message.part, message.worker
        if key not in self._snapshots:
            self._snapshots[key] = Arena.own(create_memory(message.first))
        write(self._snapshots[key], message.offset, data)


def _single_frame(frames: list[memoryview]) -> memoryview:
    """Return the only frame; raise ProtocolError for another number of frames."""
    if len(frames) != 1:
        raise ProtocolError(f"expected one frame of bytes, not {len(frames)}")
    return frames[0]


# -- agent in the client's own process, for ranks that move to its host from a lost one ------------
# Client and agent exchange messages in memory, without a network.


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


# -- agent in a process of its own -----------------------------------------------------------------


def serve_client(connection: Connection, endpoint: str) -> str:
    """Serve a client as the agent of this host until the connection has ended.

    Args:
        endpoint: the client's endpoint.

    Returns:
        The reason of the end.
    """
    address = address_towards(endpoint)
    adapt = partial(replace, host=host_id(), address=address)
    return Agent(connection, adapt, address).serve()


def host_id() -> str:
    """Return an id shared by processes with the same files and UNIX sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net", "uts")]
    return " ".join((boot, *namespaces, str(os.getuid())))


def address_towards(endpoint: str) -> str:
    """Return the address of this host's interface that leads to ``endpoint``.

    Nothing is sent.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    family, socktype, _, _, sockaddr = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, socktype) as udp:
        udp.connect(sockaddr)
        return str(udp.getsockname()[0])


# The process of one session writes its public key to standard output, reads a line of JSON with the
# client's endpoint from standard input, and writes an empty line or an error. Only public keys are
# exchanged that way. The end of standard input ends the process, and with it all workers here.


def main() -> None:
    """Connect to a client, and serve it as the agent of this host."""
    keys = Keys.generate()
    _write_line(keys.public)
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    hello = json.dumps({"rank": request["rank"], "name": socket.gethostname()}).encode()
    try:
        connection = dial(
            zmq.Context.instance(),
            request["endpoint"],
            keys,
            request["public"],
            hello,
            request["max_message"],
            request["seconds"],
        )
    except LazyGTError as error:
        _write_line(f"{type(error).__name__}: {error}".replace("\n", " "))
        raise SystemExit(1) from error
    _write_line("")
    serve_client(connection, request["endpoint"])


def _write_line(line: str) -> None:
    """Write a line to standard output, and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _end_with_input() -> None:
    """End the process at the end of standard input; runs on a thread of its own."""
    sys.stdin.buffer.read()
    os._exit(1)  # the workers end with their pipes


if __name__ == "__main__":
    main()
