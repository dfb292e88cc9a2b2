"""The collectives of one rank's program: what each needs, when it could begin, who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lazygt.graph.alias import WRITE_BACK, has_effect
from lazygt.graph.label import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, MEETINGS, REDUCE_SCATTER
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.passes.base import placed, rebuild, view_source
from lazygt.passes.order import dependencies

#: Between a stored parameter and its gather there may be views and these.
_CASTS = frozenset({"aten._to_copy.default", "aten.clone.default"})
#: Read nothing of their operand but its shape.
_LIKENESSES = frozenset({
    f"aten.{name}_like.default" for name in ("ones", "zeros", "empty", "full")
})  # fmt: skip
#: Bytes of all that an op reads and makes up to which it may run later than it is written:
#: it takes no longer than its launch, and keeps no memory to speak of.
SMALL = 4 << 10
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
        used: the first node that has to wait for its result and can't run later itself, as
            views, writes back, collectives and small pure ops can; the number of nodes if none
            has to. Of a stored parameter the first that computes with it, be it small or not.
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
    above, makers, values = _above(graph, before), _makers(graph), graph.values
    computed = _uses(graph, before, _passes_on)
    uses = _uses(graph, before, lambda node: _passes_on(node) or _is_small(node, values))
    found = []
    for number in numbers:
        node = graph.nodes[number]
        operand, made = node.args[0].index, node.fresh[0]
        meta = values[operand]
        assert meta is not None
        assert made is not None
        place = _REDUCE_OP.get(node.op)
        stored = _stored(graph, operand, makers) if node.op == ALL_GATHER else None
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
                uses[number] if stored is None else computed[number],
                stored,
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


def _uses(graph: Graph, before: Sequence[set[int]], passes_on: Callable[[Node], bool]) -> list[int]:
    """For each node the first that waits for it, those aside that can wait themselves."""
    found = [len(graph.nodes)] * len(graph.nodes)
    for number in reversed(range(len(graph.nodes))):
        use = found[number] if passes_on(graph.nodes[number]) else number
        for other in before[number]:
            found[other] = min(found[other], use)
    return found


def _passes_on(node: Node) -> bool:
    """Whether a node does not compute, but shows, moves or copies what is there."""
    return view_source(node) is not None or node.op in MEETINGS or node.op == WRITE_BACK


def _is_small(node: Node, values: Sequence[TensorMeta | None]) -> bool:
    """Whether a node may run later: it only computes its results, and next to nothing."""
    if node.writes or node.op == WRITE_BACK or has_effect(node):
        return False
    metas = (*(values[value] for value in node.refs()), *node.results)
    return sum(meta.nbytes for meta in metas if meta is not None) <= SMALL


def _stored(graph: Graph, value: int, makers: Sequence[int]) -> int | None:
    """The input that a value is, in another form."""
    while makers[value] >= 0:
        node: Node = graph.nodes[makers[value]]
        if node.writes or (view_source(node) is None and node.op not in _CASTS):
            return None
        value = node.refs()[0]
    return value
