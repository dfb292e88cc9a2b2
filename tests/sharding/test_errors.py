"""What can't be, and what fails on some rank only: said at once, and never a hang."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

import lazygt
from lazygt.config import Config
from lazygt.graph.mesh import Mesh
from lazygt.parallel.distribute import placements_for

S0, R = Shard(0), Replicate()
MESH = Mesh.parse("data=2,model=2")


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([S0], r"a tensor of f32\[4\]: 1 placements, but the mesh data=2,model=2 has 2 axes"),
        ({"rows": S0}, r"the mesh data=2,model=2 has no axis 'rows'"),
        ({"data": Shard(1)}, r"axis 'data' of the mesh data=2,model=2: .*no dim 1"),
        ({"model": Shard(-2)}, "no dim -2"),
        ([R, Partial()], "stored whole or in blocks, not as Partial"),
        ([R, "S(0)"], "no placement that lazygt knows"),
    ],
)
def test_a_placement_that_cannot_be_names_tensor_and_mesh(placements: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placements_for("a tensor of f32[4]", 1, placements, MESH)  # type: ignore[arg-type]


def test_only_lazygt_tensors_are_placed() -> None:
    with lazygt.session(launcher="inline"):
        with pytest.raises(TypeError, match=r"move it with \.to\('lazygt'\)"):
            lazygt.distribute(torch.ones(3, device="cpu"), [R])
        with pytest.raises(ValueError, match=r"f32\[3\].*2 placements"):
            lazygt.distribute(torch.ones(3), [R, R])
        with pytest.raises(TypeError, match="'data' is neither a list with one placement"):
            lazygt.distribute(torch.ones(3), "data")  # type: ignore[arg-type]
    with pytest.raises(lazygt.NoSession):
        lazygt.distribute(torch.ones(3), [R])


def test_a_pattern_that_fits_nothing_places_nothing() -> None:
    with lazygt.session(launcher="inline"):
        layer = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"no parameter fits 'wieght'.*weight, bias"):
            lazygt.parallelize_module(layer, None, {"weight": [S0], "wieght": [S0]})
        with pytest.raises(ValueError, match=r"parameter 'bias' of f32\[2\].*no dim 1"):
            lazygt.parallelize_module(layer, None, {"bias": [Shard(1)]})
        outside = torch.nn.Linear(2, 2, device="cpu")
        with pytest.raises(ValueError, match="make the module inside the session"):
            lazygt.parallelize_module(outside, None, {"*": [R]})


@pytest.mark.parametrize(
    "other", [ColwiseParallel, S0, "S(0)", None], ids=lambda one: type(one).__name__
)
def test_plan_entry_of_other_type_is_refused(other: object) -> None:
    told = pytest.raises(
        TypeError, match=r"'': .* is neither .* such as lazygt\.ColwiseParallel\(\)"
    )
    with lazygt.session(launcher="inline"), told:
        lazygt.parallelize_module(torch.nn.Linear(4, 4), None, {"": other})


def test_workers_follow_from_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.load(mesh={"data": 2, "model": 3}).workers == 6
    assert Config.load(mesh="data=2", workers=2).workers == 2
    assert Config.load(workers=3).mesh is None
    with pytest.raises(ValueError, match="that mesh is of 4 workers; leave workers= out"):
        Config.load(mesh={"data": 4}, workers=2)
    with pytest.raises(ValueError, match="integers >= 1"):
        Config.load(mesh={"data": 0})
    monkeypatch.setenv("LAZYGT_MESH", "data=2,model=2")
    assert Config.load().mesh == {"data": 2, "model": 2}
    assert Config.load().workers == 4
    monkeypatch.setenv("LAZYGT_MESH", "two by two")
    with pytest.raises(ValueError, match="LAZYGT_MESH='two by two': 'two by two' is not a mesh"):
        Config.load()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad_row", [0, 4])
@pytest.mark.parametrize("runs_before", [0, 3])
def test_an_op_that_fails_on_one_rank_ends_no_rank_in_a_collective(
    bad_row: int, runs_before: int
) -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        table = torch.arange(10.0).reshape(5, 2)
        kept = table + 1
        s.flush()

        def total(rows: list[int]) -> torch.Tensor:
            at = lazygt.distribute(torch.tensor(rows, device="cpu").to("lazygt"), [S0])
            return table.index_select(0, at).sum()

        for _ in range(runs_before):
            assert total([0, 1, 2, 3, 4]).item() == 45.0
        rows = [0, 1, 2, 3, 4]
        rows[bad_row] = 99
        with pytest.raises(lazygt.ExecutionError, match=r"index_select.*out of range") as caught:
            total(rows).item()
        assert caught.value.where.startswith(__file__)
        assert kept.sum().item() == 55.0, "what every rank has is intact"
        assert total([0, 1, 2, 3, 4]).item() == 45.0, "the ranks have a new group"
        assert (total([0, 1]) * 2).item() == 12.0, "also for a plan that is new"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_known_failure_that_keeps_a_rank_from_a_collective_is_named() -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        at = lazygt.distribute(torch.tensor([0, 1, 2, 99], device="cpu").to("lazygt"), [S0])
        bad = torch.arange(10.0).reshape(5, 2).index_select(0, at)
        with pytest.raises(lazygt.ExecutionError, match=r"index_select.*worker 1: IndexError"):
            s.synchronize()
        with pytest.raises(lazygt.ExecutionError, match=r"index_select.*worker 1: IndexError"):
            bad.sum().item()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sharded_table_refuses_index_out_of_range() -> None:
    """Each rank takes the rows of others for zeros, and may not take others for theirs."""
    look_ups = {
        "index": lambda table, at: table[at],
        "embedding": lambda table, at: torch.nn.functional.embedding(at, table),
        "index_select": lambda table, at: table.index_select(0, at),
        "gather": lambda table, at: table.gather(0, at[:, None].expand(-1, 3)),
    }
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        table = lazygt.distribute(torch.arange(24.0).reshape(8, 3), [S0])
        for name, look_up in look_ups.items():
            for row in (8, 99, -9, -99):
                at = torch.tensor([1, row, 6], device="cpu").to("lazygt")
                with pytest.raises((IndexError, RuntimeError), match=rf"{name}.*(out of|index)"):
                    look_up(table, at).sum().item()
            at = torch.tensor([1, 7, 6], device="cpu").to("lazygt")
            assert look_up(table, at).sum().item() == 135.0
        assert table[torch.tensor([-1, -8])].sum().item() == 69.0
