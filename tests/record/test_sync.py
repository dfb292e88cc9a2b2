"""Sync points: what ships, under which name, and what waits."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazygt

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


def pending() -> torch.Tensor:
    """A value that is recorded and not shipped."""
    return torch.arange(4.0) + 1


VALUES: dict[str, tuple[Callable[[torch.Tensor], Any], Any, str]] = {
    "item": (lambda x: x[2].item(), 3.0, "item"),
    "float": (lambda x: float(x[2]), 3.0, "item"),
    "int": (lambda x: int(x[2]), 3, "item"),
    "bool": (lambda x: bool(x[2] > 2), True, "item"),
    "if": (lambda x: 1 if x.sum() > 2 else 0, 1, "item"),
    "tolist": (lambda x: x.tolist(), [1, 2, 3, 4], "to cpu"),
    "numpy": (lambda x: x.numpy().tolist(), [1, 2, 3, 4], "to cpu"),
    "np.asarray": (lambda x: np.asarray(x).tolist(), [1, 2, 3, 4], "to cpu"),
    "data.numpy": (lambda x: x.data.numpy().tolist(), [1, 2, 3, 4], "to cpu"),
    "cpu": (lambda x: x.cpu().sum().item(), 10, "to cpu"),
    "to": (lambda x: x.to("cpu").device.type, "cpu", "to cpu"),
    "repr": (repr, "tensor([1., 2., 3., 4.], device='lazygt:0')", "to cpu"),
    "str": (lambda x: str(x[0]), "tensor(1., device='lazygt:0')", "to cpu"),
    "format": (lambda x: f"{x[0]:.2f}", "1.00", "item"),
    "copy_": (lambda x: torch.zeros(4, device="cpu").copy_(x).tolist(), [1, 2, 3, 4],
              "copy to CPU"),
    "equal": (lambda x: torch.equal(x, x.clone()), True, "data-dependent"),
    "nonzero": (lambda x: tuple((x > 2).nonzero().shape), (2, 1), "data-dependent"),
    "mask": (lambda x: tuple(x[x > 2].shape), (2,), "data-dependent"),
    "unique": (lambda x: tuple(x.unique().shape), (4,), "data-dependent"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_sync_once(s: lazygt.Session, name: str) -> None:
    ask, expected, reason = VALUES[name]
    assert ask(pending()) == expected
    flushes = s.stats()["flushes"]
    assert flushes[reason] == 1, flushes
    assert set(flushes) <= {reason, "data"}


def test_print_syncs(s: lazygt.Session, capsys: pytest.CaptureFixture[str]) -> None:
    print(pending())
    assert capsys.readouterr().out == "tensor([1., 2., 3., 4.], device='lazygt:0')\n"


def test_shapes_and_types_never_sync(s: lazygt.Session) -> None:
    x = pending().reshape(2, 2)
    assert (x.shape, x.dtype, x.dim(), len(x), x.numel()) == ((2, 2), torch.float32, 2, 2, 4)
    assert x.is_contiguous()
    assert s.stats()["flushes"] == {}
    assert s.stats()["messages_sent"] == 0


def test_data_ships_and_shares_storage(s: lazygt.Session) -> None:
    x = pending()
    view = x.data
    assert s.stats()["flushes"] == {"data": 1}
    assert s.stats()["fetches"] == 0
    assert isinstance(view, torch.Tensor)
    assert not view.requires_grad
    view[0] = 9
    x.mul_(2)
    assert x.tolist() == view.tolist() == [18, 4, 6, 8]


def test_backward_ships(s: lazygt.Session) -> None:
    w = torch.ones(3, requires_grad=True)
    for _ in range(3):
        (w * 2).sum().backward()
    assert s.stats()["flushes"] == {"backward": 3}
    assert s.stats()["fetches"] == 0
    torch.autograd.backward((w * 2).sum())
    assert s.stats()["flushes"] == {"backward": 4}
    torch.autograd.grad((w * 2).sum(), w)
    assert s.stats()["flushes"] == {"backward": 4}


def _long(n: int = 400) -> torch.Tensor:
    """Takes a worker about a second; the client returns long before."""
    a = torch.ones(n, n) / n
    for _ in range(300):
        a = a @ a
    return a


@pytest.mark.parametrize(
    "ship",
    [
        lambda s, x: s.flush(),
        lambda s, x: x.data,
        lambda s, x: x.sum().backward(),
    ],
    ids=["flush", "data", "backward"],
)
def test_shipping_does_not_wait(ship: Callable[[lazygt.Session, torch.Tensor], Any]) -> None:
    with lazygt.session(workers=1) as s:
        s.synchronize()
        received = s.stats()["messages_received"]
        w = torch.ones((), requires_grad=True)
        ship(s, _long() * w)
        assert s.stats()["messages_received"] == received
        assert s.stats()["messages_sent"] > received
        s.synchronize()
        assert s.stats()["messages_received"] > received


def test_the_client_runs_ahead_by_a_bounded_number_of_plans() -> None:
    with lazygt.session(workers=1, tracing=lazygt.Tracing(max_ahead=2)) as s:
        for _ in range(8):
            _long(50).data
            stats = s.stats()
            runs = sum(stats["flushes"].values())
            assert runs - stats["messages_received"] <= 2
        assert runs == 8


def _train(steps: int) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        lazygt.current().flush()


def test_a_step_is_one_plan_without_the_flush_at_backward() -> None:
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(flush_on_backward=False)) as s:
        _train(3)
        s.synchronize()
        assert "backward" not in s.stats()["flushes"]
        assert s.stats()["flushes"]["flush()"] == 3
        whole = [plan for plan in s.plans() if "aten.t.default" in str(plan)]
        assert all("addmm" in str(p) and "aten.mm" in str(p) for p in whole)
    with lazygt.session(launcher="inline") as s:
        _train(3)
        assert s.stats()["flushes"]["backward"] == 3


def test_flush_and_synchronize(s: lazygt.Session) -> None:
    x = pending()
    s.flush()
    sent = s.stats()["messages_sent"]
    s.flush()
    assert s.stats()["messages_sent"] == sent, "there was nothing to ship"
    s.synchronize()
    assert x.tolist() == [1, 2, 3, 4]


def _loop(steps: int) -> list[float]:
    x = torch.ones(16)
    for _ in range(steps):
        x = x * 1.5
        x = x - 0.25
        x = x.sin()
    return x.tolist()


def test_a_failed_op_leaves_no_trace_too_long() -> None:
    """What it has taken in counts, and what comes next cuts it, though that is no op itself."""
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(max_graph_nodes=4)) as s:
        x, *others = (torch.ones(size, device="cpu").to("lazygt") for size in (2, 3, 4, 5))
        doubled = x * 2
        for other in others:
            with pytest.raises(RuntimeError, match="The size of tensor a"):
                torch.add(x, other)
        assert s.stats()["flushes"] == {}
        x.detach()
        assert s.stats()["flushes"] == {"trace too long": 1}
        assert doubled.tolist() == [2.0, 2.0]


def test_over_long_traces_flush_where_they_come_again() -> None:
    expected = torch.ones(16, device="cpu")
    for _ in range(200):
        expected = (expected * 1.5 - 0.25).sin()
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(max_graph_nodes=40)) as s:
        assert _loop(200) == expected.tolist()
        stats = s.stats()
        assert stats["flushes"]["trace too long"] >= 15
        assert stats["plans_built"] <= 5
        assert stats["plan_hits"] >= 10


def test_traces_are_bounded_by_the_bytes_that_they_hold() -> None:
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(max_graph_bytes=64 * 40)) as s:
        _loop(200)
        assert s.stats()["flushes"] == {"to cpu": 1}, "what is dead holds nothing"
        x, kept = torch.ones(16), []
        for _ in range(200):
            x = x * 1.5 - 0.25
            kept.append(x)
        # the first when 40 are held, then where the line comes round and 20 are
        assert s.stats()["flushes"]["trace too long"] == 1 + (200 - 40) // 20


def test_values_saved_by_autograd_count_as_held() -> None:
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(max_graph_bytes=64 * 40)) as s:
        x = torch.ones(16, requires_grad=True)
        for _ in range(100):
            x = x.sin()
        assert s.stats()["flushes"]["trace too long"] == 1 + (100 - 40) // 20


def test_inputs_updated_in_place_do_not_count_for_trace_bytes() -> None:
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(max_graph_bytes=64 * 4)) as s:
        weights = [torch.ones(16) for _ in range(3)]
        s.flush()
        for _ in range(50):
            for weight in weights:
                weight.mul_(0.5)
        assert s.stats()["flushes"] == {"flush()": 1}


def test_the_bound_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_MAX_GRAPH_NODES", "40")
    with lazygt.session(launcher="inline") as s:
        _loop(100)
        assert s.stats()["flushes"]["trace too long"] >= 5
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(max_graph_nodes=10_000)) as s:
        _loop(100)
        assert "trace too long" not in s.stats()["flushes"]


def test_numpy_of_tensor_requiring_grad_is_refused(s: lazygt.Session) -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        w.numpy()
    assert w.detach().numpy().tolist() == w.numpy(force=True).tolist() == [1, 1]
