"""Mailboxes: single-producer single-consumer ring buffers in memory shared by two processes.

A mailbox carries small messages in one direction, and an eventfd wakes a reader that sleeps. A
channel has one mailbox for each direction beside its ZMQ socket, which carries the messages that do
not fit. A message by ZMQ is slower, since it wakes a thread of ZMQ's on either side.

Layout of the memory, one direction after the other::

    | written, read: a cache line each | slot 0 | slot 1 | ...

A slot holds one message: the number of the socket's messages that come before it, the number of its
frames, their lengths, and the frames. The writer increments `written` when the slot is complete,
the reader `read` when it has copied the message. On x86 stores become visible in program order, so
no memory fence is needed; on other machines there are no mailboxes. The extension has the same ring
in C++ (``native/mailbox.cpp``).
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from lazygt import native
from lazygt.errors import ProtocolError
from lazygt.host.files import create_file
from lazygt.host.processes import cpu_quota

#: Bytes and number of slots: a run of a known plan fits into one, and so does a number in an
#: answer. There are more slots than runs that a client sends ahead.
_SLOT, _SLOTS = 4096, 64
_RING_HEADER_BYTES = 4096
_RING_BYTES = _RING_HEADER_BYTES + _SLOTS * _SLOT
_WRITTEN, _READ = 0, 8  # as 64-bit words
_SLOT_HEADER = struct.Struct("<QH")
#: Bytes of the longest message, with two bytes for the length of each frame.
CAPACITY = _SLOT - _SLOT_HEADER.size

#: Longest duration of a spin: longer than a sleep and a wake-up take, and than a worker needs to
#: copy a MiB.
SPIN_SECONDS = 250e-6
_CHECKS_PER_ROUND = 200  # of the mailboxes, between two checks of other events: some 10 us
_RECHECK_SECONDS = 0.1  # interval between two counts of the cores


Frame = bytes | memoryview


@cache
def _lengths(count: int) -> struct.Struct:
    """Return the layout of a message's frame lengths."""
    return struct.Struct(f"<{count}H")


@dataclass(frozen=True, slots=True)
class MailboxFiles:
    """Descriptors that both processes own: the shared memory, and each reader's eventfd."""

    memory: int
    to_worker: int
    to_client: int

    @staticmethod
    def create() -> MailboxFiles | None:
        """Create new ones; return None on machines without mailboxes."""
        if platform.machine() not in ("x86_64", "AMD64"):
            return None
        memory = create_file("lazygt-mailbox", 2 * _RING_BYTES)
        eventfd_flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        return MailboxFiles(memory, os.eventfd(0, eventfd_flags), os.eventfd(0, eventfd_flags))

    @property
    def all(self) -> tuple[int, ...]:
        """All three descriptors."""
        return self.memory, self.to_worker, self.to_client

    def close(self) -> None:
        """Close the descriptors in this process."""
        for fd in self.all:
            os.close(fd)


class Mailbox(Protocol):
    """One direction of a channel; a process is either its reader or its writer."""

    def filled(self) -> bool:
        """Return whether there is an unread message."""

    def put(self, frames: Sequence[Frame], before: int) -> bool:
        """Append a message; False if the ring is full or the message too long.

        Args:
            before: number of the socket's messages that precede this one.
        """

    def take(self, received: int) -> list[Any] | None:
        """Remove and return the next message's frames; None if the socket's next one precedes it.

        Args:
            received: number of the socket's messages received so far.

        Raises:
            ValueError: the other process has written an invalid message.
        """

    def close(self) -> None:
        """Release the memory."""


class _Mailbox:
    """Mailbox in Python."""

    def __init__(self, memory: mmap.mmap, begin: int) -> None:
        self._memory, self._slots_offset = memory, begin + _RING_HEADER_BYTES
        self._words = memoryview(memory)[begin : begin + _RING_HEADER_BYTES].cast("Q")

    def filled(self) -> bool:
        words = self._words
        return words[_WRITTEN] != words[_READ]

    def put(self, frames: Sequence[Frame], before: int) -> bool:
        words = self._words
        written = words[_WRITTEN]
        sizes = [len(frame) for frame in frames]
        if 2 * len(sizes) + sum(sizes) > CAPACITY or written - words[_READ] >= _SLOTS:
            return False
        slot = self._slots_offset + written % _SLOTS * _SLOT
        message = b"".join(
            (_SLOT_HEADER.pack(before, len(sizes)), _lengths(len(sizes)).pack(*sizes), *frames)
        )
        self._memory[slot : slot + len(message)] = message
        words[_WRITTEN] = written + 1
        return True

    def take(self, received: int) -> list[Any] | None:
        words = self._words
        read, written = words[_READ], words[_WRITTEN]
        if written == read:
            return None
        slot = self._slots_offset + read % _SLOTS * _SLOT
        before, count = _SLOT_HEADER.unpack_from(self._memory, slot)
        if before > received:
            return None
        begin = 2 * count
        if not 0 < written - read <= _SLOTS or begin > CAPACITY:
            raise ValueError("a mailbox contradicts itself")
        slot += _SLOT_HEADER.size
        sizes = _lengths(count).unpack_from(self._memory, slot)
        if begin + sum(sizes) > CAPACITY:
            raise ValueError("a message in a mailbox contradicts its own lengths")
        message = memoryview(self._memory[slot : slot + begin + sum(sizes)])
        words[_READ] = read + 1
        frames = []
        for size in sizes:
            frames.append(message[begin : begin + size])
            begin += size
        return frames

    def close(self) -> None:
        self._words.release()


