"""State of a worker for the status page, read while the worker is busy."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from lazygt.runtime.collectives import group
from lazygt.runtime.messages import Memory, Run
from lazygt.runtime.wire import Buffer


class _RunHead(msgspec.Struct, array_like=True, tag=Run.__struct_config__.tag):
    """First fields of a `Run`: all that the status page decodes."""

    seq: int
    digest: bytes | None = None


_HEAD = msgspec.msgpack.Decoder(_RunHead)


class WorkerInsight:
    """Reader of a worker's state for the control thread, while the main thread works.

    Args:
        memory: returns the worker's memory.
        marked: returns (run, step) of the step that began last; None: steps are not marked.
    """

    def __init__(
        self, memory: Callable[[], Memory], marked: Callable[[], tuple[int, int]] | None
    ) -> None:
        self._memory, self._marked = memory, marked

    def run_named(self, header: Buffer) -> tuple[int, str] | None:
        """Return the number and the plan's name of a run message. See ``activity.Insight``."""
        try:
            run = _HEAD.decode(header)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return run.seq, "" if run.digest is None else run.digest.hex()

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that a collective waits for. See ``activity.Insight``."""
        process_group = group.current()
        return () if process_group is None else process_group.late()

    def step(self, run: int) -> int:
        """Return the current step of a run; -1 if unknown. See ``activity.Insight``."""
        marked_run, step = (0, -1) if self._marked is None else self._marked()
        return step if marked_run == run else -1

    def memory(self) -> tuple[int, int, int, int]:
        """Return (living, allocated, peak, resident) bytes. See ``activity.Insight``."""
        memory = self._memory()
        return sum(memory.living), memory.allocated, memory.peak, memory.resident
