"""Buckets of collectives, and the order of their launches.

Buckets are decided once for all ranks that meet, from all their programs: blocks and even programs
of ranks differ, the order in which they meet may not. So two collectives share a bucket only when
neither needs the other on any rank, and sizes are those of the rank with the most.

Reductions, and gathers of computed values, go in the order in which their operands are ready:
gradients from the last layer to the first. Gathers of stored parameters go in the order in which
they are needed, a wrap unit at a time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch

from lazygt.graph.alias import WRITE_BACK, has_effect
from lazygt.graph.mesh import FSDPUnit
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    EXCHANGES_OF_ROWS,
    REDUCE_SCATTER,
    SEND_RECV,
)
from lazygt.passes.base import dependencies, placed, rebuild, view_source
from lazygt.passes.sharding.marks import turns
from lazygt.passes.updates import reduced_units

# -- the collectives of one program: dependences, earliest start, first reader ---------------------

#: Between a stored parameter and its gather there may be views and these.
_CASTS = frozenset({"aten._to_copy.default", "aten.clone.default"})
#: The op by which a backward adds a gradient to an earlier one's.
_SUM = "aten.add_.Tensor"
#: Read nothing of their operand but its shape.
_LIKENESSES = frozenset({
    f"aten.{name}_like.default" for name in ("ones", "zeros", "empty", "full")
})  # fmt: skip
#: Most bytes of an op's operands and results together for it to run later than it is written: it
#: takes no longer than its launch, and keeps hardly any memory alive.
SMALL = 4 << 10
#: kind -> position of the reduce op among its arguments
_REDUCE_OP = {ALL_REDUCE: 1, REDUCE_SCATTER: 2}


class CollectiveInfo(NamedTuple):
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
        stored: the input that it gathers; None for a computed value.
        above: the collectives that it depends on, as bits.
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
        """The attributes that are equal on all ranks that meet; sizes of blocks are not."""
        return self.kind, self.op, self.axis, self.dtype


@dataclass(frozen=True, slots=True)
class CollectiveAnalysis:
    """A graph, its collectives, and its dependences without the order among collectives.

    Attributes:
        turns: for each node the number of changes between forward and backward before it.
    """

    graph: Graph
    collectives: tuple[CollectiveInfo, ...]
    before: Sequence[set[int]]
    turns: Sequence[int]

    def end_of_turn(self, node: int) -> int:
        """Return the first node after this one that is of another forward or backward."""
        return bisect_right(self.turns, self.turns[max(node, 0)])


def analyse_collectives(graph: Graph, backward: Collection[int] = ()) -> CollectiveAnalysis:
    """Analyse a rank's program; linear in its size, times its collectives / 64.

    Args:
        backward: the recorded ops of a backward pass, by number.
    """
    before = dependencies(
        graph, lambda node: has_effect(node) and node.op not in COLLECTIVES
    ).before
    numbers = [n for n, node in enumerate(graph.nodes) if node.op in COLLECTIVES]
    if not numbers:
        return CollectiveAnalysis(graph, (), before, ())
    above, makers, values = _above(graph, before), _makers(graph), graph.values
    computed = _uses(graph, before, _passes_on)
    reduced = _reduced(graph)
    uses = _uses(
        graph,
        before,
        lambda node: _passes_on(node) or _adds_up(node, reduced) or _is_small(node, values),
    )
    collectives = []
    for number in numbers:
        node = graph.nodes[number]
        operand, result = node.args[0].index, node.fresh[0]
        meta = values[operand]
        assert meta is not None
        assert result is not None
        place = _REDUCE_OP.get(node.op)
        stored = _stored(graph, operand, makers) if node.op == ALL_GATHER else None
        collectives.append(
            CollectiveInfo(
                number,
                node.op,
                None if place is None else node.args[place],
                node.args[-1],
                meta.dtype,
                tuple([arg for arg in node.args[1 : place or -1] if type(arg) is not Ref]),
                result.nbytes if node.op == ALL_GATHER else meta.nbytes,
                max([makers[value] for value in node.refs()]),
                uses[number] if stored is None else computed[number],
                stored,
                above[number],
            )
        )
    return CollectiveAnalysis(graph, tuple(collectives), before, turns(graph, backward))


def unhooked(graph: Graph) -> Graph:
    """Return the graph with likenesses of reduced values made from the unreduced ones.

    A backward begins with ones in the shape of the loss; the loss before its reduction has that
    shape too, and needs no wait.
    """
    values = graph.values
    reduced = {
        results[0]: node.args[0].index
        for node, results in graph.numbered()
        if node.op == ALL_REDUCE and values[node.args[0].index] == values[results[0]]
    }
    rows = placed(graph)
    changed = False
    for number, row in enumerate(rows):
        args = row.node.args
        if row.node.op in _LIKENESSES and type(args[0]) is Ref and args[0].index in reduced:
            other = replace(row.node, args=(ref(reduced[args[0].index]), *args[1:]))
            rows[number], changed = row._replace(node=other), True
    return rebuild(graph, rows) if changed else graph


def moves_alone(collective: CollectiveInfo) -> bool:
    """Return whether a collective never shares its buffer with others."""
    return collective.kind in EXCHANGES_OF_ROWS | {ALL_TO_ALL, SEND_RECV}


def _above(graph: Graph, before: Sequence[set[int]]) -> list[int]:
    """Return for each node the collectives that it depends on, as bits."""
    masks: list[int] = []
    bits: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        mask = 0
        for other in before[number]:
            mask |= masks[other] | bits.get(other, 0)
        masks.append(mask)
        if node.op in COLLECTIVES:
            bits[number] = 1 << len(bits)
    return masks


def _makers(graph: Graph) -> list[int]:
    """Return the node that makes each value; -1 for inputs."""
    makers = [-1] * len(graph.inputs)
    for number, node in enumerate(graph.nodes):
        makers += [number] * len(node.results)
    return makers


def _uses(graph: Graph, before: Sequence[set[int]], passes_on: Callable[[Node], bool]) -> list[int]:
    """Return for each node the first that waits for it, except nodes that ``passes_on``."""
    uses = [len(graph.nodes)] * len(graph.nodes)
    for number in reversed(range(len(graph.nodes))):
        use = uses[number] if passes_on(graph.nodes[number]) else number
        for other in before[number]:
            uses[other] = min(uses[other], use)
    return uses


def _passes_on(node: Node) -> bool:
    """Return whether a node does not compute, but only views, moves or copies values."""
    return view_source(node) is not None or node.op in COLLECTIVES or node.op == WRITE_BACK


def _reduced(graph: Graph) -> set[int]:
    """Return the blocks that reduce-scatters make, and views of them."""
    reduced: set[int] = set()
    for node, results in graph.numbered():
        if node.op == REDUCE_SCATTER or (view_source(node) in reduced):
            reduced.update(results)
    return reduced


def _adds_up(node: Node, reduced: Set[int]) -> bool:
    """Return whether a node adds a reduced block to an earlier one, as for microbatches.

    It may run as late as the sum is read.
    """
    return node.op == _SUM and not reduced.isdisjoint(node.refs()[1:])


def _is_small(node: Node, values: Sequence[TensorMeta | None]) -> bool:
    """Return whether a node may run later: it only computes its results, and next to nothing."""
    if node.writes or node.op == WRITE_BACK or has_effect(node):
        return False
    metas = (*(values[value] for value in node.refs()), *node.results)
    return sum(meta.nbytes for meta in metas if meta is not None) <= SMALL


def _stored(graph: Graph, value: int, makers: Sequence[int]) -> int | None:
    """Return the input that a value is a view or cast of; None if it is computed."""
    while makers[value] >= 0:
        node: Node = graph.nodes[makers[value]]
        if node.writes or (view_source(node) is None and node.op not in _CASTS):
            return None
        value = node.refs()[0]
    return value


# -- buckets ---------------------------------------------------------------------------------------

#: Bytes of a bucket, as in torch's DistributedDataParallel.
CAP = 25 << 20
#: The same of one with reductions of several wrap units: one unit's gradients are not kept alive
#: for another's, except where a launch takes longer.
MIXED = 64 << 10


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits of buckets. A unit with a cap of its own packs all values smaller than that.

    Attributes:
        bucket: bytes of a bucket.
        alone: bytes from which a value is not packed with others: on a CPU packing takes longer
            than a launch.
        units: input -> the wrap unit that it belongs to.
    """

    bucket: int = CAP
    alone: int = CAP
    units: Mapping[int, FSDPUnit] = field(default_factory=dict)

    def bucket_of(self, unit: FSDPUnit | None) -> int:
        """Return the bytes of a bucket of a unit's values."""
        return self.bucket if unit is None or unit.cap_bytes is None else unit.cap_bytes

    def alone_of(self, unit: FSDPUnit | None) -> int:
        """Return the bytes from which a value of a unit is not packed with others."""
        return self.alone if unit is None or unit.cap_bytes is None else unit.cap_bytes


