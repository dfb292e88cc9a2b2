"""What a step keeps at its peak, and when what it keeps dies: counted in the plans of a rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lazygt
from lazygt.graph.liveness import peak_bytes
from lazygt.graph.mesh import FSDPUnit, Sharding
from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT
from lazygt.graph.text import parse_graph
from lazygt.passes.sharding.marks import PLACE
from lazygt.passes.sharding.programs import reshard_after_forward
from lazygt.runtime.plan import Plan

pytestmark = pytest.mark.timeout(120)

DATA = {"data": 2}
S0 = lazygt.Shard(0)
ROWS, WIDTH, LAYERS = 64, 1024, 8
#: Bytes of a layer's weight; all of them are more than travels in one collective.
WEIGHT = WIDTH * WIDTH * 4
#: All gradients of them are less than that.
NARROW = 128

Lay = Callable[[nn.Module], nn.Module]


def layers(width: int) -> nn.Sequential:
    pairs = (m for _ in range(LAYERS) for m in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*pairs)


def microbatched(
    model: nn.Module, x: torch.Tensor, opt: torch.optim.Optimizer, count: int, clip: bool
) -> None:
    """One step on so many microbatches."""
    opt.zero_grad()
    for part in x.chunk(count):
        part = lazygt.distribute(part.clone(), {"data": S0})
        ((model(part) - part).square().mean() / count).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def planned(lay: Lay, count: int, width: int = WIDTH, clip: bool = False) -> Plan:
    """The plan of a steady step."""
    with lazygt.session(mesh=DATA, launcher="dry", compile="off") as s:
        model = lay(layers(width))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(ROWS * count, width)
        s.flush()
        for _ in range(2):
            microbatched(model, x, opt, count, clip)
            s.flush()
        assert s.last_plan is not None
        return max(s.plans(), key=lambda plan: len(plan.graph.nodes))


def peak(plan: Plan) -> int:
    return peak_bytes(plan.steps.graph, plan.steps.frees)


def scattered(graph: Graph) -> list[str]:
    """``launch`` and ``wait`` of the reduce-scatters of large values, in order."""
    large: set[int] = set()
    events = []
    for node, results in graph.numbered():
        if node.op in (LAUNCH, LAUNCH_) and node.args[0] == "reduce_scatter":
            if sum(graph.values[value.index].nbytes for value in node.args[1]) >= WEIGHT:
                large.add(results[0])
                events.append("launch")
        elif node.op == WAIT and node.args[0].index in large:
            events.append("wait")
    return events


@pytest.mark.parametrize("count", [1, 4])
def test_a_sharded_model_needs_less_than_a_whole_one(count: int) -> None:
    whole, sharded = (
        peak(planned(lay, count)) for lay in (lazygt.data_parallel, lazygt.fully_shard)
    )
    assert whole > 2 * LAYERS * WEIGHT, "weights and gradients"
    # blocks of both, the two weights that are under way, a gradient, and one that is reduced
    activations = (LAYERS + 4) * ROWS * WIDTH * 4
    assert sharded < LAYERS * WEIGHT + 4 * WEIGHT + activations
    assert sharded < 0.75 * whole


@pytest.mark.parametrize("count", [1, 4])
def test_a_gradient_that_is_reduced_is_gone_before_the_next_is_sent(count: int) -> None:
    events = scattered(planned(lazygt.fully_shard, count).steps.graph)
    assert events == ["launch", "wait"] * (count * LAYERS)


def test_later_microbatches_are_reduced_in_memory_of_earlier_ones() -> None:
    graph = planned(lazygt.fully_shard, 3).steps.graph
    ops = [
        node.op
        for node in graph.nodes
        if node.op in (LAUNCH, LAUNCH_) and node.args[0] == "reduce_scatter"
    ]
    # the first microbatch's blocks are what others are added to; those of the last one that are
    # still sent when nothing else is, and the biases of all, stay as they came
    assert ops == [LAUNCH] * LAYERS + [LAUNCH_] * LAYERS + [LAUNCH_] * (LAYERS - 1) + [LAUNCH] * 2


class Pair(nn.Module):
    """A block of two weights that travel together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(256, 256, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return x + y


def pairs(_: nn.Module) -> nn.Module:
    return lazygt.fully_shard(nn.Sequential(*(Pair() for _ in range(LAYERS))))


#: Bytes of the two weights of a block.
PAIR = 2 * 256 * 256 * 4


@pytest.mark.parametrize("count", [1, 3])
def test_blocks_of_small_weights_need_two_gathered_and_one_gradient(count: int) -> None:
    plan = planned(pairs, count, 256)
    blocks = LAYERS * PAIR // 2
    activations = (3 * LAYERS + 4) * ROWS * 256 * 4
    # gradients as they were reduced, two gathered blocks or one and what it is copied from, the
    # gradients of a block and their pack
    assert peak(plan) < 2 * blocks + 2 * PAIR + 2 * PAIR + activations


def test_weights_are_copied_out_of_their_pack_before_the_next_are_gathered() -> None:
    under_way: set[int] = set()
    together = []
    for node, results in planned(pairs, 2, 256).steps.graph.numbered():
        if node.op == LAUNCH and node.args[0] == "all_gather":
            under_way.add(results[0])
        elif node.op == WAIT and node.args[0].index in under_way:
            together += [len(under_way)] * (len(node.fresh) > 1)
            under_way.remove(node.args[0].index)
    assert together
    assert set(together) == {1}


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_of_each_block_travel_by_themselves_and_end_with_their_backward(
    count: int,
) -> None:
    plan = planned(pairs, count, 256)
    sent = [one.nbytes for one in plan.collectives if one.kind == "reduce_scatter"]
    assert sent == [PAIR] * (LAYERS * count)


def test_without_a_limit_gradients_are_waited_for_when_they_are_used() -> None:
    def unlimited(model: nn.Module) -> nn.Module:
        return lazygt.fully_shard(model, limit_all_gathers=False)

    events = scattered(planned(unlimited, 1).steps.graph)
    assert events == ["launch"] * LAYERS + ["wait"] * LAYERS


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 2 * 3), (False, 1)])
def test_weights_are_gathered_for_every_pass_of_every_microbatch(
    reshard: bool, gathers: int
) -> None:
    def lay(model: nn.Module) -> nn.Module:
        return lazygt.fully_shard(model, reshard_after_forward=reshard)

    plan = planned(lay, 3)
    sent = sum(one.nbytes for one in plan.collectives if one.kind == "all_gather")
    # the first layer's weight is not read by a backward, nor are biases
    backward = (gathers - 3) * (LAYERS - 1) if reshard else 0
    assert (
        sent
        == ((3 if reshard else 1) * LAYERS + backward) * WEIGHT
        + (3 if reshard else 1) * LAYERS * WIDTH * 4
    )
    assert (peak(plan) > 1.5 * LAYERS * WEIGHT) is not reshard


