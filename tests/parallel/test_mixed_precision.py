"""``fully_shard(mp_policy=...)``: the numbers of FSDP2, what is exchanged in which dtype, and which
parameters a module sees when."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lazygt
from lazygt.graph.liveness import peak_bytes
from lazygt.graph.placement import LAUNCH
from lazygt.runtime.plan import Plan
from tests.parallel.mixed import FULL, HALF, POLICIES, trained

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
S0 = lazygt.Shard(0)
WIDTH, LAYERS = 256, 4
#: Bytes of all weights, and of the biases.
WEIGHTS, BIASES = LAYERS * WIDTH * WIDTH * 4, LAYERS * WIDTH * 4


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline", mesh={"data": 1}) as s:
        yield s


# -- numbers -------------------------------------------------------------------------------------


def by_fsdp2(place: Path, ranks: int, policy: str, microbatches: int) -> dict[str, torch.Tensor]:
    """The weights that processes of torch alone come to."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.mixed", str(rank), str(ranks), str(place),
             policy, str(microbatches)],
            cwd=ROOT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    assert [process.wait(60) for process in processes] == [0] * ranks
    weights: dict[str, torch.Tensor] = torch.load(place / "weights")
    return weights


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "policy", "microbatches"),
    [(1, "param, reduce wide", 2), (2, "param", 1), (2, "param, reduce wide", 2),
     (2, "reduce narrow", 1), (2, "output", 1)],
)  # fmt: skip
def test_training_gives_the_bits_of_fsdp2(
    tmp_path: Path, ranks: int, policy: str, microbatches: int
) -> None:
    with lazygt.session(mesh={"data": ranks}, workers=lazygt.Workers(threads=1), compile="off"):
        model = trained(
            lambda module: lazygt.fully_shard(module, wrap="one", mp_policy=POLICIES[policy]),
            lambda batch: lazygt.distribute(batch.clone(), {"data": S0}),
            microbatches,
        )
        here = {name: t.detach().cpu() for name, t in model.state_dict().items()}
    for name, weight in by_fsdp2(tmp_path, ranks, policy, microbatches).items():
        assert here[name].dtype == FULL
        assert torch.equal(here[name], weight), name


# -- bytes ---------------------------------------------------------------------------------------


def planned(policy: MixedPrecisionPolicy | None, microbatches: int = 1) -> Plan:
    with lazygt.session(mesh={"data": 2}, launcher="dry", compile="off") as s:
        layers = (m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        model = lazygt.fully_shard(nn.Sequential(*layers), mp_policy=policy)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8 * microbatches, WIDTH)
        s.flush()
        for _ in range(2):
            opt.zero_grad()
            for part in x.chunk(microbatches):
                part = lazygt.distribute(part.clone(), {"data": S0})
                model(part).float().square().mean().backward()
            opt.step()
            s.flush()
        assert s.last_plan is not None
        return s.last_plan


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("policy", "gathered", "reduced"),
    [
        (MixedPrecisionPolicy(), FULL, FULL),
        (MixedPrecisionPolicy(HALF), HALF, HALF),
        (MixedPrecisionPolicy(HALF, FULL), HALF, FULL),
        (MixedPrecisionPolicy(None, HALF), FULL, HALF),
    ],
)
def test_collectives_have_dtype_of_policy(
    policy: MixedPrecisionPolicy, gathered: torch.dtype, reduced: torch.dtype, microbatches: int
) -> None:
    sent: Counter[str] = Counter()
    for one in planned(policy, microbatches).collectives:
        sent[one.kind] += one.nbytes
    # a backward needs no biases, and the first layer's is not asked for its input's gradient
    together = 2 * WEIGHTS - WEIGHTS // LAYERS + BIASES
    # more than 1 MiB of gradients are reduced after each backward, but small ones once, where no
    # policy says otherwise
    biases = (microbatches if policy != MixedPrecisionPolicy() else 1) * BIASES
    assert sent == {
        "all_gather": microbatches * together * gathered.itemsize // 4,
        "reduce_scatter": (microbatches * WEIGHTS + biases) * reduced.itemsize // 4,
    }


