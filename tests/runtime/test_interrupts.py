"""Ctrl-C at chosen moments: what it may not break, and when the user's handler hears of it.

Moments that nobody has chosen: tests/faults/test_interrupts.py.
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import torch

import lazygt
from lazygt.record.infer import Inference
from lazygt.runtime import interrupts
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.submit.planner import Planner

pytestmark = pytest.mark.timeout(120)
DEFAULT = signal.default_int_handler


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, DEFAULT)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def wait_for_ever() -> None:
    """What a pending Ctrl-C ends; pytest's timeout does if none is pending."""
    while True:
        time.sleep(60)


def test_the_handler_is_the_users_own_before_and_after() -> None:
    with lazygt.session(launcher="inline"):
        with lazygt.session(launcher="inline"):
            assert signal.getsignal(signal.SIGINT) is not DEFAULT
        assert signal.getsignal(signal.SIGINT) is not DEFAULT
    assert signal.getsignal(signal.SIGINT) is DEFAULT


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_no_function_stays(ignored: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, ignored)
    with lazygt.session(launcher="inline"):
        torch.ones(2).sum().item()
        assert signal.getsignal(signal.SIGINT) is ignored


def test_interrupt_in_user_code_is_immediate() -> None:
    with lazygt.session(launcher="inline"):
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert not DEFER_INTERRUPT._pending


class Interrupting(type):
    """A class of this kind is interrupted when Python notes its slots, as it does for a pickle."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "__slotnames__":
            interrupt()


def test_interrupt_survives_bare_except() -> None:
    """``copyreg`` has a bare ``except`` there."""

    class Pickled(metaclass=Interrupting):
        pass

    def copied() -> None:
        copy.copy(Pickled())
        wait_for_ever()

    with lazygt.session(launcher="inline"), pytest.raises(KeyboardInterrupt):
        copied()
    assert "__slotnames__" in vars(Pickled)


def test_interrupt_ends_blocking_call_of_user() -> None:
    main = threading.main_thread().ident
    assert main is not None
    with lazygt.session(launcher="inline"):
        timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait_for_ever()
        timer.join()


def test_an_op_is_recorded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    results = Inference.results
    with lazygt.session(launcher="inline"):
        x = torch.ones(3)
        kept: list[torch.Tensor] = []

        def add() -> None:
            kept.append(x + 1)
            wait_for_ever()

        def inferred(self: Inference, *args: Any) -> Any:
            monkeypatch.undo()
            interrupt()
            return results(self, *args)

        monkeypatch.setattr(Inference, "results", inferred)
        with pytest.raises(KeyboardInterrupt):
            add()
        assert kept[0].tolist() == [2, 2, 2]


def test_a_stretch_that_is_being_planned_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Planner.build
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        first = torch.ones(3) + 1
        s.flush()  # unanswered: the next run looks for its answer first

        def planned(self: Planner, *args: Any) -> Any:
            interrupt()
            return build(self, *args)

        x = first * 3
        monkeypatch.setattr(Planner, "build", planned)
        with pytest.raises(KeyboardInterrupt):
            x.tolist()
        monkeypatch.undo()
        assert x.tolist() == [6, 6, 6]


def test_interrupt_in_backward_is_raised_after_it() -> None:
    with lazygt.session(launcher="inline"):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2, 2]


def test_a_wait_is_ended_and_a_look_is_not() -> None:
    class Poller:
        def poll(self, milliseconds: float) -> list[object]:
            interrupt()
            return []

    with lazygt.session(launcher="inline"):
        with DEFER_INTERRUPT, pytest.raises(KeyboardInterrupt):
            DEFER_INTERRUPT.wait(Poller(), 1)
        with pytest.raises(KeyboardInterrupt), DEFER_INTERRUPT:
            assert DEFER_INTERRUPT.wait(Poller(), 0) == []


def test_a_handler_of_the_users_is_called_once_and_may_use_the_session() -> None:
    seen: list[float] = []
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(3)
        before = signal.signal(signal.SIGINT, lambda *_: seen.append(x.sum().item()))
        s.synchronize()
        with DEFER_INTERRUPT:
            interrupt()
            interrupt()
            assert seen == []
        assert seen == [3]
        signal.signal(signal.SIGINT, before)
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is DEFAULT


def test_a_handler_that_calls_the_one_before_it() -> None:
    called: list[int] = []
    with lazygt.session(launcher="inline") as s:
        before: Any = signal.getsignal(signal.SIGINT)

        def chained(number: int, frame: Any) -> None:
            called.append(number)
            before(number, frame)

        signal.signal(signal.SIGINT, chained)
        s.synchronize()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert called == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is chained


def test_interrupt_during_close_is_raised_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = lazygt.session(workers=lazygt.Workers(1, threads=1))
    s.__enter__()
    pid = s.worker_pids[0]
    end = s._link.close
    monkeypatch.setattr(s._link, "close", lambda: (interrupt(), end()))
    with pytest.raises(KeyboardInterrupt):
        s.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert signal.getsignal(signal.SIGINT) is DEFAULT


def test_a_forked_child_keeps_nothing_of_the_parents() -> None:
    with DEFER_INTERRUPT:
        DEFER_INTERRUPT.arrived(None)
        child = os.fork()
        if child == 0:
            os._exit(interrupts.DEFER_INTERRUPT._pending)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        DEFER_INTERRUPT.forked()


# -- torch's own Python ----------------------------------------------------------------------


class AtMoment:
    """Has Ctrl-C come at the n-th moment of a call at which the interpreter looks for signals."""

    def __init__(self, n: int) -> None:
        self.left, self.place = n, ""

    def run(self, work: Callable[[], None]) -> None:
        outer = sys.getprofile()
        sys.setprofile(self.look)
        try:
            work()
        finally:
            sys.setprofile(outer)

    def look(self, frame: FrameType, event: str, _: Any) -> None:
        mine = frame.f_code is AtMoment.run.__code__
        if event in ("call", "c_return") and not self.place and not mine:
            self.left -= 1
            if self.left < 0:
                self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                DEFER_INTERRUPT.arrived(frame)


def without_gradients() -> None:
    with torch.no_grad():
        torch.ones(2, device="cpu")


@torch.no_grad()
def decorated() -> None:
    torch.ones(2, device="cpu")


def on_a_device() -> None:
    with torch.device("cpu"):
        torch.ones(2)


def update() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="cpu"))
    weight.grad = torch.ones(2, device="cpu")
    torch.optim.SGD([weight], lr=0.1).step()


@pytest.mark.parametrize("work", [without_gradients, decorated, on_a_device, update])
def test_torchs_modes_are_set_back_whenever_it_comes(work: Callable[[], None]) -> None:
    with lazygt.session(launcher="inline"):
        work()  # imports are made, classes known
        modes = torch.overrides._get_current_function_mode_stack()
        for n in itertools.count():
            coming = AtMoment(n)
            with suppress(KeyboardInterrupt):
                coming.run(work)
                DEFER_INTERRUPT.deliver()
            assert torch.is_grad_enabled(), coming.place
            assert torch.overrides._get_current_function_mode_stack() == modes, coming.place
            if not coming.place:
                break
        assert n > 5, "hardly a moment was tried"
