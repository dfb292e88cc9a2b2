"""fuse: operator fusion. Groups of pointwise ops and reductions become one ``lazygt.fused`` node.

Horizontal (``_foreach``) ops that feed each other tensor by tensor form groups of their own kind.

Results do not change by a bit as long as the members are run one by one. A compiled group keeps its
temporaries in registers, and rounds as the compiler does.

Grouping is greedy, in one walk along the dependences. A group is closed when a node that cannot be
a member depends on it, and runs at the position of its last member. A group does not grow over
other work where that would keep large operands alive, as in gradient accumulation. A group without
gain is not fused: see ``compile_gain``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from lazygt.graph.alias import last_uses
from lazygt.graph.fusion import Metas, is_fusible
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import FUSED, Arg, Graph, Node, Param, Ref, map_arg, ref
from lazygt.graph.per_tensor import LANES, lane_count, lanes_of, slice_node
from lazygt.machine import Machine, default_machine
from lazygt.passes.base import (
    Dependencies,
    NodeRow,
    dependencies,
    moving_views,
    rebuild,
    rows_of,
    scheduled,
    view_source,
)
from lazygt.passes.foreach import SMALL
from lazygt.passes.guards import fits, guard, row_major

#: Most members of a group: compile time grows with them.
MAX_MEMBERS = 256
#: Most members of a group of horizontal ops, since code for several tensors is compiled together.
MAX_HORIZONTAL = 16


class Prices(NamedTuple):
    """Cost model of fusion, in seconds."""

    call: float  # of a call of compiled code
    launch: float  # of the launch of one op
    byte: float  # of a byte that is read from or written to memory

    @staticmethod
    def of(machine: Machine) -> Prices:
        """Return the prices of a machine."""
        return Prices(machine.host.call, machine.host.launch, 1 / machine.memory.bandwidth)


class Fuse:
    """Fusion of the groups with a gain into ``lazygt.fused`` nodes.

    Args:
        machine: gives the prices; None: ``cpu-generic``.
    """

    name = "fuse"

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine

    @cached_property
    def prices(self) -> Prices:
        """Prices of the machine."""
        return Prices.of(self._machine or default_machine("cpu"))

    def run(self, graph: Graph) -> Graph:
        order, context = dependencies(graph), GroupContext(graph)
        candidate_groups = [
            group.members for group in _Groups(graph, context.metas, order).all_groups()
        ]
        prices = self.prices
        groups = [
            group
            for group in candidate_groups
            if len(group) > 1 and _is_profitable(context, group, prices)
        ]
        if not groups:
            return graph
        units = scheduled(order.before, groups)
        return rebuild(graph, [_fused(context, unit) for unit in units])


class Candidate(NamedTuple):
    """Group of nodes that could be fused; often a single node."""

    members: list[int]  # node numbers
    gain: float  # seconds saved, see ``compile_gain``; the group is fused when the gain is above 0
    closed: str  # the reason why the group does not grow further; empty: the graph ended


def candidates(graph: Graph, prices: Prices) -> list[Candidate]:
    """Return the groups of a graph that could be fused, with their gains."""
    context = GroupContext(graph)
    groups = _Groups(graph, context.metas, dependencies(graph)).all_groups()
    return [
        Candidate(group.members, compile_gain(context, group.members, prices), group.closed)
        for group in groups
    ]


class GroupContext:
    """Graph with tables for repeated queries about groups of its nodes.

    Attributes:
        metas: of every value.
        rows: the nodes with the numbers of their results.
        readers: for each value the nodes that read or write it.
        outputs: the graph's outputs.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.metas = graph.values
        self.rows = rows_of(graph)
        self.readers: list[list[int]] = [[] for _ in self.metas]
        for row in self.rows:
            for value in (*row.node.refs(), *row.node.writes):
                self.readers[value].append(row.source)
        self.outputs = set(graph.outputs)

    def escaping(self, group: Sequence[int]) -> list[int]:
        """Return the results of a group's members that are read outside of the group."""
        members = set(group)
        return [
            value
            for number in group
            for value in self.rows[number].results
            if value in self.outputs or not members.issuperset(self.readers[value])
        ]

    def written(self, group: Sequence[int]) -> dict[int, int]:
        """Return operand -> last version, for the operands that a group's members write."""
        latest: dict[int, int] = {}
        origin = {value: value for value in self.operands(group)}  # version -> its operand
        for row in (self.rows[number] for number in group):
            versions = row.results[len(row.node.fresh) :]
            for target, version in zip(row.node.writes, versions, strict=True):
                if target in origin:
                    origin[version] = origin[target]
                    latest[origin[target]] = version
        return latest

    def operands(self, group: Sequence[int]) -> list[int]:
        """Return the values that a group's members read from outside, in order of use."""
        inner = {value for number in group for value in self.rows[number].results}
        outer: dict[int, None] = {}
        for number in group:
            node = self.rows[number].node
            outer.update(dict.fromkeys(v for v in (*node.refs(), *node.writes) if v not in inner))
        return list(outer)


