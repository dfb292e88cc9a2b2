"""A transfer on its way out: what all parts of a sender need to know of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from torch import Tensor

from lazygt.transfer.bytework import Checksum, checksum_named, sha256, wire_bytes
from lazygt.transfer.control import Deadline
from lazygt.transfer.errors import TransferError
from lazygt.transfer.extractor import Chunk
from lazygt.transfer.origins import Remote
from lazygt.transfer.peer import Peer
from lazygt.transfer.report import TransferReport
from lazygt.transfer.spec import Manifest, ParamSpec


class Outgoing:
    """One transfer.

    Attributes:
        number: counts the sender's transfers, also those that failed.
        tensors: parameters that the extractor has yielded and no request has taken yet.
        done, total: bytes that have been carried, and that will be.
        verify, check: the name of the checksum, and what computes it.
        remote: who has the values, if that is not this process.
        written: bytes that each worker of a session has written itself, by rank.
    """

    def __init__(
        self,
        number: int,
        version: int,
        manifest: Manifest,
        deadline: Deadline,
        verify: str,
    ) -> None:
        self._begin = time.perf_counter()
        self.remote: Remote | None = None
        self.number, self.version, self.manifest = number, version, manifest
        self.deadline, self.verify = deadline, verify
        self.check: Checksum | None = checksum_named(verify)
        self.tensors: dict[int, Tensor] = {}
        self._bytes: dict[int, Tensor] = {}
        self.unchanged: list[int] = []
        self.digests: dict[int, bytes] = {}
        self.requests = self.chunks = self.done = 0
        self.total = manifest.nbytes
        self.phases: dict[str, float] = {}
        self.written: Counter[int] = Counter()

    def travelling(self, number: int) -> Tensor:
        """A parameter's bytes as they travel, flat uint8, on its own device."""
        if number not in self._bytes:
            dtype = self.manifest.params[number].torch_dtype
            self._bytes[number] = wire_bytes(self.tensors[number], dtype)
        return self._bytes[number]

    def drop(self, number: int) -> None:
        """A parameter has been carried to its end."""
        self.tensors.pop(number)
        self._bytes.pop(number, None)

    def check_time(self) -> None:
        """Raise TransferError when the deadline has passed."""
        if self.deadline.expired:
            raise TransferError(
                f"the deadline of {self.deadline.seconds:g} s passed after {self.done} of "
                f"{self.total} bytes; give transfer_weights() a longer timeout"
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note how long the block takes."""
        begin = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begin

    def take_in(
        self, chunk: Chunk, known: Mapping[int, bytes] | None, *, digest: bool
    ) -> list[int]:
        """Take in a chunk; the positions of the parameters that must travel.

        Args:
            known: SHA-256 of what the receivers have; those need not travel.
            digest: find out the SHA-256 of CPU parameters.

        Raises:
            TransferError: the chunk is not what the manifest announced.
        """
        self.chunks += 1
        travelling = []
        for spec, tensor in chunk.params:
            number = _checked(self.manifest, spec, tensor)
            if digest and tensor.device.type == "cpu":
                self.digests[number] = sha256(wire_bytes(tensor, spec.torch_dtype))
            if known and number in known and known[number] == self.digests.get(number):
                self.unchanged.append(number)
                self.done += spec.nbytes
            else:
                self.tensors[number] = tensor
                travelling.append(number)
        return travelling

    def report(self, peers: Sequence[Peer], lost: tuple[str, ...]) -> TransferReport:
        """What has become of it, from what the receivers have said."""
        own = [spec for spec in self.manifest.params if spec.alias_of is None]
        committed = [peer for peer in peers if "committed" in peer.said]
        return TransferReport(
            version=self.version,
            nbytes=self.manifest.nbytes,
            params=len(own),
            aliases=len(self.manifest.params) - len(own),
            unchanged=len(self.unchanged),
            chunks=self.chunks,
            requests=self.requests,
            seconds=time.perf_counter() - self._begin,
            phases=self.phases,
            pauses={peer.name: float(peer.said["committed"]["pause"]) for peer in committed},
            lost=lost,
            written=dict(sorted(self.written.items())),
        )


@contextmanager
def alone(busy: Lock) -> Iterator[None]:
    """One transfer of a sender at a time.

    Raises:
        TransferError: there is one.
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


def _checked(manifest: Manifest, spec: ParamSpec, tensor: Tensor) -> int:
    """The position of a parameter that the extractor has yielded, if it is what was announced."""
    number = manifest.index.get(spec.name)
    if number is None or manifest.params[number] != spec or tuple(tensor.shape) != spec.shape:
        announced = "nothing of that name" if number is None else str(manifest.params[number])
        raise TransferError(
            f"the extractor yielded {spec.name} as {spec} with a tensor of shape "
            f"{list(tensor.shape)}, but its manifest announced {announced}; mend the extractor"
        )
    return number
