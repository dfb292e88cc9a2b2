"""A process forks while another thread records: its child has no session, and no lock is held."""

from __future__ import annotations

import os
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import lazygt
from tests.support.timeouts import patience

pytestmark = pytest.mark.timeout(300)
FORKS = 12
SECONDS = 60.0
READS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t + 1,
    lambda t: t.view(1),
    lambda t: t.add_(1),
    lambda t: t.item(),
    lambda t: t.tolist(),
    lambda t: t.cpu(),
    repr,
)


@contextmanager
def recording() -> Iterator[None]:
    """Another thread records: new shapes and lines, views, writes and sync points."""
    done = threading.Event()

    def record() -> None:
        number = 0
        while not done.is_set():
            number += 1
            x = torch.ones(2 + number % 50, 3, device="lazygt") * 2 + number
            x[0].add_(1)
            for size in range(100):
                torch.empty(number, size, device="lazygt")
            if number % 10 == 0:
                x.t().sum().item()

    thread = threading.Thread(target=record)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def child(t: torch.Tensor) -> None:
    """It can not use its parent's tensors, and has sessions of its own."""
    assert torch.ones(3, 3, device="cpu").sum().item() == 9.0
    for read in READS:
        with pytest.raises(lazygt.NoSession, match="forked"):
            read(t)
    with lazygt.session(launcher="inline", compile="off"):
        x = torch.arange(7.0) + 0.5
        assert (x[1:] * 2).sum().item() == 48.0
        for size in range(10_000):
            assert torch.empty(3, size).shape == (3, size)


def exit_code(t: torch.Tensor) -> int:
    """Of a forked process; one that hangs is killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(t)
            code = 0
        except BaseException:  # noqa: BLE001 - the child of a test must not run on in it
            traceback.print_exc()
        finally:
            os._exit(code)
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], patience(SECONDS))[0]:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)


def test_a_child_forked_while_another_thread_records_goes_on() -> None:
    with lazygt.session(launcher="inline", compile="off"):
        t = torch.arange(1.0) + 1
        with recording():
            codes = [exit_code(t) for _ in range(FORKS)]
        assert codes == [0] * FORKS
        assert t.item() == 1.0
