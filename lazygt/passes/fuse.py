"""fuse: groups of pointwise ops and reductions become one node with its members inside.

Horizontal ops that feed each other tensor by tensor are groups, too, of their own kind.

Bit for bit as long as the members are run one by one. A group that the compiler takes over keeps
its temporaries in registers, and rounds as the compiler does.

A group grows along its dependences, from the first node to the last. It is closed when a node
that can't be a member needs it, and stands where its last member stood. So it does not grow over
other work where that would keep large operands alive, such as gradients of several microbatches
that are added up. A group without gain is not fused: see ``worth``.
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
from lazygt.graph.per_tensor import LANES, lane_count, lanes_of, part
from lazygt.machine import Machine, default_machine
from lazygt.passes.base import (
    Dependencies,
    Placed,
    dependencies,
    moving_views,
    placed,
    rebuild,
    scheduled,
    view_source,
)
from lazygt.passes.foreach import SMALL
from lazygt.passes.questions import ask, fits, row_major

#: Members of a group at most: compile time grows with them.
MOST_MEMBERS = 256
#: The same of a group of horizontal ops, since several of its lanes are compiled together.
MOST_HORIZONTAL = 16


class Prices(NamedTuple):
    """Seconds that fusing weighs.

    Attributes:
        call: of compiled code.
        launch: of one op.
        byte: on its way from or to memory.
    """

    call: float
    launch: float
    byte: float

    @staticmethod
    def of(machine: Machine) -> Prices:
        """Return the prices of a machine."""
        return Prices(machine.host.call, machine.host.launch, 1 / machine.memory.bandwidth)


class Fuse:
    """Fusion of the groups that are worth it into ``lazygt.fused`` nodes.

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
        order, around = dependencies(graph), Surroundings(graph)
        found = [group.members for group in _Groups(graph, around.metas, order).found()]
        prices = self.prices
        groups = [each for each in found if len(each) > 1 and _fits(around, each, prices)]
        if not groups:
            return graph
        units = scheduled(order.before, groups)
        return rebuild(graph, [_unit(around, unit) for unit in units])


class Candidate(NamedTuple):
    """Nodes that belong together, worth fusing or not; often one alone.

    Attributes:
        members: their numbers.
        gain: see ``worth``; they are fused when it is above 0.
        closed: the reason for the group's end; empty: the graph ended.
    """

    members: list[int]
    gain: float
    closed: str


def candidates(graph: Graph, prices: Prices) -> list[Candidate]:
    """Return the groups that the pass finds in a graph, with their gains."""
    around = Surroundings(graph)
    groups = _Groups(graph, around.metas, dependencies(graph)).found()
    return [Candidate(g.members, worth(around, g.members, prices), g.closed) for g in groups]


class Surroundings:
    """A graph with tables for repeated queries.

    Attributes:
        metas: of every value.
        rows: the nodes with the numbers of their results.
        readers: for each value the nodes that read or write it.
        kept: values that outlive the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.metas = graph.values
        self.rows = placed(graph)
        self.readers: list[list[int]] = [[] for _ in self.metas]
        for row in self.rows:
            for value in (*row.node.refs(), *row.node.writes):
                self.readers[value].append(row.source)
        self.kept = set(graph.outputs)

    def escaping(self, group: Sequence[int]) -> list[int]:
        """Return the results of a group's members that are needed outside of it."""
        members = set(group)
        return [
            value
            for number in group
            for value in self.rows[number].results
            if value in self.kept or not members.issuperset(self.readers[value])
        ]

    def written(self, group: Sequence[int]) -> dict[int, int]:
        """Return the operands that a group's members write, with their last versions."""
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
        """Return the values that a group's members take from elsewhere, in order of use."""
        inner = {value for number in group for value in self.rows[number].results}
        taken: dict[int, None] = {}
        for number in group:
            node = self.rows[number].node
            taken.update(dict.fromkeys(v for v in (*node.refs(), *node.writes) if v not in inner))
        return list(taken)


def worth(around: Surroundings, group: Sequence[int], prices: Prices) -> float:
    """Return the seconds that compiling a group saves a run; at most 0: it is not worth it.

    One by one, each member is launched, reads its operands and writes its results. Compiled,
    there is one call, and values between members never travel to memory.
    """
    if len(group) == 1:
        return -prices.call
    return _gain(prices, *_launches(around, group), saved_bytes(around, group))


def _launches(around: Surroundings, group: Sequence[int]) -> tuple[int, int]:
    """Return a group's number of launches one by one, and of calls when compiled."""
    lanes = lane_count(around.rows[group[0]].node)
    return len(group) * max(lanes, 1), max(math.ceil(lanes / LANES), 1)


def _gain(prices: Prices, launches: int, calls: int, saved: int) -> float:
    return (launches - calls) * prices.launch + saved * prices.byte - calls * prices.call


def saved_bytes(around: Surroundings, group: Sequence[int]) -> int:
    """Return the bytes that do not travel when a group is compiled."""
    return sum(times * meta.nbytes for meta, times in _saved(around, group))


