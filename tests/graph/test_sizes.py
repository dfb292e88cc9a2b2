"""Symbols for sizes: a graph gives one symbolic graph and one list, and these give it again."""

from __future__ import annotations

import pytest

from lazygt.graph import Graph
from lazygt.graph.sizes import Size, SymbolicGraph, check_sizes
from tests.passes.tools import graph_of


def layer(batch: int, width: int = 32) -> Graph:
    return graph_of(f"""
        graph {{
          %0: f32[{batch}, {width}] = input
          %1: f32[4, {width}] = input
          %2: f32[{width}, {batch}]@(1, {width}) = aten.t.default(%0)  # a.py:1
          %3: f32[{batch}, {width}] = aten.t.default(%2)  # a.py:2
          %4: f32[{batch + 4}, {width}] = aten.cat.default([%3, %1])  # a.py:3
          %5: f32[2, {width}]+{width} = aten.slice.Tensor(%4, 0, 1, 3)  # a.py:4
          return %4, %5
        }}""")


def test_a_graph_is_its_symbols_and_its_sizes() -> None:
    symbolic, sizes = SymbolicGraph.of(layer(20))
    assert sizes == (20, 32, 4, 24, 3, 2)
    assert symbolic.count == len(sizes)
    assert [meta.shape for meta in symbolic.graph.inputs] == [(2, 3), (4, 3)]
    *_, slice_ = symbolic.graph.nodes
    assert slice_.args[1:] == (0, 1, Size(4))
    again = SymbolicGraph(symbolic.graph)
    for batch in (20, 21, 90):
        sized = (batch, 32, 4, batch + 4, 3, 2)
        for each in (symbolic, again):
            assert each.in_sizes(sized) == layer(batch)
            assert each.in_sizes(sized).lines == layer(batch).lines


def test_graphs_differing_only_in_sizes_share_symbols() -> None:
    first, second = (SymbolicGraph.of(layer(batch))[0].graph for batch in (20, 90))
    assert first == second


@pytest.mark.parametrize(("batch", "width"), [(32, 32), (1, 32), (0, 32), (28, 32), (2, 32)])
def test_sizes_that_coincide_are_other_symbols(batch: int, width: int) -> None:
    other, sizes = SymbolicGraph.of(layer(batch, width))
    assert other.graph != SymbolicGraph.of(layer(20))[0].graph
    assert SymbolicGraph(other.graph).in_sizes(sizes) == layer(batch, width)


def test_nodes_without_a_new_size_are_shared() -> None:
    text = """
        %0: f32[{0}] = input
        %1: f32[{0}] = aten.cumsum.default(%0, 0)
        %2: f32[8192] = aten.zeros.default([8192], dtype=torch.float32, device=device)
        return %1, %2
        """
    first = graph_of(text.format(20))
    symbolic, _ = SymbolicGraph.of(first)
    other = symbolic.in_sizes((30, 8192))
    assert other == graph_of(text.format(30))
    assert other.nodes[1] is first.nodes[1]
    assert other.nodes[0] is not first.nodes[0]
    assert other.nodes[0].args is first.nodes[0].args


@pytest.mark.parametrize(
    "sizes",
    [(), (20, 32, 4, 24), (2, 3, 4, 5, 6, 7, 8), (20, 32, 4, 24, 3, 1)],
)
def test_sizes_that_a_graph_cannot_have(sizes: tuple[int, ...]) -> None:
    symbolic, _ = SymbolicGraph.of(layer(20))
    with pytest.raises(ValueError, match=r"are wanted|has no symbol"):
        check_sizes(symbolic, sizes)


def test_symbols_are_numbered_without_gaps() -> None:
    gap = graph_of("%0: f32[7] = input\nreturn %0")
    with pytest.raises(ValueError, match="without gaps"):
        SymbolicGraph(gap).check()
