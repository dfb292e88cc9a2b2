"""Samples in the second dim, which is then viewed as one with the first: blocks are interleaved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard as TorchShard

import lazygt
from lazygt.graph.collectives import communications
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.placement import Replicate, Shard, StridedShard
from lazygt.graph.text import parse_graph
from lazygt.passes.sharding.axis import AxisStep, shard
from lazygt.passes.sharding.reasons import reasons
from tests.sharding.merged import SEED, run_merged, worker_graphs
from tests.sharding.models import Program
from tests.sharding.world import run_whole

pytestmark = pytest.mark.timeout(120)

LENGTH, DIM, CLASSES = 5, 8, 7


class Tagger(nn.Module):
    """Classes of all places at once, as a user writes it: everything in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x.reshape(-1, DIM))
        rows = rows + self.down(F.gelu(self.up(rows))) * torch.ones_like(rows).softmax(1)
        return rows.unflatten(0, x.shape[:2])


class Module(NamedTuple):
    """A module, the dim of its samples, and how it is called."""

    make: Callable[[], nn.Module]
    samples: int
    call: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x)


def _layer(kind: type[nn.Module], batch_first: bool, dropout: float = 0.0) -> nn.Module:
    return kind(DIM, 2, 16, dropout=dropout, batch_first=batch_first)


