"""Placements of known programs, with the collectives that follow counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lazygt.graph.mesh import Mesh, VirtualMesh
from lazygt.graph.placement import Partial, Placement, Replicate, Shard
from lazygt.machine import Machine, collective_seconds, on_hosts
from lazygt.passes.sharding.choose.solver import Solution, solve
from lazygt.passes.sharding.marks import Annotation
from tests.passes.sharding.placements import CPU, GPU, Annotations, collectives, question_of
from tests.passes.tools import graph_of

R, S, P = Replicate(), Shard, Partial("sum")


def kinds(*args: object, **kwargs: object) -> dict[str, int]:
    graph, annotations = args[0], args[1] if len(args) > 1 else {}
    question = question_of(*args, **kwargs)  # type: ignore[arg-type]
    solution = solve(question.problem)
    assert solution.exact
    outputs = kwargs.get("outputs", ())
    found = collectives(graph, question, solution, annotations, outputs)  # type: ignore[arg-type]
    return dict(Counter(kind for kind, _ in found))


# -- known answers ------------------------------------------------------------------------------

MLP = """
    %0: f32[8192, 1024] = input
    %1: f32[1024, 4096] = input
    %2: f32[4096, 1024] = input
    %3: f32[8192, 4096] = aten.mm.default(%0, %1)
    %4: f32[8192, 4096] = aten.gelu.default(%3)
    %5: f32[8192, 1024] = aten.mm.default(%4, %2)
    %6: f32[8192, 1024] = aten.add.Tensor(%5, %0)
    %7: f32[8192, 1024] = aten.gelu.default(%6)
    return %7
    """
COLUMN_ROW = {1: Annotation(S(1)), 2: Annotation(S(0))}


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("kind", ["given", "fixed"])
def test_megatron_mlp_is_one_all_reduce(machine: Machine, parts: int, kind: str) -> None:
    graph = graph_of(MLP)
    annotations = {v: replace(a, kind=kind) for v, a in COLUMN_ROW.items()}  # type: ignore[arg-type]
    assert kinds(graph, annotations, parts, machine, outputs=[[R]]) == {"all_reduce": 1}
    question = question_of(graph, annotations, parts, machine, outputs=[[R]])
    rows = question.strategies(solve(question.problem))
    assert [str(row) for row in rows[:3]] == [
        "(R, S(1)) -> (S(1))",
        "(S(1)) -> (S(1))",
        "(S(1), S(0)) -> (P(sum))",
    ]


def test_free_to_explore_it_becomes_sequence_parallel() -> None:
    """The same bytes as a reduce-scatter and an all-gather, with the addition and gelu divided."""
    found = kinds(graph_of(MLP), COLUMN_ROW, outputs=[[R]], explore=True)
    assert found == {"reduce_scatter": 1, "all_gather": 1}


ATTENTION = """
    %0: f32[4, 512, 1024] = input
    %1: f32[1024] = input
    %2: f32[1024, 1024] = input
    %3: f32[1024, 1024] = input
    %4: f32[1024, 1024] = input
    %5: f32[1024, 1024] = input
    %6: f32[4, 512, 1024], %7: f32[4, 512, 1], %8: f32[4, 512, 1] = \
aten.native_layer_norm.default(%0, [1024], %1, %1, 1e-05)
    %9: f32[2048, 1024] = aten.view.default(%6, [2048, 1024])
    %10: f32[2048, 1024] = aten.mm.default(%9, %2)
    %11: f32[2048, 1024] = aten.mm.default(%9, %3)
    %12: f32[2048, 1024] = aten.mm.default(%9, %4)
    %13: f32[4, 512, 16, 64] = aten.view.default(%10, [4, 512, 16, 64])
    %14: f32[4, 512, 16, 64] = aten.view.default(%11, [4, 512, 16, 64])
    %15: f32[4, 512, 16, 64] = aten.view.default(%12, [4, 512, 16, 64])
    %16: f32[4, 16, 512, 64]@(524288, 64, 1024, 1) = aten.transpose.int(%13, 1, 2)
    %17: f32[4, 16, 512, 64]@(524288, 64, 1024, 1) = aten.transpose.int(%14, 1, 2)
    %18: f32[4, 16, 512, 64]@(524288, 64, 1024, 1) = aten.transpose.int(%15, 1, 2)
    %19: f32[4, 16, 512, 64]@(524288, 64, 1024, 1), %20: f32[4, 16, 512]@(8192, 1, 16) = \
