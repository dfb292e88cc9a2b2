"""Which collectives travel together, and that nothing else changes.

x ── sin ── AR ── u      The two sums do not need each other: one bucket, unless u comes
x ── cos ── AR ── v      before cos, is not small, and would have to wait for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from lazygt.graph.collectives import communications
from lazygt.graph.fusion import expand_fused
from lazygt.graph.mesh import FSDPUnit, Mesh, Sharding
from lazygt.graph.node import Graph, verify
from lazygt.graph.placement import WAIT, Placement, Replicate, Shard
from lazygt.graph.text import parse_graph
from lazygt.passes import overlap
from lazygt.passes.bucket import Caps, analyse_collectives, buckets
from lazygt.passes.lifetime import Unpack
from lazygt.passes.overlap import overlapped
from lazygt.passes.sharding.programs import programs
from tests.sharding.models import recorded
from tests.sharding.world import run_sharded

DATA = Mesh.parse("data=2")
PACKED = Caps(alone=1 << 20)


def together(text: str, caps: Caps = PACKED) -> list[list[int]]:
    """The buckets of a rank's program, in the order of launch."""
    return [bucket.members for bucket in buckets([analyse_collectives(parse_graph(text))], caps)]


def launched(graph: Graph, caps: Caps = PACKED) -> Graph:
    """What both ranks run whose program this is."""
    first, second = overlapped([graph, graph], DATA, caps)
    assert first is second
    return first


def sums(*between: str) -> str:
    """Two sums of products; ``between`` stands after the first."""
    return "\n".join([
        "graph {",
        "  %0: f32[4] = input",
        "  %1: f32[4] = aten.sin.default(%0)",
        "  %2: f32[4] = lazygt.all_reduce(%1, 'sum', 'data')",
        *between,
        "  return %2, %4",
        "}",
    ])  # fmt: skip


def test_sums_that_do_not_need_each_other_travel_together() -> None:
    text = sums("  %3: f32[4] = aten.cos.default(%1)",
                "  %4: f32[4] = lazygt.all_reduce(%3, 'sum', 'data')")  # fmt: skip
    assert together(text) == [[0, 1]]
    graph = launched(parse_graph(text))
    assert (
        str(graph)
        == """graph {
  %0: f32[4] = input
  %1: f32[4] = aten.sin.default(%0)
  %2: f32[4] = aten.cos.default(%1)
  %3: f32[32] = lazygt.launch('all_reduce', [%1, %2], [], 'sum', 'data')
  %4: f32[4], %5: f32[4] = lazygt.wait(%3, [], [], 'data')
  return %4, %5
}"""
    )
    (one,) = communications(graph)
    assert (one.kind, one.reduce_op, one.nbytes) == ("all_reduce", "sum", 32)


def test_a_sum_that_needs_another_waits_for_it() -> None:
    text = sums("  %3: f32[4] = aten.cos.default(%2)",
                "  %4: f32[4] = lazygt.all_reduce(%3, 'sum', 'data')")  # fmt: skip
    assert together(text) == [[0], [1]]


#: x ── sin ── AR ── exp      What exp makes is written after the next sum is ready.
#: x ── cos ── AR
USED = """graph {
  %0: f32[4] = input
  %1: f32[4] = aten.sin.default(%0)
  %2: f32[4] = lazygt.all_reduce(%1, 'sum', 'data')
  %3: f32[4] = aten.exp.default(%2)
  %4: f32[4] = aten.cos.default(%0)
  %5: f32[4] = lazygt.all_reduce(%4, 'sum', 'data')
  return %3, %5
}"""


def test_a_bucket_is_closed_where_somebody_would_have_to_wait() -> None:
    used = USED.replace("[4]", "[4096]")
    assert together(used) == [[0], [1]]
    viewed = used.replace("aten.exp.default(%2)", "aten.view.default(%2, [4096])")
    assert together(viewed) == [[0, 1]]


def test_small_ops_wait_for_the_sum_of_another() -> None:
    assert together(USED) == [[0, 1]]
    ops = [node.op.split(".")[1] for node in launched(parse_graph(USED)).nodes]
    assert ops == ["sin", "cos", "launch", "wait", "exp"]
    chain = USED.replace("= aten.exp.default(%2)", "= lazygt.all_reduce(%2, 'max', 'data')")
    assert together(chain) == [[0, 2], [1]], "the sum of what another sum gave is small as well"


@pytest.mark.parametrize(
    "stays",
    ["aten.exp_.default(%2) writes %2", "aten.bernoulli.default(%2)"],
    ids=["written", "random"],
)
def test_op_with_side_effects_is_not_delayed(stays: str) -> None:
    assert together(USED.replace("aten.exp.default(%2)", stays)) == [[0], [1]]