def _first(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = module(x)[0]
    return made


def _encoder(batch_first: bool) -> nn.Module:
    layer = _layer(nn.TransformerEncoderLayer, batch_first, dropout=0.1)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # type: ignore[arg-type]


MODULES = {
    "encoder": Module(lambda: _encoder(True), 0),
    "encoder, length first": Module(lambda: _encoder(False), 1),
    "decoder": Module(lambda: _layer(nn.TransformerDecoderLayer, True), 0,
                      lambda module, x: module(x, x.cos())),
    "decoder, length first": Module(lambda: _layer(nn.TransformerDecoderLayer, False), 1,
                                    lambda module, x: module(x, x.cos())),
    "attention": Module(lambda: nn.MultiheadAttention(DIM, 2, batch_first=True), 0,
                        lambda module, x: module(x, x, x, need_weights=False)[0]),
    "attention, length first": Module(lambda: nn.MultiheadAttention(DIM, 2), 1,
                                      lambda module, x: module(x, x, x)[0]),
    "gru": Module(lambda: nn.GRU(DIM, DIM, batch_first=True), 0, _first),
    "gru, length first": Module(lambda: nn.GRU(DIM, DIM), 1, _first),
    "lstm, projected": Module(lambda: nn.LSTM(DIM, 12, proj_size=DIM), 1, _first),
    "tagger": Module(Tagger, 1),
}  # fmt: skip


class Net(nn.Module):
    """A module and a head, with the loss of every place."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.kind, self.body, self.head = module, module.make(), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(self.kind.call(self.body, x))
        return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), reduction="sum")


def batch(module: Module, samples: int) -> tuple[Tensor, Tensor]:
    shape = [LENGTH, LENGTH]
    shape[module.samples] = samples
    return torch.randn(*shape, DIM), torch.randint(CLASSES, shape)


@cache
def recorded(name: str, samples: int) -> Program:
    """A step of SGD as it is recorded, and what it starts from."""
    module = MODULES[name]
    torch.manual_seed(0)
    x, target = batch(module, samples)
    with lazygt.session(
        launcher="inline",
        planning=lazygt.Planning(keep_stages=True),
        tracing=lazygt.Tracing(flush_on_backward=False),
    ) as s:
        net = Net(module)
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        placed = x.to("lazygt"), target.to("lazygt")
        s.flush()
        net(*placed).backward()
        opt.step()
        trace, store = s.recorder.trace, s._link._worker.store  # type: ignore[attr-defined]
        inputs = [store.get(remote.id).clone() for remote in trace.entered]
        params = list(trace.params)
        s.flush()
        assert s.last_plan is not None
        return Program(dict(s.stages(s.last_plan))["recorded"], inputs, params)


def in_samples(name: str, program: Program) -> list[Sharding]:
    """The batch in blocks of samples, all else whole."""
    label = Shard(MODULES[name].samples)
    is_batch = [t.dim() == 3 or t.dtype == torch.int64 for t in program.inputs]
    assert sum(is_batch) == 2
    return [Sharding((label if each else Replicate(),)) for each in is_batch]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("samples", [8, 3])
@pytest.mark.parametrize("name", MODULES)
def test_a_step_on_blocks_of_samples_is_the_step(name: str, samples: int, ranks: int) -> None:
    program = recorded(name, samples)
    graph, inputs, params = program
    torch.manual_seed(SEED)
    expected = run_whole(*program)
    made = run_merged(graph, in_samples(name, program), inputs, params, f"data={ranks}", None)
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("samples", [8, 3])
@pytest.mark.parametrize("name", MODULES)
def test_only_sums_are_exchanged(name: str, samples: int, ranks: int) -> None:
    """The gradients and the loss."""
    program = recorded(name, samples)
    graphs = worker_graphs(program.graph, in_samples(name, program), f"data={ranks}", None)
    weights = sum(p.numel() for p in Net(MODULES[name]).parameters())
    for graph in graphs:
        met = communications(graph)
        assert {(each.kind, each.reduce_op) for each in met} == {("all_reduce", "sum")}
        assert sum(each.nbytes for each in met) == 4 * (weights + 1)


@pytest.mark.parametrize("name", ["encoder, length first", "attention", "tagger"])
def test_virtual_ranks_give_the_same_bits(name: str) -> None:
    program = recorded(name, 6)
    graph, inputs, params = program
    stored = in_samples(name, program)
    torch.manual_seed(SEED)
    expected = run_whole(*program)
    first, *others = [
        run_merged(graph, stored, inputs, params, f"data={workers}", 4) for workers in (1, 2, 4)
    ]
    for got, want in zip(first, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for made in others:
        assert all(map(torch.equal, made, first))


def test_two_axes_may_cut_the_samples() -> None:
    name = "encoder, length first"
    program = recorded(name, 8)
    graph, inputs, params = program
    stored = [each._replace(placements=each.placements * 2) for each in in_samples(name, program)]
    torch.manual_seed(SEED)
    expected = run_whole(*program)
    made = run_merged(graph, stored, inputs, params, "replica=2,data=2", None)
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    (local, *_) = worker_graphs(graph, stored, "replica=2,data=2", None)
    assert {each.kind for each in communications(local)} == {"all_reduce"}


ROWS = """graph {
  %0: f32[5, 8, 4] = input
  %1: f32[40, 4] = aten.view.default(%0, [40, 4])
  %2: f32[40, 4] = aten.cumsum.default(%1, 0)
  return %1, %2
}"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_interleaved_blocks_are_merged_for_neighbours_and_outputs(ranks: int) -> None:
    graph = parse_graph(ROWS)
    torch.manual_seed(0)
    x = torch.randn(5, 8, 4)
    stored, mesh = [Sharding((Shard(1),))], f"data={ranks}"
    made = run_merged(graph, stored, [x], [], mesh, None)
    for got, want in zip(made, run_whole(graph, [x], []), strict=True):
        torch.testing.assert_close(got, want)
    sharding = shard(graph, Mesh.parse(mesh), stored)
    assert not any(isinstance(each.placements[0], StridedShard) for each in sharding.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_on_workers_is_the_encoder(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batches = [torch.randn(6, 6, DIM) for _ in range(3)]
    expected = trained(copy.deepcopy(model), batches)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        dim = 0 if batch_first else 1
        placed = [lazygt.distribute(x.to("lazygt"), [TorchShard(dim)]) for x in batches]
        made = trained(model.to("lazygt"), placed)
        assert s.last_plan is not None
        assert {each.kind for each in s.last_plan.collectives} == {"all_reduce"}
        for got, want in zip(made, expected, strict=True):
            torch.testing.assert_close(got.detach().cpu(), want, rtol=1e-4, atol=1e-5)


def trained(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The weights after a step on each batch."""
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in batches:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return list(model.parameters())


PRODUCT = """graph {
  %0: f32[5, 8, 4] = input
  %1: f32[4, 4] = input
  %2: f32[40, 4] = aten.view.default(%0, [40, 4])
  %3: f32[40, 4] = aten.mm.default(%2, %1)
  %4: f32[40, 4] = aten.cumsum.default(%3, 0)
  return %4
}"""


def test_merge_of_interleaved_blocks_is_explained() -> None:
    stored = [Sharding((Shard(1),)), Sharding((Replicate(),))]
    decided: list[AxisStep] = []
    shard(parse_graph(PRODUCT), Mesh.parse("data=2"), stored, decided=decided)
    (reason,) = reasons(decided)
    assert (reason.kind, reason.cause) == ("all_to_all", "input f32[5, 8, 4] stored S(1)")
    # the product is moved; it is divided, so there is no program that does not move it
    assert reason.extra is None
