"""Faults for tests: a worker that kills itself at a given message.

``LAZYGT_FAULT=RANK:MESSAGE:WHEN``, with MESSAGE counted from 1 and WHEN one of ``before`` (it was
received), ``inside`` (the first collective of it, or of the next run, begins, or its results are
about to be kept) and
``after`` (it was done, and not answered). ``RANK:MESSAGE:WHEN:GROUP`` is for a process that was
started for the session's process group of this number, so after so many recoveries; without it,
for the first ones. Several are separated by commas.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn
from unittest import mock

from lazygt.runtime.collectives import group

VARIABLE = "LAZYGT_FAULT"
_WHENS = ("before", "inside", "after")


def faults_of(rank: int, group_number: int) -> dict[int, str]:
    """Return the points at which a worker is to kill itself, by message.

    Raises:
        ValueError: the variable's value is malformed.
    """
    faults: dict[int, str] = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        try:
            of, message, when, number = f"{text}:0".split(":")[:4]
            if when not in _WHENS:
                raise ValueError(f"expected one of {', '.join(_WHENS)}")
            if (int(of), int(number)) == (rank, group_number):
                faults[int(message)] = when
        except ValueError as error:
            raise ValueError(f"{VARIABLE}={text!r}: expected RANK:MESSAGE:WHEN: {error}") from None
    return faults


class Faulty:
    """Wrapper of a worker that kills its process at some messages."""

    def __init__(self, worker: Any, faults: dict[int, str]) -> None:
        self._worker, self._faults, self._messages = worker, faults, 0

    @property
    def wakes(self) -> int | None:
        """See ``Worker.wakes``."""
        return self._worker.wakes  # type: ignore[no-any-return]

    def late(self) -> Sequence[Sequence[Any]]:
        """See ``Worker.late``."""
        return self._worker.late()  # type: ignore[no-any-return]

    def handle(self, frames: list[Any]) -> Sequence[Sequence[Any]]:
        """See ``Worker.handle``."""
        self._messages += 1
        when = self._faults.get(self._messages)
        if when == "before":
            die()
        with ExitStack() as meanwhile:
            if when == "inside":
                # the extension would run it without asking anybody
                meanwhile.enter_context(mock.patch.object(self._worker, "known_runs", None))
                meanwhile.enter_context(mock.patch.object(self._worker.store, "put_from", die))
                meanwhile.enter_context(mock.patch.object(group, "line", die))
            replies: Sequence[Sequence[Any]] = self._worker.handle(frames)
        if when == "after":
            die()
        if when == "inside":  # that was no run
            self._faults.setdefault(self._messages + 1, when)
        return replies


def die(*_: object) -> NoReturn:
    """Kill this process, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
