"""Numbers that C++ gets by known plans: what Python gets, and nearly without it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import lazygt
from lazygt.graph.source import expand
from lazygt.record.tensor import NATIVE
from lazygt.settings import grouped

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(NATIVE is None, reason="the recorder is Python's"),
]
SETTINGS = ({"workers": 1, "threads": 1}, {"launcher": "inline"})
IDS = ("process", "inline")
HERE = os.path.dirname(lazygt.__file__) + os.sep


@pytest.fixture(scope="module", params=SETTINGS, ids=IDS)
def s(request: pytest.FixtureRequest) -> Iterator[lazygt.Session]:
    with lazygt.session(**grouped({"compile": "off", **request.param})) as session:
        if session._submitter._fetcher is None:
            pytest.skip("the worker runs no plans in C++, or has no mailbox")
        yield session


def lines(act: Callable[[], object]) -> Counter[str]:
    """How many lines of lazygt's Python run meanwhile, by function."""
    ran: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(HERE):
            return None
        if event == "line":
            ran[f"{name.removeprefix(HERE)}:{frame.f_code.co_name}"] += 1
        return note

    sys.settrace(note)
    try:
        act()
    finally:
        sys.settrace(None)
    return ran


def fewest(act: Callable[[], object]) -> Counter[str]:
    """Of several times: what comes now and then is not counted."""
    return min((lines(act) for _ in range(30)), key=Counter.total)


# -- how much Python ---------------------------------------------------------------------------


