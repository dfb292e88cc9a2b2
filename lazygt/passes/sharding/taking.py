"""Taking over: how far a logical rank's program has become part of its worker's (see ``merge``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lazygt.graph.exact import exact
from lazygt.graph.label import MEETINGS
from lazygt.graph.node import Arg, Graph, Node, Ref


class LogicalRank:
    """One logical rank's program, as far as it has been taken over.

    Attributes:
        rank: its number.
        at: number of the next node.
        values: local value -> its number in the worker's program; for memory that nobody has
            written yet a description of it.
        blanks: local value -> the node that makes such memory.
        seen: how often each piece of work has come.
        drawn: draws so far.
    """

    def __init__(self, rank: int, graph: Graph, inputs: Sequence[int]) -> None:
        self.rank, self.graph, self.at, self.drawn = rank, graph, 0, 0
        self.values: list[Any] = list(inputs)
        self.blanks: dict[int, Node] = {}
        self.seen: Counter[Any] = Counter()

    @property
    def node(self) -> Node | None:
        """The next node; None at the end."""
        return self.graph.nodes[self.at] if self.at < len(self.graph.nodes) else None

    @property
    def axis(self) -> str | None:
        """The axis on which it waits for others, if it does."""
        node = self.node
        return node.args[-1] if node is not None and node.op in MEETINGS else None

    def work(self, node: Node) -> Any:
        """What a node does: equal for nodes that do the same to the same values."""
        return (
            node.op,
            _named(node.args, self.values),
            _named(node.kwargs, self.values),
            tuple([self.values[value] for value in node.writes]),
            node.fresh,
        )


def operands_of(node: Node) -> tuple[int, ...]:
    """The values that a node reads, with repeats, and those that it writes."""
    return (*node.refs(), *node.writes)


def _named(arg: Arg, values: Sequence[Any]) -> Any:
    """An argument as part of a key."""
    kind = type(arg)
    if kind is Ref:
        return Ref, values[arg.index]
    if kind is tuple:
        return tuple([_named(item, values) for item in arg])
    return exact(arg)
