"""The receiving side: staged beside the current version, verified, then flipped to in one step."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from lazygt.errors import ProtocolError
from lazygt.transfer.batches import Piece
from lazygt.transfer.bytework import Checksum, Crew, checksum_named
from lazygt.transfer.control import PROTOCOL, Connection, Deadline, Message, PeerGone, connect
from lazygt.transfer.errors import SenderGone, TransferError
from lazygt.transfer.spec import Manifest, check_complete, difference

_SEND_SECONDS = 10.0  # for an answer of some bytes; the sender reads them while it waits
_GRACE_SECONDS = 1.0  # beyond the sender's own deadline, before the receiver gives up on it


class Version(NamedTuple):
    """A complete set of weights; its memory lives as long as one of its tensors."""

    number: int
    manifest: Manifest
    flat: Tensor
    params: dict[str, Tensor]


class Incoming:
    """A transfer on its way in."""

    def __init__(self, begin: Message) -> None:
        self.transfer, self.version = int(begin["transfer"]), int(begin["version"])
        self.manifest = Manifest.from_wire(begin["manifest"])
        self.deadline = Deadline(float(begin["seconds"]) + _GRACE_SECONDS)
        self.verify = str(begin["verify"])
        self.check: Checksum | None = checksum_named(self.verify)
        self.arrived: Counter[int] = Counter()
        self.flat = torch.empty(0, dtype=torch.uint8)
        self.staged: Version | None = None

    def run(self, piece: Piece) -> Tensor:
        """Where a piece belongs in the staging buffer.

        Raises:
            ProtocolError: it lies outside its parameter.
        """
        if not 0 <= piece.param < len(self.manifest.params):
            raise ProtocolError(f"a piece of unknown parameter {piece.param}")
        spec, place = self.manifest.params[piece.param], self.manifest.places[piece.param]
        if piece.begin < 0 or piece.nbytes < 1 or piece.begin + piece.nbytes > spec.nbytes:
            raise ProtocolError(f"a piece of {spec.name} lies outside of it")
        return self.flat[place + piece.begin : place + piece.begin + piece.nbytes]


class Wake:
    """Ends a thread's poll from any other thread, also from a finalizer (no lock is taken)."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)

    def __call__(self, *_: object) -> None:
        os.eventfd_write(self.fd, 1)


class Aborted(Exception):
    """The sender has given this transfer up."""


class _Hooks:
    """What the receiver of a strategy may fill in."""

    def invited(self, begin: Message, link: Connection) -> None:
        """Take what came with ``begin``, whatever becomes of the transfer."""

    def dropped(self) -> None:
        """The transfer on its way in was given up, or the sender has gone."""

    def holds_memory(self) -> bool:
        """Whether tensors of this process may lie in the sender's memory."""
        return False


