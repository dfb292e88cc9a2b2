"""Buckets of collectives, and the order of their launches.

Buckets are decided once for all ranks that communicate, from the programs of all of them. Shard
sizes and even programs may differ between ranks, but the order of collectives must not. So two
collectives share a bucket only when neither depends on the other on any rank, and the size of a
bucket is the largest over the ranks.

Reductions, and gathers of computed values, are ordered by the time at which their operands are
ready: gradients from the last layer to the first. Gathers of *stored* parameters (inputs that are
sharded between runs) are ordered by first use, one wrap unit (``FSDPUnit``) at a time.
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
from lazygt.passes.base import dependencies, rebuild, rows_of, view_source
from lazygt.passes.sharding.gradients import updated_with
from lazygt.passes.sharding.marks import pass_numbers

# -- the collectives of one program: dependences, earliest start, first reader ---------------------

#: Ops, besides views, that may stand between a stored parameter and its gather.
_CASTS = frozenset({"aten._to_copy.default", "aten.clone.default"})
#: The op that accumulates a gradient over microbatches.
_SUM = "aten.add_.Tensor"
#: Ops that read only the shape of their operand.
_LIKENESSES = frozenset({
    f"aten.{name}_like.default" for name in ("ones", "zeros", "empty", "full")
})  # fmt: skip
#: Most bytes of operands and results of an op that may be delayed. The op takes no longer than its
#: launch, and keeps hardly any memory alive.
SMALL = 4 << 10
#: kind -> position of the reduce op among its arguments
_REDUCE_OP = {ALL_REDUCE: 1, REDUCE_SCATTER: 2}


class CollectiveInfo(NamedTuple):
    """One collective of a graph."""

    node: int  # its number
    kind: str  # the op
    op: str | None  # ``sum``, ``max``, ``min`` or ``prod``; None for one that reduces nothing
    axis: str
    dtype: torch.dtype
    move: tuple[int, ...]  # its dims and sizes: the arguments between the value and the op
    nbytes: int  # payload of this rank
    ready: int  # the node that computes its operand; -1 for an input
    #: the first node that has to wait for its result; the number of nodes if there is none. Views,
    #: writes back, collectives and small pure ops do not count, since they can be delayed. For a
    #: gather of a stored parameter small ops count.
    first_use: int
    stored: int | None  # the input that it gathers; None for a computed value
    ancestors: int  # bit mask of the collectives that it depends on, by position

    @property
    def signature(self) -> tuple[str, str | None, str, torch.dtype]:
        """Attributes that are equal on all ranks of a collective; shard sizes are not."""
        return self.kind, self.op, self.axis, self.dtype


@dataclass(frozen=True, slots=True)
class CollectiveAnalysis:
    """Graph with its collectives, and its dependences without the order among collectives."""

    graph: Graph
    collectives: tuple[CollectiveInfo, ...]
    before: Sequence[set[int]]  # for each node the numbers of its predecessors
    #: for each node the number of changes between forward and backward before it
    pass_numbers: Sequence[int]

    def end_of_pass(self, node: int) -> int:
        """Return the number of the first node of the next forward or backward pass."""
        return bisect_right(self.pass_numbers, self.pass_numbers[max(node, 0)])


def analyse_collectives(graph: Graph, backward: Collection[int] = ()) -> CollectiveAnalysis:
    """Collect a rank's collectives with their dependences, earliest starts and first readers.

    The time is linear in the size of the program, times its collectives / 64.

    Args:
        backward: the recorded ops of a backward pass, by number.
    """
    before = dependencies(
        graph, lambda node: has_effect(node) and node.op not in COLLECTIVES
    ).before
    numbers = [n for n, node in enumerate(graph.nodes) if node.op in COLLECTIVES]
    if not numbers:
        return CollectiveAnalysis(graph, (), before, ())
    ancestors, producers, values = _ancestor_masks(graph, before), _producers(graph), graph.values
    computing_waiters = _first_waiters(graph, before, _is_movable)
    blocks = _scattered_blocks(graph)
    waiters = _first_waiters(
        graph,
        before,
        lambda node: _is_movable(node) or _is_gradient_sum(node, blocks) or _is_small(node, values),
    )
    collectives = []
    for number in numbers:
        node = graph.nodes[number]
        operand, result = node.args[0].index, node.fresh[0]
        meta = values[operand]
        assert meta is not None
        assert result is not None
        op_position = _REDUCE_OP.get(node.op)
        input_number = _gathered_input(graph, operand, producers) if node.op == ALL_GATHER else None
        collectives.append(
            CollectiveInfo(
                number,
                node.op,
                None if op_position is None else node.args[op_position],
                node.args[-1],
                meta.dtype,
                tuple([arg for arg in node.args[1 : op_position or -1] if type(arg) is not Ref]),
                result.nbytes if node.op == ALL_GATHER else meta.nbytes,
                max([producers[value] for value in node.refs()]),
                waiters[number] if input_number is None else computing_waiters[number],
                input_number,
                ancestors[number],
            )
        )
    return CollectiveAnalysis(graph, tuple(collectives), before, pass_numbers(graph, backward))


def detach_likenesses(graph: Graph) -> Graph:
    """Make ``ones_like`` and the like of an all-reduced value read the value before the reduction.

    A backward begins with ones in the shape of the loss. The loss before its reduction has the same
    shape, and needs no wait.
    """
    values = graph.values
    unreduced = {
        results[0]: node.args[0].index
        for node, results in graph.numbered()
        if node.op == ALL_REDUCE and values[node.args[0].index] == values[results[0]]
    }
    rows = rows_of(graph)
    changed = False
    for number, row in enumerate(rows):
        args = row.node.args
        if row.node.op in _LIKENESSES and type(args[0]) is Ref and args[0].index in unreduced:
            replacement = replace(row.node, args=(ref(unreduced[args[0].index]), *args[1:]))
            rows[number], changed = row._replace(node=replacement), True
    return rebuild(graph, rows) if changed else graph


def is_never_bucketed(collective: CollectiveInfo) -> bool:
    """Return whether a collective never shares a bucket with others."""
    return collective.kind in EXCHANGES_OF_ROWS | {ALL_TO_ALL, SEND_RECV}


def _ancestor_masks(graph: Graph, before: Sequence[set[int]]) -> list[int]:
    """Return for each node the bit mask of the collectives that it depends on."""
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


def _producers(graph: Graph) -> list[int]:
    """Return the number of the node that produces each value; -1 for inputs."""
    producers = [-1] * len(graph.inputs)
    for number, node in enumerate(graph.nodes):
        producers += [number] * len(node.results)
    return producers


def _first_waiters(
    graph: Graph, before: Sequence[set[int]], is_movable: Callable[[Node], bool]
) -> list[int]:
    """Return for each node the first node that waits for it.

    Nodes for which ``is_movable`` is true do not wait; the nodes that wait for them count instead.
    """
    waiters = [len(graph.nodes)] * len(graph.nodes)
    for number in reversed(range(len(graph.nodes))):
        waiter = waiters[number] if is_movable(graph.nodes[number]) else number
        for other in before[number]:
            waiters[other] = min(waiters[other], waiter)
    return waiters


def _is_movable(node: Node) -> bool:
    """Return whether a node is a view, a collective or a write back, which can be delayed."""
    return view_source(node) is not None or node.op in COLLECTIVES or node.op == WRITE_BACK


def _scattered_blocks(graph: Graph) -> set[int]:
    """Return the results of reduce-scatters, and views of them."""
    blocks: set[int] = set()
    for node, results in graph.numbered():
        if node.op == REDUCE_SCATTER or (view_source(node) in blocks):
            blocks.update(results)
    return blocks


def _is_gradient_sum(node: Node, reduced: Set[int]) -> bool:
    """Return whether a node accumulates a reduce-scattered block over microbatches.

    The node can be delayed until the sum is read.

    Args:
        reduced: results of reduce-scatters.
    """
    return node.op == _SUM and not reduced.isdisjoint(node.refs()[1:])


def _is_small(node: Node, values: Sequence[TensorMeta | None]) -> bool:
    """Return whether a node is pure and small, so that it can be delayed."""
    if node.writes or node.op == WRITE_BACK or has_effect(node):
        return False
    metas = (*(values[value] for value in node.refs()), *node.results)
    return sum(meta.nbytes for meta in metas if meta is not None) <= SMALL


def _gathered_input(graph: Graph, value: int, producers: Sequence[int]) -> int | None:
    """Return the input of which a value is a view or cast; None if the value is computed."""
    while producers[value] >= 0:
        node: Node = graph.nodes[producers[value]]
        if node.writes or (view_source(node) is None and node.op not in _CASTS):
            return None
        value = node.refs()[0]
    return value


# -- buckets ---------------------------------------------------------------------------------------

#: Bytes of a bucket, as in torch's DistributedDataParallel.
CAP = 25 << 20
#: Bytes of a bucket with reductions of several wrap units. The cap is small, so that one unit's
#: gradients are not kept alive for another's.
MIXED = 64 << 10


@dataclass(frozen=True, slots=True)
class Caps:
    """Size limits of buckets. The cap of a wrap unit, where there is one, replaces both limits."""

    bucket: int = CAP  # bytes of a bucket
    #: bytes from which a value is not packed with others: on a CPU packing takes longer than a
    #: launch
    alone: int = CAP
    units: Mapping[int, FSDPUnit] = field(default_factory=dict)  # input -> its wrap unit

    def bucket_of(self, unit: FSDPUnit | None) -> int:
        """Return the most bytes of a bucket of a unit's values."""
        return self.bucket if unit is None or unit.cap_bytes is None else unit.cap_bytes

    def alone_of(self, unit: FSDPUnit | None) -> int:
        """Return the bytes from which a value of a unit is not packed with others."""
        return self.alone if unit is None or unit.cap_bytes is None else unit.cap_bytes