def _saved(around: Surroundings, group: Sequence[int]) -> list[tuple[TensorMeta, int]]:
    """Return each tensor that travels less when a group is compiled, and the times saved."""
    times: Counter[int] = Counter()
    for number in group:
        times.update({*around.rows[number].node.refs()})
        times.update(around.rows[number].results)
    times.subtract(around.operands(group))
    times.subtract({*around.escaping(group), *around.written(group).values()})
    metas = ((around.metas[value], count) for value, count in times.items() if count)
    return [(meta, count) for meta, count in metas if meta is not None]


def _fits(around: Surroundings, group: Sequence[int], prices: Prices) -> bool:
    """Return whether a group is worth it, and can be compiled."""
    saved = _saved(around, group)
    given = (prices, *_launches(around, group), tuple([times for _, times in saved]))
    if not ask(_gains, *[meta for meta, _ in saved], given=given):
        return False
    if not lane_count(around.rows[group[0]].node):
        return True
    body = _unit(around, list(group)).node.body
    assert body is not None
    return lanes_of(body, lambda meta: ask(row_major, meta)) is not None


def _gains(
    prices: Prices, launches: int, calls: int, times: tuple[int, ...], *metas: TensorMeta
) -> bool:
    """Return whether compiling saves time, if the tensors travel ``times`` less often."""
    saved = sum(count * meta.nbytes for count, meta in zip(times, metas, strict=True))
    return _gain(prices, launches, calls, saved) > 0


# -- grouping of nodes ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    #: has as many elements as its widest member walks over; None: of horizontal ops
    space: TensorMeta | None
    members: list[int] = field(default_factory=list)
    #: memory -> the parts of it that members read or write, as far as they can be told apart
    shown: dict[int, set[tuple[TensorMeta | None, int | None]]] = field(default_factory=dict)
    #: memory that members write
    written: set[int] = field(default_factory=set)
    #: of horizontal ops: the number of tensors of each, and memory -> position of its tensor
    lanes: int = 0
    lane_of: dict[int, int] = field(default_factory=dict)
    closed: str = ""

    def clashes(self, other: _Group) -> bool:
        """Return whether one writes memory that the other sees in another shape or place.

        A fused node writes its operands at its end, so of the memory it writes it may take no
        two different parts.
        """
        return any(
            len(self.shown.get(home, set()) | other.shown.get(home, set())) > 1
            for home in self.written | other.written
        )

    def crosses(self, other: _Group) -> bool:
        """Return whether the two use a memory in different lanes."""
        return any(other.lane_of.get(home, lane) != lane for home, lane in self.lane_of.items())

    def absorb(self, other: _Group) -> None:
        """Take over everything that the other group has."""
        self.members += other.members
        self.lane_of |= other.lane_of
        self.written |= other.written
        for home, shapes in other.shown.items():
            self.shown.setdefault(home, set()).update(shapes)
        other.members = []


