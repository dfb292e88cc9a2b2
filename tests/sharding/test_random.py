"""Random numbers on any number of workers: those of eager torch for the same seed.

Every rank draws whole values, in the order of the program; what uses them takes its block.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import lazygt
from lazygt.graph.fusion import expand_fused
from lazygt.graph.mesh import Sharding
from lazygt.graph.placement import SHARD, Replicate, Shard
from lazygt.graph.text import parse_graph
from lazygt.runtime.plan import Schedule
from tests.sharding.merged import SEED, run_merged, worker_graphs

Tensor = torch.Tensor
#: Stores a value in blocks of rows; on the CPU it is the value.
Place = Callable[[Tensor], Tensor]

R, S0 = Replicate(), Shard(0)
ROWS = 10  # 4 workers have 3, 3, 3 and 1


# -- in one process -----------------------------------------------------------------------------

DRAWN = """graph {
  %0: f32[10, 3] = input
  %1: f32[10, 3] = aten.empty_like.default(%0)
  %2: f32[10, 3] = aten.bernoulli_.float(%1, 0.5) writes %1
  %3: f32[10, 3] = aten.mul.Tensor(%0, %2)
  %4: f32[10, 3] = aten.empty.memory_format([10, 3], dtype=torch.float32, device=device)
  %5: f32[10, 3] = aten.normal_.default(%4) writes %4
  %6: f32[10, 3] = aten.add.Tensor(%3, %5)
  %7: i64[10] = aten.randperm.default(10, device=device)
  %8: f32[10, 3] = aten.abs.default(%0)
  %9: i64[10, 2] = aten.multinomial.default(%8, 2)
  return %6, %7, %9
}"""


def drawn(x: Tensor) -> list[Tensor]:
    """What the graph is in eager torch."""
    torch.manual_seed(SEED)
    mask = torch.empty_like(x).bernoulli_(0.5)
    noise = torch.empty(10, 3).normal_()
    return [x * mask + noise, torch.randperm(10), torch.multinomial(x.abs(), 2)]


@pytest.mark.parametrize("label", [R, S0], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_all_workers_draw_the_numbers_of_eager_torch(
    workers: int, label: Replicate | Shard
) -> None:
    x = torch.linspace(-1, 2, 30).reshape(10, 3)
    graph = parse_graph(DRAWN)
    made = run_merged(graph, [Sharding((label,))], [x], [], f"data={workers}", None)
    assert all(map(torch.equal, made, drawn(x)))


def test_each_rank_cuts_its_block_of_draw_and_frees_rest() -> None:
    local = worker_graphs(parse_graph(DRAWN), [Sharding((S0,))], "data=2", None)[0]
    schedule = Schedule.of(expand_fused(local))
    nodes = schedule.graph.nodes
    drawings = {
        results[0]
        for node, results in schedule.graph.numbered()
        if node.op in ("aten.bernoulli_.float", "aten.normal_.default")
    }
    cuts = [n for n, node in enumerate(nodes) if node.op == SHARD and node.refs()[0] in drawings]
    assert len(cuts) == 2
    for cut in cuts:
        (block,) = nodes[cut].results
        assert block is not None
        assert block.shape == (5, 3)
        assert nodes[cut].refs()[0] in schedule.frees[cut]
    (product,) = [node for node in nodes if node.op.startswith("aten.mul.")]
    assert product.results[0].shape == (5, 3)  # type: ignore[union-attr]


# -- real workers -------------------------------------------------------------------------------


def initial(place: Place) -> list[Tensor]:
    """The first weights of layers, and of every common initialisation."""
    layers: list[nn.Module] = [
        nn.Linear(6, ROWS), nn.Embedding(ROWS, 4), nn.Conv2d(2, ROWS, 3), nn.LSTM(3, 5)
    ]  # fmt: skip
    weights = [place(p.detach()) for layer in layers for p in layer.parameters()]
    for fill in (
        nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_, nn.init.xavier_uniform_,
        nn.init.kaiming_normal_, nn.init.orthogonal_,
    ):  # fmt: skip
        weights.append(place(fill(torch.empty(ROWS, 4))))
    return weights


def dropped(place: Place) -> list[Tensor]:
    """Dropout of activations in blocks, alone, in a module and of whole channels."""
    x = place(torch.arange(1.0, 4 * ROWS + 1).reshape(ROWS, 4))
    hidden = F.dropout(x, 0.5) + F.dropout(x * 2, 0.1)
    images = place(torch.ones(ROWS, 4, 2, 2))
    return [hidden, nn.Dropout(0.3)(hidden.relu()), F.dropout2d(images, 0.5), F.dropout(x.t(), 0.5)]


def sampled(place: Place) -> list[Tensor]:
    """Samples whose probabilities are in blocks."""
    p = place(torch.linspace(0.05, 0.95, 3 * ROWS).reshape(ROWS, 3))
    return [
        torch.bernoulli(p),
        torch.multinomial(p, 5, replacement=True),
        torch.multinomial(p, 2),
        torch.normal(p, 0.5),
        torch.poisson(p * 5),
        p + torch.rand_like(p),
    ]


def made_of_nothing(place: Place) -> list[Tensor]:
    """Factories; some of their results are stored in blocks."""
    return [
        place(torch.rand(ROWS, 3)),
        torch.randn(ROWS),
        place(torch.randint(100, (ROWS,))),
        torch.randperm(ROWS),
        torch.empty(7).exponential_(),
    ]


KINDS = [initial, dropped, sampled, made_of_nothing]


def drawn_on(workers: int, place: Place) -> list[Tensor]:
    with lazygt.session(mesh={"data": workers}, workers=lazygt.Workers(threads=1)):
        torch.manual_seed(7)
        return [made.cpu() for kind in KINDS for made in kind(place)]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("label", [TorchShard(0), TorchReplicate()], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_numbers_are_those_of_eager_torch(
    workers: int, label: TorchShard | TorchReplicate
) -> None:
    made = drawn_on(workers, lambda t: lazygt.distribute(t, [label]))
    torch.manual_seed(7)
    expected = [one for kind in KINDS for one in kind(lambda t: t)]
    for got, want in zip(made, expected, strict=True):
        if want.dtype.is_floating_point and want.shape == (ROWS, 4):
            # xavier, orthogonal and others compute with what was drawn
            torch.testing.assert_close(got, want)
            assert torch.equal(got == 0, want == 0)
        else:
            assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [2, 4])
def test_a_whole_value_is_the_same_on_every_worker(workers: int) -> None:
    with lazygt.session(mesh={"data": workers}, workers=lazygt.Workers(threads=1)) as s:
        torch.manual_seed(7)
        x = torch.randn(33)
        s.flush()
        rows = lazygt.distribute(x.expand(workers, 33) + 0, [TorchShard(0)])
        s.flush()
        assert s.last_plan is not None
        assert s.last_plan.collectives == ()  # so each worker's row is what it has drawn
        assert rows.placements == (TorchShard(0),)
        torch.manual_seed(8)  # and they go on together
        more = lazygt.distribute(torch.rand(workers).cumsum(0), [TorchShard(0)])
        found, later = rows.cpu(), more.cpu()
    torch.manual_seed(7)
    assert torch.equal(found, torch.randn(33).expand(workers, 33))
    torch.manual_seed(8)
    torch.testing.assert_close(later, torch.rand(workers).cumsum(0))
