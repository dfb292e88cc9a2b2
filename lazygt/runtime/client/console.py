"""The client's log of messages, and its status line while it waits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection
from typing import IO, TYPE_CHECKING, TextIO

from lazygt.graph.source import expand, user_call_site
from lazygt.host.files import open_output

if TYPE_CHECKING:
    from lazygt.recovery.recover import RecoveryRecord
    from lazygt.runtime.client.failures import Describe
    from lazygt.runtime.messages import Snapped, Timings
    from lazygt.runtime.plan_records import PlanRecord


class InstructionLog:
    """Log of a session's messages, written to the path in ``LAZYGT_LOG``.

    Fields: ``t`` (seconds since the log was opened), ``direction``, ``kind``, ``rank``, ``run``,
    ``bytes`` (of all frames, without tensors in shared memory), ``why``, and ``line``: the user's
    ``file:line`` that caused the message. ``lazygt log`` summarizes the file.
    """

    def __init__(self, path: str) -> None:
        self._file: IO[str] | None = open(  # noqa: SIM115
            open_output(path, append=True), "a", buffering=1
        )
        self._start = time.monotonic()

    def write(self, direction: str, kind: str, rank: int, run: int, size: int, why: str) -> None:
        """Add a line; the arguments are its fields, ``size`` is ``bytes``."""
        if self._file is None:
            return
        call_site = user_call_site(1) if direction == "send" else None
        line = {
            "t": round(time.monotonic() - self._start, 6),
            "direction": direction,
            "kind": kind,
            "rank": rank,
            "run": run,
            "bytes": size,
            "why": why,
            "line": "" if call_site is None else expand(call_site),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


_FIRST_UPDATE_SECONDS = 2.0
_UPDATE_SECONDS = 0.5


class WaitLine:
    """Terminal line with the reason and duration of a wait; silent without a terminal.

    The line appears after two seconds and is wiped when the wait ends.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.enabled = bool(self._stream is not None and self._stream.isatty())
        self._began: float | None = None
        self._shown = False

    @property
    def interval(self) -> float | None:
        """Seconds between two calls of ``update``; None: never call it."""
        return _UPDATE_SECONDS if self.enabled else None

    def update(self, what: str) -> None:
        """Update the line with the seconds waited so far.

        Args:
            what: description of the awaited messages.
        """
        now = time.monotonic()
        if self._began is None:
            self._began = now
        waited = now - self._began
        if self.enabled and waited >= _FIRST_UPDATE_SECONDS:
            self._stream.write(f"\r\x1b[2Klazygt: waiting {waited:.0f} s for {what}")
            self._stream.flush()
            self._shown = True

    def done(self) -> None:
        """End the wait and wipe the line."""
        self._began = None
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._shown = False


class Observer:
    """Observer of a client's messages, waits and runs; this base class ignores all of them.

    A client has one only if its reports are read: by a log, a terminal or a profile.

    Attributes:
        interval: seconds between two calls of ``waiting`` during a wait; None: no calls.
        wants_timings: whether runs are to be timed, for ``ran``.
    """

    interval: float | None = None
    wants_timings = False

    def message(self, direction: str, kind: str, rank: int, run: int, size: int, why: str) -> None:
        """Observe that a message was sent or received."""

    def submitted(
        self, run: int, entry: PlanRecord | None, inputs: Collection[int], base: int
    ) -> None:
        """Observe that a run was sent.

        Args:
            inputs: ids of its input values.
            base: id of its first output; the user's handles show its outputs.
        """

    def waiting(self, what: str) -> None:
        """Observe that a wait for messages goes on."""

    def wait_ended(self) -> None:
        """Observe that the wait has ended."""

    def ran(
        self,
        rank: int,
        run: int,
        entry: PlanRecord | None,
        describe: Describe | None,
        timings: Timings,
    ) -> None:
        """Observe that a worker has done a timed run; ``describe`` describes its plan's steps."""

    def snapped(self, rank: int, snapped: Snapped) -> None:
        """Observe that a worker has taken its share of a snapshot."""

    def recovered(self, run: int, record: RecoveryRecord) -> None:
        """Observe that workers were replaced; ``run`` was the last run sent."""

    def close(self) -> None:
        """Observe that the session is closed."""


class Console(Observer):
    """Observer that writes a session's log and its waiting line."""

    def __init__(self, log: InstructionLog | None, line: WaitLine) -> None:
        self._log, self._line = log, line
        self.interval = line.interval

    @staticmethod
    def of(path: str | None) -> Console | None:
        """Return a console that logs to this path; None without a log and a terminal."""
        log, line = InstructionLog(path) if path else None, WaitLine()
        return Console(log, line) if log is not None or line.enabled else None

    def message(self, direction: str, kind: str, rank: int, run: int, size: int, why: str) -> None:
        """See ``InstructionLog``."""
        if self._log is not None:
            self._log.write(direction, kind, rank, run, size, why)

    def recovered(self, run: int, record: RecoveryRecord) -> None:
        """Add a line to the log."""
        self.message("recover", "runs", record.ranks[0], run, 0, str(record))

    def waiting(self, what: str) -> None:
        """See ``WaitLine``."""
        self._line.update(what)

    def wait_ended(self) -> None:
        """Wipe the line."""
        self._line.done()

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
