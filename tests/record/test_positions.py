"""Positions are numbers of a run: one plan for all of them, and each still its own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lazygt
from benchmarks.generation import Decoder
from benchmarks.models import GPTSize
from lazygt.graph.node import params_in
from lazygt.record import bridge
from lazygt.record.tensor import NATIVE
from lazygt.session import Session

pytestmark = pytest.mark.timeout(120)

SIZE = 103
Turn = Callable[[torch.Tensor, int], torch.Tensor]


def row(x: torch.Tensor, i: int) -> torch.Tensor:
    return x[i] * 2


def column(x: torch.Tensor, i: int) -> torch.Tensor:
    return x.t()[:, i] + 1


def rows(x: torch.Tensor, i: int) -> torch.Tensor:
    return x[i : i + 3].sum(0)


def narrowed(x: torch.Tensor, i: int) -> torch.Tensor:
    return x.narrow(0, i, 3)[1]


def several(x: torch.Tensor, i: int) -> torch.Tensor:
    """On several lines, each with positions of its own."""
    first = x[i] + x[-1]
    second = x[99 - i] * x[i + 1 : i + 3]
    return first * second + x[i][2]


def put(x: torch.Tensor, i: int) -> torch.Tensor:
    x[i] = i
    x[i + 1, 1:2] = x[i, 0]
    x[i : i + 2].mul_(3)
    return x * 1


def counted(x: torch.Tensor, i: int) -> torch.Tensor:
    return x[torch.arange(i, i + 3, device=x.device)] + torch.arange(i, i - 8, -2, device=x.device)


def scattered(x: torch.Tensor, i: int) -> torch.Tensor:
    x = torch.select_scatter(x, x[0] * 2, 0, i)
    return torch.slice_scatter(x, x[4:6] * 3, 0, i, i + 2)


def rolled(x: torch.Tensor, i: int) -> torch.Tensor:
    return torch.roll(x, i, 0) - torch.roll(x, (i, 1), (0, 1)) + x.roll(i)


def strided(x: torch.Tensor, i: int) -> torch.Tensor:
    x = x * 1
    x.as_strided((2, 3), (5, 2), i).add_(x.as_strided((2, 3), (1, 1), 2 * i))
    return x


def differentiated(x: torch.Tensor, i: int) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = x * 2
    y[i] = x[i + 1] * x[i : i + 2].sum(0)
    y[1:, i % 4] *= x[0, i % 3]
    (y.square() * x[:, 1:2]).sum().backward()
    assert x.grad is not None
    return x.grad


TURNS = [
    row, column, rows, narrowed, several, put, counted, scattered, rolled, strided, differentiated,
]  # fmt: skip


def start(device: str) -> torch.Tensor:
    return torch.arange(SIZE * 4.0, device="cpu").view(SIZE, 4).to(device)


def built(s: Session) -> int:
    count: int = s.stats()["plans_built"]
    return count


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: turn.__name__)
def test_a_hundred_positions_are_two_plans(turn: Turn) -> None:
    x = start("cpu")
    eager = [turn(x, i).tolist() for i in range(100)]
    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")
        for i in range(100):
            assert turn(x, i).tolist() == eager[i], f"position {i}"
        # one as the first position had it, and one for all; ``put`` meets its own result, too
        assert built(s) <= (3 if turn is put else 2)
        if turn not in (counted, strided):
            assert len(s.recorder.trie.plans()) < built(s), "there is still a plan of one position"


@pytest.mark.skipif(NATIVE is None, reason="the recorder in Python records every op")
def test_positions_that_are_known_to_change_are_recorded_without_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(x: torch.Tensor, kept: list[torch.Tensor], i: int) -> list[torch.Tensor]:
        x[i : i + 2].mul_(2)
        kept[i % 2].t()[0].add_(1)
        part = x[:, 1:3].narrow(0, i, 4)[-2].requires_grad_()
        (grad,) = torch.autograd.grad((part * 2)[i % 2], part)
        return [x[i] + x.roll(i, 0)[0], torch.select_scatter(x, x[0], 0, i), grad]

    def noted(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def asked_for(*args: object) -> object:
            asked.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, asked_for)

    asked: list[str] = []
    eager_x = start("cpu")
    eager_kept = [eager_x[2:5], eager_x[7:10]]
    for name in ("record", "step_for", "results"):
        noted(bridge.NativeRecorder, name)
    for name in ("view_again", "write_back", "input_step", "enter"):
        noted(bridge.NativeTrace, name)
    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")
        kept = [x[2:5], x[7:10]]
        for i in (0, 1, 5, 4, 8, 9, 60):
            asked.clear()
            results = program(x, kept, i)
            needed = list(asked)
            s.flush()
            eager = program(eager_x, eager_kept, i)
            assert [t.tolist() for t in results] == [t.tolist() for t in eager]
        assert not needed


def test_loops_over_positions_that_stay_keep_them_in_the_plan() -> None:
    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")

        def total() -> float:
            return sum(x[i] * i for i in range(5))[2:].sum().item()  # type: ignore[index]

        assert total() == total() == total()
        assert built(s) == 1
        assert s.last_plan is not None
        places = [n.args[1:] for n in s.last_plan.graph.nodes if n.op == "aten.select.int"]
        assert places == [(0, i) for i in range(5)]


def test_a_loop_that_is_cut_into_traces_is_two_plans() -> None:
    """They begin with other turns every time."""
    x = start("cpu")
    eager = sum(x[i % SIZE] for i in range(400))
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(max_graph_nodes=60)) as s:
        x = start("lazygt")
        total = torch.zeros(4)
        for i in range(400):
            total = total + x[i % SIZE]
        assert total.tolist() == eager.tolist()  # type: ignore[union-attr]
        assert built(s) <= 5


@pytest.mark.parametrize("index", [SIZE, -SIZE - 1, 10**12])
@pytest.mark.parametrize("known", [False, True])
def test_out_of_range_is_torchs_own_error_on_the_users_line(index: int, known: bool) -> None:
    def reached(x: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x[i], x.select(0, i)

    def error(x: torch.Tensor, which: Callable[[torch.Tensor], object]) -> str:
        with pytest.raises(IndexError) as caught:
            which(x)
        return str(caught.value).partition("\n  at ")[0]

    eager = start("cpu")
    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")
        if known:
            for i in range(3):
                reached(x, i)
                s.flush()
        ops = s.stats()["ops_recorded"]
        for which in (
            lambda t: t[index],
            lambda t: t.select(0, index),
            lambda t: reached(t, index),
        ):
            assert error(x, which) == error(eager, which)
        assert s.stats()["ops_recorded"] == ops, "something was recorded"
        assert error(x, lambda t: t.__setitem__(index, 1.0)) == error(x, lambda t: t[index])
        assert x[-1].tolist() == eager[-1].tolist()


def test_handles_say_where_they_are() -> None:
    eager = start("cpu")

    def told(x: torch.Tensor, i: int) -> list[object]:
        views = [x[i], x[i].view(2, 2), x[i : i + 4, 1:], x[i : i + 4].t()[1], x[i].unbind()[3]]
        origin = x.untyped_storage().data_ptr()
        return [(v.storage_offset(), v.stride(), v.shape, v.data_ptr() - origin) for v in views]

    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")
        for i in (0, 7, 2, 99, 0):
            assert told(x, i) == told(eager, i)
            s.flush()


def test_views_of_other_traces_bring_their_own_positions() -> None:
    def program(x: torch.Tensor) -> list[object]:
        views = []
        for i in range(30):
            views.append(x[i][1:])
            views.append(x[i : i + 2].t())
            seen = sum(view.sum().item() for view in views[:: 1 + i % 3])
            read.append(seen)
        for k, view in enumerate(views):
            view.add_(k)
            read.append(x.sum().item())
            read.append(views[(7 * k) % len(views)].tolist())
        return [x.tolist(), [view.tolist() for view in views]]

    read: list[object] = []
    eager, eager_read = program(start("cpu")), read
    read = []
    with lazygt.session(launcher="inline"):
        assert program(start("lazygt")) == eager
    assert read == eager_read


def test_a_view_that_is_written_in_later_traces_is_two_plans() -> None:
    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")
        views = [x[i] for i in range(40)]
        before = built(s)
        for view in views:
            view.mul_(2)
            s.flush()
        eager = start("cpu")
        eager[:40] *= 2
        assert x.tolist() == eager.tolist()
        assert built(s) - before <= 4


def test_views_that_may_overlap_are_never_one_kernels_operands() -> None:
    def step(x: torch.Tensor, i: int, j: int) -> torch.Tensor:
        a, b = x[i : i + 2], x[j : j + 2]
        before = b * 2
        a.add_(1)
        return before * b + a * b.sin()

    pairs = [(0, 5), (3, 3), (4, 5), (5, 4), (9, 1), (6, 6)]
    eager_x = start("cpu")
    eager = [step(eager_x, i, j).tolist() for i, j in pairs]
    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")
        assert [step(x, i, j).tolist() for i, j in pairs] == eager
        assert built(s) <= 3
        assert x.tolist() == eager_x.tolist()


def test_views_that_depend_on_where_they_begin_have_a_step_each() -> None:
    def read(x: torch.Tensor, i: int) -> object:
        part = x.flatten()[i : i + 4]
        whole = part.as_strided((3,), (2,), 1), part.as_strided((2,), (1,))
        try:
            return [v.tolist() for v in (*whole, part.view(torch.int32), part.view(torch.float64))]
        except RuntimeError as error:
            return str(error).splitlines()[0]

    eager = start("cpu")
    with lazygt.session(launcher="inline"):
        x = start("lazygt")
        for i in (0, 4, 3, 8, 5, 3, 2):
            assert read(x, i) == read(eager, i), f"position {i}"


def test_copies_of_views_are_views_at_the_same_position() -> None:
    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")
        for i in (1, 5, 3):
            view = x[i]
            s.flush()
            whole, part = copy.deepcopy([x, view])
            part.add_(1)
            buffer = io.BytesIO()
            torch.save([x, view], buffer)
            buffer.seek(0)
            saved, loaded = torch.load(buffer)
            assert whole[i].tolist() == part.tolist() == (view + 1).tolist()
            assert saved[i].tolist() == loaded.tolist() == start("cpu")[i].tolist()
            assert loaded.storage_offset() == 4 * i


def test_a_write_at_a_position_copies_nothing() -> None:
    """Into a buffer that nobody else reads: in place, wherever it is."""
    with lazygt.session(launcher="inline") as s:
        cache = torch.zeros(2, 50, 4)
        for i in range(6):
            cache[:, i] = i + 1.0
            s.flush()
        assert s.last_plan is not None
        writes = s.last_plan.steps.writes
        assert all(mode != "copy" for modes in writes.modes for mode in modes)
        assert any(params_in(node.args) for node in s.last_plan.graph.nodes)
        assert cache[:, :7].sum(2).tolist() == [[4, 8, 12, 16, 20, 24, 0]] * 2


def test_a_shuffled_dataset_in_the_session_misses_no_plan_after_two_batches() -> None:
    def trained(count: Callable[[], int]) -> list[float]:
        torch.manual_seed(0)
        x, y = torch.arange(400.0).view(100, 4) / 400, torch.arange(100) % 2
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            for rows, labels in DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True):
                loss = torch.nn.functional.cross_entropy(model(rows), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                plans.append(count())
        return losses

    plans: list[int] = []
    with torch.device("cpu"):
        eager = trained(lambda: 0)
    plans.clear()
    with lazygt.session(launcher="inline") as s:
        assert trained(lambda: built(s)) == eager
    assert plans[1] == plans[-1], "a miss after the second batch"


def test_a_cache_that_is_written_at_a_position_misses_no_plan_after_three_tokens() -> None:
    size = GPTSize(dim=16, layers=2, heads=2, length=20, vocabulary=50)
    plans: list[int] = []
    with lazygt.session(launcher="inline") as s:
        decoder = Decoder("lazygt", size, grows=False)
        text = decoder.written(20, lambda _: plans.append(built(s)))
    assert text == Decoder("cpu", size, grows=False).written(20)
    assert plans[2] == plans[-1], "a miss after the third token"


def test_a_plan_that_stands_at_another_place_too_is_kept() -> None:
    """When the one place comes to be one for all positions, the other still runs the plan."""
    with lazygt.session(launcher="inline") as s:
        x = start("lazygt")

        def moved(i: int) -> float:
            return (x[i] * 2).sum().item()

        def other() -> float:
            -x
            return (x[0] * 2).sum().item()

        assert (moved(0), other(), built(s)) == (12.0, 12.0, 1)
        assert [moved(i) for i in (5, 7)] == [172.0, 236.0]
        assert [other() for _ in range(3)] == [12.0] * 3


def test_a_part_that_eager_torch_clones_with_its_offset_can_be_read() -> None:
    with lazygt.session(launcher="inline"):
        part = start("lazygt")[2]
        assert torch.select_scatter(part, part[0], 0, 1).tolist() == [8, 8, 10, 11]
