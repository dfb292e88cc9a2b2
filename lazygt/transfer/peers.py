"""Receivers as the sender sees them: connections, answers, and disconnections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lazygt.errors import ProtocolError
from lazygt.transfer.control import (
    PROTOCOL,
    ControlConnection,
    ControlListener,
    ControlMessage,
    Deadline,
    PeerGone,
    readable,
)
from lazygt.transfer.layout import ReceiverLayout
from lazygt.transfer.transfer_errors import (
    ManifestMismatch,
    ReceiverDied,
    ReceiverFrozen,
    ReceiverRefused,
    TransferError,
    VersionHeld,
)

_HELLO_SECONDS = 1.0  # for the few bytes of an answer to `hello`
_DEATH_SECONDS = 0.1  # from the end of a killed process's connection to the end of the process
PING_SECONDS = 0.4  # for a pong, on a busy machine
_MAX_REFUSALS = 4  # last refused receivers that an error names


@dataclass(eq=False)
class ReceiverLink:
    """A sender's view of one receiver.

    Attributes:
        name: the receiver's own name; unique among those connected.
        layout: layout of its blocks; None: whole parameters.
        transfer: number of the transfer of the answers below.
        answers: kind of message -> the receiver's last message of this kind.
        staged: number of requests that the receiver has staged.
        sent: number of requests announced to the receiver.
        holds: True if readers there still hold tensors of the version to be overwritten.
        left: True if the receiver said goodbye, and holds no tensors.
    """

    connection: ControlConnection
    name: str
    layout: ReceiverLayout | None = None
    transfer: int = 0
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    staged: int = 0
    sent: int = 0
    holds: bool = False
    left: bool = False

    def expect(self, transfer: int) -> None:
        """Reset the answers for a new transfer."""
        self.transfer, self.answers, self.staged, self.holds = transfer, {}, 0, False
        self.sent = 0


class Receivers:
    """Listening socket and connections of a sender; used by one thread.

    Args:
        strategy: name of the transport; receivers of another one are refused.

    Attributes:
        address: path of the socket that receivers connect to.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._listener = ControlListener()
        self.address = self._listener.address
        self._unadmitted: list[ControlConnection] = []
        #: recently refused receivers, with the reasons
        self._refusals: deque[str] = deque(maxlen=_MAX_REFUSALS)
        self.connected: list[ReceiverLink] = []
        #: receivers of the running transfer; later ones join the next transfer
        self.active: list[ReceiverLink] = []
        #: True if a dropped receiver may be alive and still read shared memory
        self.suspect = False
        #: deadline of the pending ping; None: no ping is pending
        self._pong_deadline: Deadline | None = None
        #: phase of the transfer, for errors
        self.during = "begin"

    # -- sending ---------------------------------------------------------------------------

    def send(
        self,
        receiver: ReceiverLink,
        message: ControlMessage,
        deadline: Deadline,
    ) -> None:
        """Send a message to one receiver.

        Raises:
            ReceiverDied, ReceiverFrozen: the receiver can't be reached; it is dropped.
        """
        try:
            receiver.connection.send(message, deadline)
        except PeerGone:
            raise self._drop_dead(receiver) from None
        except TimeoutError:
            self.drop(receiver)
            raise ReceiverFrozen((receiver.name,), deadline.seconds, self.during) from None

    def wait(self, done: Callable[[ReceiverLink], bool], deadline: Deadline) -> None:
        """Wait until ``done`` holds for every receiver of the transfer.

        Raises:
            ReceiverDied: a receiver has gone; it is dropped.
            ReceiverFrozen: some were not done before the deadline; they are dropped.
            VersionHeld: some were not done because they still hold tensors; they stay connected.
            ManifestMismatch, ReceiverRefused: a receiver has refused.
        """
        self.pump(0.0)
        while not all(map(done, self.active)):
            if deadline.expired:
                self._fail_late([link for link in self.active if not done(link)], deadline)
            self.pump(deadline.remaining)

    def begin(self, transfer: int) -> list[ReceiverLink]:
        """Begin a transfer to all connected receivers, and return them."""
        self.active = list(self.connected)
        self._pong_deadline = None
        for receiver in self.active:
            receiver.expect(transfer)
        return list(self.active)

    def ping(self, deadline: Deadline) -> None:
        """Ping every receiver of the transfer, unless a ping is pending; does not wait.

        Args:
            deadline: deadline for sending the messages.
        """
        if self._pong_deadline is None and self.active:
            self._pong_deadline = Deadline(PING_SECONDS)
            for receiver in list(self.active):
                receiver.answers.pop("pong", None)
                self.send(receiver, {"kind": "ping", "transfer": receiver.transfer}, deadline)

    def check_liveness(self, deadline: Deadline) -> None:
        """Wait for a pong of every receiver, when a transfer is late or has failed.

        Args:
            deadline: deadline of the transfer, for the error.

        Raises:
            ReceiverDied, ReceiverFrozen: some sent none; they are dropped.
        """
        self._await_pongs(deadline)
        self._pong_deadline = None  # the first ping may have been answered long ago
        self._await_pongs(deadline)

    def _await_pongs(self, deadline: Deadline) -> None:
        """Wait for a pong of every receiver; drop those without one, and raise."""
        self.ping(Deadline(PING_SECONDS))
        pong_deadline = self._pong_deadline or Deadline(0.0)
        while silent := [receiver for receiver in self.active if "pong" not in receiver.answers]:
            if pong_deadline.expired:
                self._fail_late(silent, deadline)
            self.pump(pong_deadline.remaining)

    def wait_for_connected(self, count: int, deadline: Deadline) -> None:
        """Wait until at least ``count`` receivers are connected.

        Raises:
            TransferError: the deadline has passed.
        """
        self.pump(0.0)  # disconnects count before the number is read
        while len(self.connected) < count:
            if deadline.expired:
                connected = ", ".join(receiver.name for receiver in self.connected) or "none"
                refused = "; turned away: " + ", ".join(self._refusals) if self._refusals else ""
                raise TransferError(
                    f"waited {deadline.seconds:g} s for {count} receiver(s) at {self.address}; "
                    f"connected: {connected}{refused}. Start them with this address."
                )
            self.pump(deadline.remaining)
        self._refusals.clear()

    def pump(self, seconds: float) -> None:
        """Wait at most ``seconds`` for messages, disconnects and new connections; handle them."""
        peers: dict[int, ReceiverLink | ControlConnection] = {}
        for receiver in self.connected:
            peers |= dict.fromkeys(receiver.connection.descriptors, receiver)
        for connection in self._unadmitted:
            peers |= dict.fromkeys(connection.descriptors, connection)
        ready = readable([self._listener.fd, *peers], seconds)
        for peer in dict.fromkeys(peer for fd, peer in peers.items() if fd in ready):
            if isinstance(peer, ReceiverLink):
                self._receive_from(peer)
            else:
                self._admit(peer)
        if self._listener.fd in ready and (accepted := self._listener.accept()):
            self._unadmitted.append(accepted)  # `_admit` reads its `hello` later

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
        return self._listener.fd < 0

    def close(self) -> None:
        """Disconnect all, and stop listening; called once."""
        self._listener.close()
        for receiver in list(self.connected):
            self.drop(receiver)
        for connection in self._unadmitted:
            connection.close()
        self._unadmitted.clear()

    # -- receiving -------------------------------------------------------------------------

    def _admit(self, connection: ControlConnection) -> None:
        """Read the first message of a connection, and admit or refuse its receiver."""
        try:
            for message in connection.receive():
                self._unadmitted.remove(connection)
                self._answer_hello(connection, message)
                return
        except (PeerGone, ProtocolError, TimeoutError):
            connection.close()
            if connection in self._unadmitted:
                self._unadmitted.remove(connection)

    def _answer_hello(self, connection: ControlConnection, hello: ControlMessage) -> None:
        """Admit a receiver by `welcome`, or refuse it with a reason."""
        refusal = self._refusal(hello)
        deadline = Deadline(_HELLO_SECONDS)
        if refusal is not None:
            self._refusals.append(f"{hello.get('name')!r} ({refusal})")
            connection.send({"kind": "refuse", "why": refusal}, deadline)
            connection.close()
            return
        layout = ReceiverLayout.unpack(hello.get("layout"))
        connection.send({"kind": "welcome"}, deadline)
        self.connected.append(ReceiverLink(connection, hello["name"], layout))

    def _refusal(self, hello: ControlMessage) -> str | None:
        """Return the reason to refuse a receiver, or None."""
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

    def _receive_from(self, receiver: ReceiverLink) -> None:
        """Handle a receiver's messages; its end is an error during a transfer only."""
        is_active = receiver in self.active
        try:
            for message in receiver.connection.receive():
                self._handle(receiver, message)
        except PeerGone:
            died = self._drop_dead(receiver)
            if is_active:
                raise died from None
        except ProtocolError as error:
            self.drop(receiver)
            if is_active:
                raise ReceiverRefused(receiver.name, f"it broke the protocol: {error}") from error

    def _handle(self, receiver: ReceiverLink, message: dict[str, Any]) -> None:
        """Record a receiver's answer; raise if the receiver refuses the transfer."""
        kind = message["kind"]
        if kind == "leave":
            receiver.left = True
        elif message.get("transfer") != receiver.transfer or receiver not in self.active:
            return  # an answer to an aborted transfer
        elif kind == "staged":
            receiver.staged += 1
        elif kind == "held":
            receiver.holds = True
        elif kind == "refuse":
            error_class = ManifestMismatch if message.get("mismatch") else ReceiverRefused
            raise error_class(receiver.name, str(message.get("why")))
        else:
            receiver.answers[kind] = message
            receiver.holds = False

    def _drop_dead(self, receiver: ReceiverLink) -> ReceiverDied:
        """Drop a receiver that has gone, and return the error to raise."""
        self.drop(receiver)
        return ReceiverDied(receiver.name, receiver.connection.pid, self.during)

    def _fail_late(self, late: list[ReceiverLink], deadline: Deadline) -> None:
        """Drop the late receivers, except those that wait for readers, and raise the error."""
        names = tuple(receiver.name for receiver in late)
        if late and all(receiver.holds for receiver in late):
            raise VersionHeld(names, deadline.seconds)
        for receiver in late:
            if not receiver.holds:
                self.drop(receiver)
        raise ReceiverFrozen(names, deadline.seconds, self.during)
