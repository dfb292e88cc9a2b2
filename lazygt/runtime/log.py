"""The instruction log: a JSON line a message, with its size and why it was sent."""

from __future__ import annotations

import json
import time
from typing import IO


class InstructionLog:
    """Writes to the path that ``LAZYGT_LOG`` names, or nowhere.

    Fields: ``t`` (seconds since the log was opened), ``direction``, ``kind``, ``rank``, ``run``,
    ``bytes`` (of all frames; tensors in shared memory are not in them) and ``why``.
    """

    def __init__(self, path: str | None) -> None:
        self._file: IO[str] | None = open(path, "a", buffering=1) if path else None  # noqa: SIM115
        self._start = time.monotonic()

    def write(self, direction: str, kind: str, rank: int, run: int, size: int, why: str) -> None:
        """Add a line."""
        if self._file is None:
            return
        line = {
            "t": round(time.monotonic() - self._start, 6),
            "direction": direction,
            "kind": kind,
            "rank": rank,
            "run": run,
            "bytes": size,
            "why": why,
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
