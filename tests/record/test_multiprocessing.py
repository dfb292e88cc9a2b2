"""Lazy tensors sent to other processes arrive as CPU tensors, or are refused at the sender."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazygt
from tests.record.forked_sender import FORK, SECONDS

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


class Image(torch.Tensor):
    pass


def tied() -> dict[str, Any]:
    x = torch.arange(6.0)
    return {"whole": x, "a view": x[2:4], "more": [x.view(2, 3), 7, "text"]}


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 3)


SENT: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(6.0),
    "bfloat16": lambda: torch.arange(6.0).bfloat16(),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "number": lambda: torch.tensor(3.5),
    "no elements": lambda: torch.empty(0, 3),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "frozen parameter": lambda: nn.Parameter(torch.ones(3), requires_grad=False),
    "subclass": lambda: torch.arange(3.0).as_subclass(Image),
    "tied": tied,
    "module": module,
}


def facts(sent: Any) -> list[Any]:
    """Of all tensors in an object: class, layout and values."""
    if isinstance(sent, nn.Module):
        sent = dict(sent.named_parameters())
    if isinstance(sent, dict):
        sent = list(sent.values())
    if isinstance(sent, list):
        return [facts(each) for each in sent]
    if not isinstance(sent, torch.Tensor):
        return [sent]
    return [type(sent), sent.device.type, sent.dtype, sent.shape, sent.stride(),
            sent.storage_offset(), sent.requires_grad, sent.tolist()]  # fmt: skip


def by_pickle(item: Any) -> Any:
    return ForkingPickler.loads(ForkingPickler.dumps(item))


def by_queue(item: Any) -> Any:
    queue: Any = multiprocessing.Queue()
    queue.put(item)
    received = queue.get(timeout=SECONDS)
    queue.close()
    queue.join_thread()
    return received


def by_pipe(item: Any) -> Any:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver, sender:
        sender.send(item)
        return receiver.recv()


WAYS = [by_pickle, by_queue, by_pipe]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SENT)
def test_lazy_tensors_arrive_as_those_of_the_cpu_do(name: str, way: Callable[[Any], Any]) -> None:
    expected = facts(way(SENT[name]()))
    with lazygt.session(launcher="inline"):
        sent = SENT[name]()
        assert facts(way(sent)) == expected


def test_sent_tensors_keep_shared_storage(s: lazygt.Session) -> None:
    received = by_queue(tied())
    received["whole"][2] = 9
    assert received["a view"][0] == 9
    assert received["more"][0][0, 2] == 9


@pytest.mark.parametrize("way", WAYS)
def test_result_of_a_forward_pass_is_refused_at_the_sender(s: lazygt.Session, way: Any) -> None:
    x = torch.ones(2, 3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"shape \[2, 3\].* Send t\.detach\(\)"):
        way([x])
    assert facts(way([x.detach()])) == facts([torch.full((2, 3), 2.0, device="cpu")])


def test_queue_takes_the_values_of_now() -> None:
    queue: Any = multiprocessing.JoinableQueue()
    with lazygt.session(launcher="inline"):
        x = torch.ones(3)
        queue.put({"x": x})
        x.add_(1)
        queue.put((x,), timeout=SECONDS)
    assert queue.get(timeout=SECONDS)["x"].tolist() == [1.0] * 3
    assert queue.get(timeout=SECONDS)[0].tolist() == [2.0] * 3
    with pytest.raises(lazygt.NoSession):
        queue.put(x)
    queue.put("still there")
    assert queue.get(timeout=SECONDS) == "still there"


def test_cpu_tensors_keep_torchs_own_sharing(s: lazygt.Session) -> None:
    queue: Any = multiprocessing.Queue()
    shared = torch.zeros(2, device="cpu")
    queue.put(shared)
    queue.get(timeout=SECONDS).add_(1)
    assert shared.tolist() == [1.0, 1.0]
    assert s.stats()["flushes"] == {}


def doubled(x: Any) -> Any:
    assert x.device.type == "cpu"
    return x * 2


def test_pool_of_processes(s: lazygt.Session) -> None:
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        assert pool.submit(doubled, torch.ones(2)).result(SECONDS).tolist() == [2.0, 2.0]
        refused = pool.submit(doubled, torch.ones(2, requires_grad=True) + 1)
        with pytest.raises(RuntimeError, match=r"Send t\.detach"):
            refused.result(SECONDS)
        assert pool.submit(doubled, torch.ones(1)).result(SECONDS).tolist() == [2.0]
    with FORK.Pool(1) as old:
        assert [t.tolist() for t in old.map(doubled, torch.eye(2).unbind())] == [[2, 0], [0, 2]]


def answer(x: torch.Tensor, weight: nn.Parameter, queue: Any) -> None:
    queue.put((type(weight) is nn.Parameter, (x * weight.detach()).tolist()))


@pytest.mark.slow
def test_arguments_of_a_spawned_process(s: lazygt.Session) -> None:
    spawn = multiprocessing.get_context("spawn")
    queue: Any = spawn.Queue()
    child = spawn.Process(target=answer, args=(torch.arange(3.0), module().weight[0, 0], queue))
    with pytest.raises(RuntimeError, match=r"Send t\.detach"):
        child.start()
    weight = nn.Parameter(torch.full((3,), 2.0))
    child = spawn.Process(target=answer, args=(torch.arange(3.0), weight, queue))
    child.start()
    assert queue.get(timeout=SECONDS) == (True, [0.0, 2.0, 4.0])
    child.join(SECONDS)
    assert child.exitcode == 0


@pytest.mark.parametrize("settings", [{"launcher": "inline"}, {"workers": 1, "threads": 1}])
def test_forked_child_is_told_that_it_has_no_session(settings: dict[str, Any]) -> None:
    """In a fresh process: torch runs no backward in a child of one whose engine has threads."""
    program = f"from tests.record import forked_sender; forked_sender.fork_in_session({settings})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
