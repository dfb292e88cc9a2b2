"""Outgoing transfer: state shared by all parts of a sender, progress, and report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from torch import Tensor

from lazygt.transfer.control import Deadline
from lazygt.transfer.copy_request import BY_DEVICE, RemoteModel, source_of
from lazygt.transfer.extractor import Chunk, Extractor, HeldElsewhere, ModuleExtractor
from lazygt.transfer.layout import Layouts
from lazygt.transfer.manifest import Manifest, ParamSpec
from lazygt.transfer.peers import ReceiverLink
from lazygt.transfer.transfer_errors import TransferError

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


# -- state of an outgoing transfer -----------------------------------------------------------------


class Transfer:
    """State of one outgoing transfer.

    Attributes:
        number: count of the sender's transfers, also of those that failed.
        receivers: the receivers of this transfer.
        layouts: their layouts.
        remote: the model in other processes, if this one does not have the values.
        last: number of the transfer that all receivers hold, in the same layouts; 0: none.
        tensors: yielded parameters that are not completely sent yet, by position.
        unchanged: number of parameters that receivers have already.
        done, total: bytes sent so far, and of the whole transfer.
        written: bytes that each worker of a session has sent itself, by rank.
    """

    def __init__(
        self,
        number: int,
        version: int,
        manifest: Manifest,
        deadline: Deadline,
        verify: str,
    ) -> None:
        self._start = time.perf_counter()
        self.number, self.version, self.manifest = number, version, manifest
        self.deadline, self.verify = deadline, verify
        self.receivers: Sequence[ReceiverLink] = ()
        self.layouts = Layouts.build(manifest, {})
        self.remote: RemoteModel | None = None
        self.last = 0
        self.tensors: dict[int, Tensor] = {}
        self.unchanged = self.requests = self.chunks = self.done = 0
        self.total = manifest.nbytes
        self.phases: dict[str, float] = {}
        self.written: Counter[int] = Counter()

    def check_time(self) -> None:
        """Raise TransferError when the deadline has passed."""
        if self.deadline.expired:
            raise TransferError(
                f"the deadline of {self.deadline.seconds:g} s passed after {self.done} of "
                f"{self.total} bytes; give transfer_weights() a longer timeout"
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Timer of a phase: the block's seconds go into ``phases``."""
        begin = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begin

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

    def report(self, lost: tuple[str, ...]) -> TransferReport:
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
            lost=lost,
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


def remote_model(extractor: Extractor) -> RemoteModel | None:
    """Return a model in processes that send it themselves; None: this process sends it."""
    if isinstance(extractor, HeldElsewhere):
        return extractor.remote
    if not isinstance(extractor, ModuleExtractor) or not extractor.is_elsewhere(BY_DEVICE):
        return None
    entries = enumerate(extractor.entries())
    tensors = {number: tensor for number, (_, spec, tensor) in entries if not spec.alias_of}
    source = source_of(list(tensors.values()))
    return None if source is None else RemoteModel(source, tensors)


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
