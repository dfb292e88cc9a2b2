"""Report of unrequested all-gathers: the op that reads the gathered value, and a remedy.

A gather is reported unless the user requested it. Requests are a placement
(``lazygt.redistribute``, a style), stored weights (FSDP), an operand of an op with another operand
that is fixed to shards (the sharded input of a column-parallel layer), and an update of a fixed
value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.node import Node
from lazygt.graph.ops import title
from lazygt.graph.placement import Cut, Placement, Replicate, Unspecified
from lazygt.graph.text import amount
from lazygt.passes.sharding import rules
from lazygt.passes.sharding.axis import AxisStep
from lazygt.passes.sharding.marks import MARKS, PLACE
from lazygt.passes.sharding.propagate.placement_sources import is_elementwise, moves_elements

R = Replicate()
_REPLACE_IT = (
    "Where that costs too much, give the op what is whole or cut otherwise (lazygt.redistribute), "
    "or write it with ops that have a rule."
)


class Gather(NamedTuple):
    """Unrequested all-gather of sharded values for one op."""

    op: str  # the aten overload, or another name of the op
    operands: tuple[str, ...]  # the gathered ones, as ``f32[8, 16] in S(0)``
    nbytes: int  # size of all gathered operands
    axis: str  # of the mesh
    line: str  # the user's ``file:line``
    why: str  # the reason: no rule, or no better strategy
    instead: str  # a way to avoid the gather

    def __str__(self) -> str:
        return (
            f"{self.op} {self.why} along {self.axis!r}: {', '.join(self.operands)} "
            f"({amount(self.nbytes, 'B')}) is gathered on every worker that runs it, at {self.line}"
        )


def gathers(decided: Iterable[AxisStep]) -> list[Gather]:
    """Return the unrequested gathers in program order, one for each op, line and axis."""
    reported: dict[tuple[str, str, str], Gather] = {}
    for step in decided:
        gathered = [value for value, have in enumerate(step.local.values) if _is_gathered(have)]
        if gathered:
            for gather in _Gathers(step, gathered).all():
                reported.setdefault((gather.op, gather.line, gather.axis), gather)
    return list(reported.values())


def _is_gathered(have: Collection[Placement]) -> bool:
    """Return whether a value that is produced in shards was gathered.

    Args:
        have: the placements of the value, the one it was produced with first.
    """
    return R in have and isinstance(next(iter(have)), Cut)


class _Gathers:
    """Unrequested gathers of one mesh axis.

    Args:
        gathered: the gathered values.
    """

    def __init__(self, step: AxisStep, gathered: Iterable[int]) -> None:
        self._step, self._graph, self._metas = step, step.graph, step.graph.values
        self._produced_in = [next(iter(have), R) for have in step.local.values]
        reported = _user_sharded_values(step) - _fsdp_values(step)
        self._gathered, self._fixed = reported.intersection(gathered), _fixed(step)
        #: value -> the nodes that read it replicated
        self._replicated_readers: dict[int, list[int]] = defaultdict(list)
        for number, node in enumerate(self._graph.nodes):
            for value, placement in zip(node.refs(), step.strategies[number].inputs, strict=True):
                if placement == R:
                    self._replicated_readers[value].append(number)
        self._results = [results for _, results in self._graph.numbered()]

    def all(self) -> Iterator[Gather]:
        """Yield the unrequested gathers, one for each reading node."""
        values_of: dict[int, list[int]] = defaultdict(list)
        for value in sorted(self._gathered):
            readers = self._computing_readers(value)
            if readers and not any(map(self._is_requested, readers)):
                values_of[readers[0]].append(value)
        for number, values in sorted(values_of.items()):
            yield self._gather(number, values)

    def _computing_readers(self, value: int) -> list[int]:
        """Return the nodes that compute with a replicated value or its views (breadth first)."""
        readers, queue = [], [value]
        for current in queue:  # grows meanwhile
            for number in self._replicated_readers[current]:
                views = self._results[number] if moves_elements(self._graph.nodes[number]) else ()
                read_views = [view for view in views if self._replicated_readers[view]]
                queue += read_views
                readers += [] if read_views else [number]
        return readers

    def _is_requested(self, number: int) -> bool:
        """Return whether the user requested that a node's operands are gathered."""
        node, strategy = self._graph.nodes[number], self._step.strategies[number]
        if node.op in MARKS or any(value in self._fixed for value in node.writes):
            return True
        return any(
            value in self._fixed
            and isinstance(placement, Cut)
            and placement == self._produced_in[value]
            for value, placement in zip(node.refs(), strategy.inputs, strict=True)
        )

    def _gather(self, number: int, values: Sequence[int]) -> Gather:
        """Return the report of the gathers of values for a node."""
        node = self._graph.nodes[number]
        described = tuple(
            [f"{self._metas[value]} in {self._produced_in[value]}" for value in values]
        )
        nbytes = sum(meta.nbytes for value in values if (meta := self._metas[value]) is not None)
        why, instead = self._reason(node, values)
        line = self._graph.line(number)
        op = "a write through a view" if node.op == WRITE_BACK else title(node.op)
        return Gather(op, described, nbytes, self._step.name, line, why, instead)

    def _gathered_operands(self, node: Node, values: Collection[int]) -> set[int]:
        """Return the operands of a node that are these values, or views of them."""
        reached, queue = set(values), list(values)
        for current in queue:  # grows meanwhile
            for number in self._replicated_readers[current]:
                if moves_elements(self._graph.nodes[number]):
                    queue += self._results[number]
                    reached.update(self._results[number])
        return reached.intersection(node.refs())

    def _reason(self, node: Node, values: Collection[int]) -> tuple[str, str]:
        """Return the reason for a gather, and a way to avoid it."""
        strategies = rules.strategies_of(node, self._metas, self._step.axis.axis_size)
        if len(strategies) == 1:
            return "has no sharding rule for blocks", _REPLACE_IT
        operands = self._gathered_operands(node, values)
        shard_placements = {
            placement: None
            for strategy in strategies
            for value, placement in zip(node.refs(), strategy.inputs, strict=True)
            if value in operands and isinstance(placement, Cut)
        }
        produced_in = {self._produced_in[value] for value in values}
        others = [f"{placement}" for placement in shard_placements if placement not in produced_in]
        # for a replicated view it is unknown where its shards would be
        if shard_placements and (
            operands.isdisjoint(values) or not produced_in.isdisjoint(shard_placements)
        ):
            return "takes less time on whole values", (
                "To compute in blocks all the same, fix the placement (fixed=True in "
                "lazygt.distribute, or a style); weights that are to be gathered for each use "
                "belong to lazygt.fully_shard, which gathers them ahead."
            )
        if others:
            return "has no strategy for such blocks", (
                f"It runs in blocks of {' or '.join(others)}: cut the value so from the start, or "
                f"move it once (lazygt.redistribute)."
            )
        return "has no strategy for such blocks", _REPLACE_IT


