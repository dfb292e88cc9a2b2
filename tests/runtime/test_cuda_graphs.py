"""Sessions whose worker captures plans, by a stand-in for torch.cuda's graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lazygt
from lazygt.config import Config
from lazygt.runtime.executors.cuda_graphs import graphs_of
from lazygt.runtime.executors.interpreter import CheckedInterpreter
from tests.models import zoo
from tests.runtime.executors import cuda_stand_in
from tests.support.bits import assert_same_bits

RUNS = 12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "lstm"])
def test_training_has_the_bits_of_eager_torch(name: str, optimizer: str) -> None:
    data = zoo.batches(name, RUNS)
    eager, _ = zoo.train(name, optimizer, data, "cpu")
    with (
        cuda_stand_in.captured() as cuda,
        lazygt.session(launcher="inline", device="cpu", compile="off") as s,
    ):
        lazy, _ = zoo.train(name, optimizer, data, "lazygt")
        graphs = s.stats()["cuda_graphs"]
    for ours, theirs in zip(lazy, eager, strict=True):
        assert_same_bits(ours, theirs)
    assert graphs > 0
    assert cuda.replays > 0


def swept(device: str) -> list[torch.Tensor]:
    """Batches cut out of a tensor at places that change, and written to such places."""
    torch.manual_seed(0)
    data, weight = torch.rand(64, 8, device=device), torch.rand(8, 4, device=device)
    kept, sums = torch.zeros(64, 4, device=device), []
    for i in range(14):
        y = ((data[i * 4 : i * 4 + 4] @ weight).sin().exp() * 0.5).tanh().cos()
        kept[i * 4 : i * 4 + 4] = y.sin().exp().cos().tanh()
        kept[i].mul_(2).sin_().exp_().cos_().tanh_().add_(1)
        sums.append(y.sum() + kept.sum())
        if device == "lazygt":
            lazygt.current().flush()
    return [each.cpu() for each in [*sums, kept]]


def test_changed_addresses_are_never_stale() -> None:
    with (
        cuda_stand_in.captured() as cuda,
        lazygt.session(launcher="inline", device="cpu", compile="off"),
    ):
        lazy = swept("lazygt")
        assert cuda.replays > 4
    for ours, theirs in zip(lazy, swept("cpu"), strict=True):
        assert_same_bits(ours, theirs)


def test_a_measured_plan_that_gains_nothing_is_a_known_run_again() -> None:
    ticks = iter(range(1000))  # plain and captured runs take one each
    with (
        cuda_stand_in.captured(measured=True, clock=lambda: float(next(ticks))) as cuda,
        lazygt.session(launcher="inline", device="cpu", compile="off") as s,
    ):
        x = grown(torch.ones(8), 30)
        s.synchronize()
        assert "none, it takes 1000000 us, and 1000000 us as CUDA graphs" in str(lazygt.why(s))
        assert s.stats()["cuda_graphs"] == 0
        before = cuda.replays
        grown(x, 1)
        s.synchronize()
        assert cuda.replays == before


def test_a_plan_that_is_captured_is_told_of() -> None:
    with cuda_stand_in.captured() as cuda, lazygt.session(launcher="inline", device="cpu") as s:
        grown(torch.ones(8), 9)
        s.synchronize()
        assert cuda.replays > 3
        assert s.stats()["cuda_graphs"] == 1
        ((_, rank, told),) = s.cuda_graphs()
        assert (rank, told.graphs, told.steps) == (0, 1, 5)
        assert "rank 0: 1 with 5 of 5 steps" in str(lazygt.why(s))


def grown(x: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        x = (x.sin().exp().cos() * 0.5).tanh()
        if x.device.type == "lazygt":
            lazygt.current().flush()
    return x


def test_a_failed_capture_warns_once_and_the_numbers_stay_right() -> None:
    with (
        cuda_stand_in.captured() as cuda,
        lazygt.session(launcher="inline", device="cpu", compile="off") as s,
    ):
        cuda.failing = 1
        with pytest.warns(RuntimeWarning, match="could not be captured: worker 0: Runtime") as w:
            x = grown(torch.ones(8), 12).cpu()
        assert len(w) == 1
        assert_same_bits(x, grown(torch.ones(8, device="cpu"), 12))
        assert s.stats()["cuda_graphs"] == 0


def test_replays_skip_checks_of_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """That was done when the plan was captured; each time, it took longer than the graphs."""
    checked: list[str] = []
    with (
        cuda_stand_in.captured() as cuda,
        lazygt.session(launcher="inline", device="cpu", compile="off") as s,
    ):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())  # numbers that change: steps between

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sin().exp().tanh().sum().backward()
            optimizer.step()
            s.flush()

        for _ in range(12):
            step()
        s.synchronize()
        before, made = cuda.replays, CheckedInterpreter._checked

        def counting(self: CheckedInterpreter, number: int, *args: Any) -> Any:
            checked.append(self.schedule.graph.nodes[number].op)
            return made(self, number, *args)

        monkeypatch.setattr(CheckedInterpreter, "_checked", counting)
        for _ in range(3):
            step()
        s.synchronize()
        assert cuda.replays > before
    assert [op for op in checked if op.startswith("aten.")] == []


def test_a_profiled_run_is_no_replay() -> None:
    with (
        cuda_stand_in.captured() as cuda,
        lazygt.session(launcher="inline", device="cpu", compile="off") as s,
    ):
        x = grown(torch.ones(8), 6)
        s.synchronize()
        before = cuda.replays
        with lazygt.profile(s):
            grown(x, 1)
            s.synchronize()
        assert cuda.replays == before


def test_cuda_graphs_exist_only_on_gpus() -> None:
    assert graphs_of(torch.device("cpu"), "now", 1) is None
    assert graphs_of(torch.device("cuda"), "off", 1) is None
    assert graphs_of(torch.device("cuda"), "auto", 1) is not None


def test_the_setting_is_checked() -> None:
    with pytest.raises(ValueError, match=r"cuda_graphs='on'\)\): expected 'auto', 'off' or 'now'"):
        Config.load(cuda_graphs="on")
    with pytest.raises(ValueError, match="max_cuda_graph_bytes=0"):
        Config.load(max_cuda_graph_bytes=0)
