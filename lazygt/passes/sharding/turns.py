"""Forward and backward turns of a step of several microbatches."""

from __future__ import annotations

from collections.abc import Collection

from lazygt.graph.node import Graph


def turns(graph: Graph, backward: Collection[int]) -> list[int]:
    """Return for each node the number of changes of pass before it: odd in a backward.

    A change is one between forward and backward. lazygt's own ops belong to the pass around them.

    Args:
        backward: numbers of the recorded ops of a backward pass.
    """
    count, numbers = 0, []
    for number, node in enumerate(graph.nodes):
        if not node.op.startswith("lazygt."):
            count += (graph.origin(number) in backward) != count % 2
        numbers.append(count)
    return numbers