@dataclass(slots=True)
class Bucket:
    """Collectives that are launched as one, by their places in a program's order.

    Attributes:
        nbytes: together, on the rank with the most.
        unit: the wrap unit of gathered parameters, or of the first gradient that is reduced.
        stored: the inputs that it gathers; empty for everything else.
    """

    members: list[int]
    nbytes: int = 0
    unit: FSDPUnit | None = None
    stored: set[int] = field(default_factory=set)

    @property
    def limited(self) -> bool:
        """True if it waits for others of its kind that are under way."""
        return self.unit is None or self.unit.limit_all_gathers


def agree(analyses: Sequence[CollectiveAnalysis]) -> bool:
    """Return whether all ranks meet in the same collectives in the same order."""
    return len({tuple([m.signature for m in one.collectives]) for one in analyses}) == 1


def buckets(analyses: Sequence[CollectiveAnalysis], caps: Caps) -> list[Bucket]:
    """Return the buckets in the order of launch, for ranks that ``agree``."""
    finder = _Buckets(analyses, caps)
    for place in _in_order(finder.above, finder.wanted):
        finder.add(place)
    return finder.ordered()


def one_each(analysis: CollectiveAnalysis) -> list[Bucket]:
    """Return one bucket a collective, in the order of the program."""
    return [_alone(place, collective) for place, collective in enumerate(analysis.collectives)]