@dataclass(slots=True)
class Bucket:
    """Collectives that are launched as one."""

    members: list[int]  # positions among the program's collectives
    nbytes: int = 0  # payload of all members, on the rank with the largest
    #: the wrap unit of gathered parameters, or of the first reduced gradient
    unit: FSDPUnit | None = None
    #: the gathered inputs; empty for all other collectives
    stored: set[int] = field(default_factory=set)

    @property
    def limited(self) -> bool:
        """True if its launch waits for earlier collectives of its kind in flight."""
        return self.unit is None or self.unit.limit_all_gathers


def have_same_collectives(analyses: Sequence[CollectiveAnalysis]) -> bool:
    """Return whether all ranks run the same collectives in the same order."""
    return len({tuple([m.signature for m in analysis.collectives]) for analysis in analyses}) == 1


def buckets(analyses: Sequence[CollectiveAnalysis], caps: Caps) -> list[Bucket]:
    """Return the buckets in launch order, for ranks that ``have_same_collectives``."""
    search = _Buckets(analyses, caps)
    for position in _topological_order(search.ancestors, search.ordered_by):
        search.add(position)
    return search.ordered()


def unbucketed(analysis: CollectiveAnalysis) -> list[Bucket]:
    """Return one bucket for each collective, in program order."""
    return [
        _single_bucket(position, collective)
        for position, collective in enumerate(analysis.collectives)
    ]