@pytest.mark.parametrize(
    "needed",
    [
        "  %4: f32[4096, 4] = aten.mul.Tensor(%1, %3)",
        "  %4: f32[4] = aten.neg_.default(%0) writes %0",
    ],
    ids=["read", "written"],
)
def test_small_op_is_delayed_no_further_than_its_dependents(needed: str) -> None:
    """Something large reads what it makes, or something writes what it reads."""
    text = f"""graph {{
  %0: f32[4] = input
  %1: f32[4096, 4] = input
  %2: f32[4] = lazygt.all_reduce(%0, 'sum', 'data')
  %3: f32[4] = aten.add.Tensor(%2, %0)
{needed}
  %5: f32[4] = aten.sum.dim_IntList(%1, [0])
  %6: f32[4] = lazygt.all_reduce(%5, 'sum', 'data')
  return %3, %4, %6
}}"""
    assert together(text) == [[0], [1]]


def test_a_sum_of_a_sum_holds_up_no_other() -> None:
    """The second is launched after the first is waited for, where both are needed."""
    text = """graph {
  %0: f32[4] = input
  %1: f32[4096] = input
  %2: f32[4] = lazygt.all_reduce(%0, 'sum', 'data')
  %3: f32[4] = aten.exp.default(%2)
  %4: f32[4] = lazygt.all_reduce(%3, 'max', 'data')
  %5: f32[4096] = aten.sin.default(%1)
  %6: f32[4096] = lazygt.all_reduce(%5, 'sum', 'model')
  %7: f32[4096] = aten.cos.default(%1)
  %8: f32[4096] = aten.mul.Tensor(%7, %6)
  %9: f32[4] = aten.neg_.default(%4) writes %4
  return %8, %9
}"""
    assert together(text) == [[0], [2], [1]]


@pytest.mark.parametrize(
    "other",
    [
        "  %4: f32[4] = lazygt.all_reduce(%3, 'max', 'data')",
        "  %4: f32[4] = lazygt.all_reduce(%3, 'sum', 'model')",
        "  %4: f32[2] = lazygt.reduce_scatter(%3, 0, 'sum', 'data')",
    ],
    ids=["op", "axis", "kind"],
)
def test_different_collectives_are_not_bucketed(other: str) -> None:
    assert together(sums("  %3: f32[4] = aten.cos.default(%1)", other)) == [[0], [1]]


def test_buckets_have_a_cap_and_large_values_travel_alone() -> None:
    text = sums("  %3: f32[4] = aten.cos.default(%1)",
                "  %4: f32[4] = lazygt.all_reduce(%3, 'sum', 'data')")  # fmt: skip
    assert together(text, Caps(bucket=32)) == [[0, 1]]
    assert together(text, Caps(bucket=31)) == [[0], [1]]
    assert together(text, Caps(alone=16)) == [[0], [1]]


def test_crosswise_dependent_sums_are_not_bucketed_in_cycle() -> None:
    """b needs a, d needs c: with b and c together, a and d may not be."""
    text = """graph {
  %0: f32[4] = input
  %1: f32[4] = lazygt.all_reduce(%0, 'sum', 'data')
  %2: f32[4] = aten.view.default(%1, [4])
  %3: f32[4] = lazygt.all_reduce(%2, 'max', 'data')
  %4: f32[4] = lazygt.all_reduce(%0, 'max', 'data')
  %5: f32[4] = aten.view.default(%4, [4])
  %6: f32[4] = lazygt.all_reduce(%5, 'sum', 'data')
  return %3, %6
}"""
    assert together(text) == [[0], [2, 1], [3]]
    verify(launched(parse_graph(text)))


def gathers(count: int) -> Graph:
    """``count`` parameters in blocks, each gathered where it is used."""
    lines = [
        "graph {",
        *(f"  %{n}: f32[2] = input" for n in range(count)),
        f"  %{count}: f32[4] = input",
    ]
    last = count
    for n in range(count):
        made = count + 1 + 2 * n
        lines.append(f"  %{made}: f32[4] = lazygt.all_gather(%{n}, 0, 4, 'data')")
        lines.append(f"  %{made + 1}: f32[4] = aten.mul.Tensor(%{made}, %{last})")
        last = made + 1
    return parse_graph("\n".join([*lines, f"  return %{last}", "}"]))