def _alone(place: int, collective: CollectiveInfo) -> Bucket:
    stored = set() if collective.stored is None else {collective.stored}
    return Bucket([place], collective.nbytes, None, stored)


class _Buckets:
    """Search for the buckets in one walk over the collectives."""

    def __init__(self, analyses: Sequence[CollectiveAnalysis], caps: Caps) -> None:
        self.analyses, self.caps = analyses, caps
        self.collectives = analyses[0].collectives
        #: for each collective those that it depends on, on any rank
        self.above = [
            sorted({place for collective in same for place in _bits(collective.above)})
            for same in zip(*(one.collectives for one in analyses), strict=True)
        ]
        #: the same as bits
        self.masks = [
            reduce(or_, [collective.above for collective in same])
            for same in zip(*(one.collectives for one in analyses), strict=True)
        ]
        self.wanted = [m.ready if m.stored is None else m.used for m in self.collectives]
        self.reduced = reduced_units(analyses[0].graph, caps.units)
        self.home: dict[int, Bucket] = {}
        self.open: dict[object, Bucket] = {}
        self.all: list[Bucket] = []

    def add(self, place: int) -> None:
        """Put the next collective into the bucket that is open for its like, or into a new one."""
        collective = self.collectives[place]
        alone = self._alone(place)
        key = (collective.signature, collective.stored is None)
        bucket = self.open.get(key)
        if bucket is not None and self._fits(bucket, alone, place):
            bucket.members.append(place)
            bucket.nbytes += alone.nbytes
            bucket.stored |= alone.stored
            self.home[place] = bucket
            return
        self.home[place] = alone
        self.all.append(alone)
        if not moves_alone(collective) and alone.nbytes < self.caps.alone_of(alone.unit):
            self.open[key] = alone

    def ordered(self) -> list[Bucket]:
        """Return the buckets in the order of launch."""
        index = {id(bucket): number for number, bucket in enumerate(self.all)}
        above = [
            [index[id(other)] for other in self._directly(bucket)] for bucket in self.all
        ]  # fmt: skip
        return [self.all[number] for number in _in_order(above, self._begins(above))]

    def _alone(self, place: int) -> Bucket:
        bucket = _alone(place, self.collectives[place])
        bucket.nbytes = max(one.collectives[place].nbytes for one in self.analyses)
        bucket.unit = self.reduced.get(self.collectives[place].node)
        for number in bucket.stored:
            bucket.unit = self.caps.units.get(number)
        return bucket

    def _fits(self, bucket: Bucket, alone: Bucket, place: int) -> bool:
        units = bucket.unit, alone.unit
        return (
            bucket.nbytes + alone.nbytes <= min(map(self.caps.bucket_of, units))
            and alone.nbytes < min(map(self.caps.alone_of, units))
            and (bucket.unit == alone.unit or self._may_mix(bucket, alone))
            and self._turn(bucket.members[0]) == self._turn(place)
            and bucket.stored.isdisjoint(alone.stored)
            and not self._delays(bucket, place)
            and not self._needs(place, bucket)
        )

    def _may_mix(self, bucket: Bucket, alone: Bucket) -> bool:
        """Return whether collectives of different units may travel together."""
        return not bucket.stored and bucket.nbytes + alone.nbytes <= MIXED

    def _turn(self, place: int) -> int:
        """Return the number of the forward or backward of a reduce-scatter; 0 for others."""
        collective = self.collectives[place]
        if collective.kind != REDUCE_SCATTER:
            return 0
        return self.analyses[0].turns[max(collective.ready, 0)]

    def _delays(self, bucket: Bucket, place: int) -> bool:
        """Return whether a reader of the bucket would wait until the collective can begin."""
        return any(
            one.collectives[place].stored is None
            and min(one.collectives[member].used for member in bucket.members)
            <= one.collectives[place].ready
            for one in self.analyses
        )

    def _needs(self, place: int, wanted: Bucket) -> bool:
        """Return whether a collective depends on a bucket, directly or by way of others."""
        sought = self._places(wanted)
        seen, todo = 0, self.masks[place]
        while todo and not todo & sought:
            bucket = self.home[todo.bit_length() - 1]
            seen |= self._places(bucket)
            for member in bucket.members:
                todo |= self.masks[member]
            todo &= ~seen
        return bool(todo)

    def _places(self, bucket: Bucket) -> int:
        """Return the members of a bucket as bits."""
        return sum(1 << member for member in bucket.members)

    def _directly(self, bucket: Bucket) -> list[Bucket]:
        """Return the other buckets that one directly depends on."""
        return [self.home[other] for member in bucket.members for other in self.above[member]]

    def _begins(self, above: Sequence[Sequence[int]]) -> list[int]:
        """Return for each bucket the node at which it is wanted to begin.

        No bucket begins before those above it have been waited for: later buckets in the order of
        launch would wait for them too.
        """
        begins = [
            max(*(self.wanted[member] for member in bucket.members),
                *(self._needed(self.all[other]) for other in others), -1)
            for bucket, others in zip(self.all, above, strict=True)
        ]  # fmt: skip
        needed = [number for number, bucket in enumerate(self.all) if bucket.stored]
        needed.sort(key=lambda number: self._needed(self.all[number]))
        for number, former in zip(needed, [None, *needed], strict=False):
            begins[number] = -1 if former is None else self._needed(self.all[former]) - 1
        return begins

    def _needed(self, bucket: Bucket) -> int:
        return min(self.collectives[member].used for member in bucket.members)


def _in_order(above: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """Return a topological order; of ready items the one that is wanted first comes first."""
    waits = [set(others) for others in above]
    followers: list[list[int]] = [[] for _ in above]
    for number, others in enumerate(waits):
        for other in others:
            followers[other].append(number)
    missing = [len(others) for others in waits]
    ready = [(wanted[number], number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (wanted[follower], follower))
    assert len(order) == len(missing), "buckets depend on each other"
    return order


def _bits(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]