def compile_gain(context: GroupContext, group: Sequence[int], prices: Prices) -> float:
    """Return the seconds that compiling a group saves per run; at most 0: no gain.

    Without fusion each member is launched, reads its operands and writes its results. A compiled
    group is one call, and values between members stay in registers.
    """
    if len(group) == 1:
        return -prices.call
    return _gain(prices, *_launches(context, group), saved_bytes(context, group))


def _launches(context: GroupContext, group: Sequence[int]) -> tuple[int, int]:
    """Return the number of launches without fusion, and of calls of compiled code."""
    tensors = lane_count(context.rows[group[0]].node)
    return len(group) * max(tensors, 1), max(math.ceil(tensors / LANES), 1)


def _gain(prices: Prices, launches: int, calls: int, saved: int) -> float:
    """Return the seconds that a compiled group saves.

    Args:
        saved: bytes that are neither read nor written.
    """
    return (launches - calls) * prices.launch + saved * prices.byte - calls * prices.call


def saved_bytes(context: GroupContext, group: Sequence[int]) -> int:
    """Return the bytes of memory traffic that a compiled group saves."""
    return sum(times * meta.nbytes for meta, times in _saved(context, group))


def _saved(context: GroupContext, group: Sequence[int]) -> list[tuple[TensorMeta, int]]:
    """Return (meta, number of reads and writes that a compiled group saves) for each tensor."""
    times: Counter[int] = Counter()
    for number in group:
        times.update({*context.rows[number].node.refs()})
        times.update(context.rows[number].results)
    times.subtract(context.operands(group))
    times.subtract({*context.escaping(group), *context.written(group).values()})
    metas = ((context.metas[value], count) for value, count in times.items() if count)
    return [(meta, count) for meta, count in metas if meta is not None]


def _is_profitable(context: GroupContext, group: Sequence[int], prices: Prices) -> bool:
    """Return whether a group has a gain, and can be compiled."""
    saved = _saved(context, group)
    constants = (prices, *_launches(context, group), tuple([times for _, times in saved]))
    if not guard(_gains, *[meta for meta, _ in saved], constants=constants):
        return False
    if not lane_count(context.rows[group[0]].node):
        return True
    body = _fused(context, list(group)).node.body
    assert body is not None
    return lanes_of(body, lambda meta: guard(row_major, meta)) is not None


def _gains(
    prices: Prices, launches: int, calls: int, times: tuple[int, ...], *metas: TensorMeta
) -> bool:
    """Return whether compiling saves time, if each tensor is moved ``times`` less often."""
    saved = sum(count * meta.nbytes for count, meta in zip(times, metas, strict=True))
    return _gain(prices, launches, calls, saved) > 0


# -- grouping of nodes ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """Group of nodes under construction. Memory is named by the first value in it."""

    #: iteration space: the meta of the largest member; None: a group of horizontal ops
    space: TensorMeta | None
    members: list[int] = field(default_factory=list)
    #: memory -> the (meta, offset) views of it that members read or write
    views: dict[int, set[tuple[TensorMeta | None, int | None]]] = field(default_factory=dict)
    #: memory that members write
    written: set[int] = field(default_factory=set)
    #: of horizontal ops: the number of tensors, and memory -> index of its tensor in the lists
    tensor_count: int = 0
    list_index: dict[int, int] = field(default_factory=dict)
    closed: str = ""  # the reason why it does not grow further; empty: it may

    def clashes(self, other: _Group) -> bool:
        """Return whether one group writes memory that the two groups access through several views.

        A fused node writes its operands at its end, so all accesses to written memory must be
        through the same view.
        """
        return any(
            len(self.views.get(home, set()) | other.views.get(home, set())) > 1
            for home in self.written | other.written
        )

    def crosses(self, other: _Group) -> bool:
        """Return whether the two groups use a memory for tensors at different list indices."""
        return any(
            other.list_index.get(home, index) != index for home, index in self.list_index.items()
        )

    def absorb(self, other: _Group) -> None:
        """Move all members of the other group into this one."""
        self.members += other.members
        self.list_index |= other.list_index
        self.written |= other.written
        for home, views in other.views.items():
            self.views.setdefault(home, set()).update(views)
        other.members = []