aten._scaled_dot_product_flash_attention_for_cpu.default(%16, %17, %18, 0.0, True)
    %21: f32[4, 512, 16, 64] = aten.transpose.int(%19, 1, 2)
    %22: f32[2048, 1024] = aten.view.default(%21, [2048, 1024])
    %23: f32[2048, 1024] = aten.mm.default(%22, %5)
    %24: f32[4, 512, 1024] = aten.view.default(%23, [4, 512, 1024])
    %25: f32[4, 512, 1024] = aten.add.Tensor(%0, %24)
    return %25
    """


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_megatron_attention_is_one_all_reduce(machine: Machine) -> None:
    columns = dict.fromkeys((2, 3, 4), Annotation(S(1)))
    annotations = {**columns, 5: Annotation(S(0))}
    found = kinds(graph_of(ATTENTION), annotations, machine=machine, outputs=[[R]])
    assert found == {"all_reduce": 1}


DATA_PARALLEL = """
    %0: f32[64, 256] = input
    %1: f32[256, 512] = input
    %2: f32[512, 256] = input
    %3: f32[64, 512] = aten.mm.default(%0, %1)
    %4: f32[64, 512] = aten.relu.default(%3)
    %5: f32[64, 256] = aten.mm.default(%4, %2)
    %6: f32[512, 64]@(1, 512) = aten.t.default(%4)
    %7: f32[512, 256] = aten.mm.default(%6, %5)
    %8: f32[256, 512]@(1, 256) = aten.t.default(%2)
    %9: f32[64, 512] = aten.mm.default(%5, %8)
    %10: f32[64, 512] = aten.threshold_backward.default(%9, %4, 0)
    %11: f32[256, 64]@(1, 256) = aten.t.default(%0)
    %12: f32[256, 512] = aten.mm.default(%11, %10)
    %13: f32[512, 256] = aten.sub.Tensor(%2, %7)
    %14: f32[256, 512] = aten.sub.Tensor(%1, %12)
    return %13, %14
    """


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_data_parallel_is_one_reduction_a_parameter(machine: Machine, parts: int) -> None:
    found = kinds(graph_of(DATA_PARALLEL), {0: Annotation(S(0))}, parts, machine,
                  outputs=[[R], [R]])  # fmt: skip
    assert found == {"all_reduce": 2}


def test_weights_that_are_stored_in_blocks_are_gathered_and_their_gradients_scattered() -> None:
    """A fully sharded step: gathers for use (kept for the backward), a reduce-scatter each."""
    stored = {1: Annotation(S(0), "stored"), 2: Annotation(S(0), "stored")}
    # the new weights are written in place, as optimizers do
    text = DATA_PARALLEL.replace("aten.sub.Tensor(%2, %7)", "aten.sub_.Tensor(%2, %7) writes %2")
    text = text.replace("aten.sub.Tensor(%1, %12)", "aten.sub_.Tensor(%1, %12) writes %1")
    graph = graph_of(text)
    found = kinds(graph, {0: Annotation(S(0)), **stored}, outputs=[[S(0)], [S(0)]])
    assert found == {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.parametrize("explore", [False, True])
def test_a_small_batch_does_not_replicate_the_work(explore: bool) -> None:
    """To gather a small batch sends less than to reduce gradients, but has all ranks do all."""
    graph, batch = graph_of(DATA_PARALLEL), {0: Annotation(S(0))}
    question = question_of(graph, batch, 4, CPU, [[R], [R]], explore)
    assert all(
        min(entry.shares) == 1 or max(entry.shares) < 1
        for entry in question.entries
        if entry.is_heavy
    )
    rows = question.strategies(solve(question.problem))
    heavy = [row for row, entry in zip(rows, question.entries, strict=True) if entry.is_heavy]
    assert len(heavy) == 5
    assert all(Shard in map(type, (*row.inputs, *row.outputs)) for row in heavy)


def test_an_all_reduce_is_not_delayed_past_a_broadcast() -> None:
    graph = graph_of("""
        %0: f32[4096, 64] = input
        %1: f32[64] = aten.sum.dim_IntList(%0, [0])
        %2: f32[1, 64] = aten.view.default(%1, [1, 64])
        %3: f32[1024, 64]@(0, 1) = aten.expand.default(%2, [1024, 64])
        %4: f32[1024, 64] = aten.clone.default(%3)
        return %4
        """)
    question = question_of(graph, {0: Annotation(S(0))}, 4, CPU, [[R]])
    found = collectives(graph, question, solve(question.problem), {0: Annotation(S(0))}, [[R]])
    assert found == [("all_reduce", 256)]


def test_all_reduce_is_delayed_past_sum_of_partial_sums() -> None:
    graph = graph_of("""
        %0: f32[64, 512] = input
        %1: f32[512, 64] = input
        %2: f32[64, 512] = input
        %3: f32[512, 64] = input
        %4: f32[64, 64] = aten.mm.default(%0, %1)
        %5: f32[64, 64] = aten.mm.default(%2, %3)
        %6: f32[64, 64] = aten.add.Tensor(%4, %5)
        %7: f32[64, 64] = aten.exp.default(%6)
        return %7
        """)
    split = {0: S(1), 1: S(0), 2: S(1), 3: S(0)}
    annotations = {value: Annotation(placement) for value, placement in split.items()}
    assert kinds(graph, annotations, outputs=[[R]]) == {"all_reduce": 1}


def test_a_whole_bias_joins_partial_products_for_nothing() -> None:
    graph = graph_of("""
        %0: f32[64] = input
        %1: f32[64, 512] = input
        %2: f32[512, 64] = input
        %3: f32[64, 64] = aten.addmm.default(%0, %1, %2)
        return %3
        """)
    annotations = {1: Annotation(S(1)), 2: Annotation(S(0))}
    assert kinds(graph, annotations, outputs=[[R]]) == {"all_reduce": 1}


def test_one_gather_serves_several_users() -> None:
    graph = graph_of("""
        %0: f32[64, 64] = input
        %1: f32[64, 64] = aten.cholesky_inverse.default(%0)
        %2: f32[64, 64] = aten.linalg_matrix_exp.default(%0)
        %3: f32[64, 64] = aten.add.Tensor(%1, %2)
        return %3
        """)
    assert kinds(graph, {0: Annotation(S(0))}, outputs=[[R]]) == {"all_gather": 1}


# -- what annotations mean ----------------------------------------------------------------------


def test_a_pin_is_kept_by_every_user_that_can() -> None:
    graph = graph_of(MLP)
    fixed = {0: Annotation(R, "fixed"), 1: Annotation(S(1), "fixed")}
    question = question_of(graph, fixed, explore=True)
    for (node, _), entry in zip(graph.numbered(), question.entries, strict=True):
        for place, value in enumerate(node.refs()):
            if value in fixed:
                placement = fixed[value].placement
                parts = {P} if placement == R else set()  # what is whole counts as a sum, too
                assert (
                    {placement}
                    <= {row.inputs[place] for row in entry.strategies}
                    <= {placement} | parts
                )


def test_fixed_result_has_its_placement() -> None:
    graph = graph_of(MLP)
    annotations = {**COLUMN_ROW, 5: Annotation(S(0), "fixed")}
    question = question_of(graph, annotations, outputs=[[R]])
    assert question.placements(solve(question.problem))[5] == (S(0),)
    assert kinds(graph, annotations, outputs=[[R]]) == {"reduce_scatter": 1, "all_gather": 1}


def test_a_free_input_starts_where_it_is_wanted() -> None:
    graph = graph_of("""
        %0: f32[64, 64] = input
        %1: f32[64, 64] = aten.exp.default(%0)
        return %1
        """)
    for placement in (R, S(0), S(1)):
        question = question_of(graph, {0: Annotation(placement, "free")}, outputs=[[placement]])
        solution = solve(question.problem)
        assert question.placements(solution)[0] == (placement,)


def test_without_annotations_nothing_is_sharded_unless_asked() -> None:
    graph = graph_of(MLP)
    question = question_of(graph)
    rows = [row for entry in question.entries for row in entry.strategies]
    assert Shard not in {
        type(placement) for row in rows for placement in (*row.inputs, *row.outputs)
    }
    free = question_of(graph, explore=True)
    assert solve(free.problem).cost < 0.6 * solve(question.problem).cost


def test_factory_result_has_requested_placement() -> None:
    graph = graph_of("""
        %0: f32[64, 64] = input
        %1: f32[64, 64] = aten.zeros.default([64, 64], device=device)
        %2: f32[64, 64] = aten.add.Tensor(%0, %1)
        return %2
        """)
    whole = question_of(graph).entries[1].strategies
    assert [str(row) for row in whole] == ["(R, R) -> (R)"]
    sharded = {0: Annotation(S(0))}
    question = question_of(graph, sharded, outputs=[[S(0)]])
    rows = question.strategies(solve(question.problem))
    assert str(rows[1]) == "(S(0), S(0)) -> (S(0))"
    assert kinds(graph, sharded, outputs=[[S(0)]]) == {}


def test_equal_graphs_get_equal_placements() -> None:
    ours, theirs = (question_of(graph_of(ATTENTION), explore=True) for _ in range(2))
    assert solve(ours.problem) == solve(theirs.problem)


def test_layers_are_solved_once() -> None:
    def layers(count: int) -> Solution:
        rows = [f"%{number}: f32[512, 512] = input" for number in range(count + 1)]
        for weight in range(1, count + 1):
            at, last = len(rows), len(rows) - 1 if weight > 1 else 0
            rows += [
                f"%{at}: f32[512, 512] = aten.mm.default(%{last}, %{weight})",
                f"%{at + 1}: f32[512, 512] = aten.relu.default(%{at})",
                f"%{at + 2}: f32[512, 512] = aten.add.Tensor(%{at + 1}, %{last})",
            ]
        graph = graph_of("\n".join([*rows, f"return %{len(rows) - 1}"]))
        return solve(question_of(graph, explore=True, outputs=[[R]]).problem)

    few, many = layers(20), layers(80)
    assert few.exact
    assert many.exact
    assert many.width == few.width
    assert many.entries < 4.2 * few.entries
    assert many.computed < 1.1 * few.computed


@pytest.mark.parametrize(
    ("annotations", "outputs", "message"),
    [
        ({8: Annotation(R)}, (), "an annotation for %8, but the graph has %0 to %7"),
        ({}, [[R], [R]], "placements for 2 outputs, but the graph has 1"),
    ],
)
def test_annotations_that_do_not_fit_graph_are_refused(
    annotations: Annotations, outputs: Sequence[Sequence[Placement]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        question_of(graph_of(MLP), annotations, outputs=outputs)


def test_collective_between_hosts_has_network_cost() -> None:
    """The same plan of the same program costs as much more as its all-reduce does."""
    mesh = VirtualMesh.of(Mesh.parse("data=2,model=2"), None)
    machine, graph = on_hosts(CPU, mesh, [2, 2]), graph_of(MLP)
    inside, between = (
        solve(question_of(graph, COLUMN_ROW, 2, machine.along(axis), outputs=[[R]]).problem).cost
        for axis in ("model", "data")
    )
    local, network = (
        collective_seconds(machine.along(axis), "all_reduce", 8192 * 1024 * 4, 2)
        for axis in ("model", "data")
    )
    assert between - inside == pytest.approx((network - local) * 1e12)
    assert network > 4 * local