def test_parameters_are_gathered_by_wrap_unit() -> None:
    a, b = FSDPUnit("a", "data", 1 << 20), FSDPUnit("b", "data", 1 << 20)
    one = analyse_collectives(gathers(4))
    units = {0: a, 1: a, 2: b, 3: b}
    assert [each.members for each in buckets([one], Caps(units=units))] == [[0, 1], [2, 3]]
    small = {number: unit._replace(cap_bytes=16) for number, unit in units.items()}
    assert [each.members for each in buckets([one], Caps(units=small))] == [[0], [1], [2], [3]]


def test_at_most_two_gathers_are_under_way() -> None:
    units = {n: FSDPUnit(str(n), "data", 1 << 20) for n in range(5)}
    graph = launched(gathers(5), Caps(units=units))
    flying, most, order = 0, 0, []
    for node in graph.nodes:
        name = node.op.removeprefix("lazygt.")
        flying += (name == "launch") - (name == "wait")
        most = max(most, flying)
        order.append(name[0] if name in ("launch", "wait") else "c")
    assert most == overlap.MAX_GATHERS == 2
    assert "".join(order) == "llwclwclwclwcwc"  # each is launched before the one before is used


def test_results_that_outlive_the_run_leave_the_buffer() -> None:
    text = sums("  %3: f32[4] = aten.cos.default(%1)",
                "  %4: f32[4] = lazygt.all_reduce(%3, 'sum', 'data')")  # fmt: skip
    used = text.replace("  return %2, %4", "  %5: f32[4] = aten.neg_.default(%4) writes %4\n"
                        "  %6: f32[4] = aten.exp.default(%2)\n  return %5, %6")  # fmt: skip
    graph = launched(parse_graph(used))
    (wait,) = [node for node in Unpack().run(graph).nodes if node.op == WAIT]
    assert wait.args[2] == (1,)


def test_ranks_with_different_programs_on_another_axis_keep_order() -> None:
    """Ranks 0 and 1 meet on both axes, 2 and 3 only their partners 0 and 1."""
    both = parse_graph(
        sums("  %3: f32[4] = lazygt.all_reduce(%1, 'sum', 'model')",
             "  %4: f32[4] = lazygt.all_reduce(%1, 'sum', 'data')")
    )  # fmt: skip
    one = parse_graph(sums("  %3: f32[4] = aten.cos.default(%1)",
                           "  %4: f32[4] = lazygt.all_reduce(%1, 'sum', 'data')"))  # fmt: skip
    made = overlapped([both, both, one, one], Mesh.parse("data=2,model=2"), PACKED)
    axes = [[each.mesh_dim for each in communications(graph)] for graph in made]
    assert axes == [["data", "model", "data"]] * 2 + [["data", "data"]] * 2
    alike = overlapped([both] * 4, Mesh.parse("data=2,model=2"), PACKED)
    assert [each.mesh_dim for each in communications(alike[0])] == ["data", "model"]


def signature(graph: Graph) -> list[tuple[str, str | None, str]]:
    return [(c.kind, c.reduce_op, c.mesh_dim) for c in communications(expand_fused(graph))]


@pytest.mark.parametrize("mesh", ["data=3", "data=8", "data=3,model=2"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_ranks_with_uneven_blocks_launch_the_same(name: str, mesh: str) -> None:
    grid, program = Mesh.parse(mesh), recorded(name)
    stored = cut_at_random(program.graph, grid)
    made = overlap_of(program.graph, grid, stored)
    for axis in grid.names:
        for line in grid.axis_groups(axis):
            met = [[each for each in signature(made[rank]) if each[2] == axis] for rank in line]
            assert all(each == met[0] for each in met)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_buckets_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, program = Mesh.parse("data=3,model=2"), recorded(name)
    stored = cut_at_random(program.graph, grid)
    with_buckets = run_sharded(program.graph, grid, stored, program.inputs, program.params)
    monkeypatch.setattr(overlap, "overlapped", lambda graphs, *_: tuple(graphs))
    monkeypatch.setattr("lazygt.passes.sharding.programs.overlapped", overlap.overlapped)
    without = run_sharded(program.graph, grid, stored, program.inputs, program.params)
    for a, b in zip(with_buckets, without, strict=True):
        assert torch.equal(a, b)


def cut_at_random(graph: Graph, grid: Mesh) -> list[Sharding]:
    draw = random.Random(1)

    def label(rank: int) -> Placement:
        return draw.choice([Replicate(), *map(Shard, range(rank))])

    return [Sharding(tuple(label(len(meta.shape)) for _ in grid.names)) for meta in graph.inputs]


def overlap_of(graph: Graph, grid: Mesh, stored: Sequence[Sharding]) -> tuple[Graph, ...]:
    return programs(graph, grid, list(stored), check=True).graphs
