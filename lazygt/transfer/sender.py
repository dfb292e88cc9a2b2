"""The protocol of a transfer, in the sender; a transport moves the bytes.

    begin ->     manifest, version, place of the bytes           <- ready | refuse
    parts ->     one request: blocks with their checksums        <- staged | refuse
    prepare ->   no more data                                    <- prepared | refuse
    commit ->    flip to the new version                         <- committed
    abort ->     (instead, at any point before commit) forget it

It is a two-phase commit: readers see the new version after commit only, and commit is sent only
when every receiver has said *prepared*: it has all bytes, with the right checksums.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Self

from lazygt.transfer.checksums import checksum_named
from lazygt.transfer.control import Deadline
from lazygt.transfer.copier import LocalSource
from lazygt.transfer.copy_request import WeightSource
from lazygt.transfer.data_stream import TransferStream
from lazygt.transfer.extractor import Extractor
from lazygt.transfer.layout import Bounds, Layouts
from lazygt.transfer.manifest import ALIGNMENT
from lazygt.transfer.peers import ReceiverLink, Receivers
from lazygt.transfer.transaction import Progress, Transfer, TransferReport, alone, remote_model
from lazygt.transfer.transfer_errors import (
    ManifestMismatch,
    ReceiverDied,
    ReceiverFrozen,
    ReceiverRefused,
    TransferError,
)
from lazygt.transfer.transports.transport import SenderEnd

GIB = 1 << 30

_ABORT_SECONDS = 0.1  # for a message of 30 bytes; a receiver that does not take it is dropped
_COMMIT_SECONDS = 1.0  # at least, for the answers to a decision that can't be taken back

ShowProgress = Callable[[Progress], object]


def threshold_bytes(threshold_gb: float | str, name: str = "threshold_gb") -> int:
    """Return a request's threshold in GiB as bytes.

    Args:
        name: name of the setting, for the error.

    Raises:
        ValueError: it is no number, negative, infinite, or above 0 and below 256 bytes.
    """
    try:
        nbytes = int(float(threshold_gb) * GIB)
    except (ValueError, TypeError, OverflowError):
        nbytes = -1
    if nbytes < 0 or 0 < nbytes < ALIGNMENT:
        raise ValueError(
            f"{name}={threshold_gb!r}: expected GiB, 0 (a request a chunk) or at least "
            f"{ALIGNMENT / GIB:.1e}"
        )
    return nbytes


class Sender:
    """Sender of models to the connected receivers; used by one thread at a time.

    Args:
        transport: sender's end of a transport: see `transports.base`.
            `SharedMemoryTransferSender` and the others make a sender with theirs.
        verify: checksum of every block: crc32, xor64 or none.
        skip_unchanged: leave out blocks in the host's memory with the bytes (by SHA-256) of the
            last version, when all receivers have that one.

    Attributes:
        address: path of the socket that receivers connect to; only this user can reach it.
        version: last committed version; 0: none.
        verify: see above; may be changed between two transfers.
    """

    def __init__(
        self, transport: SenderEnd, *, verify: str = "crc32", skip_unchanged: bool = False
    ) -> None:
        checksum_named(verify)
        self.verify = verify
        self.transport = transport
        self.version = 0
        self._skip = skip_unchanged
        self._receivers = Receivers(transport.strategy)
        transport.attach(self._receivers)
        self._busy = threading.Lock()
        self._transfers = 0
        self._sent: Transfer | None = None
        self._here: LocalSource | None = None
        self._sources: weakref.WeakSet[WeightSource] = weakref.WeakSet()

    @property
    def strategy(self) -> str:
        """Name of the transport, the same as the receivers'."""
        return self.transport.strategy

    @property
    def address(self) -> str:
        return self._receivers.address

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the connected receivers."""
        return tuple(receiver.name for receiver in self._receivers.connected)

    def wait_for_receivers(self, count: int, timeout: float = 60.0) -> None:
        """Wait until at least ``count`` receivers are connected.

        Raises:
            TransferError: they were not within ``timeout`` seconds.
        """
        self._receivers.wait_for_connected(count, Deadline(timeout))

    def send(
        self,
        extractor: Extractor,
        *,
        version: int | None = None,
        timeout: float = 60.0,
        progress: ShowProgress | None = None,
    ) -> TransferReport:
        """Send a model to every connected receiver: all get the new version, or none does.

        Args:
            version: greater than the receivers' own; by default the last one plus 1.
            timeout: seconds for the whole transfer.
            progress: called after each request.

        Raises:
            TransferError: see `lazygt.transfer.transfer_errors`. Receivers have their old version,
                and the next transfer may be tried at once.
        """
        with alone(self._busy):
            transfer = self._new_transfer(extractor, version, Deadline(timeout))
            stream = TransferStream(transfer, self._receivers, self.transport, digests=self._skip)
            committed = False
            try:
                self._stage(transfer, stream, extractor, progress or _ignore)
                committed = True
                self.version, self._sent = transfer.version, transfer
                lost = self._commit(transfer)
            except BaseException:
                if committed:
                    self._drop_undecided()
                else:
                    self._abort(transfer)
                raise
            finally:
                self._receivers.active = []
                self._end(stream, committed=committed)
            return transfer.report(lost)

    def close(self) -> None:
        """Disconnect the receivers, which keep their version. Idempotent."""
        if self._receivers.closed:
            return
        self._receivers.close()
        self.transport.close()
        self._let_go()
        if self._here is not None:
            self._here.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the steps -------------------------------------------------------------------------

    def _new_transfer(
        self, extractor: Extractor, version: int | None, deadline: Deadline
    ) -> Transfer:
        self._transfers += 1
        manifest = extractor.manifest()
        if self._sent is not None and manifest == self._sent.manifest:
            manifest = self._sent.manifest  # its cached properties need not be computed again
        version = self.version + 1 if version is None else version
        transfer = Transfer(self._transfers, version, manifest, deadline, self.verify)
        transfer.remote = remote_model(extractor)
        transfer.receivers = self._open()
        return transfer

    def _open(self) -> list[ReceiverLink]:
        if self._receivers.closed:
            raise TransferError("this sender is closed; make a new one")
        self._receivers.pump(0.0)
        if self._receivers.suspect:
            self._receivers.suspect = False
            self._sent = None
            self.transport.forget()
            self._let_go()
        if not self._receivers.connected:
            raise TransferError(
                f"no receiver is connected to {self.address}; start one with this address and "
                f"call wait_for_receivers(1)"
            )
        return self._receivers.begin(self._transfers)

    def _stage(
        self, transfer: Transfer, stream: TransferStream, extractor: Extractor, show: ShowProgress
    ) -> None:
        self._receivers.during = "begin"
        with transfer.phase("begin"):
            self._begin(transfer)
        self._receivers.during = "data"
        with transfer.phase("data"):
            for _ in self._data(transfer, stream, extractor):
                show(Progress(transfer.done, transfer.total, transfer.requests))
        self._receivers.during = "prepare"
        with transfer.phase("prepare"):
            self._prepare(transfer, stream)
        show(Progress(transfer.total, transfer.total, transfer.requests))

    def _begin(self, transfer: Transfer) -> None:
        transfer.layouts = self._layouts(transfer)
        self.transport.begin(transfer)
        general = {
            "kind": "begin",
            "transfer": transfer.number,
            "version": transfer.version,
            "manifest": transfer.manifest.packed,
            "seconds": transfer.deadline.remaining,
            "verify": transfer.verify,
        }
        for receiver in transfer.receivers:
            more, fds = self.transport.invitation(receiver)
            self._receivers.send(receiver, {**general, **more}, transfer.deadline, fds)
        self._receivers.wait(lambda receiver: "ready" in receiver.said, transfer.deadline)
        for receiver in transfer.receivers:
            receiver.version = receiver.said["ready"]["version"]
        transfer.last = self._last(transfer)

    def _layouts(self, transfer: Transfer) -> Layouts:
        """Return the layouts of the receivers.

        Raises:
            ManifestMismatch: a receiver has placements that the model can't have.
        """
        manifest = transfer.manifest
        blocks_of: dict[ReceiverLink, tuple[Bounds, ...]] = {}
        for receiver in transfer.receivers:
            layout = receiver.layout
            try:
                blocks_of[receiver] = layout.blocks(manifest) if layout else manifest.wholes
            except ValueError as error:
                raise ManifestMismatch(receiver.name, str(error)) from error
        return Layouts.build(manifest, blocks_of)

    def _last(self, transfer: Transfer) -> int:
        """Return the last transfer's number if all receivers have it in these layouts, or 0."""
        sent = self._sent
        same = (
            sent is not None
            and sent.manifest == transfer.manifest
            and sent.layouts.blocks == transfer.layouts.blocks
            and all(receiver.version == self.version for receiver in transfer.receivers)
        )
        return sent.number if sent is not None and same else 0

    def _data(
        self, transfer: Transfer, stream: TransferStream, extractor: Extractor
    ) -> Iterator[None]:
        if transfer.remote is not None:
            self._sources.add(transfer.remote.source)
            return stream.from_remote(transfer.remote)
        if self._here is None:
            end = self.transport
            at_once = 2 if end.in_place else 1  # the others pack a buffer, or broadcast in turn
            self._here = LocalSource(end.device, {end.kind: end.source_end()}, at_once)
        return stream.from_chunks(extractor, self._here)

    def _prepare(self, transfer: Transfer, stream: TransferStream) -> None:
        for receiver in list(self._receivers.active):
            layout = transfer.layouts.of[receiver]
            blocks = [[b.param, b.target] for b in stream.unchanged if b.layout == layout]
            message = {"kind": "prepare", "transfer": transfer.number, "unchanged": blocks}
            self._receivers.send(receiver, message, transfer.deadline, ())
        self._receivers.wait(lambda receiver: "prepared" in receiver.said, transfer.deadline)
        transfer.check_time()  # this process itself may have been stopped

    def _commit(self, transfer: Transfer) -> tuple[str, ...]:
        """Tell all receivers to flip; return the names of those that went away.

        The decision has been made, so that is no error.
        """
        self._receivers.during = "commit"
        lost: list[str] = []
        deadline = Deadline(max(transfer.deadline.remaining, _COMMIT_SECONDS))
        message = {"kind": "commit", "transfer": transfer.number}
        untold = list(self._receivers.active)
        with transfer.phase("commit"):
            while True:
                try:
                    while untold:
                        self._receivers.send(untold.pop(), message, deadline, ())
                    self._receivers.wait(lambda receiver: "committed" in receiver.said, deadline)
                    return tuple(lost)
                except (ReceiverDied, ReceiverRefused) as error:
                    lost.append(error.receiver)
                    self._receivers.drop_named(error.receiver)
                except ReceiverFrozen as error:
                    lost += error.receivers

    def _drop_undecided(self) -> None:
        """Drop receivers that may not know of the decision.

        They connect again, and get the next version.
        """
        active = self._receivers.active
        for receiver in [receiver for receiver in active if "committed" not in receiver.said]:
            self._receivers.drop(receiver)

    def _abort(self, transfer: Transfer) -> None:
        message = {"kind": "abort", "transfer": transfer.number}
        for receiver in list(self._receivers.active):
            try:
                self._receivers.send(receiver, message, Deadline(_ABORT_SECONDS), ())
            except TransferError:
                continue  # the caller hears of the first failure; this receiver is dropped too

    def _end(self, stream: TransferStream, *, committed: bool) -> None:
        """Release the transfer's resources; after a failure, the sources' places too."""
        if self.transport.in_place and self._here is not None and stream.is_local:
            stream.settle(self._here)
        self.transport.end(committed=committed, idle=not stream.unanswered)
        if stream.has_begun and not committed and not self.transport.in_place:
            self._let_go()
        stream.close()

    def _let_go(self) -> None:
        """Make all sources drop the places of this sender; does not wait."""
        for source in self._sources:
            source.let_go(self.address)
        if self._here is not None:
            self._here.let_go(self.address)


def _ignore(at: Progress) -> None:
    """Discard the progress."""
