"""Assignment of nodes and values to the stages of a pipeline.

The nodes after a mark belong to its stage until the next mark; a node that reads a weight of one
stage belongs to that stage. A gradient that leaves a stage goes back to the stage of its value.
Nodes that depend on no stage (new tensors, random draws, numbers) run wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazygt.graph.alias import WRITE_BACK, draws
from lazygt.graph.node import Graph, Node
from lazygt.passes.sharding.marks import ENTER, LEAVE

#: The stage of a node that all ranks run, on operands that they are sent.
EVERY = -1


@dataclass(frozen=True, slots=True)
class Stages:
    """Stage of each node and of each value.

    Attributes:
        nodes: the stage, ``EVERY``, or None: wherever its results are needed.
        values: the stage; None: every rank has it, or can make it.
        makers: value -> the node that made it; -1: an input.
        same: a mark's result -> its first operand.
    """

    nodes: Sequence[int | None]
    values: Sequence[int | None]
    makers: Sequence[int]
    same: dict[int, int]

    def named(self, value: int) -> int:
        """Return the value behind the marks that it passed."""
        while value in self.same:
            value = self.same[value]
        return value


def assign(graph: Graph, inputs: Sequence[int | None]) -> Stages:
    """Assign every node and value to a stage.

    Args:
        inputs: the stage that has each input; None: every rank has it, and its new versions too.
    """
    return _Assignment(graph, inputs).made()


class _Assignment:
    def __init__(self, graph: Graph, inputs: Sequence[int | None]) -> None:
        self._graph = graph
        self._values = list(inputs)
        self._nodes: list[int | None] = []
        self._makers = [-1] * len(inputs)
        self._same: dict[int, int] = {}
        #: values that every rank must have, also when they are written
        self._everywhere = {value for value, stage in enumerate(inputs) if stage is None}
        #: the stage of the last mark: of two stages that a node could belong to, the likely one
        self._current: int | None = None

    def made(self) -> Stages:
        for number, (node, results) in enumerate(self._graph.numbered()):
            stage = self._marked(node) if node.op in (ENTER, LEAVE) else self._stage(node)
            self._nodes.append(stage)
            self._values += [None if stage == EVERY else stage] * len(results)
            self._makers += [number] * len(results)
            if node.op in (ENTER, LEAVE):
                self._same[results[0]] = node.args[0].index
            first = 0 if node.op == WRITE_BACK else len(node.fresh)
            versions = zip(written(node), results[first:], strict=False)
            self._everywhere.update(new for old, new in versions if old in self._everywhere)
        return Stages(self._nodes, self._values, self._makers, self._same)

    def _marked(self, node: Node) -> int | None:
        if node.op == ENTER:
            self._current = node.args[1]
        else:
            gradient, value = (self._values[arg.index] for arg in node.args[:2])
            self._current = gradient if value is None else value
        return self._current

    def _stage(self, node: Node) -> int | None:
        targets = written(node)
        staged = self._of((*node.refs(), *targets))
        if node.dynamic:
            return EVERY  # each rank names its results
        if not staged:
            return None
        if draws(node) or not self._everywhere.isdisjoint(targets):
            return EVERY
        likely = self._of(targets) or staged
        return self._current if self._current in likely else max(likely)

    def _of(self, values: Sequence[int]) -> set[int]:
        return {stage for value in values if (stage := self._values[value]) is not None}


def written(node: Node) -> Sequence[int]:
    """Return the values that a node makes new versions of."""
    return (node.args[0].index,) if node.op == WRITE_BACK else node.writes