@pytest.mark.parametrize("clip", [False, True])
def test_few_gradients_are_added_up_and_reduced_once(clip: bool) -> None:
    plan = planned(lazygt.fully_shard, 4, NARROW, clip)
    sent = dict.fromkeys(("all_reduce", "reduce_scatter"), 0)
    for one in plan.collectives:
        if one.kind in sent:
            sent[one.kind] += one.nbytes
    assert sent["reduce_scatter"] == LAYERS * (NARROW * NARROW + NARROW) * 4
    assert sent["all_reduce"] == (2 * LAYERS * 4 if clip else 0)


def test_microbatches_of_one_device_keep_the_activations_of_one() -> None:
    def step(count: int) -> Plan:
        with lazygt.session(workers=1, launcher="dry", compile="off") as s:
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(count * 1024, 64)
            s.flush()
            for _ in range(2):
                opt.zero_grad()
                for part in x.chunk(count):
                    (model(part).square().mean() / count).backward()
                opt.step()
                s.flush()
            assert s.last_plan is not None
            return s.last_plan

    inputs = 3 * 1024 * 64 * 4
    assert peak(step(4)) < peak(step(1)) + inputs + 3 * (64 << 10)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(500, 64), nn.Linear(64, 500)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(words))
        return logits


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "embedding": (Words, lambda count: torch.randint(500, (count, 16))),
    "conv": (pictures, lambda count: torch.randn(count, 4, 8, 8)),
    "linear": (lambda: layers(64), lambda count: torch.randn(count, 64)),
}