class _Groups:
    """Greedy grouping in one walk over the nodes.

    Args:
        metas: of every value.
        order: constraints on the order of the nodes.
    """

    def __init__(self, graph: Graph, metas: Metas, order: Dependencies) -> None:
        self.graph, self.metas, self.order = graph, metas, order
        self.moving_views_of = moving_views(graph)
        self.results = [results for _, results in graph.numbered()]
        self.uses = last_uses(graph)
        #: node -> the open group that it is in
        self.open: dict[int, _Group] = {}
        self.all: list[_Group] = []
        #: the last computing node that cannot be a member
        self.last_barrier = -1

    def all_groups(self) -> list[_Group]:
        """Return the groups, with their members in order."""
        for number, node in enumerate(self.graph.nodes):
            needed = self._open_before(number)
            single = self._as_group(number, node)
            if single is not None:
                self._add(single, needed)
            else:
                for group in needed:
                    self._close(group, f"{node.op} needs it")
                if view_source(node) is None:
                    self.last_barrier = number
        groups = [group for group in self.all if group.members]
        for group in groups:
            group.members.sort()
        return groups

    def _open_before(self, number: int) -> list[_Group]:
        """Return the groups that may grow and on which a node depends, the largest first."""
        groups = {
            id(group): group
            for other in self.order.before[number]
            if (group := self.open.get(other)) is not None
        }
        return sorted(groups.values(), key=lambda group: (-len(group.members), group.members[0]))

    def _as_group(self, number: int, node: Node) -> _Group | None:
        """Return the node as a group of one member; None if the node cannot be fused."""
        tensor_count = lane_count(node)
        if not tensor_count:
            return self._new_group(number, node) if is_fusible(node, self.metas) else None
        results = self.results[number]
        group = _Group(None, [number], tensor_count=tensor_count)
        for index in range(tensor_count):
            for value in (*slice_node(node, index).refs(), results[index]):
                memory = self.order.memory[value]
                if group.list_index.setdefault(memory, index) != index:
                    return None
                group.views.setdefault(memory, set()).add(
                    (self.metas[value], self.moving_views_of.get(value))
                )
        group.written.update(self.order.memory[target] for target in node.writes)
        return group

    def _new_group(self, number: int, node: Node) -> _Group:
        """Return a group of one pointwise op or reduction."""
        memory = self.order.memory
        tensors = [self.metas[value] for value in node.refs()] + list(node.results)
        metas = list(dict.fromkeys(meta for meta in tensors if meta is not None))
        group = _Group(metas[guard(_widest, *metas) if len(metas) > 1 else 0], [number])
        for value in (*node.refs(), *node.writes):
            view = self.metas[value], self.moving_views_of.get(value)
            group.views.setdefault(memory[value], set()).add(view)
        group.written.update(memory[target] for target in node.writes)
        return group

    def _add(self, single: _Group, needed: list[_Group]) -> None:
        """Merge a node with the groups on which it depends, or make it a new group.

        Args:
            single: the node as a group of one member.
            needed: the groups on which it depends; those that cannot be merged are closed.
        """
        target: _Group | None = None
        for group in needed:
            reason = self._conflict(target, group, single) or self._keeps_operands_alive(group)
            if reason:
                self._close(group, reason)
            elif target is None:
                target = group
            else:
                self.open.update(dict.fromkeys(group.members, target))
                target.absorb(group)
        if target is None:
            target = single
            self.all.append(target)
            self.open[single.members[0]] = target
        else:
            self.open[single.members[0]] = target
            target.absorb(single)

    @staticmethod
    def _conflict(target: _Group | None, group: _Group, single: _Group) -> str:
        """Return the reason why the three groups cannot be merged; empty: they can."""
        if single.tensor_count != group.tensor_count:
            return "an op on one tensor and an op on many need each other"
        if group.crosses(single) or (target is not None and target.crosses(group)):
            return "it meets what is computed for another tensor"
        space, group_space = single.space, group.space
        if space is not None and group_space is not None and space is not group_space \
                and guard(_wider, space, group_space):  # fmt: skip
            return "a larger op needs it"
        most = MAX_HORIZONTAL if single.tensor_count else MAX_MEMBERS
        if len(group.members) + 1 + (len(target.members) if target is not None else 0) > most:
            return f"it would have more than {most} members"
        if group.clashes(single) or (target is not None and target.clashes(group)):
            return "an op writes memory that another sees in another shape"
        return ""

    def _keeps_operands_alive(self, group: _Group) -> str:
        """Return the reason why a group must not grow; empty: it may.

        A group that grows over other work keeps its operands alive meanwhile.
        """
        if group.space is None or max(group.members) > self.last_barrier:
            return ""
        nodes = [self.graph.nodes[number] for number in group.members]
        written = {self.order.memory[target] for node in nodes for target in node.writes}
        last_read = {
            value for node in nodes for value in node.refs() if self._is_last(value, group)
        }
        results = {
            value
            for node, number in zip(nodes, group.members, strict=True)
            for value in self.results[number][: len(node.fresh)]
            if self.uses[value] > number and self.uses[value] not in group.members
        }
        inner = {value for number in group.members for value in self.results[number]}
        dying = [v for v in last_read - inner if self.order.memory[v] not in written]
        large = [self._is_large(value, group.space) for value in dying]
        if sum(large) > sum(self.metas[value] == group.space for value in results):
            return "its operands would be kept until the next op that takes its result"
        return ""

    def _is_last(self, value: int, group: _Group) -> bool:
        """Return whether the last reader of a value is a member of a group."""
        return self.uses[value] in group.members

    def _is_large(self, value: int, space: TensorMeta) -> bool:
        """Return whether a value fills a group's iteration space, and that is not small."""
        return self.metas[value] == space and not guard(fits, space, constants=(SMALL,))

    def _close(self, group: _Group, reason: str) -> None:
        """Let a group grow no further."""
        group.closed = reason
        for member in group.members:
            self.open.pop(member, None)


