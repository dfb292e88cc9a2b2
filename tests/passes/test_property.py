"""Whatever the program: the passes, each alone and all together, change no bit of what it computes.

The inputs are odd on purpose: NaN, infinities, both zeros, a denormal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lazygt
from lazygt.graph import Graph
from lazygt.graph.alias import IN_PLACE, analyse, draws
from lazygt.graph.fusion import expand_fused, is_fusible
from lazygt.graph.node import Node, verify
from lazygt.graph.per_tensor import lane_count, slice_node
from lazygt.passes import PIPELINE, Pass, run_passes
from lazygt.passes.fuse import MAX_MEMBERS, Fuse
from lazygt.passes.lifetime import Lifetime
from lazygt.runtime.graph_codec import decode_graph, encode_graph
from tests.passes.recording import recorded
from tests.passes.steps import PROGRAMS, Step
from tests.passes.tools import difference, same_numbers, with_literals
from tests.property import programs

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

NAMES = [one.name for one in PIPELINE]
#: A second run of these finds nothing more to do.
IDEMPOTENT = [one for one in PIPELINE if one.name in ("fold", "cse", "dce")]


def variants(program: list[Step]) -> Iterator[Graph]:
    """Each graph as recorded, and with its run-time numbers as literals."""
    for graph in recorded(program):
        yield graph
        if graph.params:
            yield with_literals(graph)


@pytest.mark.parametrize("one", PIPELINE, ids=NAMES)
@given(program=PROGRAMS)
def test_a_pass_changes_no_bit(one: Pass, program: list[Step]) -> None:
    for graph in variants(program):
        made = run_passes(graph, [one], check=True)
        same_numbers(graph, made)


def test_every_pass_has_something_to_do() -> None:
    """What the tests of this file are worth: on how many of the graphs each pass does something."""
    seen: Counter[str] = Counter()

    @settings(max_examples=40, derandomize=True, database=None)
    @given(PROGRAMS)
    def look(program: list[Step]) -> None:
        for graph in recorded(program):
            seen["graphs"] += 1
            for one in PIPELINE:
                made = one.run(graph)
                seen[one.name] += made is not graph
                graph = made

    look()
    for name in NAMES:
        assert seen[name] >= 0.25 * seen["graphs"], seen


@given(PROGRAMS)
def test_the_pipeline_changes_no_bit(program: list[Step]) -> None:
    for graph in variants(program):
        same_numbers(graph, run_passes(graph, PIPELINE, check=True))


@given(PROGRAMS, st.permutations(PIPELINE))
def test_passes_in_any_order_keep_numbers(program: list[Step], passes: list[Pass]) -> None:
    for graph in recorded(program):
        same_numbers(graph, run_passes(graph, passes, check=True))


@pytest.mark.parametrize("one", IDEMPOTENT, ids=lambda one: one.name)
@given(program=PROGRAMS)
def test_a_second_run_changes_nothing(one: Pass, program: list[Step]) -> None:
    for graph in variants(program):
        made = one.run(graph)
        again = one.run(made)
        assert again is made, difference(str(made), str(again))


@given(PROGRAMS)
def test_no_pass_adds_nodes_or_drops_draws(program: list[Step]) -> None:
    for graph in variants(program):
        for one in IDEMPOTENT:
            made = one.run(graph)
            assert len(made.nodes) <= len(graph.nodes)
            assert [n.op for n in made.nodes if draws(n)] == [n.op for n in graph.nodes if draws(n)]


@given(PROGRAMS)
def test_a_pass_is_a_function(program: list[Step]) -> None:
    """The same graph gives the same graph, also when it has been over the wire."""
    for graph in variants(program):
        for one in PIPELINE:
            made = one.run(graph)
            verify(made)
            again = one.run(decode_graph(encode_graph(graph)))
            assert encode_graph(again) == encode_graph(made), difference(str(made), str(again))


@given(PROGRAMS)
def test_lifetime_writes_in_place(program: list[Step]) -> None:
    """It never makes a write that would have to copy, nor one into an input."""
    for graph in recorded(program):
        made = Lifetime().run(graph)
        before, after = analyse(graph), analyse(made)
        assert after.overwritten_inputs == before.overwritten_inputs
        for old, new in zip(before.modes, after.modes, strict=True):
            assert new == (old or new)
            assert old or all(mode == IN_PLACE for mode in new)


def _lanes(node: Node) -> list[Node]:
    """What a horizontal op does, one by one; the node itself if it is none."""
    return [slice_node(node, which) for which in range(lane_count(node))] or [node]


@given(PROGRAMS)
def test_expanded_fused_nodes_equal_original_nodes(program: list[Step]) -> None:
    """The same nodes with the same lines and origins; only members inside, and never too many."""
    for graph in recorded(program):
        made = Fuse().run(graph)
        opened = expand_fused(made)
        names = [sorted(map(str, zip(_ops(g), g.lines, _origins(g), strict=True)))
                 for g in (graph, opened)]  # fmt: skip
        assert names[0] == names[1]
        for body in (node.body for node in made.nodes if node.body is not None):
            assert 1 < len(body.nodes) <= MAX_MEMBERS
            assert all(
                is_fusible(node, body.values) for each in body.nodes for node in _lanes(each)
            )


def _ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def _origins(graph: Graph) -> list[int]:
    return [graph.origin(number) for number in range(len(graph.nodes))]


@settings(max_examples=20)
@given(programs.PROGRAMS)
def test_whole_programs_with_gradients(program: list[programs.Step]) -> None:
    """With sync points: every graph between two of them, a data-dependent last node too."""
    with lazygt.session(launcher="inline", planning=lazygt.Planning(keep_stages=True)) as s:
        programs.run(program, "lazygt")
        graphs = [s.stages(plan)[0][1] for plan in s.plans()]
    for graph in graphs:
        same_numbers(graph, run_passes(graph, PIPELINE, check=True))
