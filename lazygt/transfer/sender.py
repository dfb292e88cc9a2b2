"""Sender of transfers: a two-phase commit; a transport moves the bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Self

from lazygt.transfer.control import Deadline
from lazygt.transfer.copier import LocalSource, checksum_named
from lazygt.transfer.copy_request import RemoteModel, WeightSource
from lazygt.transfer.data_stream import TransferStream, remote_model
from lazygt.transfer.manifest import ALIGNMENT, Extractor, Manifest
from lazygt.transfer.peers import Receivers
from lazygt.transfer.transaction import Progress, Transfer, TransferReport, alone
from lazygt.transfer.transfer_errors import TransferError
from lazygt.transfer.transports import SenderEnd

GIB = 1 << 30

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
        transport: sender's end of a transport: see `lazygt.transfer.transports`.
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
        self._busy = threading.Lock()
        self._transfer_count = 0
        self._last_committed: Transfer | None = None
        self._local_source: LocalSource | None = None
        self._sources: weakref.WeakSet[WeightSource] = weakref.WeakSet()
        #: the source of the last transfer, if it still exists
        self._last_source: weakref.ref[WeightSource] | None = None

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
            deadline = Deadline(timeout)
            manifest = self._manifest_of(extractor)
            version = self.version + 1 if version is None else version
            self._check_receivers()
            remote = remote_model(extractor)
            source = self._source_of(remote)
            self._transfer_count += 1
            number, ranks = self._transfer_count, source.mesh.world_size
            try:
                transfer = Transfer(
                    number, version, manifest, deadline, self.verify, ranks, self._receivers
                )
                stream = TransferStream(
                    transfer,
                    self._receivers,
                    self.transport,
                    source,
                    remote,
                    digests=self._skip_unchanged,
                )
                return self._run(transfer, stream, extractor, progress or _ignore)
            finally:
                self._receivers.active = []

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

    def _manifest_of(self, extractor: Extractor) -> Manifest:
        """Return a model's manifest; the last one if equal, for its cached properties."""
        manifest, last = extractor.manifest(), self._last_committed
        return last.manifest if last is not None and manifest == last.manifest else manifest

    def _check_receivers(self) -> None:
        """Check that a receiver is connected; abandon memory that a dropped one may read."""
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

    def _source_of(self, remote: RemoteModel | None) -> WeightSource:
        """Return the source of a model: the processes with its values."""
        end = self.transport
        if remote is not None:
            source: WeightSource = remote.source
            self._sources.add(source)
        else:
            if self._local_source is None:
                # other transports pack or broadcast one at a time
                concurrency = 2 if end.in_place else 1
                openers = {end.kind: end.open_here}
                self._local_source = LocalSource(end.device, openers, concurrency)
            source = self._local_source
        if self._last_source is None or self._last_source() is not source:
            self._last_source = weakref.ref(source)
            if not end.in_place:
                end.forget()  # its groups or buffers are the last source's
        return source

    def _run(
        self, transfer: Transfer, stream: TransferStream, extractor: Extractor, show: ShowProgress
    ) -> TransferReport:
        """Run the phases of a transfer."""
        try:
            with transfer.phase("begin"):
                self.transport.begin(transfer)
                transfer.begin(self.transport.invitation)
                transfer.last = self._last_number(transfer)
            with transfer.phase("data"), closing(stream.run(extractor)) as steps:
                for _ in steps:
                    show(Progress(transfer.done, transfer.total, transfer.requests))
            with transfer.phase("prepare"):
                transfer.prepare(stream.unchanged)
            show(Progress(transfer.total, transfer.total, transfer.requests))
            transfer.decided = True
            self.version, self._last_committed = transfer.version, transfer
            with transfer.phase("commit"):
                transfer.commit()
            return transfer.report()
        except BaseException:
            transfer.give_up()
            raise
        finally:
            stream.end()
            has_sent = "begin" in transfer.phases
            if has_sent and not transfer.decided and not self.transport.in_place:
                self._release_sources()

    def _last_number(self, transfer: Transfer) -> int:
        """Return the last transfer's number if all receivers hold it in these layouts, or 0."""
        last = self._last_committed
        is_current = (
            last is not None
            and last.manifest == transfer.manifest
            and last.layouts.blocks == transfer.layouts.blocks
            and all(
                receiver.answers["ready"]["version"] == self.version
                for receiver in transfer.receivers
            )
        )
        return last.number if last is not None and is_current else 0

    def _release_sources(self) -> None:
        """Make all sources release the memory of this sender; does not wait."""
        for source in self._sources:
            source.let_go(self.address)
        if self._local_source is not None:
            self._local_source.let_go(self.address)


def _ignore(progress: Progress) -> None:
    """Discard the progress."""
