"""Stages that can't be: refused, by name."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.graph.mesh import Mesh, Sharding, VirtualMesh
from lazygt.graph.placement import Placement, Replicate, Shard, SingleRank
from lazygt.graph.text import parse_graph
from lazygt.passes.sharding.programs import programs
from tests.sharding.staged import mark_for

R = Replicate()


def test_invalid_stage_is_refused() -> None:
    with lazygt.session(launcher="inline") as s:
        layer = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="the mesh workers=1 has no axis 'pipe'"):
            lazygt.stage(layer, 0)
        mark_for(s, Mesh.parse("pipe=2,data=2"))
        with pytest.raises(ValueError, match=r"stage 2: axis 'pipe' of .* has stages 0 to 1"):
            lazygt.stage(layer, 2)
        for index in (-1, 0.5, "0"):
            with pytest.raises(ValueError, match=f"stage {index!r}"):
                lazygt.stage(layer, index)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes modules"):
            lazygt.stage([3], 0)
        with pytest.raises(TypeError, match=r"move it with \.to\('lazygt'\)"):
            lazygt.stage(torch.ones(2, device="cpu"), 0)
        outside = torch.nn.Linear(2, 2, device="cpu")
        with pytest.raises(ValueError, match=r"parameter 'weight' is no lazygt tensor"):
            lazygt.stage(outside, 0)
        model = torch.nn.Sequential(layer, torch.nn.ReLU())
        assert lazygt.stage(model, 0) is model
        with pytest.raises(ValueError, match="Linear is on stage 0 already"):
            lazygt.stage(layer, 1)
        with pytest.raises(ValueError, match=r"Sequential\.1\.0 is on stage 0 already"):
            lazygt.stage(torch.nn.Sequential(torch.nn.ReLU(), model[:1]), 1)
        mark_for(s, Mesh.parse("workers=1"))


ENTERED = """graph {
  %0: f32[4] = input
  %1: f32[4] = lazygt.enter_stage(%0, 0, "pipe")
  %2: f32[4] = lazygt.BETWEEN
  %3: f32[4] = aten.exp.default(%2)
  return %3
}"""


@pytest.mark.parametrize(
    ("between", "labels", "workers", "message"),
    [
        ('enter_stage(%1, 1, "data")', (R, R), None, "stages along one axis .*, not data and pipe"),
        ('enter_stage(%1, 1, "pipe")', (SingleRank(1), R), None, "not data and pipe"),
        ('enter_stage(%1, 1, "pipe")', (R, Shard(0)), None, "a value is cut along axis 'pipe'"),
        ('place(%1, ["R", "S(0)"], False)', (R, R), None, "a value is cut along axis 'pipe'"),
        ('enter_stage(%1, 1, "pipe")', (R, R), {"data": 4}, "invariant=True knows no pipeline"),
    ],
)  # fmt: skip
def test_stages_with_incompatible_placements_are_refused(
    between: str, labels: tuple[Placement, ...], workers: dict[str, int] | None, message: str
) -> None:
    mesh = Mesh.parse("data=2,pipe=2")
    virtual_mesh = None if workers is None else VirtualMesh.of(mesh, workers)
    graph = parse_graph(ENTERED.replace("BETWEEN", between))
    with pytest.raises(ValueError, match=message):
        programs(graph, mesh, [Sharding(labels)], workers=virtual_mesh)


def test_text_of_single_rank_placement() -> None:
    assert str(SingleRank(1)) == "H(1)"
