"""Outgoing transfer: its messages, its phases, and its report.

    begin ->     manifest, version, location of the bytes        <- ready | refuse
    parts ->     one request: blocks with their checksums        <- staged | refuse
    prepare ->   no more data                                    <- prepared | refuse
    commit ->    flip to the new version                         <- committed
    abort ->     (instead, at any point before commit) drop the version

Readers see the new version after commit only, and commit is sent only when every receiver has
answered *prepared*: all bytes are there, with the right checksums.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock

from torch import Tensor

from lazygt.transfer.control import ControlMessage, Deadline
from lazygt.transfer.layout import Bounds, Layouts, Route
from lazygt.transfer.manifest import Chunk, Manifest, ParamSpec
from lazygt.transfer.peers import ReceiverLink, Receivers
from lazygt.transfer.transfer_errors import (
    ManifestMismatch,
    ReceiverDied,
    ReceiverFrozen,
    ReceiverRefused,
    TransferError,
)

_ABORT_SECONDS = 0.1  # for a message of 30 bytes; a receiver that does not read it is dropped
_COMMIT_SECONDS = 1.0  # at least, for the answers to an irrevocable decision

# -- progress of a transfer, and its report --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a transfer, in bytes and requests."""

    done: int
    total: int
    requests: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Report of a committed transfer.

    Attributes:
        version: version that receivers have now.
        nbytes: bytes of the parameters; ties count once.
        params, aliases: parameters with bytes of their own, and names tied to one of them.
        unchanged: parameters not sent because the receivers had them.
        chunks, requests: chunks from the extractor, and the requests they were sent in.
        seconds: time from the call to the last receiver's answer to the commit.
        phases: seconds by phase: begin, data, prepare, commit.
        pauses: seconds by receiver for which the flip could have blocked new readings.
        lost: receivers that went away after the decision to commit.
        written: bytes that each worker of a session wrote itself, by rank; empty when the bytes
            came from the calling process.
    """

    version: int
    nbytes: int
    params: int
    aliases: int
    unchanged: int
    chunks: int
    requests: int
    seconds: float
    phases: Mapping[str, float]
    pauses: Mapping[str, float]
    lost: tuple[str, ...] = ()
    written: Mapping[int, int] = field(default_factory=dict)

    @property
    def gb_per_second(self) -> float:
        """Throughput over the whole transfer, in 1e9 bytes a second."""
        return self.nbytes / self.seconds / 1e9

    def __str__(self) -> str:
        pause = max(self.pauses.values(), default=0.0)
        skipped = f", {self.unchanged} unchanged" if self.unchanged else ""
        lost = f"; LOST: {', '.join(self.lost)}" if self.lost else ""
        return (
            f"version {self.version}: {self.params} parameters{skipped}, "
            f"{self.nbytes / 1e6:.1f} MB in {self.requests} requests to {len(self.pauses)} "
            f"receiver(s), {self.seconds * 1e3:.1f} ms ({self.gb_per_second:.2f} GB/s), "
            f"pause {pause * 1e6:.0f} us{lost}"
        )


# -- the two-phase commit --------------------------------------------------------------------------


class Transfer:
    """One outgoing transfer to the connected receivers.

    Args:
        verify: name of the checksum of every block.
        ranks: number of the processes that copy blocks.

    Attributes:
        number: count of the sender's transfers, also of those that failed.
        receivers: the receivers of this transfer, also those that have gone since.
        layouts: their layouts.
        last: number of the transfer that all receivers hold, in the same layouts; 0: none.
        tensors: yielded parameters that are not completely sent yet, by position.
        unchanged: number of parameters that receivers have already.
        done, total: bytes sent so far, and of the whole transfer.
        written: bytes that each worker of a session has sent itself, by rank.
        decided: True from the decision to commit on.
        lost: receivers that went away after the decision.
    """

    def __init__(
        self,
        number: int,
        version: int,
        manifest: Manifest,
        deadline: Deadline,
        verify: str,
        ranks: int,
        peers: Receivers,
    ) -> None:
        self._start = time.perf_counter()
        self._peers = peers
        self.number, self.version, self.manifest = number, version, manifest
        self.deadline, self.verify, self.ranks = deadline, verify, ranks
        self.receivers = peers.begin(number)
        self.layouts = Layouts.build(manifest, _blocks_of(self.receivers, manifest))
        self.last = 0
        self.tensors: dict[int, Tensor] = {}
        self.unchanged = self.requests = self.chunks = self.done = 0
        self.total = manifest.nbytes
        self.phases: dict[str, float] = {}
        self.written: Counter[int] = Counter()
        self.decided = False
        self.lost: list[str] = []

    # -- messages ------------------------------------------------------------------------------

    def send(
        self,
        receiver: ReceiverLink,
        kind: str,
        fields: ControlMessage | None = None,
        *,
        deadline: Deadline | None = None,
    ) -> None:
        """Send a message about this transfer to one receiver.

        Raises:
            ReceiverDied, ReceiverFrozen: the receiver can't be reached; it is dropped.
        """
        message = {"kind": kind, "transfer": self.number, **(fields or {})}
        self._peers.send(receiver, message, deadline or self.deadline)

    def wait_for(self, kind: str, deadline: Deadline | None = None) -> None:
        """Wait for an answer of this kind from every receiver; see `Receivers.wait`."""
        self._peers.wait(lambda receiver: kind in receiver.answers, deadline or self.deadline)

    @property
    def directory(self) -> str:
        """The sender's directory, which only its user can enter."""
        return os.path.dirname(self._peers.address)

    def holders(self, layout: int) -> list[ReceiverLink]:
        """Return the receivers with a layout that have not gone."""
        return [receiver for receiver in self._peers.active if self.layouts.of[receiver] == layout]

    # -- phases --------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase, named in errors; the block's seconds go into ``phases``."""
        self._peers.during = name
        begin = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begin

    def begin(self, invitation: Callable[[Transfer, ReceiverLink], ControlMessage]) -> None:
        """Offer the manifest to all receivers, and wait until they have staging memory.

        Args:
            invitation: function that returns the transport's fields.
        """
        offer = {
            "version": self.version,
            "manifest": self.manifest.packed,
            "seconds": self.deadline.remaining,
            "verify": self.verify,
        }
        for receiver in self.receivers:
            self.send(receiver, "begin", {**offer, **invitation(self, receiver)})
        self.wait_for("ready")

    def prepare(self, unchanged: Sequence[Route]) -> None:
        """Collect the receivers' votes for the commit.

        Args:
            unchanged: blocks that were not sent, because the receivers have them.
        """
        for receiver in list(self._peers.active):
            layout = self.layouts.of[receiver]
            blocks = [[piece.param, piece.target] for piece in unchanged if piece.layout == layout]
            self.send(receiver, "prepare", {"unchanged": blocks})
        self.wait_for("prepared")
        self.check_time()  # this process itself may have been stopped

    def commit(self) -> None:
        """Send the decided commit to all receivers; one that goes away is no error any more."""
        deadline = Deadline(max(self.deadline.remaining, _COMMIT_SECONDS))
        uninformed = list(self._peers.active)
        while True:
            try:
                while uninformed:
                    self.send(uninformed.pop(), "commit", deadline=deadline)
                self.wait_for("committed", deadline)
                return
            except (ReceiverDied, ReceiverRefused) as error:
                self.lost.append(error.receiver)
                self._peers.drop_named(error.receiver)
            except ReceiverFrozen as error:
                self.lost += error.receivers

    def give_up(self) -> None:
        """Abort; after the decision, drop the receivers that may not know of it.

        Those connect again, and get the next version.
        """
        for receiver in list(self._peers.active):
            if not self.decided:
                with suppress(TransferError):  # the caller raises the first failure
                    self.send(receiver, "abort", deadline=Deadline(_ABORT_SECONDS))
            elif "committed" not in receiver.answers:
                self._peers.drop(receiver)

    def check_time(self) -> None:
        """Raise TransferError when the deadline has passed."""
        if self.deadline.expired:
            raise TransferError(
                f"the deadline of {self.deadline.seconds:g} s passed after {self.done} of "
                f"{self.total} bytes; give transfer_weights() a longer timeout"
            )

    # -- contents ------------------------------------------------------------------------------

    def add_chunk(self, chunk: Chunk) -> list[int]:
        """Add a chunk's tensors; return the positions of its parameters.

        Raises:
            TransferError: the chunk differs from the manifest.
        """
        self.chunks += 1
        positions = []
        for spec, tensor in chunk.params:
            position = _position(self.manifest, spec, tensor)
            self.tensors[position] = tensor
            positions.append(position)
        return positions

    def report(self) -> TransferReport:
        """Build the report from the receivers' answers."""
        untied = [spec for spec in self.manifest.params if spec.alias_of is None]
        committed = [receiver for receiver in self.receivers if "committed" in receiver.answers]
        return TransferReport(
            version=self.version,
            nbytes=self.manifest.nbytes,
            params=len(untied),
            aliases=len(self.manifest.params) - len(untied),
            unchanged=self.unchanged,
            chunks=self.chunks,
            requests=self.requests,
            seconds=time.perf_counter() - self._start,
            phases=self.phases,
            pauses={link.name: float(link.answers["committed"]["pause"]) for link in committed},
            lost=tuple(self.lost),
            written=dict(sorted(self.written.items())),
        )


