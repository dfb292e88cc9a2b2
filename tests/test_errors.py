"""Errors: at the call where torch raises there; else at the next sync point, with the line."""

import gc
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F

import lazygt
from lazygt.errors import exception_class, execution_error, kind_of
from tests.support.descriptors import descriptors_before, open_descriptors
from tests.support.timeouts import patience
from tests.support.versions import TORCH

pytestmark = pytest.mark.timeout(120)
SETTINGS: list[Any] = [{"launcher": "inline"}, {"workers": 1}]
#: a dead worker is to be noticed within a second; the rest is the test machine's
SOON = 2.0


@pytest.fixture(params=SETTINGS, ids=["inline", "worker"])
def s(request: pytest.FixtureRequest) -> Iterator[lazygt.Session]:
    with lazygt.session(**request.param) as session:
        yield session


def line() -> int:
    """The caller's line."""
    return sys._getframe(1).f_lineno


WRONG: dict[str, Callable[[], Any]] = {
    "matmul": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "add": lambda: torch.ones(2) + torch.ones(3),
    "add_": lambda: torch.ones(2).add_(torch.ones(3)),
    "view": lambda: torch.ones(6).view(4, 2),
    "cat": lambda: torch.cat([torch.ones(2, 2), torch.ones(3, 3)], 1),
    "index_dim": lambda: torch.ones(3)[0, 0],
    "select": lambda: torch.ones(3)[7],
    "dim": lambda: torch.ones(3).sum(4),
    "dtype": lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64),
    "embedding": lambda: F.embedding(torch.ones(2), torch.ones(3, 3)),
    "conv": lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(2, 4, 3, 3)),
    "inplace_leaf": lambda: torch.ones(2, requires_grad=True).add_(1),
    "backward_vector": lambda: (torch.ones(2, requires_grad=True) * 2).backward(),
    "cast": lambda: torch.ones(2, dtype=torch.int64).add_(0.5),
    "negative": lambda: torch.empty(-1),
    "argument": lambda: torch.ones(2).sum(nonsense=1),
    "item": lambda: torch.ones(2).item(),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call_raises_torchs_error_at_call(name: str) -> None:
    if name == "embedding" and TORCH < (2, 13):
        pytest.skip("the meta kernel of this torch takes indices of any dtype")
    with pytest.raises(Exception) as expected:
        WRONG[name]()
    with lazygt.session(launcher="inline") as s:
        with pytest.raises(expected.type) as found:
            WRONG[name]()
        assert found.type is expected.type
        assert (torch.ones(2) * 2).tolist() == [2, 2]
        assert s.stats()["fetches"] == 1


def test_a_failure_names_op_inputs_and_line(s: lazygt.Session) -> None:
    x, index = torch.arange(5.0), torch.tensor([1, 9])
    here = line() + 1
    bad = x[index]
    worse = bad * 2
    with pytest.raises(lazygt.ExecutionError) as caught:
        s.synchronize()
    error = caught.value
    assert error.op == "aten.index.Tensor"
    assert error.inputs[0] == "f32[5]"
    assert "i64[2]" in error.inputs[1]
    assert error.where == f"{__file__}:{here}"
    assert error.kind == "IndexError"
    assert "out of bounds" in error.detail
    assert f"{__file__}:{here}" in str(error)
    for dependent in (bad, worse):
        with pytest.raises(lazygt.ExecutionError, match=f":{here}"):
            dependent.tolist()


def test_independent_values_survive_failure(s: lazygt.Session) -> None:
    kept = torch.ones(3) * 3
    bad = torch.arange(5.0)[torch.tensor([9, 9])]
    after = torch.ones(3) * 4
    with pytest.raises(lazygt.ExecutionError):
        bad.tolist()
    assert kept.tolist() == [3, 3, 3]
    assert after.tolist() == [4, 4, 4]
    s.synchronize()
    kept.add_(1)
    assert kept.tolist() == [4, 4, 4]


def test_each_failure_is_raised_once_unless_it_is_read(s: lazygt.Session) -> None:
    bad = torch.arange(5.0)[torch.tensor([9, 9])]
    with pytest.raises(lazygt.ExecutionError):
        s.synchronize()
    s.synchronize()
    with pytest.raises(lazygt.ExecutionError):
        bad.sum().item()


def test_data_dependent_op_names_failed_op_that_it_needs(s: lazygt.Session) -> None:
    here = line() + 1
    bad = torch.arange(5.0)[torch.tensor([9, 9])]
    with pytest.raises(lazygt.ExecutionError):
        s.synchronize()
    for reads in (bad.nonzero, (torch.ones(2) * bad).nonzero):
        with pytest.raises(lazygt.ExecutionError, match=f":{here}"):
            reads()
    s.synchronize()


