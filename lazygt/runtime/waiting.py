"""A line on the terminal while the client waits for its workers."""

from __future__ import annotations

import sys
import time
from typing import TextIO

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
