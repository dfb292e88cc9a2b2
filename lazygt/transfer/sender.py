"""The life of a transfer, seen from the sender; a strategy fills in how bytes move.

    begin ->     manifest, version, where the bytes will be      <- ready | refuse
    data ->      one request: pieces with their checksums        <- staged | refuse
    prepare ->   no more data                                    <- prepared | refuse
    commit ->    flip to the new version                         <- committed
    abort ->     (instead, at any point before commit) forget it

Readers see the new version after commit only, and commit goes out only when every receiver has
said *prepared*: all bytes are there and have the right checksums.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

from lazygt.transfer.batches import Batcher, Request
from lazygt.transfer.bytework import Crew, checksum_named
from lazygt.transfer.control import Deadline
from lazygt.transfer.errors import ReceiverDied, ReceiverFrozen, ReceiverRefused, TransferError
from lazygt.transfer.extractor import Extractor
from lazygt.transfer.hooks import SenderHooks
from lazygt.transfer.outgoing import Outgoing, alone
from lazygt.transfer.parts import remote
from lazygt.transfer.peer import Peer
from lazygt.transfer.peers import Peers
from lazygt.transfer.report import Progress, TransferReport
from lazygt.transfer.spec import Manifest

_ABORT_SECONDS = 0.1  # for a message of 30 bytes; who does not take it is told by what comes next
_UNREAD = 64  # requests: with more answers than a socket holds, both sides would wait to send
_COMMIT_SECONDS = 1.0  # at least, for the answers to a decision that can't be taken back


class Sender(SenderHooks, ABC):
    """Sends models to the receivers that are connected; used by one thread at a time.

    A strategy is a subclass in a file of its own, with its receiver beside it.

    Args:
        verify: the checksum of every piece: crc32, xor64 or none.
        skip_unchanged: leave out CPU parameters whose bytes (by SHA-256) are those of the last
            version, when all receivers have that one.

    Attributes:
        address: what receivers connect to, a path that only this user can reach.
        version: the last one that was committed; 0: none.
        verify: may be changed between two transfers.
    """

    strategy: ClassVar[str]

    def __init__(self, *, verify: str = "crc32", skip_unchanged: bool = False) -> None:
        checksum_named(verify)
        self.verify = verify
        self._skip = skip_unchanged
        self._peers = Peers(self.strategy)
        self._crew = Crew()
        self._busy = threading.Lock()
        self._transfers = 0
        self._digests: dict[int, bytes] = {}
        self._sent: Manifest | None = None
        self.version = 0

    # -- what a strategy has to fill in ------------------------------------------------------

    @property
    @abstractmethod
    def threshold(self) -> int:
        """Bytes of a request; 0: each chunk is a request."""

    @abstractmethod
    def prepare(self, out: Outgoing, peers: Sequence[Peer]) -> None:
        """Get ready for a transfer to these receivers."""

    @abstractmethod
    def carry(self, out: Outgoing, request: Request) -> None:
        """Move a request's bytes, and `announce` it."""

    # -- for everyone ----------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._peers.address

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the receivers that are connected."""
        return tuple(peer.name for peer in self._peers.connected)

    def wait_for_receivers(self, count: int, timeout: float = 60.0) -> None:
        """Wait until so many receivers are connected.

        Raises:
            TransferError: they were not, within ``timeout`` seconds.
        """
        self._peers.wait_for_connected(count, Deadline(timeout))

    def send(
        self,
        extractor: Extractor,
        *,
        version: int | None = None,
        timeout: float = 60.0,
        progress: Callable[[Progress], object] | None = None,
    ) -> TransferReport:
        """Send a model to every connected receiver: all get the new version, or none does.

        Args:
            version: greater than the receivers' own; by default the last one plus 1.
            timeout: seconds for the whole transfer.
            progress: called after each request.

        Raises:
            TransferError: see `lazygt.transfer.errors`. Receivers have their old version, and the
                next transfer may be tried at once.
        """
        with alone(self._busy):
            version = self.version + 1 if version is None else version
            self._transfers += 1
            manifest = extractor.manifest()
            if manifest == self._sent:
                manifest = self._sent  # what is known of it need not be found out again
            out = Outgoing(self._transfers, version, manifest, Deadline(timeout), self.verify)
            out.remote = remote(extractor)
            peers = self._open()
            committed = False
            try:
                self._stage(out, extractor, peers, progress)
                committed = True
                self.version, self._sent, self._digests = version, out.manifest, out.digests
                lost = self._commit(out)
            except BaseException:
                if committed:
                    self._drop_undecided()
                else:
                    self._abort(out)
                raise
            finally:
                self._peers.active = []
                self.ended(out, committed=committed)
            return out.report(peers, lost)

    def close(self) -> None:
        """Hang up on the receivers, which keep what they have. Idempotent."""
        if self._peers.closed:
            return
        self._peers.close()
        self._crew.close()
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for strategies --------------------------------------------------------------------

    def announce(self, out: Outgoing, request: Request, checks: Sequence[int], **more: Any) -> None:
        """Tell the receivers of a request; ``checks`` are the checksums of its pieces."""
        self.wait_staged(out, out.requests - _UNREAD)
        out.requests += 1
        out.done += sum(piece.nbytes for piece in request)
        message = {"kind": "data", "pieces": request, "checks": checks, **more}
        self._peers.tell_all({**message, "transfer": out.number}, out.deadline)

    def wait_staged(self, out: Outgoing, requests: int) -> None:
        """Wait until every receiver has taken in so many requests."""
        self._peers.wait(lambda peer: peer.staged >= requests, out.deadline)

    # -- the steps -------------------------------------------------------------------------

    def _open(self) -> list[Peer]:
        if self._peers.closed:
            raise TransferError("this sender is closed; make a new one")
        self._peers.pump(0.0)
        if self._peers.suspect:
            self._peers.suspect = False
            self._digests = {}
            self.forget()
        if not self._peers.connected:
            raise TransferError(
                f"no receiver is connected to {self.address}; start one with this address and "
                f"call wait_for_receivers(1)"
            )
        self._peers.active = list(self._peers.connected)
        for peer in self._peers.active:
            peer.expect(self._transfers)
        return list(self._peers.active)

    def _stage(
        self,
        out: Outgoing,
        extractor: Extractor,
        peers: list[Peer],
        progress: Callable[[Progress], object] | None,
    ) -> None:
        self._peers.during = "begin"
        with out.phase("begin"):
            self._begin(out, peers)
        self._peers.during = "data"
        with out.phase("data"):
            for _ in self.requests(out, extractor, peers):
                if progress is not None:
                    progress(Progress(out.done, out.total, out.requests))
            self.finish(out)
        self._peers.during = "prepare"
        with out.phase("prepare"):
            self.keep(out, out.unchanged)
            message = {"kind": "prepare", "transfer": out.number, "unchanged": out.unchanged}
            self._peers.tell_all(message, out.deadline)
            self._peers.wait(lambda peer: "prepared" in peer.said, out.deadline)
            out.check_time()  # this process itself may have been stopped
        if progress is not None:
            progress(Progress(out.total, out.total, out.requests))

    def _begin(self, out: Outgoing, peers: list[Peer]) -> None:
        self.prepare(out, peers)
        general = {
            "kind": "begin",
            "transfer": out.number,
            "version": out.version,
            "manifest": out.manifest.packed,
            "seconds": out.deadline.remaining,
            "verify": out.verify,
        }
        for peer in peers:
            more, fds = self.invitation(out, peer)
            self._peers.tell(peer, {**general, **more}, out.deadline, fds)
        self._peers.wait(lambda peer: "ready" in peer.said, out.deadline)
        for peer in peers:
            peer.version = peer.said["ready"]["version"]

    def requests(
        self, out: Outgoing, extractor: Extractor, peers: Sequence[Peer]
    ) -> Iterator[None]:
        """Carry one request after the other, each when the next item is asked for."""
        batcher = Batcher(out.manifest, self.threshold)
        known = self._digests if self._skip and self._all_have_last(out, peers) else None
        for chunk in extractor.chunks():
            for request in batcher.add(out.take_in(chunk, known, digest=self._skip)):
                self._carry(out, request)
                yield
            self._peers.pump(0.0)  # so that a death is noticed while chunks are being made
        for request in batcher.flush():
            self._carry(out, request)
            yield

    def _carry(self, out: Outgoing, request: Request) -> None:
        self.carry(out, request)
        for piece in request:
            if piece.begin + piece.nbytes == out.manifest.params[piece.param].nbytes:
                out.drop(piece.param)
        out.check_time()

    def _all_have_last(self, out: Outgoing, peers: Sequence[Peer]) -> bool:
        return (
            self._sent is not None
            and self._sent.digest == out.manifest.digest
            and all(peer.version == self.version for peer in peers)
        )

    def _commit(self, out: Outgoing) -> tuple[str, ...]:
        """Tell everyone to flip; names who went away now: the decision has been made."""
        self._peers.during = "commit"
        lost: list[str] = []
        deadline = Deadline(max(out.deadline.remaining, _COMMIT_SECONDS))
        message = {"kind": "commit", "transfer": out.number}
        untold = list(self._peers.active)
        with out.phase("commit"):
            while True:
                try:
                    while untold:
                        self._peers.tell(untold.pop(), message, deadline, ())
                    self._peers.wait(lambda peer: "committed" in peer.said, deadline)
                    return tuple(lost)
                except (ReceiverDied, ReceiverRefused) as error:
                    lost.append(error.receiver)
                    self._peers.drop_named(error.receiver)
                except ReceiverFrozen as error:
                    lost += error.receivers

    def _drop_undecided(self) -> None:
        """Let who may not know of the decision come back, and get the next version."""
        for peer in [peer for peer in self._peers.active if "committed" not in peer.said]:
            self._peers.drop(peer)

    def _abort(self, out: Outgoing) -> None:
        message = {"kind": "abort", "transfer": out.number}
        for peer in list(self._peers.active):
            try:
                self._peers.tell(peer, message, Deadline(_ABORT_SECONDS), ())
            except TransferError:
                continue  # the first failure is what the caller hears of; this one is dropped too