def _single_bucket(position: int, collective: CollectiveInfo) -> Bucket:
    stored = set() if collective.stored is None else {collective.stored}
    return Bucket([position], collective.nbytes, None, stored)


class _Buckets:
    """Greedy bucketing in one walk over the collectives."""

    def __init__(self, analyses: Sequence[CollectiveAnalysis], caps: Caps) -> None:
        self.analyses, self.caps = analyses, caps
        self.collectives = analyses[0].collectives
        #: for each collective the positions of those that it depends on, on any rank
        self.ancestors = [
            sorted({position for per_rank in of_ranks for position in _bits(per_rank.ancestors)})
            for of_ranks in zip(*(analysis.collectives for analysis in analyses), strict=True)
        ]
        #: the same as bit masks
        self.masks = [
            reduce(or_, [per_rank.ancestors for per_rank in of_ranks])
            for of_ranks in zip(*(analysis.collectives for analysis in analyses), strict=True)
        ]
        #: for each collective the node by which it is ordered: the one that computes its operand;
        #: for a gather of a stored parameter its first reader
        self.ordered_by = [
            info.ready if info.stored is None else info.first_use for info in self.collectives
        ]
        #: reduce-scatter's node -> wrap unit of the gradient
        self.reduced = reduced_units(analyses[0].graph, caps.units)
        #: position -> its bucket
        self.home: dict[int, Bucket] = {}
        #: signature -> the bucket that collectives of it may still join
        self.open: dict[object, Bucket] = {}
        self.all: list[Bucket] = []

    def add(self, position: int) -> None:
        """Put the next collective into the open bucket of its signature, or into a new one."""
        collective = self.collectives[position]
        single = self._single_bucket(position)
        key = (collective.signature, collective.stored is None)
        bucket = self.open.get(key)
        if bucket is not None and self._fits(bucket, single, position):
            bucket.members.append(position)
            bucket.nbytes += single.nbytes
            bucket.stored |= single.stored
            self.home[position] = bucket
            return
        self.home[position] = single
        self.all.append(single)
        if not is_never_bucketed(collective) and single.nbytes < self.caps.alone_of(single.unit):
            self.open[key] = single

    def ordered(self) -> list[Bucket]:
        """Return the buckets in the order of launch."""
        index = {id(bucket): number for number, bucket in enumerate(self.all)}
        above = [
            [index[id(other)] for other in self._direct_predecessors(bucket)] for bucket in self.all
        ]  # fmt: skip
        return [self.all[number] for number in _topological_order(above, self._start_nodes(above))]

    def _single_bucket(self, position: int) -> Bucket:
        """Return the bucket of one collective, with its bytes on the rank that sends most."""
        bucket = _single_bucket(position, self.collectives[position])
        bucket.nbytes = max(analysis.collectives[position].nbytes for analysis in self.analyses)
        bucket.unit = self.reduced.get(self.collectives[position].node)
        for number in bucket.stored:
            bucket.unit = self.caps.units.get(number)
        return bucket

    def _fits(self, bucket: Bucket, single: Bucket, position: int) -> bool:
        """Return whether a collective, alone in the bucket ``single``, may join a bucket."""
        units = bucket.unit, single.unit
        return (
            bucket.nbytes + single.nbytes <= min(map(self.caps.bucket_of, units))
            and single.nbytes < min(map(self.caps.alone_of, units))
            and (bucket.unit == single.unit or self._may_mix(bucket, single))
            and self._pass_number(bucket.members[0]) == self._pass_number(position)
            and bucket.stored.isdisjoint(single.stored)
            and not self._would_delay_reader(bucket, position)
            and not self._depends_on(position, bucket)
        )

    def _may_mix(self, bucket: Bucket, single: Bucket) -> bool:
        """Return whether collectives of different wrap units may share a bucket."""
        return not bucket.stored and bucket.nbytes + single.nbytes <= MIXED

    def _pass_number(self, position: int) -> int:
        """Return the number of the forward or backward pass of a reduce-scatter; 0 for others."""
        collective = self.collectives[position]
        if collective.kind != REDUCE_SCATTER:
            return 0
        return self.analyses[0].pass_numbers[max(collective.ready, 0)]

    def _would_delay_reader(self, bucket: Bucket, position: int) -> bool:
        """Return whether a reader of the bucket would have to wait for the collective's operand."""
        return any(
            analysis.collectives[position].stored is None
            and min(analysis.collectives[member].first_use for member in bucket.members)
            <= analysis.collectives[position].ready
            for analysis in self.analyses
        )

    def _depends_on(self, position: int, target: Bucket) -> bool:
        """Return whether a collective depends on a bucket, directly or through other buckets."""
        target_mask = self._member_mask(target)
        seen, todo = 0, self.masks[position]
        while todo and not todo & target_mask:
            bucket = self.home[todo.bit_length() - 1]
            seen |= self._member_mask(bucket)
            for member in bucket.members:
                todo |= self.masks[member]
            todo &= ~seen
        return bool(todo)

    def _member_mask(self, bucket: Bucket) -> int:
        """Return the members of a bucket as a bit mask."""
        return sum(1 << member for member in bucket.members)

    def _direct_predecessors(self, bucket: Bucket) -> list[Bucket]:
        """Return the buckets on which a bucket directly depends."""
        return [self.home[other] for member in bucket.members for other in self.ancestors[member]]

    def _start_nodes(self, predecessors: Sequence[Sequence[int]]) -> list[int]:
        """Return for each bucket the number of the node before which it should be launched.

        No bucket is launched before the first uses of its predecessors: the buckets after it in
        launch order would have to wait for them too.

        Args:
            predecessors: for each bucket its predecessors.
        """
        starts = [
            max(*(self.ordered_by[member] for member in bucket.members),
                *(self._first_use(self.all[other]) for other in others), -1)
            for bucket, others in zip(self.all, predecessors, strict=True)
        ]  # fmt: skip
        # a gather of stored parameters needs no operand: it runs during the use of the one before
        gathers = [number for number, bucket in enumerate(self.all) if bucket.stored]
        gathers.sort(key=lambda number: self._first_use(self.all[number]))
        for number, previous in zip(gathers, [None, *gathers], strict=False):
            starts[number] = -1 if previous is None else self._first_use(self.all[previous]) - 1
        return starts

    def _first_use(self, bucket: Bucket) -> int:
        """Return the first node that has to wait for a member of the bucket."""
        return min(self.collectives[member].first_use for member in bucket.members)


