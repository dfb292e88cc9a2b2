"""Pipeline stages on real workers: the numbers are eager torch's, whatever is asked between
two steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import lazygt
from lazygt.graph.placement import SingleRank
from tests.sharding.staged import BATCH, MLP, WIDTH, StagedGPT, batch, put_on_stages, train_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STEPS = 3


#: By model. A key's bias has no gradient but rounding, which Adam would make a whole step of.
EPS = {MLP: 1e-8, StagedGPT: 1e-3}


def train(
    make: Callable[[], Any], mesh: Mapping[str, int] | None, microbatches: int = 4
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final weights, in the session that is open; without a mesh, of eager torch."""
    torch.manual_seed(3)
    model = make()
    if mesh is not None:
        put_on_stages(model.stages(mesh["pipe"]))
    opt = torch.optim.AdamW(model.parameters(), lr=0.05, eps=EPS[type(model)])
    losses = []
    for _ in range(STEPS):
        x, y = batch(model)
        if mesh is not None:
            x, y = x.to("lazygt"), y.to("lazygt")
            if "data" in mesh:
                x, y = (lazygt.distribute(t, {"data": Shard(0)}) for t in (x, y))
        losses.append(train_step(model, opt, x, y, microbatches, clip=True))
    return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "mesh", [{"pipe": 2}, {"pipe": 4}, {"pipe": 2, "data": 2}, {"data": 2, "pipe": 2}], ids=str
)
@pytest.mark.parametrize("make", [MLP, StagedGPT])
def test_training_in_stages_agrees_with_eager(
    make: Callable[[], Any], mesh: Mapping[str, int]
) -> None:
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)):
        losses, weights = train(make, mesh)
    eager_losses, eager_weights = train(make, None)
    assert losses == pytest.approx(eager_losses, rel=1e-4)
    for got, expected in zip(weights, eager_weights, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_dropout_in_stages_matches_eager() -> None:
    def make() -> MLP:
        return MLP(dropout=0.5)

    with lazygt.session(mesh={"pipe": 2}, workers=lazygt.Workers(threads=1)):
        losses, _ = train(make, {"pipe": 2}, 2)
    assert losses == pytest.approx(train(make, None, 2)[0], rel=1e-4)


def test_stages_have_own_weights_and_send_only_boundary_values() -> None:
    with lazygt.session(mesh={"pipe": 2}, workers=lazygt.Workers(threads=1)) as s:
        model = MLP()
        put_on_stages(model.stages(2))
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        x, y = (t.to("lazygt") for t in batch(model))
        for _ in range(2):
            loss = train_step(model, opt, x, y, 4)
        assert s.last_plan is not None
        found = s.last_plan.collectives
        assert [(c.kind, c.nbytes, c.mesh_dim) for c in found] == [
            ("send_recv", BATCH // 4 * WIDTH * 4, "pipe")
        ] * 8
        assert [c.why.split()[0] for c in found] == [
            "sends",
            *["sends", "receives"] * 3,
            "receives",
        ]
        first, last = model.layers[0][0].weight, model.layers[7][0].weight
        assert first.placements == (SingleRank(0),)
        assert opt.state[last]["exp_avg"].placements == (SingleRank(1),)
        fetched = s.stats()["bytes_fetched"]
        assert loss.item() > 0
        assert s.stats()["bytes_fetched"] - fetched == 4
        assert torch.stack([first.sum(), last.sum()]).sum().isfinite().item()
        assert lazygt.redistribute(x, [Replicate()]).sum().isfinite().item()


def test_an_evaluation_and_a_loss_that_is_read_every_microbatch() -> None:
    with lazygt.session(mesh={"pipe": 2}, workers=lazygt.Workers(threads=1)):
        torch.manual_seed(3)
        model = MLP()
        put_on_stages(model.stages(2))
        x = batch(model)[0].to("lazygt")
        with torch.no_grad():
            whole = torch.cat([model(one) for one in x.chunk(2)])
        read = []
        for one in x.chunk(2):
            loss = model(one).square().sum()
            read.append(loss.item())
            loss.backward()
        made = whole.cpu(), [p.grad.cpu() for p in model.parameters()]  # type: ignore[union-attr]
    torch.manual_seed(3)
    model = MLP()
    x = batch(model)[0]
    expected = model(x)
    expected.square().sum().backward()
    torch.testing.assert_close(made[0], expected.detach())
    assert sum(read) == pytest.approx(expected.square().sum().item(), rel=1e-4)
    for got, p in zip(made[1], model.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, rtol=1e-4, atol=1e-5)


def many_things(staged: bool) -> list[float]:
    """What users do with a model besides training it, on two stages or on one device."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    if staged:
        put_on_stages([[model[:2]], [model[2:]]])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, found = torch.randn(8, 6), []

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        opt.zero_grad()
        for one in x.chunk(4):
            loss = forward(one).square().mean()
            loss.backward()
        opt.step()
        found.append(loss.item())

    def again(one: torch.Tensor) -> torch.Tensor:
        return model[2](checkpoint(lambda t: model[1](model[0](t)), one, use_reentrant=False))

    def skipping(one: torch.Tensor) -> torch.Tensor:
        first = model[1](model[0](one))
        return model[2](first) + first

    for forward in (model, again, skipping):
        step(forward)
    model.load_state_dict({name: t.cpu() for name, t in model.state_dict().items()})
    step(model)
    if staged:
        assert [p.placements for p in model.parameters()] == [(SingleRank(0),)] * 2 + [
            (SingleRank(1),)
        ] * 2
    made = model(x)
    found += [t.sum().item() for t in (made[made > 0], made.softmax(1).multinomial(2).float())]
    with torch.no_grad():
        model[2].weight.normal_()
    drawn = torch.rand_like(made) + torch.randn(6)
    found += [t.sum().item() for t in (model[2].weight, drawn, copy.deepcopy(model)(x))]
    return found


def test_other_uses_of_staged_model_match_unstaged() -> None:
    with lazygt.session(mesh={"pipe": 2}, workers=lazygt.Workers(threads=1)):
        made = many_things(staged=True)
    assert made == pytest.approx(many_things(staged=False), rel=1e-4)


def test_a_tensor_on_a_stage() -> None:
    with lazygt.session(mesh={"pipe": 2}, workers=lazygt.Workers(threads=1)) as s:
        x = torch.ones(3, requires_grad=True)
        (lazygt.stage(lazygt.stage(x, 0).exp(), 1) * 2).sum().backward()
        s.flush()
        assert s.last_plan is not None
        assert [c.nbytes for c in s.last_plan.collectives] == [12, 12]
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu(), 2 * torch.ones(3, device="cpu").exp())


def test_an_op_that_fails_on_one_stage_ends_the_others() -> None:
    with lazygt.session(mesh={"pipe": 2}, workers=lazygt.Workers(threads=1)) as s:
        table = torch.nn.Embedding(4, 3)
        head = torch.nn.Linear(3, 2)
        lazygt.stage(table, 0)
        lazygt.stage(head, 1)
        s.synchronize()
        with pytest.raises(lazygt.ExecutionError, match=r"embedding.*out of range"):
            head(table(torch.tensor([99]))).sum().item()