def test_casts_are_made_when_they_are_gathered_and_not_kept() -> None:
    graph = planned(MixedPrecisionPolicy(HALF)).steps.graph
    block = (WIDTH // 2, WIDTH)
    made: dict[int, int] = {}
    for number, (node, results) in enumerate(graph.numbered()):
        if node.op == LAUNCH and node.args[0] == "all_gather":
            for value in node.args[1]:
                meta = graph.values[value.index]
                assert meta is not None
                assert meta.dtype == HALF
                if meta.shape == block:
                    # at most the bias's own cast stands between
                    assert number - made.pop(value.index) <= 3
        elif node.op == "aten._to_copy.default" and node.results[0].shape == block:
            made |= dict.fromkeys(results, number) if node.results[0].dtype == HALF else {}
    assert not made


def test_casts_are_stored_in_their_unit_across_a_sync_point() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum().item() != 0.5:  # ships what is recorded, the casts among it
                x = x + 1
            y: torch.Tensor = self.layer(x)
            return y

    with lazygt.session(mesh={"data": 2}, launcher="dry", compile="off") as s:
        model = lazygt.fully_shard(Reading(), mp_policy=MixedPrecisionPolicy(HALF))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        s.flush()
        x = lazygt.distribute(torch.randn(8, WIDTH, requires_grad=True), {"data": S0})
        model(x).float().square().mean().backward()
        opt.step()
        assert s.last_plan is not None
        sent = [(one.kind, one.nbytes) for one in s.last_plan.collectives]
        assert not lazygt.why(s).gathers
    assert sent == [
        *[("all_gather", WIDTH * WIDTH * 2)] * 2, ("reduce_scatter", WIDTH * WIDTH * 2),
    ]  # fmt: skip


def test_half_precision_halves_gathered_memory() -> None:
    half, full = (
        peak_bytes(plan.steps.graph, plan.steps.frees)
        for plan in (planned(MixedPrecisionPolicy(HALF)), planned(None))
    )
    # two gathered weights and a gradient, each of half the bytes
    assert half < full - WEIGHTS // LAYERS


# -- what a module sees --------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(8))
        self.seen: list[torch.dtype] = []

    def forward(self, words: torch.Tensor, fail: bool = False) -> torch.Tensor:
        assert self.head.weight is self.table.weight
        self.seen = [t.dtype for t in (*self.parameters(), self.scale)]
        if fail:
            raise ArithmeticError
        y: torch.Tensor = self.head(self.table(words))
        return y


def test_parameters_are_casts_while_a_module_runs_and_themselves_else(
    session: lazygt.Session,
) -> None:
    model = Tied()
    before = dict(model.named_parameters(remove_duplicate=False))
    lazygt.fully_shard(model, mp_policy=MixedPrecisionPolicy(HALF))
    words = torch.arange(4)
    assert model(words).dtype == HALF
    assert model.seen == [HALF, FULL], "buffers stay as they are"
    with pytest.raises(ArithmeticError):
        model(words, fail=True)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert copy.deepcopy(model)(words).dtype == HALF
    model(words).float().sum().backward()
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.dtype == FULL


def test_recurrent_layers_use_cast_parameters(session: lazygt.Session) -> None:
    layer = lazygt.fully_shard(nn.LSTM(4, 4), mp_policy=MixedPrecisionPolicy(HALF))
    y, _ = layer(torch.randn(3, 2, 4))
    assert y.dtype == HALF
    y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {FULL}
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            y: torch.Tensor = self.inner(x)
            return y
        again: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return again


class Selective(nn.Module):
    """A layer and what follows it, checkpointed by a policy."""

    def __init__(self, contexts: Any) -> None:
        super().__init__()
        self.inner, self.contexts = nn.Linear(8, 8), contexts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.contexts is None:
            return self.body(x)
        y: torch.Tensor = checkpoint(self.body, x, use_reentrant=False, context_fn=self.contexts)
        return y

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x).relu().square()
        return y


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_cast_again(session: lazygt.Session, reentrant: bool) -> None:
    gradients = []
    for how in (None, reentrant):
        torch.manual_seed(0)
        model = lazygt.fully_shard(Checkpointed(how), mp_policy=MixedPrecisionPolicy(HALF, FULL))
        model(torch.randn(4, 8, requires_grad=True)).float().square().sum().backward()
        gradients.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 2
    assert all(map(torch.equal, *gradients))


def test_a_checkpoint_that_keeps_some_ops_does_not_count_casts(session: lazygt.Session) -> None:
    kept: list[Any] = []

    def policy(context: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept.append(op)
        product = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE

    gradients = []
    for contexts in (None, partial(create_selective_checkpoint_contexts, policy)):
        torch.manual_seed(0)
        model = lazygt.fully_shard(Selective(contexts), mp_policy=MixedPrecisionPolicy(HALF, FULL))
        model(torch.randn(4, 8, requires_grad=True)).float().square().sum().backward()
        gradients.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    assert torch.ops.aten.addmm.default in kept
    assert torch.ops.aten._to_copy.default not in kept
    assert len(gradients[0]) == 2
    assert all(map(torch.equal, *gradients))


def test_inputs_and_outputs_are_cast_as_the_policy_says(session: lazygt.Session) -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, *, by_name: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": x * self.weight, "by_name": by_name, "count": torch.arange(3)}

    def dtypes(**policy: object) -> list[torch.dtype]:
        module = lazygt.fully_shard(Names(), mp_policy=MixedPrecisionPolicy(**policy))  # type: ignore[arg-type]
        out = module(torch.ones(3), by_name=torch.ones(3))
        return [out[name].dtype for name in ("x", "by_name", "count")]

    assert dtypes(param_dtype=HALF) == [HALF, HALF, torch.int64]
    assert dtypes(param_dtype=HALF, cast_forward_inputs=False) == [FULL, FULL, torch.int64]
    assert dtypes(param_dtype=HALF, output_dtype=FULL) == [FULL, FULL, torch.int64]
    assert dtypes(output_dtype=torch.float64) == [torch.float64, torch.float64, torch.int64]


def test_the_first_policy_of_a_parameter_counts(session: lazygt.Session) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lazygt.fully_shard(model[0], mp_policy=MixedPrecisionPolicy(torch.float64))
    lazygt.fully_shard(model, mp_policy=MixedPrecisionPolicy(HALF))
    seen: list[torch.dtype] = []
    for layer in model:
        layer.register_forward_hook(lambda m, args, y: seen.append(y.dtype))
    assert model(torch.randn(2, 4)).dtype == HALF
    assert seen == [torch.float64, HALF]
