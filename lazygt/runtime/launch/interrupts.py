"""Ctrl-C without half-done work: held back while state changes, let through while we wait.

A KeyboardInterrupt can fall between any two bytecodes of the main thread, and into whatever C
function looks for signals. Between taking an answer and noting it, that would lose the answer. In
torch's guard of a device that is written in Python it would end the process: every op asks the
guard, where nothing may be raised, and pybind11 looks for signals on the way.

Torch's own Python is no better prepared: between the lines of ``no_grad.__exit__``, and of what an
optimizer's step ends with, gradients would not be recorded any more.

So SIGINT comes here first as long as a session is open, and the user's own handler is called at
once where the main thread is in the user's own code. Elsewhere it is called a moment later: when a
sync point or a backward pass ends, in the midst of a wait, or when the signal, sent again and
again, meets the user's code.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import copyreg
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from lazygt.graph.source import PACKAGE, is_library

#: Frames that are looked at, innermost first.
_MOST = 128


class _Symbol(ctypes.Structure):
    """What ``dladdr`` tells of an address: ``Dl_info`` in dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


_libc = ctypes.PyDLL(None)  # not CDLL, which would let other threads run in between


def in_torch() -> bool:
    """Whether this was called, through whatever, by a function of torch's libraries."""
    addresses = (ctypes.c_void_p * _MOST)()
    symbol = _Symbol()
    for address in addresses[: _libc.backtrace(addresses, _MOST)]:
        known = _libc.dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
        if known and b"/torch/lib/" in (symbol.file or b""):
            return True
    return False


#: Before each piece of work: the functions of ``signal`` make enums of what they take and give.
_SIGINT = int(signal.SIGINT)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds until the signal is sent again
#: What of this package changes no state of a session by itself, or has waits of its own.
_ELSEWHERE = tuple(
    PACKAGE + part
    for part in ("cli/", "sweeps/", "simulation/", "observe/", "graph/", "passes/", "transfer/")
)
#: Python's function that whatever is pickled or copied goes through passes over all that is raised
#: in it, Ctrl-C too (a bare ``except``).
_SWALLOWS = copyreg._slotnames.__code__  # type: ignore[attr-defined]
#: Torch's functions that set a mode of this thread and set it back, not always in a ``with`` block:
#: context managers, and what is around an optimizer's step.
_CHANGING_MODES = frozenset(("__enter__", "__exit__", "_use_grad"))


def _torch_changes_a_mode(frame: FrameType | None) -> bool:
    """Whether torch, called by the user's code, may not have set back yet what it has set."""
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_name in _CHANGING_MODES:
            return True
        frame = frame.f_back
    return False


def _in_users_code(frame: FrameType | None) -> bool:
    """Whether this thread, with this frame, is neither in a session's work nor in torch's."""
    if _torch_changes_a_mode(frame):
        return False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.startswith(_ELSEWHERE):
            return False
        if frame.f_code is _SWALLOWS:
            return False
        frame = frame.f_back
    return not in_torch()


def _on_main_thread() -> bool:
    return _thread.get_ident() == _main


def _note_main_thread() -> None:
    """Whoever forks goes on as the child's main thread."""
    global _main
    _main = threading.main_thread().ident


_main = threading.main_thread().ident
os.register_at_fork(after_in_child=_note_main_thread)


class _Handler:
    """Of SIGINT, in the place of the user's."""

    def __init__(
        self, deferred: DeferredInterrupt, theirs: Callable[[int, FrameType | None], Any]
    ) -> None:
        self.deferred, self.theirs = deferred, theirs

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and sys._getframe(1) is not frame:
            self.theirs(number, frame)  # called by a handler that the user has put before it
        else:
            self.deferred.arrived(frame)


class DeferredInterrupt:
    """``with DEFER_INTERRUPT:`` holds SIGINT back to the end of the block.

    Nests; other threads pass.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._waiting = False
        self._pending = False
        self._reminding = False
        self._sent_again = False

    # -- the handler -------------------------------------------------------------------------

    def adopt(self) -> None:
        """Have SIGINT come here first. Again before each piece of work: others set handlers too."""
        if not _on_main_thread():
            return
        handler = _signal.getsignal(_SIGINT)
        # ignored, or it ends the process: neither falls between two bytecodes
        if callable(handler) and not isinstance(handler, _Handler):
            signal.signal(signal.SIGINT, _Handler(self, handler))

    @property
    def adopted(self) -> bool:
        """Whether no other handler of SIGINT can raise in the midst of a piece of work."""
        handler = _signal.getsignal(_SIGINT)
        return isinstance(handler, _Handler) or not callable(handler)

    def give_back(self) -> None:
        """Put the user's handler back, and tell it what it has missed."""
        if not _on_main_thread():
            return  # ours may stay: without a session it calls theirs
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Handler):
            signal.signal(signal.SIGINT, handler.theirs)
        self.deliver()

    def arrived(self, frame: FrameType | None) -> None:
        """SIGINT has come, while the main thread was in this frame."""
        again, self._sent_again = self._sent_again, False
        if again and not self._pending:
            return  # told while it was on its way
        if self._waiting or (not self._depth and _in_users_code(frame)):
            self._tell(frame)
            return
        self._pending = True
        if not self._depth:
            self._remind()

    def deliver(self) -> None:
        """Here nothing is half done: call the user's handler if SIGINT has come meanwhile."""
        if self._pending and not self._depth and _on_main_thread():
            self._tell(sys._getframe(1))

    def _tell(self, frame: FrameType | None) -> None:
        self._pending = False
        handler: Any = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Handler):
            handler = handler.theirs
        before = self._depth, self._waiting
        self._depth, self._waiting = 0, False  # the handler may use the session
        try:
            if callable(handler):
                handler(signal.SIGINT, frame)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(signal.SIGINT)
        finally:
            self._depth, self._waiting = before

    def _remind(self) -> None:
        """Send the signal again until it has met the user's code."""
        if not self._reminding:
            self._reminding = True
            # Not threading.Thread: the signal may have come in the midst of its bookkeeping.
            _thread.start_new_thread(self._send_again, (threading.main_thread(),))

    def _send_again(self, main: threading.Thread) -> None:
        pause = _FIRST_PAUSE
        while True:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if not self._pending:
                break
            if not self._depth and main.ident is not None:
                self._sent_again = True
                signal.pthread_kill(main.ident, signal.SIGINT)
        self._reminding = False
        if self._pending:  # it came between the last two lines
            self._remind()

    def forked(self) -> None:
        """In a child there is no thread that reminds, and what was pending is the parent's."""
        self._pending = self._reminding = self._sent_again = False

    # -- blocks ------------------------------------------------------------------------------

    def __enter__(self) -> None:
        if _on_main_thread():
            self.adopt()
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _on_main_thread():
            self._depth -= 1
            self.deliver()

    def wait(self, poller: Any, milliseconds: float) -> Any:
        """``poller.poll(milliseconds)``, which SIGINT may end, unless it only looks."""
        if milliseconds <= 0 or not _on_main_thread():
            return poller.poll(milliseconds)
        before, self._waiting = self._waiting, True
        try:
            if self._pending:
                self._tell(sys._getframe())
            return poller.poll(milliseconds)
        finally:
            self._waiting = before


DEFER_INTERRUPT = DeferredInterrupt()
"""SIGINT belongs to the process, so there is one of these."""

os.register_at_fork(after_in_child=DEFER_INTERRUPT.forked)