def test_a_number_by_a_known_plan_takes_a_few_lines_of_python(s: lazygt.Session) -> None:
    """They say that nothing is out of the ordinary."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("an answer that is waited for asleep may take longer than C++ waits")
    x = torch.arange(4.0)
    held = x.sum()
    acts: dict[str, Callable[[], object]] = {
        "run": lambda: x.sum().item(),
        "a number given": lambda: (x.sum() * time.monotonic()).item(),
        "of a view": lambda: x[2].item(),
        "held": held.item,
        "as a condition": lambda: bool(x.sum() > 1),
    }
    for act in acts.values():
        for _ in range(6):
            act()
    for name, act in acts.items():
        ran = fewest(act)
        assert ran.total() <= 15, (name, ran)


def test_while_plans_are_compiled_one_more_function_runs() -> None:
    with lazygt.session(launcher="inline") as session:
        x = torch.arange(4.0)
        for _ in range(6):
            x.sum().item()
        session._tiers.busy = True
        ran = lines(lambda: x.sum().item())
        assert any(name.startswith("runtime/compiling/tiers.py") for name in ran)
        assert not any(name.startswith("record/recorder.py") for name in ran)


# -- what comes is what Python gets --------------------------------------------------------------


def numbers(session: lazygt.Session) -> list[object]:
    x = torch.arange(4.0)
    read: list[object] = []
    for k in range(12):
        read += [x.sum().item(), float((x * k).max()), bool(x.gt(k).any()), int(x.argmax())]
        read.append((x + 0.5 * k - 2**40 * (k % 2)).sum().item())
        read += [x[k % 4].item(), x.view(2, 2)[1, 0].item()]
    return read


def dtypes(session: lazygt.Session) -> list[object]:
    read: list[object] = []
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8,
             torch.uint8, torch.bool, torch.complex64)  # fmt: skip
    for kind in kinds:
        t = torch.tensor([3, 1], device="cpu").to(kind).to("lazygt")
        read += [t[0].item() for _ in range(4)]
        read += [t[:1].clone().item() for _ in range(4)]
    return read


def signs(session: lazygt.Session) -> list[object]:
    z = torch.tensor([1 - 2j, 3 + 4j], device="cpu").to("lazygt")
    return [part for _ in range(4) for part in (z.conj().imag[1].item(), z.conj()[0].item())]


def training(session: lazygt.Session) -> list[object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    read: list[object] = []
    for k in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        assert model.weight.grad is not None
        read.append(model.weight.grad.norm().item())
        optimizer.step()
        read += [loss.item(), model.bias.item(), (loss.detach() * k).item()]
    return read


def values_kept(session: lazygt.Session) -> list[object]:
    """What a run makes besides the number stays; what is dropped is freed with the next."""
    x, kept, read = torch.arange(6.0), [], list[object]()
    for k in range(10):
        y = x * k
        kept.append(y + 1)
        read.append(y.sum().item())
        if k % 3 == 0:
            del kept[:1]
    return read + [t.tolist() for t in kept]


def written(session: lazygt.Session) -> list[object]:
    x, read = torch.zeros(4), list[object]()
    part = x[1:3]
    for k in range(8):
        part.add_(k)
        x.mul_(0.5)
        read += [x.sum().item(), part[1].item(), x[2].item()]
    return read


def many_inputs(session: lazygt.Session) -> list[object]:
    """More than a mailbox takes."""
    read: list[object] = []
    for _ in range(4):
        parts = [torch.full((1,), float(k)) for k in range(900)]
        session.flush()
        read.append(torch.cat(parts).sum().item())
    return read


PROGRAMS = (numbers, dtypes, signs, training, values_kept, written, many_inputs)


def told(session: lazygt.Session) -> list[Any]:
    """The flushes, with the lines that forced them."""
    return [flush._replace(call_site=expand(flush.call_site)) for flush in session.history.recent]


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_native_fetch_matches_python_fetch(
    program: Callable[[lazygt.Session], list[object]], settings: dict[str, Any]
) -> None:
    """Values, counts, bytes of the messages, and what the history tells."""
    with lazygt.session(**grouped({"compile": "off", **settings})) as session:
        ours = program(session)
        here = session.stats(), told(session)
    with lazygt.session(**grouped({"compile": "off", **settings})) as session:
        session._submitter._fetcher = None
        theirs = program(session)
        there = session.stats(), told(session)
    assert list(map(repr, ours)) == list(map(repr, theirs))
    assert here[0] == there[0]
    assert here[1] == there[1]


def test_fetched_number_has_bits_of_eager(s: lazygt.Session) -> None:
    for number in (0.1, -0.0, 1e-45, float("inf"), 3.4e38):
        there = torch.tensor([number, 1.0], device="cpu")
        lazy = there.to("lazygt")
        for _ in range(4):
            assert repr(lazy[0].item()) == repr(there[0].item())


# -- what is out of the ordinary -------------------------------------------------------------------


def test_a_failure_names_the_line(s: lazygt.Session) -> None:
    table = torch.arange(3.0)
    for k in (0, 1, 2, 1, 7, 1, 2):
        index = torch.tensor([k])
        if k == 7:
            with pytest.raises(IndexError, match=r"test_fetches\.py") as caught:
                table[index].sum().item()
            assert isinstance(caught.value, lazygt.ExecutionError)
        else:
            assert table[index].sum().item() == k


def test_runs_under_way_are_answered_first(s: lazygt.Session) -> None:
    x = torch.arange(4.0)
    for k in range(20):
        y = x + k
        if k % 3 == 0:
            s.flush()
        assert y.sum().item() == 6.0 + 4 * k


def test_threads_read_numbers_of_their_own(s: lazygt.Session) -> None:
    x, wrong = torch.arange(4.0), list[int]()

    def reads(k: int) -> None:
        wrong.extend(k for _ in range(200) if (x + k).sum().item() != 6.0 + 4 * k)

    threads = [threading.Thread(target=reads, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_handler_of_sigint_is_taken_in_first(s: lazygt.Session) -> None:
    """It may raise between two lines of Python: they are held back from there on."""
    x = torch.arange(4.0)
    for _ in range(4):
        x.sum().item()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert not s._submitter.plain
        assert x.sum().item() == 6.0
        assert s._submitter.plain
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_a_number_is_awaited_loses_nothing() -> None:
    with lazygt.session(workers=lazygt.Workers(1, threads=1, frozen_after=1000.0)) as session:
        x = torch.arange(4.0)
        for _ in range(4):
            x.sum().item()
        (pid,) = session.worker_pids
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        y = x + 1
        with pytest.raises(KeyboardInterrupt):
            y.sum().item()
        os.kill(pid, signal.SIGCONT)
        assert [y.sum().item() for _ in range(5)] == [10.0] * 5
        assert y.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_sessions_that_are_dropped_are_gone() -> None:
    session = lazygt.session(launcher="inline")
    with session:
        x = torch.arange(4.0)
        for _ in range(4):
            x.sum().item()
    gone = weakref.ref(session)
    del session, x
    gc.collect()
    assert gone() is None


def test_outer_session_reads_on_after_inner_session() -> None:
    with lazygt.session(launcher="inline"):
        a = torch.arange(4.0)
        with lazygt.session(launcher="inline"):
            b = torch.arange(5.0)
            assert [b.sum().item() for _ in range(5)] == [10.0] * 5
        assert [a.sum().item() for _ in range(5)] == [6.0] * 5
    with pytest.raises(lazygt.NoSession):
        a.sum().item()
