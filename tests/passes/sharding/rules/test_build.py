"""Builder: ways between placements, and the nodes it writes."""

from __future__ import annotations

import pytest
import torch

from lazygt.errors import GraphError
from lazygt.graph import parse_graph
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Param, Ref
from lazygt.graph.placement import Partial, Placement, StridedShard, side_by_side
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules.strategy import PMAX, PMIN, P, R, S
from tests.passes.sharding.rules.blocks import blocks, joined
from tests.passes.sharding.rules.harness import PARTS
from tests.passes.sharding.rules.lockstep import AXIS, lockstep

LABELS = (
    *(R, S(0), S(1), StridedShard(0, 2), StridedShard(0, 1, 5)),
    *(side_by_side(0, (4, 6)), side_by_side(0, (1, 8, 1)), P, PMAX, PMIN),
)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("want", LABELS, ids=str)
@pytest.mark.parametrize("have", LABELS, ids=str)
def test_conversion_between_placements(have: Placement, want: Placement, parts: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(10, 3, dtype=torch.float64)
    mine = [[piece] for piece in blocks(whole, have, parts)]
    graphs = []
    for rank in range(parts):
        build = Builder([TensorMeta.of(mine[rank][0])], axis=AXIS, parts=parts, index=rank)
        graphs.append(build.graph([build.convert(Ref(0), (10, 3), have, want)]))
    pieces = [values[0] for values in lockstep(graphs, mine, ())]
    torch.testing.assert_close(joined(pieces, want, (10, 3), parts), whole)


def test_conversion_to_partial_product_is_refused() -> None:
    build = Builder([TensorMeta.of(torch.empty(3))], axis=AXIS, parts=2, index=0)
    with pytest.raises(GraphError, match=r"no way from R to P\(prod\)"):
        build.convert(Ref(0), (3,), R, Partial("prod"))


def builder(**kinds: object) -> Builder:
    metas = [TensorMeta.of(torch.empty(4, 2)), TensorMeta.of(torch.empty(2))]
    return Builder(metas, axis=AXIS, parts=2, index=1, **kinds)  # type: ignore[arg-type]


def test_text_of_built_graph() -> None:
    build = builder()
    added = build.op("aten.add_.Tensor", Ref(0), Ref(1), alpha=2)
    total = build.all_reduce(build.op("aten.sum.dim_IntList", added, [0]))
    graph = build.graph([total, build.shard(total, 0)])
    wanted = """graph {
  %0: f32[4, 2] = input
  %1: f32[2] = input
  %2: f32[4, 2] = aten.add_.Tensor(%0, %1, alpha=2) writes %0
  %3: f32[2] = aten.sum.dim_IntList(%2, [0])
  %4: f32[2] = lazygt.all_reduce(%3, 'sum', 'x')
  %5: f32[1] = lazygt.shard(%4, 0, 'x')
  return %4, %5
}"""
    assert str(graph) == wanted
    assert parse_graph(wanted) == graph


def test_arguments_changed_by_name() -> None:
    build = builder()
    node = Node("aten.slice.Tensor", (Ref(0), 0, 1))
    (made,) = build.rerun(node, [Ref(0)], end=2)
    assert build.nodes[-1].args == (Ref(0), 0, 1, 2)
    assert made is not None
    assert build.shape(made) == (1, 2)


def test_a_run_time_number_has_a_kind() -> None:
    build = builder(params=["float"])
    whole = build.op("aten._to_copy.default", Ref(0), dtype=torch.int64)
    assert build.meta(build.op("aten.mul.Tensor", whole, Param(0))).dtype == torch.float32


def test_reshape_copies_only_where_no_view_exists() -> None:
    build = builder()
    build.reshape(Ref(0), (8,))
    assert [node.op for node in build.nodes] == ["aten.view.default"]
    made = build.reshape(build.op("aten.t.default", Ref(0)), (8,))
    assert [node.op for node in build.nodes[2:]] == [
        "aten.empty_strided.default", "aten.copy_.default", "aten._unsafe_view.default",
    ]  # fmt: skip
    assert build.shape(made) == (8,)


def test_an_op_of_lazygts_own_has_no_schema() -> None:
    with pytest.raises(GraphError, match="its rule says how"):
        builder().rerun(Node("lazygt.write_back", (Ref(0), Ref(0), ())), [Ref(0), Ref(0)])


def test_results_that_depend_on_values() -> None:
    with pytest.raises(GraphError, match="depend on values"):
        builder().op("aten.nonzero.default", Ref(0))