def test_failure_on_every_worker_is_raised_once() -> None:
    with lazygt.session(workers=lazygt.Workers(3, threads=1)) as s:
        table, mask = torch.ones(3), torch.ones(4, dtype=torch.bool)
        rows = torch.tensor([9])
        for _ in range(30):  # whichever worker answers first
            with pytest.raises(IndexError, match="shape of the mask"):
                table[mask]
            s.synchronize()
            with pytest.raises(lazygt.ExecutionError, match="out of bounds"):
                table[rows].tolist()
            s.synchronize()


def test_an_error_that_is_raised_again_does_not_grow(s: lazygt.Session) -> None:
    bad = torch.arange(5.0)[torch.tensor([9, 9])]
    depths = []
    for _ in range(3):
        with pytest.raises(lazygt.ExecutionError) as caught:
            bad.tolist()
        depths.append(len(caught.traceback))
    assert depths[1:] == depths[:1] * 2


def test_a_failed_backward_op_names_the_forward_line(s: lazygt.Session) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad[torch.tensor([7, 7, 7])]

    x = torch.ones(3, requires_grad=True)
    here = line() + 1
    y = x.sin()
    y = Bad.apply(y)
    y.sum().backward()
    with pytest.raises(lazygt.ExecutionError) as caught:
        x.grad.tolist()
    user = Bad.backward.__code__.co_firstlineno + 2
    assert caught.value.where == f"{__file__}:{user}"
    rows = [row for plan in s.plans() for row in str(plan).splitlines()]
    (cos,) = [row for row in rows if "aten.cos.default" in row]
    assert f"{__file__}:{here}" in cos


def test_out_of_memory(s: lazygt.Session) -> None:
    kept = torch.ones(2) + 1
    here = line() + 1
    big = torch.ones(1 << 45)
    with pytest.raises(lazygt.ExecutionError) as caught:
        big.sum().item()
    assert "alloc" in caught.value.detail or "memory" in caught.value.detail
    assert caught.value.where == f"{__file__}:{here}"
    assert kept.tolist() == [2, 2]


# -- workers that die or stop --------------------------------------------------------------------