def _user_sharded_values(step: AxisStep) -> set[int]:
    """Return the values that the user sharded, and those computed from them until replicated.

    The solver chose the placements of all other sharded values.
    """
    axis_index, stored = step.axis.at, step.axis.stored(step.graph)
    inputs = range(len(step.graph.inputs))
    sharded = {value for value in inputs if isinstance(stored[value].placements[axis_index], Cut)}
    for node, results in step.graph.numbered():
        placement = stored[results[0]].placements[axis_index] if node.op == PLACE else Unspecified()
        is_open = isinstance(placement, Unspecified)
        if not sharded.isdisjoint(node.refs()) if is_open else isinstance(placement, Cut):
            sharded.update(results)
    return sharded


def _fsdp_values(step: AxisStep) -> set[int]:
    """Return the values of FSDP wrap units, and those computed elementwise from them only."""
    graph, metas = step.graph, step.graph.values
    stored = {
        value
        for value, sharding in step.axis.stored(graph).items()
        if sharding.unit is not None and sharding.unit.axis == step.name
    }
    for node, results in graph.numbered():
        large = {v for v in node.refs() if (meta := metas[v]) is None or meta.numel > 1}
        if large and large <= stored and is_elementwise(node, metas):
            stored.update(results)
    return stored


def _fixed(step: AxisStep) -> set[int]:
    """Return the values that are fixed along the axis, and views of them."""
    axis_index, stored = step.axis.at, step.axis.stored(step.graph)
    fixed = {
        value
        for value, sharding in stored.items()
        if sharding.fixed and not isinstance(sharding.placements[axis_index], Unspecified)
    }
    for node, results in step.graph.numbered():
        if moves_elements(node) and fixed.issuperset(node.refs()):
            fixed.update(results)
    return fixed
