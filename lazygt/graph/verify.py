"""The rules that every graph keeps."""

from __future__ import annotations

from lazygt.errors import GraphError
from lazygt.graph.node import FUSED, Graph, Node, Param, Ref, params_in


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
        for param in params_in(node.args) + params_in(tuple(arg for _, arg in node.kwargs)):
            if not 0 <= param < len(graph.params):
                raise _broken(number, node, f"uses ${param} of {len(graph.params)} parameters")
        if node.dynamic and number != len(graph.nodes) - 1:
            raise _broken(number, node, "has data-dependent results but is not the last node")
        if node.op == FUSED or node.body is not None:
            _verify_body(number, node)
    total = len(graph.values)
    for value in graph.outputs:
        if not 0 <= value < total:
            raise GraphError(f"output %{value} is not a value of the graph")


def _verify_body(number: int, node: Node) -> None:
    if node.op != FUSED or node.body is None:
        raise _broken(number, node, "is fused without members, or has members without being fused")
    refs = list(node.refs())
    if node.args != (*map(Ref, refs), *map(Param, params_in(node.args))) or node.kwargs:
        raise _broken(number, node, "takes something that is neither value nor parameter")
    if len(refs) != len(node.body.inputs) or len(params_in(node.args)) != len(node.body.params):
        raise _broken(number, node, "does not take what its members need")
    if len(node.body.outputs) != len(node.results):
        raise _broken(number, node, "does not give what its members make")
    if any(target not in refs for target in node.writes):
        raise _broken(number, node, "writes a value that it does not take")
    verify(node.body)


def _broken(number: int, node: Node, rule: str) -> GraphError:
    return GraphError(f"node {number} ({node.op}) {rule}")
