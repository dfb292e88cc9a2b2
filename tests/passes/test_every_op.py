"""Every overload that a pass or the compiler treats by its name, with all that is asked of it.

One walk: an op is drawn on every dtype and shape that it takes once, and each check looks at the
same graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from lazygt.graph import Graph, Ref
from lazygt.graph.fusion import REDUCTIONS
from lazygt.graph.node import Node, map_arg, verify
from lazygt.passes.lifetime import Lifetime, _in_place_overloads, _rounds_in_place
from tests.graph.pointwise import POINTWISE, has_a_functional_form
from tests.passes.overloads import graphs, inputs_for, that
from tests.passes.tools import same_numbers
from tests.runtime.compiling.lowering import (
    DRAWN,
    TAKES_NUMBERS,
    a_number_as_a_tensor_is_the_number,
    is_lowered_to_the_same_arithmetic,
)

LIFETIME = Lifetime()
#: What lifetime may write over an operand.
OVERWRITING = frozenset(that(_in_place_overloads))
MEMBERS = frozenset([*POINTWISE, *REDUCTIONS])
NUMBERS = (2, 0.5, -0.5, 0.0, -3.25, 1)


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


def written_form_computes_the_same_bits(op: str) -> None:
    """Whichever operand dies."""
    in_place, out, _ = _in_place_overloads(op) or ("", "", "")
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", sorted(MEMBERS | OVERWRITING))
def test_every_op(op: str) -> None:
    if op in MEMBERS:
        has_a_functional_form(op)
    if op in DRAWN:
        is_lowered_to_the_same_arithmetic(op)
    if op in OVERWRITING:
        written_form_computes_the_same_bits(op)
    if op in TAKES_NUMBERS:
        for dtype, number in product((torch.float32, torch.float64), NUMBERS):
            a_number_as_a_tensor_is_the_number(op, dtype, number)


def test_tables_of_ops_are_large() -> None:
    assert len(OVERWRITING) >= 220
    assert len(DRAWN) > 500
    assert len(TAKES_NUMBERS) >= 31
