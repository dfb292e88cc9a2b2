"""What the client tells whoever looks: a log of its messages, and a line while it waits."""

from __future__ import annotations

import json
import sys
import time
from typing import IO, TextIO


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


_FIRST_SECONDS = 2.0
_EVERY_SECONDS = 0.5


class WaitLine:
    """Says how long the client has been waiting, and for what; silent where there is no terminal.

    The line appears after two seconds and is wiped when the wait ends.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.enabled = bool(self._stream is not None and self._stream.isatty())
        self._began: float | None = None
        self._shown = False

    @property
    def patience(self) -> float | None:
        """Seconds to wait before the next ``update``; None: for ever."""
        return _EVERY_SECONDS if self.enabled else None

    def update(self, what: str) -> None:
        """Nothing has come yet."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        waited = now - self._began
        if self.enabled and waited >= _FIRST_SECONDS:
            self._stream.write(f"\r\x1b[2Klazygt: waiting {waited:.0f} s for {what}")
            self._stream.flush()
            self._shown = True

    def done(self) -> None:
        """Something has come."""
        self._began = None
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._shown = False
