"""Torch is itself again after every end of a session, and a session nests inside itself."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import optimizer

import lazygt
from lazygt.record import device, factories, host_rng
from lazygt.settings import grouped

pytestmark = pytest.mark.timeout(120)
#: `lazygt.session` is the class
session_module = sys.modules["lazygt.session"]
INLINE: dict[str, Any] = {"launcher": "inline"}
WORKER: dict[str, Any] = {"workers": 1, "threads": 1, "recovery": "off"}


def replaced() -> dict[str, Any]:
    """All that a session may replace in torch and in this process."""
    names = {
        f"{owner.__name__}.{name}": found
        for owner in (torch, torch.fft, torch.random, torch.Tensor, Parameter, torch.nn.Module)
        for name, found in vars(owner).items()
    }
    names["ScriptModule._apply"] = torch.jit.ScriptModule._apply
    names["SIGINT"] = signal.getsignal(signal.SIGINT)
    names["step hooks"] = (
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
    )
    names["kernel of bernoulli_"] = torch._C._dispatch_dump_table("aten::bernoulli_.float")
    names["view replay"] = torch._C._is_view_replay_enabled()
    names["sessions"] = list(device.session_stack)
    names["this module"] = {k: v for k, v in globals().items() if k != "__warningregistry__"}
    return names


def assert_plain() -> None:
    ones = torch.ones(2)
    assert type(ones) is torch.Tensor
    assert ones.device.type == "cpu"
    assert ones.tolist() == [1.0, 1.0]
    assert torch.Tensor([2.0]).device.type == "cpu"
    assert torch.FloatTensor([2.0]).device.type == "cpu"
    assert nn.Linear(1, 1).weight.device.type == "cpu"
    torch.manual_seed(3)
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(3)).item()


# -- the ends --------------------------------------------------------------------------------


def normal() -> None:
    with lazygt.session(**grouped(INLINE)):
        torch.ones(2).sum().item()


def exception_in_the_block() -> None:
    with pytest.raises(KeyError), lazygt.session(**grouped(INLINE)):
        torch.ones(2)
        raise KeyError


def refused_setting() -> None:
    with pytest.raises(ValueError), lazygt.session(launcher="nonsense"):
        pass


def bad_worker() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lazygt.runtime.launch.launcher.Launcher.start", fail)
        with pytest.raises(OSError, match="no more processes"), lazygt.session(**grouped(WORKER)):
            pass


def fail(*args: Any, **kwargs: Any) -> Any:
    raise OSError("no more processes")


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def interrupted_while(owner: object, name: str) -> Callable[[], None]:
    def opening() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt), lazygt.session(**grouped(INLINE)):
                raise AssertionError("it was opened")

    opening.__name__ = f"interrupted_in_{name}"
    return opening


def interrupted_by_a_signal() -> None:
    patch_factories = factories.patch

    def patch_and_interrupt() -> None:
        patch_factories()
        signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factories, "patch", patch_and_interrupt)
        with pytest.raises(KeyboardInterrupt), lazygt.session(**grouped(INLINE)):
            raise AssertionError("it was opened")


class Strange(types.ModuleType):
    """A module that lets nothing be set in it."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no names here")


def strange_module() -> None:
    sys.modules["strange_module"] = Strange("strange_module")
    try:
        with pytest.raises(RuntimeError, match="no names"), lazygt.session(**grouped(INLINE)):
            raise AssertionError("it was opened")
    finally:
        del sys.modules["strange_module"]


def failed_step() -> None:
    with pytest.raises(lazygt.ExecutionError), lazygt.session(**grouped(INLINE)):
        x = torch.ones(3).index_select(0, torch.tensor([9]))
    assert "session closed" in repr(x)


def dead_worker() -> None:
    with pytest.raises(lazygt.WorkerDied), lazygt.session(**grouped(WORKER)) as s:
        x = torch.ones(2)
        os.kill(s.worker_pids[0], signal.SIGKILL)
        x.sum().item()


def closed_in_the_block() -> None:
    with lazygt.session(**grouped(INLINE)) as s:
        torch.ones(2)
        s.close()
        assert_plain()


def closed_in_an_inner_block() -> None:
    with lazygt.session(**grouped(INLINE)) as s:
        with s:
            s.close()
            assert_plain()
        assert_plain()


