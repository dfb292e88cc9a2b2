"""Ctrl-C without half-done work: held back while state changes, let through while we wait.

A KeyboardInterrupt can fall between any two bytecodes of the main thread. Between taking an answer
and noting it, that would lose the answer, and the next wait would last for ever. So sync points
hold SIGINT back and only the wait itself lets it through.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Hold:
    """``with HOLD:`` holds SIGINT back to the end of the block. Nests; other threads pass."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending = False
        self._theirs: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            handler = signal.getsignal(signal.SIGINT)
            if not callable(handler):
                return  # ignored, or it ends the process: neither falls between two bytecodes
            self._theirs = handler
            signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._depth == 0 or threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            self._let_through()

    def wait(self, poller: Any, milliseconds: float) -> Any:
        """``poller.poll(milliseconds)``, which SIGINT may end."""
        if self._depth == 0 or threading.current_thread() is not threading.main_thread():
            return poller.poll(milliseconds)
        try:
            self._let_through()
            return poller.poll(milliseconds)
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = True

    def _let_through(self) -> None:
        """Put the user's handler back, and tell it what it has missed."""
        pending, self._pending = self._pending, False
        signal.signal(signal.SIGINT, self._theirs)
        if pending:
            signal.raise_signal(signal.SIGINT)


HOLD = Hold()
"""SIGINT belongs to the process, so there is one of these."""
