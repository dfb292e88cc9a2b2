"""Fused nodes opened: the same graph with the members in the place of their node."""

from __future__ import annotations

from collections.abc import Collection

from lazygt.graph.node import Arg, Graph, Node, Param, Ref, map_arg


def inline(graph: Graph, kept: Collection[int] = ()) -> Graph:
    """``graph`` with every fused node replaced by its members, in their order.

    Args:
        kept: numbers of fused nodes that stay as they are.
    """
    if all(node.body is None or n in kept for n, node in enumerate(graph.nodes)):
        return graph
    return _Inlined(graph, kept).graph()


class _Inlined:
    def __init__(self, source: Graph, kept: Collection[int]) -> None:
        self.source, self.kept = source, kept
        self.nodes: list[Node] = []
        self.lines: list[str] = []
        self.origins: list[int] = []
        self.count = len(source.inputs)

    def graph(self) -> Graph:
        source = self.source
        numbers = list(range(self.count))
        for number, node in enumerate(source.nodes):
            if node.body is None or number in self.kept:
                self._add(node, numbers, None, source.line(number), source.origin(number))
            else:
                numbers.extend(self._members(node, node.body, numbers))
        outputs = tuple(numbers[value] for value in source.outputs)
        lines = tuple(self.lines) if source.lines else ()
        return Graph(
            source.inputs, source.params, tuple(self.nodes), outputs, lines, tuple(self.origins)
        )

    def _members(self, node: Node, body: Graph, numbers: list[int]) -> list[int]:
        """Add a fused node's members; returns the numbers of the node's results."""
        inner = [numbers[ref] for ref in node.refs()]
        params = [arg.index for arg in node.args if type(arg) is Param]
        for number, member in enumerate(body.nodes):
            self._add(member, inner, params, body.line(number), body.origin(number))
        return [inner[value] for value in body.outputs]

    def _add(
        self, node: Node, numbers: list[int], params: list[int] | None, line: str, origin: int
    ) -> None:
        def leaf(arg: Arg) -> Arg:
            if type(arg) is Ref:
                return Ref(numbers[arg.index])
            if type(arg) is Param and params is not None:
                return Param(params[arg.index])
            return arg

        self.nodes.append(
            Node(
                node.op,
                map_arg(node.args, leaf),
                tuple((name, map_arg(arg, leaf)) for name, arg in node.kwargs),
                node.fresh,
                tuple(numbers[value] for value in node.writes),
                node.written,
                node.dynamic,
                node.body,
            )
        )
        made = len(node.results)
        numbers.extend(range(self.count, self.count + made))
        self.count += made
        self.lines.append(line)
        self.origins.append(origin)
