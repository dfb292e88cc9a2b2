"""The receiving side: staged beside the current version, verified, then flipped to in one step."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.batches import Piece
from lazygt.transfer.bytework import Crew
from lazygt.transfer.control import PROTOCOL, Connection, Deadline, Message, PeerGone, connect
from lazygt.transfer.errors import SenderGone, TransferError
from lazygt.transfer.holding import Holding
from lazygt.transfer.hooks import ReceiverHooks
from lazygt.transfer.incoming import Aborted, Block, Incoming, Mismatch
from lazygt.transfer.listening import SEND_SECONDS, Listening
from lazygt.transfer.spec import Manifest, check_complete, difference


class Receiver(ReceiverHooks, Listening, ABC):
    """Receives versions of a model in a thread of its own, and hands them to readers.

    Args:
        address: the sender's.
        name: how errors call this receiver; unique among a sender's receivers.
        expect: refuse any other manifest; by default that of the first transfer counts.
        holding: what it holds of each parameter; None: all of it. Strategies take it as three
            arguments: ``mesh``, of receivers, such as ``{"model": 2}``; ``rank``, this one's
            place there; ``placements``, which maps name patterns to ``torch.distributed.tensor``
            placements, one an axis: a list in the mesh's order or a dict by axis. The first
            pattern that fits counts; a parameter that none fits is held whole. They raise
            ValueError if these make no sense together.

    Attributes:
        name: see above.
    """

    strategy: ClassVar[str]

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        expect: Manifest | None = None,
        holding: Holding | None = None,
    ) -> None:
        super().__init__(name or f"pid {os.getpid()}")
        self._address, self._expect, self.holding = os.fspath(address), expect, holding
        self._waiting: Message | None = None
        self._welcome = False
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

    # -- for everyone ----------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the sender is there and has admitted this receiver."""
        return self._welcome and self._ended is None

    def close(self) -> None:
        """Leave the sender and drop the weights. Idempotent."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            ended = self._follow()
        except (SenderGone, ProtocolError, TimeoutError) as error:
            ended = str(error)
        except Exception as error:  # noqa: BLE001 - readers that wait are told
            ended = f"it failed with {type(error).__name__}: {error}"
        if self._closing:
            self._current = None
        self._end(ended)

    def _follow(self) -> str:
        """Serve the sender until it has gone or this receiver is closed; says which."""
        while not self._closing:
            try:
                link = connect(self._address)
            except (OSError, PeerGone):
                gone = f"the sender at {self._address} has gone"
                return gone if self._welcome else f"there is no sender at {self._address}"
            try:
                self._serve(link)
            except PeerGone:
                continue  # a sender that dropped us (we were stopped for too long) takes us back
            finally:
                self._give_up()
                link.close()
                self._inbox.clear()
        return "it is closed"

    def _serve(self, link: Connection) -> None:
        hello = {"protocol": PROTOCOL, "strategy": self.strategy, "name": self.name}
        holds = {} if self.holding is None else {"holding": self.holding.packed}
        link.send({"kind": "hello", **hello, **holds}, Deadline(SEND_SECONDS))
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
            link.send({"kind": "leave"}, Deadline(SEND_SECONDS))

    def _handle(self, link: Connection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "welcome":
            self._welcome = True
        elif kind == "begin":
            self._give_up()
            self._guarded(link, message, self._begin)
        elif self._incoming is not None and message.get("transfer") == self._incoming.transfer:
            step = {
                "data": self._data,
                "coming": self._coming,
                "parts": self._parts,
                "prepare": self._prepare,
                "commit": self._commit,
            }.get(kind)
            if step is not None:
                self._guarded(link, message, step)
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
                mismatch=isinstance(error, Mismatch),
            )

    def _begin(self, link: Connection, message: Message) -> None:
        if "deadline" not in message:
            self.invited(message, link)
        incoming = Incoming(message, self._current, self.holding)
        self._check_manifest(incoming)
        incoming.deadline = message.get("deadline", incoming.deadline)
        self._incoming, self._waiting = incoming, None
        flat = self.staging(message, link, incoming.manifest.extent)
        if flat is None:
            if "deadline" not in message:
                self._answer(link, message, "held")
            self._waiting = {**message, "deadline": incoming.deadline}
            return
        self._answer(link, message, "ready", version=self.version)
        incoming.stage_in(flat)  # while the sender gathers the first request

    def _check_manifest(self, incoming: Incoming) -> None:
        if incoming.version <= self.version:
            raise Mismatch(f"it has version {self.version}, not older than {incoming.version}")
        expected = self._expect
        if expected is None and self._current is not None:
            expected = self._current.whole
        why = None if expected is None else difference(expected, incoming.whole)
        if why is not None:
            raise Mismatch(why)

    def _data(self, link: Connection, message: Message) -> None:
        incoming = self._incoming
        assert incoming is not None
        pieces = [Piece(*entry) for entry in message["pieces"]]
        runs = [incoming.run(piece) for piece in pieces]
        self.receive(incoming, message, pieces, link)
        incoming.take_in(self._crew, pieces, runs, message["checks"])
        self._answer(link, message, "staged")

    def _coming(self, link: Connection, message: Message) -> None:
        assert self._incoming is not None
        self.coming(self._incoming, message, link)

    def _parts(self, link: Connection, message: Message) -> None:
        """Blocks that their owner has written."""
        incoming = self._incoming
        assert incoming is not None
        blocks = [Block(*entry) for entry in message["parts"]]
        self.bring(incoming, message, blocks, link)
        incoming.take_in(self._crew, blocks, map(incoming.block, blocks), message["checks"])
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
        incoming.complete = True
        self._answer(link, message, "prepared")

    def _commit(self, link: Connection, message: Message) -> None:
        incoming = self._incoming
        if incoming is None or incoming.staged is None or not incoming.complete:
            raise ProtocolError("a commit without a prepare")
        begin = time.perf_counter()
        self._flip(incoming.staged)
        pause = time.perf_counter() - begin
        self._incoming = None
        self._answer(link, message, "committed", pause=pause)

    def _give_up(self) -> None:
        """Forget the transfer on its way in."""
        begun = self._incoming is not None
        self._incoming = self._waiting = None
        if begun:
            self.dropped()