def _topological_order(before: Sequence[Sequence[int]], priority: Sequence[int]) -> list[int]:
    """Return a topological order (Kahn's algorithm); ready items are taken by ``priority``.

    Args:
        before: for each item its predecessors.
        priority: for each item its priority; the smallest goes first.
    """
    predecessors = [set(others) for others in before]
    successors: list[list[int]] = [[] for _ in before]
    for number, others in enumerate(predecessors):
        for other in others:
            successors[other].append(number)
    in_degree = [len(others) for others in predecessors]
    ready = [(priority[number], number) for number, count in enumerate(in_degree) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for successor in successors[number]:
            in_degree[successor] -= 1
            if not in_degree[successor]:
                heapq.heappush(ready, (priority[successor], successor))
    assert len(order) == len(in_degree), "buckets depend on each other"
    return order


def _bits(mask: int) -> list[int]:
    """Return the positions of the set bits."""
    return [position for position in range(mask.bit_length()) if mask >> position & 1]


# -- wrap units of reduced gradients ---------------------------------------------------------------


def reduced_units(graph: Graph, units: Mapping[int, FSDPUnit]) -> dict[int, FSDPUnit]:
    """Return the wrap unit of each reduce-scatter of a rank's program, by number of the node.

    The unit is that of the parameter that is updated with the reduced gradient, else the first unit
    with a parameter block of the same shape.

    Args:
        units: input -> its wrap unit.
    """
    scatters = {
        number: results.start
        for number, (node, results) in enumerate(graph.numbered())
        if node.op == REDUCE_SCATTER
    }
    if not scatters or not units:
        return {}
    updates, metas = updated_with(graph, units), graph.values
    for node, results in reversed(list(graph.numbered())):
        source = view_source(node)
        if source is not None and results[0] in updates:
            updates.setdefault(source, updates[results[0]])
    shapes: dict[tuple[int, ...], FSDPUnit] = {}
    for value, unit in units.items():
        shapes.setdefault(graph.inputs[value].shape, unit)
    reduced = {}
    for number, result in scatters.items():
        meta = metas[result]
        unit_of_shape = shapes.get(meta.shape) if meta is not None else None
        reduced_unit = updates.get(result, unit_of_shape)
        if reduced_unit is not None:
            reduced[number] = reduced_unit
    return reduced
