"""Parts of a miss: every pass by its own name, on a graph that was really recorded."""

import argparse

import pytest

from benchmarks import compile_cost
from benchmarks.compile_cost import ALL_PASSES, chain_of_numbers, infer, measure, parts, record
from lazygt.graph.node import verify
from lazygt.passes import PIPELINE


def test_a_recording_is_a_graph_of_the_size_asked_for() -> None:
    recorded = record(chain_of_numbers, 60)
    graph = recorded.graph()
    verify(graph)
    assert len(graph.nodes) == 60
    assert len(graph.lines) == 60
    assert all(line.split(":")[0].endswith("compile_cost.py") for line in graph.lines)
    assert graph.params == ("float",) * 6
    assert len(graph.inputs) == 3


def test_inference_finds_every_op_again() -> None:
    for _, make in compile_cost.PROGRAMS:
        infer(record(make, 50).graph())


def test_every_pass_is_timed_by_its_name() -> None:
    names = [name for name, _ in parts(record(chain_of_numbers, 20))]
    passes = [f"pass {one.name}" for one in PIPELINE]
    assert names == ["inference", "build_graph", *passes, ALL_PASSES, "plan", "encode"]


@pytest.mark.deep
@pytest.mark.slow
def test_table_has_column_per_size_and_states_if_aim_is_met() -> None:
    report = measure(argparse.Namespace(sizes=[20, 40], rounds=1))
    assert report.columns == ["graph", "part of a miss", "20 ops", "40 ops", "growth"]
    assert len(report.rows) == len(compile_cost.PROGRAMS) * (len(PIPELINE) + 5)
    for _, _, *costs, growth in report.rows:
        assert all(float(cost) >= 0 for cost in costs)
        assert growth.endswith("x")
    assert report.remarks[-1].startswith("aim: all passes together at most 60 us a node at 40 ops")
