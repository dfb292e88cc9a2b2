"""A program in other sizes: the template gives what the passes would make, or the passes run."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st

import lazygt
from lazygt.errors import GraphError
from lazygt.graph import Graph
from lazygt.graph.node import Node, Ref
from lazygt.graph.sizes import check_sizes
from lazygt.host.gc_pause import gc_paused
from lazygt.passes import PIPELINE, Pass, run_passes
from lazygt.passes.foreach import SMALL
from lazygt.passes.template import Template, outline_key
from lazygt.runtime.plan import Plan, PlanTemplate, Schedule
from tests.passes.sized import SIZED, SIZES, layer, recorded
from tests.passes.tools import difference, graph_of
from tests.property.programs import Step

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


class Templates:
    """Programs in other sizes, planned as in a session: by an earlier template or the passes."""

    def __init__(self, passes: Sequence[Pass] = PIPELINE) -> None:
        self.passes = passes
        self.planned: list[tuple[Any, Template[Plan]]] = []
        self.resized = 0

    def plan(self, graph: Graph) -> Plan:
        steps = [*graph.inputs, *graph.nodes]
        key = graph.params, graph.outputs, graph.lines, outline_key(steps)
        for known, template in self.planned:
            plan = template.resized(steps) if known == key else None
            if plan is not None:
                self.resized += 1
                return plan
        template = Template.of(graph, steps, self.passes, Plan, check=True)
        self.planned.insert(0, (key, template))
        return template.plan


def same_as_passes(templates: Templates, graph: Graph) -> bool:
    """Assert that a graph becomes what the passes make of it: nodes, text, lines and schedule.

    Returns:
        Whether it came out of a template.
    """
    before = templates.resized
    ours = templates.plan(graph)
    made, wanted = ours.graph, run_passes(graph, PIPELINE)
    assert made == wanted, difference(str(wanted), str(made))
    assert (made.lines, made.origins) == (wanted.lines, wanted.origins)
    theirs = Plan.build(wanted)
    if len(set(ours.sizes)) == len(ours.sizes):  # sizes that have become equal are still two there
        assert str(ours) == str(theirs)  # the lines of fused members too
        assert ours.digest == theirs.digest
    assert str(ours.steps) == str(theirs.steps)
    assert ours.steps == theirs.steps
    assert from_its_template(ours) == theirs.steps
    assert ours.origins == ours.steps.graph.origins == theirs.steps.graph.origins
    return templates.resized > before


#: as a worker has them, by name: each was decoded from the first plan of it
DECODED: dict[bytes, PlanTemplate] = {}


def from_its_template(plan: Plan) -> Schedule:
    """The steps of a plan as a worker makes them, in whose sizes ever it was sent first."""
    known = DECODED.setdefault(plan.template.digest, PlanTemplate.decoded(plan.template.encoded))
    assert known.symbolic.graph == plan.template.symbolic.graph
    check_sizes(known.symbolic, plan.sizes)
    made = Plan(form=(known, plan.sizes))
    assert made.digest == plan.digest
    assert made.graph == plan.graph
    return made.steps


def resized(first: Graph, *others: Graph) -> list[bool]:
    """For each of the other graphs, in turn, whether it came out of a template."""
    templates = Templates()
    assert not same_as_passes(templates, first)
    return [same_as_passes(templates, graph) for graph in others]


# -- what is reused ----------------------------------------------------------------------------


def test_another_batch_needs_no_pass() -> None:
    assert resized(layer(48), layer(40), layer(47, 4), layer(48)) == [True, True, True]


def test_fused_body_is_resized() -> None:
    templates = Templates()
    templates.plan(layer(48))
    made = templates.plan(layer(40)).graph
    assert templates.resized == 1
    (fused,) = [node.body for node in made.nodes if node.body is not None]
    assert [meta.shape for meta in fused.values if meta is not None] == [(40, 512), (512,)] + [
        (40, 512)
    ] * 3


def test_nodes_without_a_new_size_are_shared() -> None:
    text = """
        %0: f32[{0}] = input
        %1: f32[8192] = input
        %2: f32[{0}] = aten.cumsum.default(%0, 0)
        %3: f32[8192] = aten.cumsum.default(%1, 0)
        return %2, %3
        """
    templates = Templates()
    first, other = (templates.plan(graph_of(text.format(n))).graph for n in (20, 30))
    assert templates.resized == 1
    assert other.nodes[1] is first.nodes[1]
    assert other.nodes[0] is not first.nodes[0]


def test_an_entry_of_the_size_of_a_constant_stays() -> None:
    """The passes compute 32 + 32: a number of the program that happens to be a size of it."""
    text = """
        %0: i64[{0}] = aten.full.default([{0}], 32, dtype=torch.int64, device=device)
        %1: i64[{0}] = aten.full.default([{0}], 32, dtype=torch.int64, device=device)
        %2: i64[{0}] = aten.add.Tensor(%0, %1)
        return %2
        """
    assert resized(graph_of(text.format(64)), graph_of(text.format(48))) == [True]
    assert resized(graph_of(text.format(32)), graph_of(text.format(48))) == [True]


def test_lists_and_keywords_hold_sizes() -> None:
    text = """
        %0: f32[{0}, 6] = input
        %1: f32[{1}, 6] = input
        %2: f32[{2}, 6] = aten.cat.default([%0, %1])
        %3: f32[{0}, 6] = aten.slice.Tensor(%2, 0, 0, {0})
        %4: f32[{0}] = aten.full.default([{0}], 1.5, dtype=torch.float32, device=device)
        %5: i64[{2}] = aten.arange.start_step(0, {2}, 1, dtype=torch.int64, device=device)
        return %2, %3, %4, %5
        """
    first, other = graph_of(text.format(20, 30, 50)), graph_of(text.format(21, 33, 54))
    assert resized(first, other) == [True]


# -- what is not -------------------------------------------------------------------------------


def test_equal_shapes_are_another_program() -> None:
    """512 rows of 512 columns have the shape of their transpose, 48 picked rows that of all."""
    assert resized(layer(48), layer(512), layer(48, 48)) == [False, False]


def test_equal_sizes_of_different_shapes_are_no_other_program() -> None:
    assert resized(layer(48), layer(256)) == [True]


@pytest.mark.parametrize("batch", [0, 1])
def test_sizes_zero_and_one_need_own_plan(batch: int) -> None:
    text = """
        %0: f32[{0}, 6] = input
        %1: f32[6] = input
        %2: f32[{0}, 6] = aten.add.Tensor(%0, %1)
        %3: f32[{0}, 6] = aten.exp.default(%2)
        return %3
        """
    assert resized(graph_of(text.format(20)), graph_of(text.format(batch))) == [False]


TWINS = """
    %0: f32[{0}] = input
    %1: f32[{0}] = aten.exp.default(%0)
    %2: f32[] = aten.median.default(%1)
    %3: f32[{0}] = aten.exp.default(%0)
    %4: f32[] = aten.median.default(%3)
    return %2, %4
    """


def test_a_twin_too_large_to_keep() -> None:
    """cse keeps 4096 bytes alive for a later twin, and not one more."""
    small, larger, large = (graph_of(TWINS.format(n)) for n in (1000, 1024, 1025))
    assert len(run_passes(larger, PIPELINE).nodes) < len(run_passes(large, PIPELINE).nodes)
    assert resized(small, larger, large) == [True, False]


MANY = """
    %0: f32[{0}] = input
    %1: f32[{0}] = input
    %2: f32[{0}] = input
    %3: f32[{0}] = input
    %4: f32[{0}] = aten.sqrt.default(%0)
    %5: f32[{0}] = aten.sqrt.default(%1)
    %6: f32[{0}] = aten.sqrt.default(%2)
    %7: f32[{0}] = aten.sqrt.default(%3)
    return %4, %5, %6, %7
    """


def test_tensors_too_large_for_one_horizontal_op() -> None:
    most = SMALL // 4
    small, larger, large = (graph_of(MANY.format(n)) for n in (most - 9, most, most + 1))
    assert len(run_passes(larger, PIPELINE).nodes) == 1
    assert resized(small, larger, large) == [True, False]


CHAIN = """
    %0: f32[{0}] = input
    %1: f32[{0}] = aten.exp.default(%0)
    %2: f32[{0}] = aten.tanh.default(%1)
    return %2
    """


def test_fusion_is_decided_again_for_new_sizes() -> None:
    """Both answers are kept, and given again on either side."""
    few, more, many, most, fewer = (
        graph_of(CHAIN.format(n)) for n in (5000, 6000, 9000, 9900, 5500)
    )
    assert len(run_passes(more, PIPELINE).nodes) == 2
    assert len(run_passes(many, PIPELINE).nodes) == 1
    assert resized(few, more, many, most, fewer) == [True, False, True, True]


LARGER = """
    %0: f32[{0}] = input
    %1: f32[{1}] = input
    %2: f32[{0}] = aten.exp.default(%0)
    %3: f32[] = aten.sum.default(%2)
    %4: f32[{1}] = aten.add.Tensor(%1, %3)
    return %4
    """


def test_order_of_tensor_sizes_is_guarded() -> None:
    """A larger op does not join the group that it needs; a smaller one does."""
    down, smaller, up = (
        graph_of(LARGER.format(*sizes))
        for sizes in ((30000, 20000), (31000, 20500), (20000, 30000))
    )
    assert run_passes(down, PIPELINE) != run_passes(up, PIPELINE)
    assert resized(down, smaller, up) == [True, False]


REGROUPED = """
    %0: f32[7, 3, 5]@({0}, 5, 1) = input
    %1: f32[7, 3, 1, 5]@({0}, 5, 5, 1) = aten.view.default(%0, [7, 3, 1, 5])
    %2: f32[7, 1, 3, 5]@({0}, {0}, 5, 1) = aten.view.default(%1, [7, 1, 3, 5])
    return %2
    """


def test_row_major_or_not_counts() -> None:
    """A view of a view is one view of what is row-major."""
    rows, apart, further = (
        graph_of(REGROUPED.format(step).replace("@(15, 5, 1)", "").replace("@(15, 5, 5, 1)", "")
                 .replace("@(15, 15, 5, 1)", ""))
        for step in (15, 20, 22)
    )  # fmt: skip
    assert len(run_passes(rows, PIPELINE).nodes) < len(run_passes(apart, PIPELINE).nodes)
    assert resized(rows, apart, further) == [False, True]


COPIED = """
    %0: f64[20] = input
    %1: f32[20] = aten._to_copy.default(%0, dtype=torch.float32)
    %2: f32[{0}] = aten.slice.Tensor(%1, 0, 0, {0})
    %3: f32[3, {0}]@(0, 1) = aten.expand.default(%2, [3, {0}])
    %4: f32[3, {0}]@(0, 1) = aten.clone.default(%3)
    return %4
    """


def test_order_of_memory_sizes_is_guarded() -> None:
    """A copy stays that lets go of more bytes than it has, be they fewer elements."""
    fewer, more, most = (graph_of(COPIED.format(n)) for n in (10, 15, 16))
    assert len(run_passes(fewer, PIPELINE).nodes) > len(run_passes(more, PIPELINE).nodes)
    assert resized(fewer, more, most) == [False, True]


def test_a_size_that_a_pass_computed_is_never_replaced() -> None:
    """A pass that does arithmetic with sizes breaks the rule: its graphs are no templates."""

    class Doubles:
        name = "doubles"

        def run(self, graph: Graph) -> Graph:
            (node,) = graph.nodes
            stop = 2 * node.args[3]
            doubled = Node(node.op, (Ref(0), 0, 0, stop), (), node.fresh)
            return replace(graph, nodes=(doubled,))

    text = """
        %0: f32[{0}] = input
        %1: f32[{1}] = aten.slice.Tensor(%0, 0, 0, {1})
        return %1
        """
    templates = Templates((*PIPELINE, Doubles()))
    stops = [
        templates.plan(graph_of(text.format(n, n // 4))).graph.nodes[0].args[3] for n in (40, 60)
    ]
    assert stops == [20, 30]
    assert templates.resized == 0


# -- how much is kept, and what is asked besides -----------------------------------------------


def test_every_pass_appends_its_stage() -> None:
    graph = layer(40)
    stages: list[tuple[str, Graph]] = []
    steps = [*graph.inputs, *graph.nodes]
    template = Template.of(graph, steps, PIPELINE, Plan, stages=stages)
    assert [name for name, _ in stages] == [one.name for one in PIPELINE]
    assert stages[-1][1] is template.plan.graph


def test_a_broken_graph_is_refused() -> None:
    graph = layer(48)
    node = Node("aten.exp.default", (Ref(9),))
    broken = Graph(graph.inputs, (), (node,), ())
    with pytest.raises(GraphError, match="reads %9, which is not defined before it"):
        Template.of(broken, [*graph.inputs, node], (), Plan)


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_put_off_and_goes_on_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(ZeroDivisionError), gc_paused():
            with gc_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_collection_goes_on_when_the_last_of_several_threads_has_done() -> None:
    """Whoever begins while another is about to end must not take its state for the program's."""

    def put_off_often() -> None:
        for _ in range(20_000):
            with gc_paused():
                assert not gc.isenabled()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(put_off_often) for _ in range(4)]:
                future.result()
    finally:
        sys.setswitchinterval(interval)
    assert gc.isenabled()


