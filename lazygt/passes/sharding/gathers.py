"""Gathers of values that the user had cut: the op that takes them whole, and a remedy.

Told is every gather that the user did not ask for. Asked for are a placement
(``lazygt.redistribute``, a style), stored weights that are gathered to be used (FSDP), an operand
that an op needs whole because its other operand is pinned in blocks (the input of a column-parallel
layer that comes in blocks), and an update of a pinned value.
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
from lazygt.passes.sharding.annotations import is_elementwise, moves_elements
from lazygt.passes.sharding.axis import AxisStep
from lazygt.passes.sharding.marks import MARKS, PLACE

R = Replicate()
_WHOLE_OR_OTHERWISE = (
    "Where that costs too much, give the op what is whole or cut otherwise (lazygt.redistribute), "
    "or write it with ops that have a rule."
)


class Gather(NamedTuple):
    """Values that the user had cut, and one op took whole.

    Attributes:
        op: the aten overload, or another name of the op.
        operands: the gathered ones, as ``f32[8, 16] in S(0)``.
        nbytes: of them, whole.
        axis: of the mesh.
        line: the user's ``file:line``.
        why: no rule, or no better strategy.
        instead: a way to avoid it.
    """

    op: str
    operands: tuple[str, ...]
    nbytes: int
    axis: str
    line: str
    why: str
    instead: str

    def __str__(self) -> str:
        return (
            f"{self.op} {self.why} along {self.axis!r}: {', '.join(self.operands)} "
            f"({amount(self.nbytes, 'B')}) is gathered on every worker that runs it, at {self.line}"
        )


def gathers(decided: Iterable[AxisStep]) -> list[Gather]:
    """Return the gathers that the user did not ask for, in program order; one an op and line."""
    told: dict[tuple[str, str, str], Gather] = {}
    for step in decided:
        whole = [value for value, have in enumerate(step.local.values) if _is_gathered(have)]
        if whole:
            for gather in _Gathers(step, whole).all():
                told.setdefault((gather.op, gather.line, gather.axis), gather)
    return list(told.values())


def _is_gathered(have: Collection[Placement]) -> bool:
    """Return whether a value that is made in blocks was put together."""
    return R in have and isinstance(next(iter(have)), Cut)


class _Gathers:
    """Gathers of one axis.

    Args:
        whole: the values that are put together.
    """

    def __init__(self, step: AxisStep, whole: Iterable[int]) -> None:
        self._step, self._graph, self._metas = step, step.graph, step.graph.values
        self._made = [next(iter(have), R) for have in step.local.values]
        told = _cut_by_user(step) - _stored(step)
        self._whole, self._pinned = told.intersection(whole), _pinned(step)
        #: value -> the nodes that take it whole
        self._takers: dict[int, list[int]] = defaultdict(list)
        for number, node in enumerate(self._graph.nodes):
            for value, placement in zip(node.refs(), step.strategies[number].inputs, strict=True):
                if placement == R:
                    self._takers[value].append(number)
        self._results = [results for _, results in self._graph.numbered()]

    def all(self) -> Iterator[Gather]:
        """Yield those that the user did not ask for."""
        of_user: dict[int, list[int]] = defaultdict(list)
        for value in sorted(self._whole):
            users = self._users(value)
            if users and not any(map(self._asks, users)):
                of_user[users[0]].append(value)
        for number, values in sorted(of_user.items()):
            yield self._gather(number, values)

    def _users(self, value: int) -> list[int]:
        """Return the nodes that compute with a value whole, also with views of it."""
        users, ahead = [], [value]
        for at in ahead:  # grows meanwhile
            for number in self._takers[at]:
                views = self._results[number] if moves_elements(self._graph.nodes[number]) else ()
                taken = [view for view in views if self._takers[view]]
                ahead += taken
                users += [] if taken else [number]
        return users

    def _asks(self, number: int) -> bool:
        """Return whether the user has asked that a node gets its operands whole."""
        node, strategy = self._graph.nodes[number], self._step.strategies[number]
        if node.op in MARKS or any(value in self._pinned for value in node.writes):
            return True
        return any(
            value in self._pinned and isinstance(placement, Cut) and placement == self._made[value]
            for value, placement in zip(node.refs(), strategy.inputs, strict=True)
        )

    def _gather(self, number: int, values: Sequence[int]) -> Gather:
        node = self._graph.nodes[number]
        shown = tuple([f"{self._metas[value]} in {self._made[value]}" for value in values])
        nbytes = sum(meta.nbytes for value in values if (meta := self._metas[value]) is not None)
        why, instead = self._reason(node, values)
        line = self._graph.line(number)
        op = "a write through a view" if node.op == WRITE_BACK else title(node.op)
        return Gather(op, shown, nbytes, self._step.name, line, why, instead)

    def _seen(self, node: Node, values: Collection[int]) -> set[int]:
        """Return the operands of a node that are these values, or views of them."""
        seen, ahead = set(values), list(values)
        for at in ahead:  # grows meanwhile
            for number in self._takers[at]:
                if moves_elements(self._graph.nodes[number]):
                    ahead += self._results[number]
                    seen.update(self._results[number])
        return seen.intersection(node.refs())

    def _reason(self, node: Node, values: Collection[int]) -> tuple[str, str]:
        """Return the reason for which a node took these whole, and a way to avoid it."""
        strategies = rules.strategies_of(node, self._metas, self._step.axis.parts)
        if len(strategies) == 1:
            return "has no sharding rule for blocks", _WHOLE_OR_OTHERWISE
        taken = self._seen(node, values)
        cuts = {
            placement: None
            for strategy in strategies
            for value, placement in zip(node.refs(), strategy.inputs, strict=True)
            if value in taken and isinstance(placement, Cut)
        }
        had = {self._made[value] for value in values}
        others = [f"{placement}" for placement in cuts if placement not in had]
        # of a view that is whole, nothing says where its blocks would be
        if cuts and (taken.isdisjoint(values) or not had.isdisjoint(cuts)):
            return "takes less time on whole values", (
                "To compute in blocks all the same, pin the value (pinned=True in "
                "lazygt.distribute, or a style); weights that are to be gathered for each use "
                "belong to lazygt.fully_shard, which gathers them ahead."
            )
        if others:
            return "has no strategy for such blocks", (
                f"It runs in blocks of {' or '.join(others)}: cut the value so from the start, or "
                f"move it once (lazygt.redistribute)."
            )
        return "has no strategy for such blocks", _WHOLE_OR_OTHERWISE


def _cut_by_user(step: AxisStep) -> set[int]:
    """Return values placed in blocks, with all that is computed of them until placed whole.

    All other values in blocks are cut by the costs.
    """
    at, stored = step.axis.at, step.axis.stored(step.graph)
    inputs = range(len(step.graph.inputs))
    cut = {value for value in inputs if isinstance(stored[value].placements[at], Cut)}
    for node, results in step.graph.numbered():
        placement = stored[results[0]].placements[at] if node.op == PLACE else Unspecified()
        is_open = isinstance(placement, Unspecified)
        if not cut.isdisjoint(node.refs()) if is_open else isinstance(placement, Cut):
            cut.update(results)
    return cut


def _stored(step: AxisStep) -> set[int]:
    """Return the values of wrap units, and those computed elementwise from such alone."""
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


def _pinned(step: AxisStep) -> set[int]:
    """Return the values that are pinned along the axis, and views of such."""
    at, stored = step.axis.at, step.axis.stored(step.graph)
    pinned = {
        value
        for value, sharding in stored.items()
        if sharding.pinned and not isinstance(sharding.placements[at], Unspecified)
    }
    for node, results in step.graph.numbered():
        if moves_elements(node) and pinned.issuperset(node.refs()):
            pinned.update(results)
    return pinned