class Receiver(_Hooks, ABC):
    """Receives versions of a model in a thread of its own, and hands them to readers.

    Args:
        address: the sender's.
        name: how errors call this receiver; unique among a sender's receivers.
        expect: refuse any other manifest; by default that of the first transfer counts.

    Attributes:
        name: see above.
    """

    strategy: ClassVar[str]

    def __init__(
        self, address: str, *, name: str | None = None, expect: Manifest | None = None
    ) -> None:
        self.name = name or f"pid {os.getpid()}"
        self._address = address
        self._expect = expect
        self._current: Version | None = None
        self._incoming: Incoming | None = None
        self._waiting: Message | None = None
        self._inbox: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._welcome = self._closing = False
        self._ended: str | None = None
        self._wake = Wake()
        self._crew = Crew()
        self._thread = threading.Thread(target=self._run, name="lazygt-receiver", daemon=True)
        self._thread.start()

    # -- what a strategy has to fill in ------------------------------------------------------

    @abstractmethod
    def staging(self, begin: Message, link: Connection, extent: int) -> Tensor | None:
        """A flat uint8 buffer of ``extent`` bytes for the new version.

        None when its memory is still held by readers; it is asked again after `Wake`.
        """

    @abstractmethod
    def receive(
        self, incoming: Incoming, data: Message, pieces: Sequence[Piece], link: Connection
    ) -> None:
        """Bring a request's pieces into the staging buffer."""

    def keep(self, incoming: Incoming, unchanged: Sequence[int]) -> None:
        """Bring parameters that did not travel into the staging buffer."""
        current = self._current
        if current is None or current.manifest.digest != incoming.manifest.digest:
            raise ProtocolError("unchanged parameters for a receiver that has none")
        for number in unchanged:
            begin, size = incoming.manifest.places[number], incoming.manifest.params[number].nbytes
            incoming.flat[begin : begin + size].copy_(current.flat[begin : begin + size])

    # -- reading ---------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that readers see; 0: none yet."""
        current = self._current
        return 0 if current is None else current.number

    @property
    def connected(self) -> bool:
        """Whether the sender is there and has admitted this receiver."""
        return self._welcome and self._ended is None

    @contextmanager
    def reading(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """The current version and its parameters, all of one version for the whole block.

        Tied names share a tensor. Do not write to the tensors, and clone what must outlive the
        block: the mapping is emptied at its end, and a tensor that is kept all the same holds
        back the memory that the next but one transfer needs.

        Raises:
            TransferError: there is no version yet.
        """
        current = self._current
        if current is None:
            raise TransferError(
                f"receiver {self.name!r} has no weights yet; call wait_for_version(1) first"
            )
        params = dict(current.params)
        number = current.number
        del current
        try:
            yield number, params
        finally:
            params.clear()

    def load_into(self, module: nn.Module) -> int:
        """Copy the current version into a module's parameters and buffers; returns its number.

        Raises:
            RuntimeError: names or shapes are not the module's.
            TransferError: there is no version yet.
        """
        with self.reading() as (number, params):
            module.load_state_dict(dict(params))
        return number

    def wait_for_version(self, number: int = 1, timeout: float = 60.0) -> int:
        """Wait until a version at least this new is there; returns its number.

        Raises:
            SenderGone: the sender has gone, or has turned this receiver away.
            TransferError: it was not there within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        with self._changed:
            while self.version < number:
                if self._ended is not None:
                    raise SenderGone(f"receiver {self.name!r}: {self._ended}")
                if deadline.expired:
                    raise TransferError(
                        f"receiver {self.name!r} waited {timeout:g} s for version {number}; it "
                        f"has version {self.version}"
                    )
                self._changed.wait(deadline.remaining)
        return self.version

    def close(self) -> None:
        """Leave the sender and drop the weights. Idempotent."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        ended = "it is closed"
        while not self._closing:
            # A sender that dropped us (we were stopped for too long) takes us back.
            try:
                link = connect(self._address)
            except (OSError, PeerGone):
                ended = f"the sender at {self._address} has gone"
                break
            try:
                self._serve(link)
            except PeerGone:
                continue
            except (SenderGone, ProtocolError, TimeoutError) as error:
                ended = str(error)
                break
            finally:
                self._give_up()
                link.close()
                self._inbox.clear()
        with self._changed:
            self._ended = ended
            if self._closing:
                self._current = None
            self._changed.notify_all()

    def _serve(self, link: Connection) -> None:
        hello = {"protocol": PROTOCOL, "strategy": self.strategy, "name": self.name}
        link.send({"kind": "hello", **hello}, Deadline(_SEND_SECONDS))
        while not self._closing:
            self._poll(link)
            self._pull(link)
            while self._inbox and not self._closing:
                self._handle(link, self._inbox.popleft())
            if self._waiting is not None:
                self._guarded(link, self._waiting, self._begin)
            if self._incoming is not None and self._incoming.deadline.expired:
                raise PeerGone  # a frozen sender; it is left, and finds that out when it wakes
        self._give_up()
        self._current = None
        if not self.holds_memory():
            link.send({"kind": "leave"}, Deadline(_SEND_SECONDS))

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
        self._inbox.extend(link.receive())

    def wait_or_abort(self, link: Connection, seconds: float) -> None:
        """For strategies: wait a moment in the middle of `receive`.

        Raises:
            Aborted: the sender gives the transfer up, or is too late.
            PeerGone: it has gone.
        """
        self._poll(link, seconds)
        self._pull(link)
        incoming = self._incoming
        if incoming is None or incoming.deadline.expired:
            raise Aborted
        if any(_is_about(message, incoming, "abort") for message in self._inbox):
            raise Aborted

    def _handle(self, link: Connection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "welcome":
            self._welcome = True
        elif kind == "refuse":
            raise SenderGone(f"the sender turned it away: {message.get('why')}")
        elif kind == "begin":
            self._give_up()
            self._guarded(link, message, self._begin)
        elif self._incoming is not None and message.get("transfer") == self._incoming.transfer:
            steps = {"data": self._data, "prepare": self._prepare, "commit": self._commit}
            if kind in steps:
                self._guarded(link, message, steps[kind])
            else:
                self._give_up()

    def _guarded(self, link: Connection, message: Message, step: Any) -> None:
        """Run a step; what goes wrong in it is the sender's to know, and ends this transfer."""
        try:
            step(link, message)
        except (PeerGone, TimeoutError):
            raise
        except Aborted:
            self._give_up()
        except Exception as error:  # noqa: BLE001 - said to the sender, who raises it
            self._give_up()
            self._answer(
                link,
                message,
                "refuse",
                why=str(error) or type(error).__name__,
                mismatch=isinstance(error, _Mismatch),
            )

    def _begin(self, link: Connection, message: Message) -> None:
        if "deadline" not in message:
            self.invited(message, link)
        incoming = Incoming(message)
        self._check_manifest(incoming)
        incoming.deadline = message.get("deadline", incoming.deadline)
        self._incoming, self._waiting = incoming, None
        flat = self.staging(message, link, incoming.manifest.extent)
        if flat is None:
            if "deadline" not in message:
                self._answer(link, message, "held")
            self._waiting = {**message, "deadline": incoming.deadline}
            return
        incoming.flat = flat
        self._answer(link, message, "ready", version=self.version)

    def _check_manifest(self, incoming: Incoming) -> None:
        if incoming.version <= self.version:
            raise _Mismatch(f"it has version {self.version}, not older than {incoming.version}")
        expected = self._expect
        if expected is None and self._current is not None:
            expected = self._current.manifest
        why = None if expected is None else difference(expected, incoming.manifest)
        if why is not None:
            raise _Mismatch(why)

    def _data(self, link: Connection, message: Message) -> None:
        incoming = self._incoming
        assert incoming is not None
        pieces = [Piece(*entry) for entry in message["pieces"]]
        runs = [incoming.run(piece) for piece in pieces]
        self.receive(incoming, message, pieces, link)
        if incoming.check is not None:
            found = self._crew.check(runs, incoming.check)
            for piece, ours, theirs in zip(pieces, found, message["checks"], strict=True):
                if ours != theirs:
                    raise TransferError(
                        f"bytes {piece.begin} to {piece.begin + piece.nbytes} of "
                        f"{incoming.manifest.params[piece.param].name} are not what was sent "
                        f"({incoming.verify} {ours:#x}, sent {theirs:#x})"
                    )
        for piece in pieces:
            incoming.arrived[piece.param] += piece.nbytes
        self._answer(link, message, "staged")

    def _prepare(self, link: Connection, message: Message) -> None:
        incoming = self._incoming
        assert incoming is not None
        unchanged = list(message["unchanged"])
        if unchanged:
            self.keep(incoming, unchanged)
            for number in unchanged:
                incoming.arrived[number] += incoming.manifest.params[number].nbytes
        why = check_complete(incoming.manifest, incoming.arrived)
        if why is not None:
            raise TransferError(why)
        params = incoming.manifest.tensors(incoming.flat)
        incoming.staged = Version(incoming.version, incoming.manifest, incoming.flat, params)
        self._answer(link, message, "prepared")

    def _commit(self, link: Connection, message: Message) -> None:
        incoming = self._incoming
        if incoming is None or incoming.staged is None:
            raise ProtocolError("a commit without a prepare")
        begin = time.perf_counter()
        with self._changed:
            self._current = incoming.staged  # the flip: readers see the old one, then the new one
            self._changed.notify_all()
        pause = time.perf_counter() - begin
        self._incoming = None
        self._answer(link, message, "committed", pause=pause)

    def _give_up(self) -> None:
        """Forget the transfer on its way in."""
        begun = self._incoming is not None
        self._incoming = self._waiting = None
        if begun:
            self.dropped()

    def _answer(self, link: Connection, message: Message, kind: str, **more: Any) -> None:
        link.send({"kind": kind, "transfer": message["transfer"], **more}, Deadline(_SEND_SECONDS))


class _Mismatch(TransferError):
    """The offered manifest is not what this receiver takes."""


def _is_about(message: Message, incoming: Incoming, kind: str) -> bool:
    return message["kind"] == kind and message.get("transfer") == incoming.transfer
