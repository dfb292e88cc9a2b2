"""Deferred delivery of SIGINT (Ctrl-C): held back while state changes, delivered during waits.

A KeyboardInterrupt can be raised between any two bytecodes of the main thread, and in any C
function that checks for signals. Raised between the receipt and the storing of an answer, it would
lose the answer. Raised in torch's device guard, which is written in Python, it would end the
process: every op calls the guard, no exception may leave it, and pybind11 checks for signals there.

Torch's own Python code is not safe either: an interrupt between the lines of ``no_grad.__exit__``,
or at the end of an optimizer's step, would leave the recording of gradients switched off.

Therefore this module handles SIGINT as long as a session is open. It calls the user's own handler
at once if the main thread is in the user's own code. Otherwise it calls the handler a moment later:
at the end of a sync point or a backward pass, during a wait, or when the signal, which a thread
sends again at intervals, arrives in the user's code.
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

#: Native frames that are examined, innermost first.
_MAX_FRAMES = 128


class _Symbol(ctypes.Structure):
    """Result of ``dladdr`` for an address: ``Dl_info`` in dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


_libc = ctypes.PyDLL(None)  # not CDLL, which would let other threads run in between


def in_torch() -> bool:
    """Return whether a function of torch's libraries is on the native call stack."""
    addresses = (ctypes.c_void_p * _MAX_FRAMES)()
    symbol = _Symbol()
    for address in addresses[: _libc.backtrace(addresses, _MAX_FRAMES)]:
        known = _libc.dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
        if known and b"/torch/lib/" in (symbol.file or b""):
            return True
    return False


#: SIGINT as an int: `adopt` runs often, and the functions of ``signal`` convert to enums.
_SIGINT = int(signal.SIGINT)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds until the signal is sent again
#: Folders of this package with code that changes no state of a session, or defers SIGINT itself.
_HARMLESS = tuple(
    PACKAGE + part
    for part in ("cli/", "sweeps/", "simulation/", "observe/", "graph/", "passes/", "transfer/")
)
#: A function of Python's that every pickling and copy calls. Its bare ``except`` swallows all
#: exceptions, Ctrl-C too.
_SWALLOWS = copyreg._slotnames.__code__  # type: ignore[attr-defined]
#: Torch's functions that set a mode of this thread and set it back, not always in a ``with`` block:
#: context managers, and the wrapper of an optimizer's step.
_MODE_CHANGES = frozenset(("__enter__", "__exit__", "_use_grad"))


def _torch_changes_a_mode(frame: FrameType | None) -> bool:
    """Return whether torch, called by user code, may be in the middle of a mode change."""
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_name in _MODE_CHANGES:
            return True
        frame = frame.f_back
    return False


def _in_users_code(frame: FrameType | None) -> bool:
    """Return whether this thread, at this frame, may be interrupted: no lazygt or torch inside."""
    if _torch_changes_a_mode(frame):
        return False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.startswith(_HARMLESS):
            return False
        if frame.f_code is _SWALLOWS:
            return False
        frame = frame.f_back
    return not in_torch()


def _on_main_thread() -> bool:
    return _thread.get_ident() == _main


def _note_main_thread() -> None:
    """Record the forking thread as the child's main thread."""
    global _main
    _main = threading.main_thread().ident


_main = threading.main_thread().ident
os.register_at_fork(after_in_child=_note_main_thread)


