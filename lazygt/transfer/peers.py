"""The sender's view of its receivers: connections, answers, and departures."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazygt.errors import ProtocolError, SecurityError
from lazygt.host.files import bind
from lazygt.runtime.launch.session_directory import SessionDirectory
from lazygt.transfer.control import PROTOCOL, Connection, Deadline, Message, PeerGone
from lazygt.transfer.layout import ReceiverLayout
from lazygt.transfer.transfer_errors import (
    ManifestMismatch,
    ReceiverDied,
    ReceiverFrozen,
    ReceiverRefused,
    TransferError,
    VersionHeld,
)

_HELLO_SECONDS = 1.0  # for the few bytes of an answer to a newcomer
_DEATH_SECONDS = 0.1  # between the end of a killed process's connection and its own
PING_SECONDS = 0.4  # for a sign of life, on a busy machine
_TURNED_AWAY = 4  # that an error names, the last ones


@dataclass(eq=False)
class ReceiverLink:
    """A sender's view of one receiver.

    Attributes:
        name: the receiver's own name; unique among those connected.
        layout: layout of its blocks; None: whole parameters.
        version: its version at the beginning of the transfer.
        transfer: number of the transfer that the answers below belong to.
        said: its answers: kind of message -> the message.
        staged: number of requests that it has taken in.
        sent: number of requests announced to it.
        holds: True if it still holds tensors of the version that is to be overwritten.
        left: True if it has left by a message, and holds nothing.
    """

    connection: Connection
    name: str
    layout: ReceiverLayout | None = None
    version: int = 0
    transfer: int = 0
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    staged: int = 0
    sent: int = 0
    holds: bool = False
    left: bool = False

    def expect(self, transfer: int) -> None:
        """Forget the answers to earlier transfers."""
        self.transfer, self.said, self.staged, self.holds = transfer, {}, 0, False
        self.sent = 0


class Receivers:
    """Listening socket and connections of a sender; used by one thread.

    Args:
        strategy: name of the transport; receivers of another one are turned away.

    Attributes:
        address: path of the socket that receivers connect to.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._directory = SessionDirectory()
        self.address = str(self._directory.path / "transfer")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind(self._listener, self.address)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._strangers: list[Connection] = []
        #: receivers turned away since enough were connected, with the reasons
        self._turned_away: deque[str] = deque(maxlen=_TURNED_AWAY)
        self.connected: list[ReceiverLink] = []
        #: receivers of the running transfer; newcomers join the next one
        self.active: list[ReceiverLink] = []
        #: a dropped receiver may be alive and still read shared memory
        self.suspect = False
        #: deadline of the pongs that were asked for
        self._patience: Deadline | None = None
        #: phase of the transfer, for errors
        self.during = "begin"

    # -- talking ---------------------------------------------------------------------------

    def send(
        self, receiver: ReceiverLink, message: Message, deadline: Deadline, fds: Sequence[int]
    ) -> None:
        """Send a message to one receiver.

        Raises:
            ReceiverDied, ReceiverFrozen: the receiver can't be reached; it is dropped.
        """
        try:
            receiver.connection.send(message, deadline, fds)
        except PeerGone:
            raise self._gone(receiver) from None
        except TimeoutError:
            self.drop(receiver)
            raise ReceiverFrozen((receiver.name,), deadline.seconds, self.during) from None

    def send_all(self, message: Message, deadline: Deadline) -> None:
        """Send a message to every receiver of the transfer."""
        for receiver in list(self.active):
            self.send(receiver, message, deadline, ())

    def wait(self, done: Callable[[ReceiverLink], bool], deadline: Deadline) -> None:
        """Wait until ``done`` holds for every receiver of the transfer.

        Raises:
            ReceiverDied: a receiver has gone; it is dropped.
            ReceiverFrozen: some were not done before the deadline; they are dropped.
            VersionHeld: some were not done because they still hold tensors; they are kept.
            ManifestMismatch, ReceiverRefused: a receiver has refused.
        """
        self.pump(0.0)
        while not all(map(done, self.active)):
            if deadline.expired:
                self._too_late([link for link in self.active if not done(link)], deadline)
            self.pump(deadline.remaining)

    def begin(self, transfer: int) -> list[ReceiverLink]:
        """Begin a transfer to all connected receivers, and return them."""
        self.active = list(self.connected)
        self._patience = None
        for receiver in self.active:
            receiver.expect(transfer)
        return list(self.active)

    def ping(self, deadline: Deadline) -> None:
        """Ping every receiver of the transfer, unless a ping is pending; does not wait.

        Args:
            deadline: deadline for sending the messages.
        """
        if self._patience is None and self.active:
            self._patience = Deadline(PING_SECONDS)
            for receiver in self.active:
                receiver.said.pop("pong", None)
            self.send_all({"kind": "ping", "transfer": self.active[0].transfer}, deadline)

    def check_liveness(self, deadline: Deadline) -> None:
        """Wait for a pong of every receiver, when a transfer is late or has failed.

        Args:
            deadline: deadline of the transfer, for the error.

        Raises:
            ReceiverDied, ReceiverFrozen: some sent none; they are dropped.
        """
        self._await_pongs(deadline)
        self._patience = None  # they may have answered long ago
        self._await_pongs(deadline)

    def _await_pongs(self, deadline: Deadline) -> None:
        self.ping(Deadline(PING_SECONDS))
        patience = self._patience or Deadline(0.0)
        while silent := [receiver for receiver in self.active if "pong" not in receiver.said]:
            if patience.expired:
                self._too_late(silent, deadline)
            self.pump(patience.remaining)

    def wait_for_connected(self, count: int, deadline: Deadline) -> None:
        """Wait until at least ``count`` receivers are connected.

        Raises:
            TransferError: the deadline has passed.
        """
        self.pump(0.0)  # so that receivers that have left do not count
        while len(self.connected) < count:
            if deadline.expired:
                here = ", ".join(receiver.name for receiver in self.connected) or "none"
                away = "; turned away: " + ", ".join(self._turned_away) if self._turned_away else ""
                raise TransferError(
                    f"waited {deadline.seconds:g} s for {count} receiver(s) at {self.address}; "
                    f"connected: {here}{away}. Start them with this address."
                )
            self.pump(deadline.remaining)
        self._turned_away.clear()

    def pump(self, seconds: float) -> None:
        """Wait at most ``seconds`` for messages, departures and newcomers; handle them."""
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        owners: dict[int, ReceiverLink | Connection] = {}
        for receiver in self.connected:
            owners |= dict.fromkeys(receiver.connection.descriptors, receiver)
        for stranger in self._strangers:
            owners |= dict.fromkeys(stranger.descriptors, stranger)
        for fd in owners:
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(seconds * 1e3)]
        for owner in dict.fromkeys(owners[fd] for fd in ready if fd in owners):
            if isinstance(owner, ReceiverLink):
                self._listen_to(owner)
            else:
                self._admit(owner)
        if self._listener.fileno() in ready:
            self._accept()

    def drop(self, receiver: ReceiverLink) -> None:
        """Disconnect a receiver. Idempotent."""
        if receiver not in self.connected:
            return
        if not receiver.left and not receiver.connection.has_ended(_DEATH_SECONDS):
            self.suspect = True
        receiver.connection.close()
        self.connected.remove(receiver)
        if receiver in self.active:
            self.active.remove(receiver)

    def drop_named(self, name: str) -> None:
        """Disconnect the receiver of this name, if there is one."""
        for receiver in [receiver for receiver in self.connected if receiver.name == name]:
            self.drop(receiver)

    @property
    def closed(self) -> bool:
        return self._listener.fileno() < 0

    def close(self) -> None:
        """Disconnect all, and stop listening; called once."""
        self._listener.close()
        self._directory.close()
        for receiver in list(self.connected):
            self.drop(receiver)
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()

    # -- listening -------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        try:
            self._strangers.append(Connection(sock))
        except (PeerGone, SecurityError):
            return  # a stranger's connection: the socket is closed

    def _admit(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._strangers.remove(connection)
                self._greet(connection, message)
                return
        except (PeerGone, ProtocolError, TimeoutError):
            connection.close()
            if connection in self._strangers:
                self._strangers.remove(connection)

    def _greet(self, connection: Connection, hello: Message) -> None:
        why = self._unwelcome(hello)
        deadline = Deadline(_HELLO_SECONDS)
        if why is not None:
            self._turned_away.append(f"{hello.get('name')!r} ({why})")
            connection.send({"kind": "refuse", "why": why}, deadline)
            connection.close()
            return
        layout = ReceiverLayout.unpack(hello.get("layout"))
        connection.send({"kind": "welcome"}, deadline)
        self.connected.append(ReceiverLink(connection, hello["name"], layout))

    def _unwelcome(self, hello: Message) -> str | None:
        if hello["kind"] != "hello" or hello.get("protocol") != PROTOCOL:
            return f"this sender speaks transfer protocol {PROTOCOL}"
        if hello.get("strategy") != self._strategy:
            return f"this is a {self._strategy} sender, not a {hello.get('strategy')} one"
        name = hello.get("name")
        if not isinstance(name, str):
            return f"a receiver's name is a str, not {name!r}"
        if any(receiver.name == name for receiver in self.connected):
            return f"there is a receiver named {name!r} already; give this one another name"
        return None

    def _listen_to(self, receiver: ReceiverLink) -> None:
        needed = receiver in self.active
        try:
            for message in receiver.connection.receive():
                self._take(receiver, message)
        except PeerGone:
            died = self._gone(receiver)
            if needed:
                raise died from None
        except ProtocolError as error:
            self.drop(receiver)
            if needed:
                raise ReceiverRefused(receiver.name, f"it broke the protocol: {error}") from error

    def _take(self, receiver: ReceiverLink, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "leave":
            receiver.left = True
        elif message.get("transfer") != receiver.transfer or receiver not in self.active:
            return  # an answer to a transfer that was given up
        elif kind == "staged":
            receiver.staged += 1
        elif kind == "held":
            receiver.holds = True
        elif kind == "refuse":
            refused = ManifestMismatch if message.get("mismatch") else ReceiverRefused
            raise refused(receiver.name, str(message.get("why")))
        else:
            receiver.said[kind] = message
            receiver.holds = False

    def _gone(self, receiver: ReceiverLink) -> ReceiverDied:
        self.drop(receiver)
        return ReceiverDied(receiver.name, receiver.connection.pid, self.during)

    def _too_late(self, late: list[ReceiverLink], deadline: Deadline) -> None:
        names = tuple(receiver.name for receiver in late)
        if late and all(receiver.holds for receiver in late):
            raise VersionHeld(names, deadline.seconds)
        for receiver in late:
            if not receiver.holds:
                self.drop(receiver)
        raise ReceiverFrozen(names, deadline.seconds, self.during)
