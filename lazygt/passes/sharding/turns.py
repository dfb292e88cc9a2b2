"""Forward and backward, in turns: what a step of several microbatches is made of."""

from __future__ import annotations

from collections.abc import Collection

from lazygt.graph.node import Graph


def turns(graph: Graph, backward: Collection[int]) -> list[int]:
    """For each node how often forward and backward have taken turns before it: odd in a backward.

    lazygt's own ops belong to what they stand in.

    Args:
        backward: which recorded ops, by number, are of a backward pass.
    """
    count, numbers = 0, []
    for number, node in enumerate(graph.nodes):
        if not node.op.startswith("lazygt."):
            count += (graph.origin(number) in backward) != count % 2
        numbers.append(count)
    return numbers