class _Handler:
    """SIGINT handler that replaces the user's.

    Attributes:
        theirs: the user's handler.
    """

    def __init__(
        self, deferred: DeferredInterrupt, theirs: Callable[[int, FrameType | None], Any]
    ) -> None:
        self.deferred, self.theirs = deferred, theirs

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a SIGINT of the kernel's, or a call by a handler of the user's."""
        if frame is not None and sys._getframe(1) is not frame:
            self.theirs(number, frame)  # called by a handler that the user has put before it
        else:
            self.deferred.arrived(frame)


class DeferredInterrupt:
    """Context manager that defers SIGINT to the end of the block.

    Use as ``with DEFER_INTERRUPT:``. It nests, and does nothing on other threads.
    """

    def __init__(self) -> None:
        #: number of blocks that the main thread is in
        self._depth = 0
        #: True during ``wait``: a signal is delivered at once
        self._waiting = False
        #: True if a signal has come and the user's handler has not been called for it
        self._pending = False
        #: True while a thread sends the pending signal again
        self._reminding = False
        #: True from the sending of the repeated signal until its arrival
        self._sent_again = False

    # -- the handler -------------------------------------------------------------------------

    def adopt(self) -> None:
        """Install the handler of SIGINT, unless it is installed.

        Called again before each block, since other code may set handlers meanwhile.
        """
        if not _on_main_thread():
            return
        handler = _signal.getsignal(_SIGINT)
        # SIG_IGN and SIG_DFL are no callables, and raise nothing between two bytecodes
        if callable(handler) and not isinstance(handler, _Handler):
            signal.signal(signal.SIGINT, _Handler(self, handler))

    @property
    def adopted(self) -> bool:
        """True if no other SIGINT handler can raise an exception inside a block."""
        handler = _signal.getsignal(_SIGINT)
        return isinstance(handler, _Handler) or not callable(handler)

    def give_back(self) -> None:
        """Restore the user's handler, and deliver a SIGINT that is pending."""
        if not _on_main_thread():
            return  # our handler may stay: without a session it calls the user's
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Handler):
            signal.signal(signal.SIGINT, handler.theirs)
        self.deliver()

    def arrived(self, frame: FrameType | None) -> None:
        """Handle a SIGINT that came while the main thread was in this frame."""
        is_repeated, self._sent_again = self._sent_again, False
        if is_repeated and not self._pending:
            return  # the user's handler was called before the repeated signal arrived
        if self._waiting or (not self._depth and _in_users_code(frame)):
            self._call_handler(frame)
            return
        self._pending = True
        if not self._depth:
            self._start_sending_again()

    def deliver(self) -> None:
        """Call the user's handler if SIGINT is pending, at a point with consistent state."""
        if self._pending and not self._depth and _on_main_thread():
            self._call_handler(sys._getframe(1))

    def _call_handler(self, frame: FrameType | None) -> None:
        """Call the user's handler; it may use the session."""
        self._pending = False
        handler: Any = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Handler):
            handler = handler.theirs
        saved = self._depth, self._waiting
        self._depth, self._waiting = 0, False
        try:
            if callable(handler):
                handler(signal.SIGINT, frame)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(signal.SIGINT)
        finally:
            self._depth, self._waiting = saved

    def _start_sending_again(self) -> None:
        """Start a thread that sends the signal again until it arrives in the user's code."""
        if not self._reminding:
            self._reminding = True
            # Not threading.Thread: the signal may have interrupted that class's bookkeeping.
            _thread.start_new_thread(self._send_again, (threading.main_thread(),))

    def _send_again(self, main: threading.Thread) -> None:
        """Send SIGINT to the main thread, with exponential backoff, while it is pending."""
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
        if self._pending:  # a signal arrived between the last two lines
            self._start_sending_again()

    def forked(self) -> None:
        """Reset the state in a child: pending signals and the reminder are the parent's."""
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
        """Return ``poller.poll(milliseconds)``; SIGINT may end it unless the timeout is 0."""
        if milliseconds <= 0 or not _on_main_thread():
            return poller.poll(milliseconds)
        saved_waiting, self._waiting = self._waiting, True
        try:
            if self._pending:
                self._call_handler(sys._getframe())
            return poller.poll(milliseconds)
        finally:
            self._waiting = saved_waiting


DEFER_INTERRUPT = DeferredInterrupt()
"""The process's only instance, since signal handlers belong to the process."""

os.register_at_fork(after_in_child=DEFER_INTERRUPT.forked)
