"""Graphs that pages of `lazygt viz` draw."""

from __future__ import annotations

from lazygt.graph import Graph, parse_graph

FUSED = """\
graph {
  %0: f32[4] = input
  %1: f32[4] = lazygt.fused(%0) {
    %0: f32[4] = input
    %1: f32[4] = aten.exp.default(%0)  # a.py:1
    %2: f32[4] = aten.neg.default(%1)  # a.py:2
    return %2
  }
  %2: f32[4] = aten.sin.default(%1)  # a.py:3
  return %2
}"""


def layered_net(depth: int, width: int) -> Graph:
    """``depth`` layers of ``width`` ops, each from two of the layer above; a line a layer."""
    text = ["graph {", *(f"%{number}: f32[64] = input" for number in range(width))]
    for layer in range(depth):
        above = layer * width
        for place in range(width):
            left, right = above + place, above + (place + 1) % width
            text.append(
                f"%{above + width + place}: f32[64] = aten.add.Tensor(%{left}, %{right})"
                f"  # net.py:{layer + 1}"
            )
    last = range(depth * width, depth * width + width)
    return parse_graph("\n".join([*text, "return " + ", ".join(f"%{v}" for v in last), "}"]))