def entered_again() -> None:
    with lazygt.session(**grouped(INLINE)) as s:
        with s, s:
            x = torch.ones(2)
        assert torch.ones(2).device.type == "lazygt"
        assert x.sum().item() == 2


def entered_again_and_raised() -> None:
    with pytest.raises(KeyError), lazygt.session(**grouped(INLINE)) as s, s:
        raise KeyError


def entered_without_a_block() -> None:
    s = lazygt.session(**grouped(INLINE)).__enter__()
    with s:
        torch.ones(2)
    assert torch.ones(2).sum().item() == 2
    s.close()


def different_sessions() -> None:
    with (
        lazygt.session(**grouped(INLINE)) as a,
        lazygt.session(**grouped({"default_device": False, **INLINE})) as b,
    ):
        assert torch.ones(2, device="lazygt").sum().item() == 2
        with a:
            x = torch.ones(2)
        assert device.session_stack == [a, b]
    assert str(x).startswith("tensor(...")


def other_order() -> None:
    a, b = lazygt.session(**grouped(INLINE)), lazygt.session(**grouped(INLINE))
    a.__enter__()
    b.__enter__()
    a.__enter__()
    a.close()
    assert torch.ones(2).sum().item() == 2
    b.__exit__(None, None, None)


def held() -> Iterator[torch.Tensor]:
    with lazygt.session(**grouped(INLINE)):
        yield torch.ones(2)


def abandoned_generators() -> None:
    first, second = held(), held()
    next(first), next(second)
    del first
    gc.collect()
    assert torch.ones(2).sum().item() == 2
    second.close()


def another_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(normal).result()
    with ThreadPoolExecutor(1) as pool:
        s = lazygt.session(**grouped(INLINE))
        pool.submit(s.__enter__).result()
        pool.submit(s.__exit__, None, None, None).result()


def many_threads() -> None:
    """Each opens and closes ten; what is left open decides what torch is."""
    barrier = threading.Barrier(4)

    def open_and_close() -> None:
        barrier.wait()
        for _ in range(10):
            with lazygt.session(**grouped(INLINE)):
                pass

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(open_and_close) for _ in range(4)]:
            each.result()


def collected_without_close() -> None:
    def lose() -> None:
        lazygt.session(**grouped(INLINE))
        gc.collect()

    with pytest.warns(lazygt.IdleWarning):
        lose()


def warning_as_an_error() -> None:
    s = lazygt.session(**grouped(WORKER))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(lazygt.IdleWarning):
            s.close()
    assert not is_alive(s.worker_pids[0])


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def forked_in_the_block() -> None:
    """The child leaves the block too; the parent's worker is not its own."""
    with lazygt.session(**grouped(WORKER)) as s:
        x = torch.ones(2)
        child = os.fork()
        if child == 0:
            leave_in_child(s)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert x.sum().item() == 2


def leave_in_child(s: lazygt.Session) -> NoReturn:
    code = 1
    try:
        assert_plain()
        with pytest.raises(lazygt.NoSession, match="from which this one was forked"):
            s.synchronize()
        s.__exit__(None, None, None)
        assert_plain()
        code = 0
    finally:
        os._exit(code)


def failing_end() -> None:
    s = lazygt.session(**grouped(INLINE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s._tiers, "close", fail)
        with pytest.raises(OSError, match="no more processes"), s:
            torch.ones(2)


ENDS = [
    normal, exception_in_the_block, refused_setting, bad_worker,
    interrupted_while(session_module, "open_link"), interrupted_while(session_module, "Submitter"),
    interrupted_while(host_rng, "install"), interrupted_while(factories, "_patch_imported"),
    interrupted_by_a_signal, strange_module, failed_step, dead_worker, closed_in_the_block,
    closed_in_an_inner_block, entered_again, entered_again_and_raised, entered_without_a_block,
    different_sessions, other_order, abandoned_generators, another_thread, many_threads,
    collected_without_close, forked_in_the_block, warning_as_an_error, failing_end,
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_ended_session_leaves_torch_unpatched(end: Callable[[], None]) -> None:
    normal()  # what is made once a process is made
    before = replaced()
    end()
    assert_plain()
    after = replaced()
    kept = (str, list, dict, tuple, bool)
    changed = [
        name
        for name, value in before.items()
        if not (after[name] == value if isinstance(value, kept) else after[name] is value)
    ]
    assert changed == []
    normal()
