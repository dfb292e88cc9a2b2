"""Values on a mesh of real workers: placed, moved, reduced and fetched."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import lazygt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

Tensor = torch.Tensor
S0, S1, R = Shard(0), Shard(1), Replicate()

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of a dim": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "mean of a dim": lambda x: x.mean(0),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(),
    "max with indices": lambda x: x.max(0).indices,
    "prod": lambda x: x.prod(),
    "any": lambda x: (x > 1).any(0),
    "all": lambda x: (x > -9).all(),
    "norm": lambda x: x.norm(),
    "logsumexp": lambda x: x.logsumexp(0),
    "argmax": lambda x: x.argmax(0),
    "var": lambda x: x.var(0, correction=0),
    "std": lambda x: x.std(correction=0),
    "softmax": lambda x: x.softmax(0).sum(1),
}


@pytest.mark.parametrize("rows", [7, 4, 1])
def test_reductions_over_blocks_move_nothing_through_the_client(rows: int) -> None:
    whole = torch.randn(rows, 5)
    with lazygt.session(mesh={"data": 3}, workers=lazygt.Workers(threads=1)) as s:
        x = lazygt.distribute(whole.to("lazygt"), [S0])
        assert x.placements == (S0,)
        fetched = 0
        for name, reduction in REDUCTIONS.items():
            result = reduction(x)
            s.synchronize()
            assert s.stats()["bytes_fetched"] == fetched
            made, expected = result.cpu(), reduction(whole)
            torch.testing.assert_close(made, expected, msg=lambda t, n=name: f"{n}: {t}")
            fetched += made.nbytes
            assert s.stats()["bytes_fetched"] == fetched, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (1, 1), (0, 4)])
def test_every_rank_sends_its_block_once(shape: tuple[int, int]) -> None:
    whole = torch.randn(shape)
    with lazygt.session(mesh="data=2,model=2", workers=lazygt.Workers(threads=1)) as s:
        assert (str(s.mesh), len(s.worker_pids)) == ("data=2,model=2", 4)
        for placements in itertools.product((R, S0, S1), (R, S0, S1)):
            before = s.stats()["bytes_fetched"]
            x = lazygt.distribute(whole.to("lazygt"), placements)
            assert x.placements == placements
            assert torch.equal(x.cpu(), whole)
            assert torch.equal((x * 2).t().cpu(), (whole * 2).t())
            assert s.stats()["bytes_fetched"] - before == 2 * whole.nbytes


def test_large_blocks_come_through_shared_memory() -> None:
    whole = torch.randn(1001, 700)
    with lazygt.session(
        mesh={"data": 2}, workers=lazygt.Workers(threads=1, shm_threshold=1 << 16)
    ) as s:
        x = lazygt.distribute(whole.to("lazygt"), [S0])
        for turn in range(3):
            assert torch.equal((x + turn).cpu(), whole + turn)
        assert s.stats()["bytes_received"] < 1 << 16


def test_values_stay_in_blocks_and_move_when_told() -> None:
    whole = torch.randn(5, 6)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        x = lazygt.distribute(whole.to("lazygt"), {"data": S0})
        y = (x * 2).relu()
        assert y.placements == (S0,)
        for placements, kinds in [([S1], ["all_to_all"]), ([R], ["all_gather"]), ([S0], [])]:
            y = lazygt.redistribute(y, placements)
            assert y.placements == tuple(placements)
            assert s.last_plan is not None
            assert [c.kind for c in s.last_plan.collectives] == kinds
        assert torch.equal(y.cpu(), (whole * 2).relu())


def test_gradients_pass_through_a_placement() -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        x = torch.arange(5.0, requires_grad=True)
        (lazygt.distribute(x, [S0]) ** 2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("max_plans", [512, 2])
def test_plans_that_only_some_ranks_share_are_told_apart(max_plans: int) -> None:
    # 5 and 6 rows on 2 ranks: rank 0 has 3 rows of both and runs the same graph
    totals = {rows: torch.zeros(rows) for rows in (5, 6, 4)}
    with lazygt.session(
        mesh={"data": 2},
        workers=lazygt.Workers(threads=1),
        planning=lazygt.Planning(max_plans=max_plans),
    ) as s:
        stored = {n: lazygt.distribute(t.to("lazygt"), [S0]) for n, t in totals.items()}
        s.flush()
        for turn in range(4):
            for rows in (5, 6, 4, 6, 5):
                stored[rows] = stored[rows] * 2 + turn
                totals[rows] = totals[rows] * 2 + turn
                s.flush()
        for rows, total in totals.items():
            assert stored[rows].tolist() == total.tolist()


def test_draws_are_those_of_one_worker() -> None:
    torch.manual_seed(7)
    expected = torch.randn(5, 3)
    torch.manual_seed(7)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        x = lazygt.distribute(torch.randn(5, 3), [S0])
        assert x.placements == (S0,)
        assert torch.equal(x.cpu(), expected)
        dropped = torch.nn.functional.dropout(x, 0.5)
        assert torch.equal(dropped != 0, dropped.cpu().to("lazygt") != 0)


def test_shapes_that_depend_on_values_are_those_of_the_whole() -> None:
    whole = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0])
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        x = lazygt.distribute(whole.to("lazygt"), [S0])
        assert x.nonzero().flatten().tolist() == [1, 3, 4]
        assert x[x > 0].tolist() == [1.0, 2.0, 3.0]


def test_a_write_keeps_the_placement() -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        x = lazygt.distribute(torch.zeros(5, 2), [S0])
        x.add_(1)
        s.flush()
        x[1:3].mul_(3)
        assert x.placements == (S0,)
        assert x.tolist() == [[1.0, 1.0], [3.0, 3.0], [3.0, 3.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("columnwise", [lambda x: x.t() * 2, lambda x: x.t().sort(0).values])
def test_column_major_value_is_viewable_in_later_plan(
    columnwise: Callable[[Tensor], Tensor], placement: Shard
) -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    expected = columnwise(whole)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        value = columnwise(lazygt.distribute(whole.to("lazygt"), [placement]))
        s.flush()
        assert torch.equal(value.t().cpu(), expected.t())
        assert torch.equal(value.t().reshape(-1).cpu(), expected.t().reshape(-1))


def test_on_one_worker_a_placement_is_no_op() -> None:
    with lazygt.session(launcher="inline", mesh={"data": 1}) as s:
        x = lazygt.distribute(torch.ones(3), [S0])
        y = x + 1
        assert y.tolist() == [2.0] * 3
        assert x.tolist() == [1.0] * 3
        assert s.last_plan is not None
        assert s.last_plan.collectives == ()
        x.add_(1)
        assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize("compile", ["off", pytest.param("now", marks=pytest.mark.deep)])
def test_stages_and_compiled_groups_are_each_ranks_own(compile: str) -> None:
    whole = torch.randn(1001, 64)
    with lazygt.session(
        mesh={"data": 2},
        workers=lazygt.Workers(threads=1),
        compile=compile,
        planning=lazygt.Planning(keep_stages=True),
    ) as s:
        x = lazygt.distribute(whole.to("lazygt"), [S0])
        s.flush()
        for _ in range(3):
            y = (x.sin() * 2 + x).tanh()
            s.flush()
        torch.testing.assert_close(y.cpu(), (whole.sin() * 2 + whole).tanh())
        assert s.last_plan is not None
        names = [name for name, _ in s.stages(s.plans()[-1])]
        before = ["recorded", "fold", "cse", "dce", "shard"]
        assert names == [*before, "overlap", "foreach", "lifetime", "fuse", "unpack"]


def test_horizontal_ops_on_same_tensors_run_in_sequence() -> None:
    def run(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        a, b = place(torch.arange(4.0)), torch.ones(4)
        torch._foreach_add_([a, b], [b, a])
        torch._foreach_mul_([a, a], 3.0)
        return [a.cpu(), b.cpu()]

    with torch.device("cpu"):
        expected = run(lambda t: t)
    with (
        lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)),
        pytest.warns(lazygt.GatherWarning, match="_foreach_add_"),
    ):
        assert all(map(torch.equal, run(lambda t: lazygt.distribute(t, [S0])), expected))
