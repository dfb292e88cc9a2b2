"""A worker's state for the status page, beyond the messages that come and go."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from lazygt.runtime.collectives import group
from lazygt.runtime.messages import Memory, Run
from lazygt.runtime.wire import Buffer


class _RunHead(msgspec.Struct, array_like=True, tag=Run.__struct_config__.tag):
    """The beginning of a `Run`."""

    seq: int
    digest: bytes | None = None


_HEAD = msgspec.msgpack.Decoder(_RunHead)


class WorkerInsight:
    """Answers to the control thread about a worker while its main thread works.

    Args:
        memory: returns the worker's memory.
        marked: returns (run, step) of the step that was noted last.
    """

    def __init__(
        self, memory: Callable[[], Memory], marked: Callable[[], tuple[int, int]] | None
    ) -> None:
        self._memory, self._marked = memory, marked

    def run_named(self, header: Buffer) -> tuple[int, str] | None:
        """See ``activity.Insight``."""
        try:
            run = _HEAD.decode(header)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return run.seq, "" if run.digest is None else run.digest.hex()

    def waits_for(self) -> tuple[int, ...]:
        """See ``activity.Insight``."""
        joined = group.current()
        return () if joined is None else joined.late()

    def step(self, run: int) -> int:
        """See ``activity.Insight``."""
        marked, step = (0, -1) if self._marked is None else self._marked()
        return step if marked == run else -1

    def memory(self) -> tuple[int, int, int, int]:
        """See ``activity.Insight``."""
        told = self._memory()
        return sum(told.living), told.allocated, told.peak, told.resident