def clipped_steps(name: str, way: str, count: int, device: str = "lazygt") -> list[torch.Tensor]:
    """Train with clipped gradients; the norms, and the weights at the end."""
    make, data = MODELS[name]
    torch.manual_seed(3)
    with torch.device(device):
        model, batch = make(), data(32)
    if way == "fsdp":
        lazygt.fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if way == "zero":
        lazygt.shard_optimizer_state(opt)
    norms = []
    for _ in range(3):
        opt.zero_grad()
        for part in batch.chunk(count):
            if way:
                part = lazygt.distribute(part.clone(), {"data": S0})
            (model(part).square().mean() / count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        opt.step()
    return [t.detach().cpu() for t in (*norms, *model.state_dict().values())]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["fsdp", "zero"])
@pytest.mark.parametrize("name", MODELS)
def test_a_clipped_gradient_is_reduced_to_blocks_all_the_same(
    name: str, way: str, count: int
) -> None:
    with lazygt.session(mesh=DATA, launcher="dry", compile="off") as s:
        clipped_steps(name, way, count)
        parameters = len(list(MODELS[name][0]().parameters()))
        # an optimizer's state is in blocks from the second step on
        step = [plan for plan in s.plans() if len(plan.graph.nodes) > parameters][-1]
        reduced = [one for one in step.collectives if one.kind == "all_reduce"]
    assert sum(one.nbytes for one in reduced) <= 8 * parameters, "a number a parameter"
    assert any(one.kind == "reduce_scatter" for one in step.collectives)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("embedding", "fsdp"), ("conv", "zero")])
def test_clipped_microbatches_train_as_on_one_device(name: str, way: str) -> None:
    with lazygt.session(mesh=DATA, workers=lazygt.Workers(threads=1)):
        on_workers = clipped_steps(name, way, 2)
    with lazygt.session(workers=lazygt.Workers(1, threads=1)):
        alone = clipped_steps(name, "", 2)
    for a, b in zip(on_workers, alone, strict=True):
        torch.testing.assert_close(a, b)


def test_a_copy_that_outlives_an_update_is_that_of_before_it() -> None:
    graph = parse_graph("""graph {
  %0: f32[8, 8] = input
  %1: f32[8, 8] = aten.clone.default(%0)
  %2: f16[8, 8] = aten._to_copy.default(%0, dtype=torch.float16)
  %3: f32[8, 8] = aten.mm.default(%2, %2)
  %4: f32[8, 8] = aten.mm.default(%1, %1)
  %5: f32[8, 8] = aten.sub_.Tensor(%0, %4) writes %0
  %6: f32[8, 8] = aten.sub.Tensor(%5, %1)
  %7: f32[8, 8] = aten.sub.Tensor(%5, %2)
  return %3, %5, %6, %7
}""")
    home = Sharding((S0,), True, FSDPUnit("layer", "data", None))
    again = reshard_after_forward(graph, {0: home, 5: home}, {3})
    copies = [node.op for node in again.nodes if node.op == PLACE]
    assert len(copies) == 1, "the backward's"
    assert [node.op for node in again.nodes[-2:]] == ["aten.sub.Tensor"] * 2
    assert [node.refs()[1] for node in again.nodes[-2:]] == [1, 2]


@pytest.mark.parametrize("mesh", [{"data": 8}, {"replica": 2, "data": 4}])
def test_memory_that_is_written_in_blocks_is_had_in_blocks(mesh: dict[str, int]) -> None:
    """The gradient of a loss begins as empty memory, which takes no time whole or in blocks."""
    rows, words = 512, 512
    cut = dict.fromkeys(mesh, lazygt.Shard(0))
    with lazygt.session(
        mesh=mesh, launcher="dry", tracing=lazygt.Tracing(flush_on_backward=False)
    ) as s:
        weight = torch.randn(16, words, requires_grad=True)
        x, y = torch.randn(rows, 16), torch.randint(words, (rows,))
        s.flush()
        x, y = lazygt.distribute(x, cut), lazygt.distribute(y, cut)
        torch.nn.functional.cross_entropy(x @ weight, y).backward()
        s.flush()
        graph = s.last_plan.graph
    sizes = [meta.numel for meta in graph.values[len(graph.inputs) :] if meta is not None]
    assert max(sizes) == rows // 8 * words
