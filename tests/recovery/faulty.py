"""Workers that kill themselves at messages.

``LAZYGT_FAULT=RANK:MESSAGE:WHEN`` makes a worker of `faulty_workers` kill itself at a message.
MESSAGE counts from 1. WHEN is ``before`` (the message was received), ``inside`` (the first
collective of this message or of the next run begins, or results are about to be stored) or
``after`` (the message was done, and not answered). ``RANK:MESSAGE:WHEN:GROUP`` is for a process
started for the session's process group of this number, that is after this number of recoveries; the
default is 0. Several faults are separated by commas.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn
from unittest import mock

import pytest

from lazygt.runtime.cluster import opening
from lazygt.runtime.collectives import group
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.worker.worker import Worker

VARIABLE = "LAZYGT_FAULT"
_PHASES = ("before", "inside", "after")


def faults_of(rank: int, group_number: int) -> dict[int, str]:
    """Parse the fault variable: return {message number: phase} for one worker.

    Raises:
        ValueError: the variable's value is malformed.
    """
    faults: dict[int, str] = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        try:
            fault_rank, message, phase, fault_group = f"{text}:0".split(":")[:4]
            if phase not in _PHASES:
                raise ValueError(f"expected one of {', '.join(_PHASES)}")
            if (int(fault_rank), int(fault_group)) == (rank, group_number):
                faults[int(message)] = phase
        except ValueError as error:
            raise ValueError(f"{VARIABLE}={text!r}: expected RANK:MESSAGE:WHEN: {error}") from None
    return faults


class Faulty:
    """Wrapper of a worker that kills its process at some messages."""

    def __init__(self, worker: Worker, faults: dict[int, str]) -> None:
        self._worker, self._faults, self._messages = worker, faults, 0
        self.wakes, self.late, self.insight = worker.wakes, worker.late, worker.insight

    def handle(self, frames: list[Any]) -> Sequence[Sequence[Any]]:
        """See ``Worker.handle``."""
        self._messages += 1
        phase = self._faults.get(self._messages)
        if phase == "before":
            die()
        with ExitStack() as patches:
            if phase == "inside":
                # the extension would run the message without the patched functions
                patches.enter_context(mock.patch.object(self._worker, "known_runs", None))
                patches.enter_context(mock.patch.object(self._worker.store, "put_from", die))
                patches.enter_context(mock.patch.object(group, "axis_group", die))
            replies: Sequence[Sequence[Any]] = self._worker.handle(frames)
        if phase == "after":
            die()
        if phase == "inside":  # this message was no run
            self._faults.setdefault(self._messages + 1, phase)
        return replies


def die(*_: object) -> NoReturn:
    """Kill this process, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def worker(rank: int, **options: Any) -> Faulty:
    """A worker process's message handler, with the faults that the environment names."""
    process_group = group.current()
    group_number = 0 if process_group is None else process_group.number
    return Faulty(Worker(rank=rank, **options), faults_of(rank, group_number))


FACTORY = f"{__name__}:worker"


def use_faulty_workers(monkeypatch: pytest.MonkeyPatch, faults: str) -> None:
    """Give the sessions opened from here on workers with these faults."""
    link_spec = opening.link_spec

    def faulty(*given: Any) -> LinkSpec:
        return replace(link_spec(*given), factory=FACTORY)

    monkeypatch.setattr(opening, "link_spec", faulty)
    monkeypatch.setenv(VARIABLE, faults)
