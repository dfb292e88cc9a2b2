"""Pollable timer: the kernel's timerfd, which Python's `os` has from 3.13 on."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from contextlib import suppress

_MONOTONIC = 1  # CLOCK_MONOTONIC, that of time.monotonic
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK | TFD_CLOEXEC have the same values
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """One-shot timer that expires at the earliest of the requested times.

    Attributes:
        fd: descriptor that is readable from that time on, until `clear`.
        at: that time, by ``time.monotonic``; None while no time is requested.
    """

    def __init__(self) -> None:
        self.fd = _libc.timerfd_create(_MONOTONIC, _FLAGS)
        if self.fd < 0:
            raise _failed("timerfd_create")
        self.at: float | None = None

    def schedule(self, at: float = 0.0) -> None:
        """Schedule an expiry at ``at`` (seconds of ``time.monotonic``); 0.0: now.

        An earlier scheduled expiry stays.
        """
        if self.at is not None and self.at <= at:
            return
        self.at = at
        seconds = int(at)
        # No interval; a time of zero would switch the timer off.
        setting = struct.pack("@llll", 0, 0, seconds, int((at - seconds) * 1e9) or 1)
        if _libc.timerfd_settime(self.fd, _ABSOLUTE, setting, None) < 0:
            raise _failed("timerfd_settime")

    def clear(self) -> bool:
        """Reset the timer if it has expired; return whether it had."""
        if self.at is None or time.monotonic() < self.at:
            return False
        self.at = None
        with suppress(BlockingIOError):
            os.read(self.fd, 8)
        return True

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


def can_be_read(descriptor: int) -> bool:
    """Return whether a descriptor is readable now."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


def _failed(call: str) -> OSError:
    """Return the error of a libc call, from errno."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
