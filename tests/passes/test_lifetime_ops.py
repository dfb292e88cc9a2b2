"""Every overload that lifetime may write over an operand: the same bits, whichever operand dies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lazygt.graph import Graph, Ref
from lazygt.graph.node import Node, map_arg
from lazygt.graph.verify import verify
from lazygt.passes.lifetime import Lifetime, _overwriting, _rounds_in_place
from tests.passes.overloads import graphs, inputs_for, that
from tests.passes.tools import same_numbers

LIFETIME = Lifetime()
OPS = that(_overwriting)


def dying(graph: Graph) -> Iterator[Graph]:
    """The graph with each operand in turn that fits a copy, which dies at the op."""
    (node,) = graph.nodes
    count = len(graph.inputs)
    for which, meta in enumerate(graph.inputs):
        if node.fresh != (meta,):
            continue
        copy = Node("aten.clone.default", (Ref(which),), fresh=(meta,))
        args = map_arg(node.args, lambda arg, which=which: Ref(count) if arg == Ref(which) else arg)
        yield replace(graph, nodes=(copy, replace(node, args=args)), outputs=(count + 1,))


@pytest.mark.parametrize("op", OPS)
def test_a_written_form_computes_the_same_bits(op: str) -> None:
    in_place, out, _ = _overwriting(op) or ("", "", "")
    tried = 0
    for graph in (one for drawn in graphs(op) for one in dying(drawn)):
        made = LIFETIME.run(graph)
        copy = len(graph.inputs)
        first = graph.nodes[1].args[0] == Ref(copy)
        (meta,) = graph.nodes[1].fresh
        assert meta is not None
        if (not out and not (in_place and first)) or _rounds_in_place(op, meta):
            assert made is graph
            continue
        verify(made)
        assert made.nodes[1].writes == (copy,), str(made)
        assert made.nodes[1].op == (in_place if in_place and first else out)
        same_numbers(graph, made, inputs_for(graph))
        tried += 1
    assert tried, "no dtype and shape was tried"


def test_there_are_many() -> None:
    assert len(OPS) >= 220