def _widest(*metas: TensorMeta) -> int:
    """Return the index of the tensor with the most elements."""
    return max(range(len(metas)), key=lambda which: metas[which].numel)


def _wider(meta: TensorMeta, other: TensorMeta) -> bool:
    """Return whether a tensor has more elements than another."""
    return meta.numel > other.numel


# -- the fused node ------------------------------------------------------------------------------


def _fused(context: GroupContext, unit: list[int]) -> NodeRow:
    """Return the fused node of a group; a single node as it is."""
    rows = [context.rows[number] for number in unit]
    if len(rows) == 1:
        return rows[0]
    operands, written = context.operands(unit), context.written(unit)
    last_versions = list(written.values())
    new_outputs = [value for value in context.escaping(unit) if value not in last_versions]
    body, params = _body(context, rows, operands, [*new_outputs, *last_versions])
    metas = context.metas
    node = Node(
        FUSED,
        (*map(ref, operands), *params),
        (),
        tuple(metas[value] for value in new_outputs),
        tuple(written),
        tuple(meta for value in last_versions if (meta := metas[value]) is not None),
        body=body,
    )
    return NodeRow(node, [*new_outputs, *last_versions], unit[0])


def _body(
    context: GroupContext, rows: list[NodeRow], operands: list[int], outputs: list[int]
) -> tuple[Graph, list[Param]]:
    """Return the members as a subgraph, and the run-time numbers that they use.

    Args:
        operands, outputs: the subgraph's inputs and outputs, as values of the full graph.
    """
    numbers = {value: inner for inner, value in enumerate(operands)}
    params: dict[int, int] = {}

    def leaf(arg: Arg) -> Arg:
        if type(arg) is Ref:
            return ref(numbers[arg.index])
        if type(arg) is Param:
            return Param(params.setdefault(arg.index, len(params)))
        return arg

    nodes = []
    count = len(operands)
    for row in rows:
        node = row.node
        kwargs = tuple((name, map_arg(arg, leaf)) for name, arg in node.kwargs)
        writes = tuple(numbers[target] for target in node.writes)
        nodes.append(
            Node(node.op, map_arg(node.args, leaf), kwargs, node.fresh, writes, node.written)
        )
        for value in row.results:
            numbers[value] = count
            count += 1
    graph = context.graph
    inputs = tuple(meta for value in operands if (meta := context.metas[value]) is not None)
    body = Graph(
        inputs,
        tuple(graph.params[index] for index in params),
        tuple(nodes),
        tuple(numbers[value] for value in outputs),
        tuple(graph.line(row.source) for row in rows) if graph.lines else (),
        tuple(graph.origin(row.source) for row in rows),
    )
    return body, [Param(index) for index in params]