class _Groups:
    """Search for the groups in one walk over the nodes."""

    def __init__(self, graph: Graph, metas: Metas, order: Dependencies) -> None:
        self.graph, self.metas, self.order = graph, metas, order
        self.moving = moving_views(graph)
        self.results = [results for _, results in graph.numbered()]
        self.uses = last_uses(graph)
        #: node -> the open group that it is in
        self.open: dict[int, _Group] = {}
        self.all: list[_Group] = []
        #: the last node that computes and can't be a member
        self.work = -1

    def found(self) -> list[_Group]:
        """Return the groups, with their members in order."""
        for number, node in enumerate(self.graph.nodes):
            needed = self._open_before(number)
            alone = self._member(number, node)
            if alone is not None:
                self._place(alone, needed)
            else:
                for group in needed:
                    self._close(group, f"{node.op} needs it")
                if view_source(node) is None:
                    self.work = number
        groups = [group for group in self.all if group.members]
        for group in groups:
            group.members.sort()
        return groups

    def _open_before(self, number: int) -> list[_Group]:
        """Return the open groups that a node needs, the largest first."""
        groups = {
            id(group): group
            for other in self.order.before[number]
            if (group := self.open.get(other)) is not None
        }
        return sorted(groups.values(), key=lambda group: (-len(group.members), group.members[0]))

    def _member(self, number: int, node: Node) -> _Group | None:
        """Return the node as a group of its own; None if it can't be in one."""
        lanes = lane_count(node)
        if not lanes:
            return self._alone(number, node) if is_fusible(node, self.metas) else None
        results = self.results[number]
        group = _Group(None, [number], lanes=lanes)
        for which in range(lanes):
            for value in (*part(node, which).refs(), results[which]):
                home = self.order.memory[value]
                if group.lane_of.setdefault(home, which) != which:
                    return None
                group.shown.setdefault(home, set()).add((self.metas[value], self.moving.get(value)))
        group.written.update(self.order.memory[target] for target in node.writes)
        return group

    def _alone(self, number: int, node: Node) -> _Group:
        memory = self.order.memory
        tensors = [self.metas[value] for value in node.refs()] + list(node.results)
        metas = list(dict.fromkeys(meta for meta in tensors if meta is not None))
        group = _Group(metas[ask(_widest, *metas) if len(metas) > 1 else 0], [number])
        for value in (*node.refs(), *node.writes):
            part = self.metas[value], self.moving.get(value)
            group.shown.setdefault(memory[value], set()).add(part)
        group.written.update(memory[target] for target in node.writes)
        return group

    def _place(self, alone: _Group, needed: list[_Group]) -> None:
        """Put a node into the groups that it needs, which become one; or into a new one."""
        home: _Group | None = None
        for group in needed:
            clash = self._clash(home, group, alone) or self._hoards(group)
            if clash:
                self._close(group, clash)
            elif home is None:
                home = group
            else:
                self.open.update(dict.fromkeys(group.members, home))
                home.absorb(group)
        if home is None:
            home = alone
            self.all.append(home)
            self.open[alone.members[0]] = home
        else:
            self.open[alone.members[0]] = home
            home.absorb(alone)

    @staticmethod
    def _clash(home: _Group | None, group: _Group, alone: _Group) -> str:
        """Return the reason why the three may not be one group; empty: they may."""
        if alone.lanes != group.lanes:
            return "an op on one tensor and an op on many need each other"
        if group.crosses(alone) or (home is not None and home.crosses(group)):
            return "it meets what is computed for another tensor"
        space, other = alone.space, group.space
        if space is not None and other is not None and space is not other \
                and ask(_wider, space, other):  # fmt: skip
            return "a larger op needs it"
        most = MOST_HORIZONTAL if alone.lanes else MOST_MEMBERS
        if len(group.members) + 1 + (len(home.members) if home is not None else 0) > most:
            return f"it would have more than {most} members"
        if group.clashes(alone) or (home is not None and home.clashes(group)):
            return "an op writes memory that another sees in another shape"
        return ""

    def _hoards(self, group: _Group) -> str:
        """Return the reason why a group may not wait for its next member; empty: it may."""
        if group.space is None or max(group.members) > self.work:
            return ""
        nodes = [self.graph.nodes[number] for number in group.members]
        written = {self.order.memory[target] for node in nodes for target in node.writes}
        taken = {value for node in nodes for value in node.refs() if self._is_last(value, group)}
        results = {
            value
            for node, number in zip(nodes, group.members, strict=True)
            for value in self.results[number][: len(node.fresh)]
            if self.uses[value] > number and self.uses[value] not in group.members
        }
        inner = {value for number in group.members for value in self.results[number]}
        dying = [v for v in taken - inner if self.order.memory[v] not in written]
        large = [self._is_large(value, group.space) for value in dying]
        if sum(large) > sum(self.metas[value] == group.space for value in results):
            return "its operands would be kept until the next op that takes its result"
        return ""

    def _is_last(self, value: int, group: _Group) -> bool:
        """Return whether the last reader of a value is in a group."""
        return self.uses[value] in group.members

    def _is_large(self, value: int, space: TensorMeta) -> bool:
        """Return whether a value fills a group's space, and the space is not small."""
        return self.metas[value] == space and not ask(fits, space, given=(SMALL,))

    def _close(self, group: _Group, why: str) -> None:
        group.closed = why
        for member in group.members:
            self.open.pop(member, None)


def _widest(*metas: TensorMeta) -> int:
    """Return the position of the tensor with the most elements."""
    return max(range(len(metas)), key=lambda which: metas[which].numel)


def _wider(meta: TensorMeta, other: TensorMeta) -> bool:
    """Return whether a tensor has more elements than another."""
    return meta.numel > other.numel


# -- the node ------------------------------------------------------------------------------------


def _unit(around: Surroundings, unit: list[int]) -> Placed:
    """Return the row of a single node, or of the fused node of a group."""
    rows = [around.rows[number] for number in unit]
    if len(rows) == 1:
        return rows[0]
    operands, written = around.operands(unit), around.written(unit)
    final = list(written.values())
    fresh = [value for value in around.escaping(unit) if value not in final]
    body, params = _body(around, rows, operands, [*fresh, *final])
    metas = around.metas
    node = Node(
        FUSED,
        (*map(ref, operands), *params),
        (),
        tuple(metas[value] for value in fresh),
        tuple(written),
        tuple(meta for value in final if (meta := metas[value]) is not None),
        body=body,
    )
    return Placed(node, [*fresh, *final], unit[0])


def _body(
    around: Surroundings, rows: list[Placed], operands: list[int], outputs: list[int]
) -> tuple[Graph, list[Param]]:
    """Return the members as a graph of their own, and the run-time numbers that they take."""
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
    graph = around.graph
    inputs = tuple(meta for value in operands if (meta := around.metas[value]) is not None)
    body = Graph(
        inputs,
        tuple(graph.params[index] for index in params),
        tuple(nodes),
        tuple(numbers[value] for value in outputs),
        tuple(graph.line(row.source) for row in rows) if graph.lines else (),
        tuple(graph.origin(row.source) for row in rows),
    )
    return body, [Param(index) for index in params]
