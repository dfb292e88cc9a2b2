"""The sender's view of its receivers: who is there, what they have said, and who has gone."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lazygt.errors import ProtocolError, SecurityError
from lazygt.runtime.launch.session_directory import SessionDirectory
from lazygt.transfer.control import PROTOCOL, Connection, Deadline, Message, PeerGone
from lazygt.transfer.errors import (
    ManifestMismatch,
    ReceiverDied,
    ReceiverFrozen,
    ReceiverRefused,
    TransferError,
    VersionHeld,
)
from lazygt.transfer.holding import Holding
from lazygt.transfer.peer import Peer

_HELLO_SECONDS = 1.0  # for the few bytes of an answer to a newcomer
_DEATH_SECONDS = 0.1  # between the end of a killed process's connection and its own
_ASK_AGAIN_SECONDS = 1e-3
_PING_SECONDS = 0.4  # for a sign of life, on a busy machine
_TURNED_AWAY = 4  # that an error names, the last ones


class Peers:
    """Listens for receivers and talks to them; used by one thread.

    Args:
        strategy: receivers of another strategy are turned away.

    Attributes:
        address: the path that receivers connect to.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._directory = SessionDirectory()
        self.address = str(self._directory.path / "transfer")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._strangers: list[Connection] = []
        #: who was turned away since enough were there, and why
        self._turned_away: deque[str] = deque(maxlen=_TURNED_AWAY)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.connected: list[Peer] = []
        #: of the transfer that runs; newcomers join the next one
        self.active: list[Peer] = []
        #: somebody who may still look at shared memory can't be asked any more
        self.suspect = False
        #: what the transfer is at, for errors
        self.during = "begin"

    # -- talking ---------------------------------------------------------------------------

    def tell(self, peer: Peer, message: Message, deadline: Deadline, fds: Sequence[int]) -> None:
        """Send a message to one receiver.

        Raises:
            ReceiverDied, ReceiverFrozen: see there; the receiver is dropped.
        """
        try:
            peer.connection.send(message, deadline, fds)
        except PeerGone:
            raise self._gone(peer) from None
        except TimeoutError:
            self.drop(peer)
            raise ReceiverFrozen((peer.name,), deadline.seconds, self.during) from None

    def tell_all(self, message: Message, deadline: Deadline) -> None:
        """Send a message to every receiver of the transfer."""
        for peer in list(self.active):
            self.tell(peer, message, deadline, ())

    def wait(
        self,
        done: Callable[[Peer], bool],
        deadline: Deadline,
        until: Callable[[], bool] | None = None,
    ) -> None:
        """Wait until ``done`` holds for every receiver of the transfer.

        Args:
            until: besides, wait for this; it is asked every millisecond, and after `wake`.

        Raises:
            ReceiverDied: one has gone. It is dropped.
            ReceiverFrozen: some were not done before the deadline. They are dropped.
            VersionHeld: the same, but they are alive and say what keeps them.
            ManifestMismatch, ReceiverRefused: one has refused.
        """
        self.pump(0.0)
        while not (all(map(done, self.active)) and (until is None or until())):
            if deadline.expired:
                slowest = min((peer.staged for peer in self.active), default=0)
                late = [peer for peer in self.active if not done(peer)]
                self._too_late(
                    late or [peer for peer in self.active if peer.staged == slowest], deadline
                )
            asked = until is not None
            self.pump(min(deadline.remaining, _ASK_AGAIN_SECONDS) if asked else deadline.remaining)

    def accuse_silent(self, deadline: Deadline) -> None:
        """Ask every receiver for a sign of life, when a transfer is late or has failed.

        Args:
            deadline: of the transfer, for the error.

        Raises:
            ReceiverDied, ReceiverFrozen: some gave none. They are dropped.
        """
        for peer in self.active:
            peer.said.pop("pong", None)
        patience = Deadline(_PING_SECONDS)
        if self.active:
            self.tell_all({"kind": "ping", "transfer": self.active[0].transfer}, patience)
        while silent := [peer for peer in self.active if "pong" not in peer.said]:
            if patience.expired:
                self._too_late(silent, deadline)
            self.pump(patience.remaining)

    def wait_for_connected(self, count: int, deadline: Deadline) -> None:
        """Wait until so many receivers are connected.

        Raises:
            TransferError: they were not, until the deadline.
        """
        self.pump(0.0)  # so that those who have left do not count
        while len(self.connected) < count:
            if deadline.expired:
                here = ", ".join(peer.name for peer in self.connected) or "none"
                away = "; turned away: " + ", ".join(self._turned_away) if self._turned_away else ""
                raise TransferError(
                    f"waited {deadline.seconds:g} s for {count} receiver(s) at {self.address}; "
                    f"connected: {here}{away}. Start them with this address."
                )
            self.pump(deadline.remaining)
        self._turned_away.clear()

    def pump(self, seconds: float) -> None:
        """Wait at most so long for something to happen, and take it in."""
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        owners: dict[int, Peer | Connection] = {}
        for peer in self.connected:
            owners |= dict.fromkeys(peer.connection.descriptors, peer)
        for stranger in self._strangers:
            owners |= dict.fromkeys(stranger.descriptors, stranger)
        for fd in owners:
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(seconds * 1e3)]
        for owner in dict.fromkeys(owners[fd] for fd in ready if fd in owners):
            if isinstance(owner, Peer):
                self._listen_to(owner)
            else:
                self._admit(owner)
        if self._listener.fileno() in ready:
            self._accept()
        if self._wake in ready:
            os.eventfd_read(self._wake)

    def wake(self) -> None:
        """Let a `wait` ask again at once; any thread may call it."""
        if not self.closed:
            os.eventfd_write(self._wake, 1)

    def drop(self, peer: Peer) -> None:
        """Hang up on a receiver. Idempotent."""
        if peer not in self.connected:
            return
        if not peer.left and not peer.connection.has_ended(_DEATH_SECONDS):
            self.suspect = True
        peer.connection.close()
        self.connected.remove(peer)
        if peer in self.active:
            self.active.remove(peer)

    def drop_named(self, name: str) -> None:
        """Hang up on the receiver of this name, if it is there."""
        for peer in [peer for peer in self.connected if peer.name == name]:
            self.drop(peer)

    @property
    def closed(self) -> bool:
        return self._listener.fileno() < 0

    def close(self) -> None:
        """Hang up on all and stop listening; called once."""
        self._listener.close()
        self._directory.close()
        for peer in list(self.connected):
            self.drop(peer)
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()
        os.close(self._wake)

    # -- listening -------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        try:
            self._strangers.append(Connection(sock))
        except (PeerGone, SecurityError):
            return  # who it was has no say here, and the socket is closed

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
        holding = Holding.unpack(hello.get("holding"))
        connection.send({"kind": "welcome"}, deadline)
        self.connected.append(Peer(connection, hello["name"], holding))

    def _unwelcome(self, hello: Message) -> str | None:
        if hello["kind"] != "hello" or hello.get("protocol") != PROTOCOL:
            return f"this sender speaks transfer protocol {PROTOCOL}"
        if hello.get("strategy") != self._strategy:
            return f"this is a {self._strategy} sender, not a {hello.get('strategy')} one"
        name = hello.get("name")
        if not isinstance(name, str):
            return f"a receiver's name is a str, not {name!r}"
        if any(peer.name == name for peer in self.connected):
            return f"there is a receiver named {name!r} already; give this one another name"
        return None

    def _listen_to(self, peer: Peer) -> None:
        needed = peer in self.active
        try:
            for message in peer.connection.receive():
                self._take(peer, message)
        except PeerGone:
            died = self._gone(peer)
            if needed:
                raise died from None
        except ProtocolError as error:
            self.drop(peer)
            if needed:
                raise ReceiverRefused(peer.name, f"it broke the protocol: {error}") from error

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "leave":
            peer.left = True
        elif message.get("transfer") != peer.transfer or peer not in self.active:
            return  # an answer to a transfer that was given up
        elif kind == "staged":
            peer.staged += 1
        elif kind == "held":
            peer.holds = True
        elif kind == "refuse":
            refused = ManifestMismatch if message.get("mismatch") else ReceiverRefused
            raise refused(peer.name, str(message.get("why")))
        else:
            peer.said[kind] = message
            peer.holds = False

    def _gone(self, peer: Peer) -> ReceiverDied:
        self.drop(peer)
        return ReceiverDied(peer.name, peer.connection.pid, self.during)

    def _too_late(self, late: list[Peer], deadline: Deadline) -> None:
        names = tuple(peer.name for peer in late)
        if late and all(peer.holds for peer in late):
            raise VersionHeld(names, deadline.seconds)
        for peer in late:
            if not peer.holds:
                self.drop(peer)
        raise ReceiverFrozen(names, deadline.seconds, self.during)