WAITS: dict[str, Callable[[lazygt.Session, torch.Tensor], Any]] = {
    "fetch": lambda s, x: x.tolist(),
    "flush": lambda s, x: [(s.flush(), x.add_(1)) for _ in range(10)],
    "synchronize": lambda s, x: s.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_killed_worker_is_reported(name: str) -> None:
    before = descriptors_before()
    with lazygt.session(workers=2, recovery="off") as s:
        x = torch.ones(3) + 1
        s.synchronize()
        pid = s.worker_pids[0]
        os.kill(pid, signal.SIGKILL)
        x.add_(1)
        start = time.monotonic()
        with pytest.raises(lazygt.WorkerDied) as caught:
            WAITS[name](s, x)
        assert time.monotonic() - start < patience(SOON)
        assert (caught.value.rank, caught.value.pid) == (0, pid)
        assert "SIGKILL" in caught.value.status
        with pytest.raises(lazygt.WorkerDied):
            s.synchronize()
        s.close()
    assert not any(psutil.pid_exists(pid) for pid in s.worker_pids)
    assert open_descriptors() <= before


def test_a_worker_killed_while_the_client_waits() -> None:
    with lazygt.session(workers=1, recovery="off") as s:
        s.synchronize()
        x = torch.ones(600, 600) / 600
        for _ in range(2000):
            x = x @ x
        s.flush()
        timer = threading.Timer(0.2, os.kill, (s.worker_pids[0], signal.SIGKILL))
        timer.start()
        with pytest.raises(lazygt.WorkerDied):
            x.tolist()
        timer.join()
        s.close()


def test_frozen_worker_is_reported() -> None:
    with lazygt.session(workers=lazygt.Workers(1, frozen_after=0.5), recovery="off") as s:
        x = torch.ones(3) + 1
        s.synchronize()
        os.kill(s.worker_pids[0], signal.SIGSTOP)
        x.add_(1)
        with pytest.raises(lazygt.WorkerFrozen) as caught:
            x.tolist()
        assert (caught.value.rank, caught.value.deadline) == (0, 0.5)
        s.close()
    assert not psutil.pid_exists(s.worker_pids[0])


def _fetch_for_ever(x: torch.Tensor) -> None:
    while True:
        (x + torch.rand(1)).sum().item()


def test_an_interrupted_fetch_shifts_no_later_answer() -> None:
    with lazygt.session(workers=1, recovery="off") as s:
        s.synchronize()
        kept = torch.arange(3.0) + 1
        slow = torch.ones(400, 400) / 400
        for _ in range(300):
            slow = slow @ slow
        s.flush()
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            _fetch_for_ever(slow)
        timer.join()
        assert kept.tolist() == [1, 2, 3]
        for number in range(5):
            assert (kept + number).tolist() == [1 + number, 2 + number, 3 + number]
        s.synchronize()


def test_an_exception_in_the_block_closes_the_session() -> None:
    with pytest.raises(ZeroDivisionError), lazygt.session(workers=1) as s:
        torch.ones(3) / (1 // 0)
    assert not psutil.pid_exists(s.worker_pids[0])
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize("settings", SETTINGS, ids=["inline", "worker"])
def test_an_unread_failure_is_raised_at_the_end(settings: dict[str, Any]) -> None:
    def leave_it_unread() -> torch.Tensor:
        with lazygt.session(**settings):
            return torch.arange(5.0)[torch.tensor([9, 9])]

    with pytest.raises(lazygt.ExecutionError):
        leave_it_unread()


@pytest.mark.parametrize("settings", SETTINGS, ids=["inline", "worker"])
def test_unreadable_value_is_not_computed_and_cannot_fail(settings: dict[str, Any]) -> None:
    with lazygt.session(**settings) as s:
        torch.arange(5.0)[torch.tensor([9, 9])]
        s.flush()
        assert s.last_plan is not None
        assert not s.last_plan.graph.nodes


class Mine(ValueError):
    """An exception of the user's, made in its own way."""

    def __init__(self, shape: tuple[int, ...], wanted: int) -> None:
        super().__init__(f"{shape}, wanted {wanted}")


EAGER: dict[str, tuple[Callable[[], torch.Tensor], type[Exception]]] = {
    "index": (lambda: torch.arange(5.0)[torch.tensor([9])], IndexError),
    "not positive": (lambda: torch.linalg.cholesky(-torch.eye(2)), torch.linalg.LinAlgError),
    "singular": (lambda: torch.linalg.inv(torch.zeros(2, 2)), torch.linalg.LinAlgError),
    "division": (lambda: torch.ones(2, dtype=torch.int64) // torch.tensor([0, 0]), RuntimeError),
    "memory": (lambda: torch.ones(1).expand(1 << 60).clone(), RuntimeError),
}


@pytest.mark.parametrize("name", EAGER)
def test_worker_error_has_type_of_eager_error(s: lazygt.Session, name: str) -> None:
    call, kind = EAGER[name]
    with torch.device("cpu"), pytest.raises(kind) as eager:
        call()
    with pytest.raises(kind) as raised:
        call().sum().item()
    assert isinstance(raised.value, lazygt.ExecutionError | type(eager.value))
    assert isinstance(raised.value, type(eager.value))
    assert str(eager.value).splitlines()[0] in str(raised.value)
    assert torch.ones(2).sum().item() == 2  # the session goes on


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), OSError(2, "gone"), UnicodeDecodeError("utf8", b"a", 0, 1, "bad"),
     Mine((2,), 3), ZeroDivisionError("0"), StopIteration(), lazygt.GraphError("broken")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_execution_error_is_of_any_class_and_can_be_pickled(error: Exception) -> None:
    given = ("aten.f.default", ("f32[2]",), "user.py:3", kind_of(error), "why", 1)
    made = execution_error(*given)
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - made here
    for each in (made, again):
        assert isinstance(each, type(error))
        assert isinstance(each, lazygt.ExecutionError)
        assert (each.op, each.where, each.rank) == ("aten.f.default", "user.py:3", 1)
        assert each.kind == type(error).__name__
        assert str(each).startswith("aten.f.default(f32[2]) failed on worker 1: ")


@pytest.mark.parametrize("kind", ["", "int", "os.path", "no.such.Thing", "SystemExit", "..", "sys"])
def test_a_name_that_is_of_no_exception_makes_a_plain_execution_error(kind: str) -> None:
    made = execution_error("op", (), "here", kind, "why")
    assert type(made) is lazygt.ExecutionError
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - made here
    assert (type(again), str(again)) == (type(made), str(made))


def test_an_exception_that_needs_arguments_to_exist_leaves_a_plain_execution_error() -> None:
    class Strict(Exception):
        def __new__(cls, needed: int) -> "Strict":
            return super().__new__(cls)

    Mine.Strict = Strict  # type: ignore[attr-defined]
    kind = f"{__name__}.Mine.Strict"
    assert exception_class(kind) is Strict
    assert type(execution_error("op", (), "here", kind, "why")) is lazygt.ExecutionError


def test_a_closed_session_is_freed_though_its_errors_went_through_frames_with_its_tensors() -> None:
    def failing() -> None:
        table, message = torch.arange(6.0).reshape(2, 3), ""
        try:
            torch.ones(3)[torch.tensor([7])].sum().item()
        except IndexError as error:
            message = str(error)
        assert table.shape == (2, 3)
        assert "index 7 is out of bounds" in message

    def opened() -> weakref.ref[lazygt.Session]:
        with lazygt.session(launcher="inline") as session:
            failing()
        return weakref.ref(session)

    closed = [opened() for _ in range(3)]
    for _ in range(2):  # a tensor in a cycle outlives the first
        gc.collect()
    assert [session() for session in closed] == [None] * 3