@contextmanager
def alone(busy: Lock) -> Iterator[None]:
    """Exclusive use of a sender by one transfer.

    Raises:
        TransferError: another transfer is running.
    """
    if not busy.acquire(blocking=False):
        raise TransferError(
            "this sender is in the middle of a transfer; wait for it, or make a sender for each "
            "thread"
        )
    try:
        yield
    finally:
        busy.release()


def _blocks_of(
    receivers: Sequence[ReceiverLink], manifest: Manifest
) -> dict[ReceiverLink, tuple[Bounds, ...]]:
    """Return each receiver's block of each parameter.

    Raises:
        ManifestMismatch: a receiver has placements that the model can't have.
    """
    blocks_of: dict[ReceiverLink, tuple[Bounds, ...]] = {}
    for receiver in receivers:
        layout = receiver.layout
        try:
            blocks_of[receiver] = layout.blocks(manifest) if layout else manifest.wholes
        except ValueError as error:
            raise ManifestMismatch(receiver.name, str(error)) from error
    return blocks_of


def _position(manifest: Manifest, spec: ParamSpec, tensor: Tensor) -> int:
    """Return a parameter's position; raise TransferError if the manifest lacks it."""
    position = manifest.index.get(spec.name)
    if position is None or manifest.params[position] != spec or tuple(tensor.shape) != spec.shape:
        announced = "nothing of that name" if position is None else str(manifest.params[position])
        raise TransferError(
            f"the extractor yielded {spec.name} as {spec} with a tensor of shape "
            f"{list(tensor.shape)}, but its manifest announced {announced}; mend the extractor"
        )
    return position
