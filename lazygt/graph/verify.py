"""The rules that every graph keeps."""

from __future__ import annotations

from lazygt.errors import GraphError
from lazygt.graph.node import Arg, Graph, Node, Param


def verify(graph: Graph) -> None:
    """Check that values are defined before use, once, and that parameters exist.

    Raises:
        GraphError: naming the node and the rule.
    """
    for number, (node, results) in enumerate(graph.numbered()):
        for ref in node.refs():
            if not 0 <= ref < results.start:
                raise _broken(number, node, f"reads %{ref}, which is not defined before it")
        for ref in node.writes:
            if not 0 <= ref < results.start:
                raise _broken(number, node, f"writes %{ref}, which is not defined before it")
        if not node.dynamic and len(node.writes) != len(node.written):
            raise _broken(number, node, "has a write without a new version, or the reverse")
        for param in _params(node.args) + _params(tuple(arg for _, arg in node.kwargs)):
            if not 0 <= param < len(graph.params):
                raise _broken(number, node, f"uses ${param} of {len(graph.params)} parameters")
        if node.dynamic and number != len(graph.nodes) - 1:
            raise _broken(number, node, "has data-dependent results but is not the last node")
    total = len(graph.values)
    for value in graph.outputs:
        if not 0 <= value < total:
            raise GraphError(f"output %{value} is not a value of the graph")


def _params(arg: Arg) -> list[int]:
    if type(arg) is Param:
        return [arg.index]
    if type(arg) is tuple:
        return [index for item in arg for index in _params(item)]
    return []


def _broken(number: int, node: Node, rule: str) -> GraphError:
    return GraphError(f"node {number} ({node.op}) {rule}")