def test_collection_goes_on_in_a_child_of_a_process_that_had_put_it_off() -> None:
    """Of a DataLoader, say: the thread that would put it back is not in the child."""
    with gc_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()
    assert gc.isenabled()


# -- whatever the program ----------------------------------------------------------------------


@given(
    st.lists(SIZED, min_size=3, max_size=25),
    st.lists(st.tuples(SIZES, SIZES), min_size=2, max_size=4),
)
def test_template_plans_equal_results_of_passes(
    program: list[Step], sizes: list[tuple[int, int]]
) -> None:
    templates = Templates()
    for rows, columns in sizes:
        if rows * columns <= 1 << 17:
            for graph in recorded(program, rows, columns):
                same_as_passes(templates, graph)
    target(float(templates.resized), label="resized")


def training_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> float:
    x = torch.linspace(-1, 1, batch * 6, device=next(model.parameters()).device).view(batch, 6)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def losses(device: str, batches: list[int]) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [training_step(model, optimizer, batch) for batch in batches]


def test_a_session_trains_on_varying_batches() -> None:
    batches = [20, 20, 20, 21, 23, 22, 25, 20, 29, 27]
    with lazygt.session(launcher="inline", planning=lazygt.Planning(check_passes=True)) as s:
        ours = losses("lazygt", batches)
        assert s._planner.resized >= 5
    assert ours == losses("cpu", batches)
