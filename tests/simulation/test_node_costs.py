"""What a rank's memory holds at the peak, by kind and by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import lazygt
from lazygt.graph.liveness import peak_bytes
from lazygt.machine import default_machine
from lazygt.runtime.plan import Schedule
from lazygt.settings import grouped
from lazygt.simulation import DRY, LiveValue, Prediction, predict
from lazygt.simulation.node_costs import KINDS

pytestmark = pytest.mark.timeout(120)

WIDTH, LAYERS, ROWS = 64, 4, 32
#: Of all weights.
WEIGHTS = LAYERS * 4 * WIDTH * WIDTH * 4
#: Of a gradient.
ONE = WEIGHTS // LAYERS // 2
Wrap = Callable[[nn.Module], object]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).tanh())
        return y


def predicted(
    program: Callable[[], object], mesh: dict[str, int] | None = None
) -> tuple[Prediction, lazygt.Session]:
    more = {"mesh": mesh} if mesh else {}
    with lazygt.session(**grouped({**DRY, **more})) as s:
        living = LiveValue(s)
        program()
    return predict(s, default_machine("cpu"), living), s


def train(
    wrap: Wrap = lambda model: None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    microbatches: int = 1,
    recompute: bool = False,
    cut: bool = True,
) -> None:
    model = nn.ModuleList(Layer() for _ in range(LAYERS))
    wrap(model)
    opt = optimizer(model.parameters(), lr=0.1)
    for _ in range(4):
        for _ in range(microbatches):
            x = torch.randn(ROWS, WIDTH)
            x = lazygt.distribute(x, {"data": Shard(0)}) if cut else x
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            x.square().sum().backward()
        opt.step()
        opt.zero_grad()


def check_sums(prediction: Prediction) -> None:
    """Whatever the kinds and the lines are: they add up, at the peak and at any other time."""
    peak = prediction.peak
    assert prediction.peak_bytes == peak.nbytes == sum(peak.kinds.values())
    assert tuple(peak.kinds) == KINDS
    assert all(nbytes >= 0 for nbytes in peak.kinds.values())
    for kind in KINDS:
        assert sum(row.nbytes for row in peak.lines if row.kind == kind) == peak.kinds[kind]
    for run in prediction.runs:
        for ranks in run.simulated.classes:
            assert max(sum(row) for _, row in ranks.alive) == ranks.peak_bytes
            assert all(min(row) >= 0 for _, row in ranks.alive)
            assert [at for at, _ in ranks.alive] == sorted(at for at, _ in ranks.alive)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("optimizer", "states"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2)])
def test_on_one_rank_parameters_and_state_are_those_of_the_model(
    optimizer: type[torch.optim.Optimizer], states: int, microbatches: int, recompute: bool
) -> None:
    prediction, s = predicted(lambda: train(lambda m: None, optimizer, microbatches, recompute,
                                            cut=False))  # fmt: skip
    check_sums(prediction)
    kinds = prediction.peak.kinds
    assert kinds["parameters"] == WEIGHTS
    assert kinds["optimizer"] == states * WEIGHTS
    assert kinds["gathered"] == 0
    assert 0 < kinds["gradients"] <= WEIGHTS + ONE  # and one that is added
    plans = {plan.digest.hex()[:12]: plan.graph for plan in s.plans()}
    for run in prediction.runs:
        graph = plans[run.plan]
        (ranks,) = run.simulated.classes
        # without what the program keeps anyhow, but the plan reads no more
        least = peak_bytes(graph, Schedule.of(graph).frees)
        assert least <= ranks.peak_bytes <= least + WEIGHTS


def test_gradients_of_several_microbatches_wait_for_the_update() -> None:
    prediction, _ = predicted(lambda: train(microbatches=2, cut=False))
    update = prediction.runs[-1].simulated.classes[0].memory
    assert update.kinds["gradients"] == WEIGHTS + ONE  # one is added last


def test_recomputing_keeps_fewer_activations() -> None:
    kept, _ = predicted(lambda: train(cut=False))
    again, _ = predicted(lambda: train(cut=False, recompute=True))

    def most(prediction: Prediction) -> int:
        place = KINDS.index("activations")
        return max(row[place] for run in prediction.runs
                   for row in (row for _, row in run.simulated.classes[0].alive))  # fmt: skip

    assert most(again) < 0.9 * most(kept)


@pytest.mark.parametrize(
    ("wrap", "parts", "gathers"),
    [
        (lazygt.data_parallel, 1, False),
        (lazygt.fully_shard, 4, True),
        (lambda m: lazygt.fully_shard(m, reshard_after_forward=False), 4, True),
        (lambda m: lazygt.fully_shard(
            m, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), 4, True),
    ],
)  # fmt: skip
def test_blocks_are_a_part_of_everything(wrap: Wrap, parts: int, gathers: bool) -> None:
    prediction, _ = predicted(lambda: train(wrap), {"data": 4})
    check_sums(prediction)
    kinds = prediction.peak.kinds
    assert kinds["parameters"] == WEIGHTS // parts
    assert kinds["optimizer"] == 2 * WEIGHTS // parts
    assert (kinds["gathered"] > 0) == gathers


def test_weights_without_resharding_stay_gathered_longer() -> None:
    again, _ = predicted(lambda: train(lazygt.fully_shard), {"data": 4})
    kept, _ = predicted(
        lambda: train(lambda m: lazygt.fully_shard(m, reshard_after_forward=False)), {"data": 4}
    )
    assert kept.peak.kinds["gathered"] > 1.5 * again.peak.kinds["gathered"]


def test_stages_hold_their_own() -> None:
    def stages(model: nn.Module) -> None:
        assert isinstance(model, nn.ModuleList)
        lazygt.stage(model[:2], 0)
        lazygt.stage(model[2:], 1)

    prediction, _ = predicted(lambda: train(stages, microbatches=2, cut=False), {"pipe": 2})
    check_sums(prediction)
    assert prediction.peak.kinds["parameters"] == WEIGHTS // 2
    assert prediction.peak.kinds["optimizer"] == WEIGHTS


def test_value_kept_between_plans_of_step_is_activation() -> None:
    """The forward is flushed by itself."""

    def program() -> None:
        model = Layer()
        opt = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            loss = model(torch.randn(ROWS, WIDTH)).square().sum()
            lazygt.current().flush()
            loss.backward()
            opt.step()
            opt.zero_grad()

    prediction, _ = predicted(program)
    check_sums(prediction)
    inside = [run.simulated.classes[0].memory.kinds for run in prediction.runs]
    assert any(kinds["activations"] >= ROWS * WIDTH * 4 and not kinds["other"] for kinds in inside)
    assert all(kinds["other"] <= 2 * WEIGHTS for kinds in inside)  # on the way to an update


def test_inference_has_parameters_and_no_optimizer_memory() -> None:
    def program() -> None:
        model, table = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH)
        with torch.no_grad():
            for _ in range(3):
                _ = (model(torch.randn(ROWS, WIDTH)) * table).sum().item()

    prediction, _ = predicted(program)
    check_sums(prediction)
    assert prediction.peak.kinds["parameters"] == 4 * WIDTH * (WIDTH + 1)
    assert prediction.peak.kinds["other"] >= 4 * WIDTH
    assert prediction.peak.kinds["optimizer"] == prediction.peak.kinds["gradients"] == 0


def test_the_report_the_json_and_the_timeline_tell_of_it(tmp_path: Path) -> None:
    prediction, _ = predicted(lambda: train(lazygt.fully_shard), {"data": 4})
    text = str(prediction)
    assert "what holds memory at the peak" in text
    assert "    parameters 65.5 kB, gradients " in text
    told = json.loads(json.dumps(prediction.as_json()))
    assert sum(told["memory"]["kinds"].values()) == told["peak_bytes"]
    assert told["memory"]["lines"][0]["nbytes"] == prediction.peak.lines[0].nbytes
    prediction.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counted = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counted} == {"memory"}
    assert max(sum(event["args"].values()) for event in counted) == prediction.peak_bytes
