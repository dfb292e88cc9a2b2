"""Progress of a transfer, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        pauses: seconds by receiver for which the flip could have held up new readings.
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
