"""The collectives of one rank's program: what each needs, when it could begin, who waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lazygt.graph.alias import has_effect
from lazygt.graph.label import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, MEETINGS, REDUCE_SCATTER
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.passes.base import placed, rebuild, view_source
from lazygt.passes.order import dependencies

#: Between a stored parameter and its gather there may be views and these.
_CASTS = frozenset({"aten._to_copy.default", "aten.clone.default"})
#: Read nothing of their operand but its shape.
_LIKENESSES = frozenset({
    f"aten.{name}_like.default" for name in ("ones", "zeros", "empty", "full")
})  # fmt: skip
#: kind -> where the reduce op stands among its arguments
_REDUCE_OP = {ALL_REDUCE: 1, REDUCE_SCATTER: 2}


class Meeting(NamedTuple):
    """One collective of a graph.

    Attributes:
        node: its number.
        kind: the op.
        op: ``sum``, ``max``, ``min`` or ``prod``; None for one that reduces nothing.
        move: its arguments between the value and the op.
        nbytes: payload of this rank.
        ready: the node that makes its operand; -1 for an input.
        used: the first node that computes with its result, views and collectives aside; the
            number of nodes if none does.
        stored: the input that it gathers; None for what is computed.
        above: the meetings that it depends on, as bits.
    """

    node: int
    kind: str
    op: str | None
    axis: str
    dtype: torch.dtype
    move: tuple[int, ...]
    nbytes: int
    ready: int
    used: int
    stored: int | None
    above: int

    @property
    def signature(self) -> tuple[str, str | None, str, torch.dtype]:
        """What is equal on all ranks that meet; sizes of blocks are not."""
        return self.kind, self.op, self.axis, self.dtype


@dataclass(frozen=True, slots=True)
class Survey:
    """A graph, its meetings in order, and what has to come before what, meetings set free."""

    graph: Graph
    meetings: tuple[Meeting, ...]
    before: Sequence[set[int]]


def survey(graph: Graph) -> Survey:
    """Look at a rank's program; linear in its size, times its meetings / 64."""
    before = dependencies(graph, lambda node: has_effect(node) and node.op not in MEETINGS).before
    numbers = [n for n, node in enumerate(graph.nodes) if node.op in MEETINGS]
    if not numbers:
        return Survey(graph, (), before)
    above, makers, uses, values = _above(graph, before), _makers(graph), _uses(graph), graph.values
    found = []
    for number, (node, results) in enumerate(graph.numbered()):
        if node.op not in MEETINGS:
            continue
        operand, made = node.args[0].index, node.fresh[0]
        meta = values[operand]
        assert meta is not None
        assert made is not None
        place = _REDUCE_OP.get(node.op)
        found.append(
            Meeting(
                number,
                node.op,
                None if place is None else node.args[place],
                node.args[-1],
                meta.dtype,
                tuple(node.args[1 : place or -1]),
                made.nbytes if node.op == ALL_GATHER else meta.nbytes,
                makers[operand],
                uses[results[0]],
                _stored(graph, operand, makers) if node.op == ALL_GATHER else None,
                above[number],
            )
        )
    return Survey(graph, tuple(found), before)


def unhooked(graph: Graph) -> Graph:
    """The graph in which nobody waits for a reduced value to make another in its likeness.

    A backward begins with ones in the shape of the loss; the loss before its reduction has that
    shape too.
    """
    values = graph.values
    made = {
        results[0]: node.args[0].index
        for node, results in graph.numbered()
        if node.op == ALL_REDUCE and values[node.args[0].index] == values[results[0]]
    }
    rows = placed(graph)
    changed = False
    for number, row in enumerate(rows):
        args = row.node.args
        if row.node.op in _LIKENESSES and type(args[0]) is Ref and args[0].index in made:
            other = replace(row.node, args=(ref(made[args[0].index]), *args[1:]))
            rows[number], changed = row._replace(node=other), True
    return rebuild(graph, rows) if changed else graph


def moves_alone(meeting: Meeting) -> bool:
    """Whether a collective never shares its buffer with others."""
    return meeting.kind == ALL_TO_ALL


def _above(graph: Graph, before: Sequence[set[int]]) -> list[int]:
    """For each node the meetings that it depends on, as bits."""
    found: list[int] = []
    bits: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        mask = 0
        for other in before[number]:
            mask |= found[other] | bits.get(other, 0)
        found.append(mask)
        if node.op in MEETINGS:
            bits[number] = 1 << len(bits)
    return found


def _makers(graph: Graph) -> list[int]:
    """The node that makes each value."""
    found = [-1] * len(graph.inputs)
    for number, node in enumerate(graph.nodes):
        found += [number] * len(node.results)
    return found


def _uses(graph: Graph) -> list[int]:
    """For each value the first node that computes with it."""
    end = len(graph.nodes)
    found = [end] * len(graph.values)
    rows = list(enumerate(graph.numbered()))
    for number, (node, results) in reversed(rows):
        passes_on = view_source(node) is not None or node.op in MEETINGS
        use = min((found[value] for value in results), default=end) if passes_on else number
        for value in (*node.refs(), *node.writes):
            found[value] = min(found[value], use)
    return found


def _stored(graph: Graph, value: int, makers: Sequence[int]) -> int | None:
    """The input that a value is, in another form."""
    while makers[value] >= 0:
        node: Node = graph.nodes[makers[value]]
        if node.writes or (view_source(node) is None and node.op not in _CASTS):
            return None
        value = node.refs()[0]
    return value