class Mailboxes:
    """One process's incoming and outgoing mailbox, in one order with the socket's messages.

    Attributes:
        incoming: the mailbox that this process reads.
        wakes: an eventfd that becomes readable when a message has come in.
        files: the descriptors of both mailboxes.
        sent, received: messages on the socket so far; the socket's owner counts them.
    """

    def __init__(self, files: MailboxFiles, *, of_worker: bool) -> None:
        self._memory = mmap.mmap(files.memory, 2 * _RING_BYTES)
        self._ring_offsets = (0, _RING_BYTES) if of_worker else (_RING_BYTES, 0)
        self.incoming: Mailbox
        self._out: Mailbox
        self.incoming, self._out = [_Mailbox(self._memory, begin) for begin in self._ring_offsets]
        #: the extension's way to spin
        self.spin: Callable[[Sequence[Mailbox], Callable[[], object], float], None] | None = None
        ours, theirs = files.to_worker, files.to_client
        self.wakes, self._wakes_other = (ours, theirs) if of_worker else (theirs, ours)
        self.sent = self.received = 0
        self._put_lock = threading.Lock()
        self.files = files

    def use_extension(self) -> None:
        """Switch to the extension's implementation, if there is one; it needs torch."""
        module = native.load().module
        if module is None:
            return
        replaced = self.incoming, self._out
        self.incoming, self._out = [
            module.Mailbox(self._memory, begin, _RING_HEADER_BYTES, _SLOT, _SLOTS)
            for begin in self._ring_offsets
        ]
        self.spin = module.spin
        for mailbox in replaced:
            mailbox.close()

    def put(self, frames: Sequence[Frame]) -> bool:
        """Append a message for the other process; False if it must go by the socket.

        Also False during another call, of another thread or of this one (in a finalizer).
        """
        if not self._put_lock.acquire(blocking=False):
            return False
        try:
            if not self._out.put(frames, self.sent):
                return False
        finally:
            self._put_lock.release()
        os.eventfd_write(self._wakes_other, 1)
        return True

    def take(self) -> list[Any] | None:
        """Remove and return the next message; None if the socket's next one precedes it.

        Raises:
            ProtocolError: the other process has written an invalid message.
        """
        try:
            return self.incoming.take(self.received)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def clear_wakeup(self) -> None:
        """Reset `wakes` after a wake-up."""
        with suppress(BlockingIOError):  # it is reset already
            os.eventfd_read(self.wakes)

    def close(self) -> None:
        """Release everything. Idempotent."""
        if not self._memory.closed:
            self.incoming.close()
            self._out.close()
            self._memory.close()
            self.files.close()


def spin(mailboxes: Sequence[Mailboxes], other_events: Callable[[], object]) -> None:
    """Spin for a moment until a message comes in, or ``other_events`` reports an event."""
    incoming = [mailbox.incoming for mailbox in mailboxes]
    if (native_spin := mailboxes[0].spin) is not None:
        native_spin(incoming, other_events, SPIN_SECONDS)
        return
    until = time.perf_counter() + SPIN_SECONDS
    checks = [mailbox.filled for mailbox in incoming]
    while True:
        for _ in range(_CHECKS_PER_ROUND):
            for filled in checks:
                if filled():
                    return
        if other_events() or time.perf_counter() >= until:
            return


class Cores:
    """Test if there are enough cores to spin: one for each communicating process.

    On a shared core a spinning process keeps the awaited one from working.

    Args:
        pids: processes with affinity masks that count.
        processes: number of processes that need a core.
    """

    def __init__(self, pids: Sequence[int], processes: int) -> None:
        self._pids, self._processes = pids, processes
        self._enough, self._judge_at = False, 0.0
        quota = cpu_quota()
        #: spinning uses up processor time of the cgroup's quota, which the processes share
        self._quota_suffices = quota is None or quota >= processes

    @property
    def enough(self) -> bool:
        """True if there are enough cores; counted again at intervals, as affinities may change."""
        now = time.monotonic()
        if now >= self._judge_at:
            self._judge_at = now + _RECHECK_SECONDS
            self._enough = self._quota_suffices and self._count_suffices()
        return self._enough

    def _count_suffices(self) -> bool:
        """Return whether the processes may run on enough different cores."""
        try:
            cores = set[int]().union(*map(os.sched_getaffinity, self._pids))
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
            return False  # a process has ended
        return len(cores) >= self._processes
