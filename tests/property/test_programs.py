"""Any program gives the same bits lazily as eagerly, wherever it is flushed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lazygt
from lazygt.graph import Graph, parse_graph
from lazygt.runtime.executors.interpreter import CheckedInterpreter
from lazygt.runtime.graph_codec import decode_graph, encode_graph
from lazygt.runtime.plan import Plan
from tests.property.comparison import assert_same
from tests.property.programs import PROGRAMS, SYNCS, Step, run
from tests.runtime.executors.compared import comparing, needs_native
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.timeout(600)


@given(PROGRAMS)
def test_a_program_gives_the_bits_of_eager_torch(program: list[Step]) -> None:
    with lazygt.session(launcher="inline"):
        assert_same(run(program, "lazygt"), run(program, "cpu"))


@needs_native
@given(PROGRAMS)
def test_native_and_generated_code_give_the_same_bits(program: list[Step]) -> None:
    with comparing(), lazygt.session(launcher="inline"):
        first = run(program, "lazygt")
        for _ in range(2):
            assert_same(run(program, "lazygt"), first)


@given(PROGRAMS, st.integers(1, 6))
def test_flush_points_change_nothing(program: list[Step], length: int) -> None:
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(max_graph_nodes=length)):
        assert_same(run(program, "lazygt"), run(program, "cpu"))


@given(PROGRAMS)
def test_a_second_run_is_all_hits(program: list[Step]) -> None:
    with lazygt.session(launcher="inline") as s:
        first = run(program, "lazygt")
        run(program, "lazygt")
        before = s.stats()
        again = run(program, "lazygt")
        after = s.stats()
    assert_same(again, first)
    if first[2]:
        return  # an op that raises is inferred, and raises, every time
    assert after["ops_inferred"] == before["ops_inferred"]
    assert after["plans_built"] == before["plans_built"]


@given(PROGRAMS, st.sampled_from([0.25, -3.0, 7.0]))
def test_changed_numbers_are_never_stale(program: list[Step], number: float) -> None:
    changed = [replace(step, number=number) for step in program]
    with lazygt.session(launcher="inline"):
        run(program, "lazygt")
        assert_same(run(changed, "lazygt"), run(changed, "cpu"))


def plans_of(program: list[Step]) -> list[Plan]:
    with lazygt.session(launcher="inline") as s:
        run(program, "lazygt")
        return s.plans()


@given(PROGRAMS)
def test_graphs_survive_text_and_wire(program: list[Step]) -> None:
    for plan in plans_of(program):
        graph = plan.graph
        assert decode_graph(encode_graph(graph)) == graph
        again = parse_graph(str(graph))
        assert again == graph
        assert str(again) == str(graph)


def interpreted(plan: Plan, inputs: list[torch.Tensor], params: tuple[Any, ...]) -> list[Any]:
    careful = CheckedInterpreter(plan.steps, torch.device("cpu"))
    values: dict[int, Any] = dict(enumerate(t.clone() for t in inputs))
    torch.manual_seed(2)
    failures = careful.run(values, params, 0, check=False)
    assert not failures
    return [values[number] for number in plan.graph.outputs]


def always_copying(plan: Plan) -> Plan:
    """The same plan with a copy at every write and no value dropped."""
    modes = tuple(tuple("copy" for _ in modes) for modes in plan.steps.writes.modes)
    steps = plan.steps
    writes, frees = replace(steps.writes, modes=modes), tuple(() for _ in steps.frees)
    return Plan(plan.graph, replace(steps, writes=writes, frees=frees))


def arguments(graph: Graph) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    values = {"float": 0.75, "int": 2, "bool": True}
    torch.manual_seed(1)
    inputs = [torch.rand(m.shape).to(m.dtype).as_strided(m.shape, m.stride) for m in graph.inputs]
    return inputs, tuple(values[kind] for kind in graph.params)


UNBROKEN = PROGRAMS.map(lambda program: [s for s in program if s.name not in SYNCS])


@given(UNBROKEN)
def test_writing_in_place_equals_copying(program: list[Step]) -> None:
    for plan in plans_of(program):
        if plan.returns_dynamic or any("rng" in node.op for node in plan.graph.nodes):
            continue
        if any(meta.extent != meta.numel for meta in plan.graph.inputs):
            continue
        inputs, params = arguments(plan.graph)
        ours = interpreted(plan, inputs, params)
        reference = interpreted(always_copying(plan), inputs, params)
        for a, b in zip(ours, reference, strict=True):
            assert_same_bits(a, b)
