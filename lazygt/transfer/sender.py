"""Sender of transfers: a two-phase commit; a transport moves the bytes.

    begin ->     manifest, version, location of the bytes        <- ready | refuse
    parts ->     one request: blocks with their checksums        <- staged | refuse
    prepare ->   no more data                                    <- prepared | refuse
    commit ->    flip to the new version                         <- committed
    abort ->     (instead, at any point before commit) drop the version

Readers see the new version after commit only, and commit is sent only when every receiver has
answered *prepared*: all bytes are there, with the right checksums.
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

_ABORT_SECONDS = 0.1  # for a message of 30 bytes; a receiver that does not read it is dropped
_COMMIT_SECONDS = 1.0  # at least, for the answers to an irrevocable decision

ShowProgress = Callable[[Progress], object]


def threshold_bytes(threshold_gb: float | str, name: str = "threshold_gb") -> int:
    """Return a request's threshold in GiB as bytes.

    Args:
        name: name of the setting, for the error.

    Raises:
        ValueError: the threshold is no number, negative, infinite, or above 0 and below 256 bytes.
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
        transport: sender's end of a transport: see `transports.transport`.
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
        self._skip_unchanged = skip_unchanged
        self._receivers = Receivers(transport.strategy)
        transport.attach(self._receivers)
        self._busy = threading.Lock()
        self._transfer_count = 0
        self._last_committed: Transfer | None = None
        self._local_source: LocalSource | None = None
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
            TransferError: fewer were connected after ``timeout`` seconds.
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
        """Send a model to every connected receiver, atomically: all get the version, or none.

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
            stream = TransferStream(
                transfer, self._receivers, self.transport, digests=self._skip_unchanged
            )
            committed = False
            try:
                self._stage(transfer, stream, extractor, progress or _ignore)
                committed = True
                self.version, self._last_committed = transfer.version, transfer
                lost = self._commit(transfer)
            except BaseException:
                if committed:
                    self._drop_undecided()
                else:
                    self._abort(transfer)
                raise
            finally:
                self._receivers.active = []
                self._release(stream, committed=committed)
            return transfer.report(lost)

    def close(self) -> None:
        """Disconnect the receivers, which keep their version. Idempotent."""
        if self._receivers.closed:
            return
        self._receivers.close()
        self.transport.close()
        self._release_sources()
        if self._local_source is not None:
            self._local_source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the steps -------------------------------------------------------------------------

    def _new_transfer(
        self, extractor: Extractor, version: int | None, deadline: Deadline
    ) -> Transfer:
        """Return the state of a new transfer to the connected receivers."""
        self._transfer_count += 1
        manifest = extractor.manifest()
        if self._last_committed is not None and manifest == self._last_committed.manifest:
            manifest = self._last_committed.manifest  # reuses its cached properties
        version = self.version + 1 if version is None else version
        transfer = Transfer(self._transfer_count, version, manifest, deadline, self.verify)
        transfer.remote = remote_model(extractor)
        transfer.receivers = self._begin_receivers()
        return transfer

    def _begin_receivers(self) -> list[ReceiverLink]:
        """Begin a transfer to the receivers; abandon memory that a dropped one may read."""
        if self._receivers.closed:
            raise TransferError("this sender is closed; make a new one")
        self._receivers.pump(0.0)
        if self._receivers.suspect:
            self._receivers.suspect = False
            self._last_committed = None
            self.transport.forget()
            self._release_sources()
        if not self._receivers.connected:
            raise TransferError(
                f"no receiver is connected to {self.address}; start one with this address and "
                f"call wait_for_receivers(1)"
            )
        return self._receivers.begin(self._transfer_count)

    def _stage(
        self, transfer: Transfer, stream: TransferStream, extractor: Extractor, show: ShowProgress
    ) -> None:
        """Run the phases before the commit: begin, data and prepare."""
        self._receivers.during = "begin"
        with transfer.phase("begin"):
            self._begin(transfer)
        self._receivers.during = "data"
        with transfer.phase("data"):
            for _ in self._stream(transfer, stream, extractor):
                show(Progress(transfer.done, transfer.total, transfer.requests))
        self._receivers.during = "prepare"
        with transfer.phase("prepare"):
            self._prepare(transfer, stream)
        show(Progress(transfer.total, transfer.total, transfer.requests))

    def _begin(self, transfer: Transfer) -> None:
        """Offer the manifest to all receivers, and wait until they have staging memory."""
        transfer.layouts = self._layouts(transfer)
        self.transport.begin(transfer)
        message = {
            "kind": "begin",
            "transfer": transfer.number,
            "version": transfer.version,
            "manifest": transfer.manifest.packed,
            "seconds": transfer.deadline.remaining,
            "verify": transfer.verify,
        }
        for receiver in transfer.receivers:
            transport_data, fds = self.transport.invitation(receiver)
            self._receivers.send(receiver, {**message, **transport_data}, transfer.deadline, fds)
        self._receivers.wait(lambda receiver: "ready" in receiver.answers, transfer.deadline)
        for receiver in transfer.receivers:
            receiver.version = receiver.answers["ready"]["version"]
        transfer.last = self._last_number(transfer)

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

    def _last_number(self, transfer: Transfer) -> int:
        """Return the last transfer's number if all receivers hold it in these layouts, or 0."""
        last = self._last_committed
        is_current = (
            last is not None
            and last.manifest == transfer.manifest
            and last.layouts.blocks == transfer.layouts.blocks
            and all(receiver.version == self.version for receiver in transfer.receivers)
        )
        return last.number if last is not None and is_current else 0

    def _stream(
        self, transfer: Transfer, stream: TransferStream, extractor: Extractor
    ) -> Iterator[None]:
        """Return the iterator that sends the data, from other processes or from this one."""
        if transfer.remote is not None:
            self._sources.add(transfer.remote.source)
            return stream.from_remote(transfer.remote)
        if self._local_source is None:
            end = self.transport
            concurrency = (
                2 if end.in_place else 1
            )  # other transports pack or broadcast one at a time
            self._local_source = LocalSource(end.device, {end.kind: end.source_end()}, concurrency)
        return stream.from_chunks(extractor, self._local_source)

    def _prepare(self, transfer: Transfer, stream: TransferStream) -> None:
        """Collect the receivers' votes for the commit."""
        for receiver in list(self._receivers.active):
            layout = transfer.layouts.of[receiver]
            blocks = [[b.param, b.target] for b in stream.unchanged if b.layout == layout]
            message = {"kind": "prepare", "transfer": transfer.number, "unchanged": blocks}
            self._receivers.send(receiver, message, transfer.deadline, ())
        self._receivers.wait(lambda receiver: "prepared" in receiver.answers, transfer.deadline)
        transfer.check_time()  # this process itself may have been stopped

    def _commit(self, transfer: Transfer) -> tuple[str, ...]:
        """Send the commit to all receivers; return the names of those that went away.

        The decision has been made, so a lost receiver is no error.
        """
        self._receivers.during = "commit"
        lost: list[str] = []
        deadline = Deadline(max(transfer.deadline.remaining, _COMMIT_SECONDS))
        message = {"kind": "commit", "transfer": transfer.number}
        uninformed = list(self._receivers.active)
        with transfer.phase("commit"):
            while True:
                try:
                    while uninformed:
                        self._receivers.send(uninformed.pop(), message, deadline, ())
                    self._receivers.wait(lambda receiver: "committed" in receiver.answers, deadline)
                    return tuple(lost)
                except (ReceiverDied, ReceiverRefused) as error:
                    lost.append(error.receiver)
                    self._receivers.drop_named(error.receiver)
                except ReceiverFrozen as error:
                    lost += error.receivers

    def _drop_undecided(self) -> None:
        """Drop receivers that may not know of the commit.

        These receivers connect again, and get the next version.
        """
        active = self._receivers.active
        for receiver in [receiver for receiver in active if "committed" not in receiver.answers]:
            self._receivers.drop(receiver)

    def _abort(self, transfer: Transfer) -> None:
        """Send an abort to all receivers of the transfer."""
        message = {"kind": "abort", "transfer": transfer.number}
        for receiver in list(self._receivers.active):
            try:
                self._receivers.send(receiver, message, Deadline(_ABORT_SECONDS), ())
            except TransferError:
                continue  # the caller raises the first failure; this receiver is dropped too

    def _release(self, stream: TransferStream, *, committed: bool) -> None:
        """Release the transfer's resources; after a failure, the sources' memory too."""
        if self.transport.in_place and self._local_source is not None and stream.is_local:
            stream.settle(self._local_source)
        self.transport.end(committed=committed, idle=not stream.unanswered)
        if stream.has_begun and not committed and not self.transport.in_place:
            self._release_sources()
        stream.close()

    def _release_sources(self) -> None:
        """Make all sources release the memory of this sender; does not wait."""
        for source in self._sources:
            source.let_go(self.address)
        if self._local_source is not None:
            self._local_source.let_go(self.address)


def _ignore(progress: Progress) -> None:
    """Discard the progress."""
