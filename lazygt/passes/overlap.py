"""Overlap of collectives with computation.

Every bucket becomes a launch, which does not block, and a wait. A launch is scheduled as early as
its operands are ready, a wait right before the first node that computes with a result; all other
nodes keep their order. A gather of stored parameters is launched at the wait for the previous
gather, so at most two are in flight, or right after that wait, where the weights are copied out of
their buffer. A reduce-scatter is launched after the wait for the previous one, and is waited for
before its backward ends, so that unreduced gradients are freed during the backward.

There is no deadlock: all ranks launch the same collectives in the same order and wait only for
launched collectives, so the first incomplete collective can always complete.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from lazygt.graph.collectives import buffer_length, slots
from lazygt.graph.mesh import Mesh
from lazygt.graph.meta import TensorMeta, intern
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    LAUNCH,
    LAUNCH_,
    REDUCE_SCATTER,
    WAIT,
)
from lazygt.passes.base import NodeRow, by_class, rebuild, rows_of
from lazygt.passes.bucket import (
    Bucket,
    Caps,
    CollectiveAnalysis,
    analyse_collectives,
    buckets,
    detach_likenesses,
    have_same_collectives,
    unbucketed,
)

#: Most gathers of stored parameters in flight, as in PyTorch's FSDP.
MAX_GATHERS = 2


def overlapped(
    graphs: Sequence[Graph], mesh: Mesh, caps: Caps, backward: Collection[int] = ()
) -> tuple[Graph, ...]:
    """Return each rank's program with collectives bucketed, launched early and waited for late.

    Args:
        graphs: of each rank; equal programs are one object, in the argument and in the result.
        backward: the recorded ops of a backward pass, by number.
    """
    done: dict[tuple[int, ...], dict[int, Graph]] = {}
    programs: list[Graph] = list(graphs)
    for ranks in _connected_components(graphs, mesh):
        distinct = {id(graphs[rank]): graphs[rank] for rank in ranks}
        component = done.get(tuple(distinct))
        if component is None:
            component = done[tuple(distinct)] = _overlap_component(distinct, mesh, caps, backward)
        for rank in ranks:
            programs[rank] = component[id(graphs[rank])]
    return tuple(programs)


def _overlap_component(
    graphs: dict[int, Graph], mesh: Mesh, caps: Caps, backward: Collection[int]
) -> dict[int, Graph]:
    """Return the new programs, by key, of ranks that communicate with each other."""
    analyses = {
        key: analyse_collectives(detach_likenesses(graph), backward)
        for key, graph in graphs.items()
    }
    if not any(analysis.collectives for analysis in analyses.values()):
        return graphs
    all_analyses = list(analyses.values())
    # programs with different collectives are not bucketed: their shard sizes differ on two axes
    shared_buckets = buckets(all_analyses, caps) if have_same_collectives(all_analyses) else None
    return {
        key: launched(analysis, shared_buckets or unbucketed(analysis), mesh)
        for key, analysis in analyses.items()
    }


def _connected_components(graphs: Sequence[Graph], mesh: Mesh) -> list[list[int]]:
    """Return the connected components of ranks that communicate."""
    component = {rank: [rank] for rank in range(len(graphs))}
    axes_of = by_class(_used_axes, graphs)
    for axis in mesh.names:
        for axis_group in mesh.axis_groups(axis):
            for rank in axis_group[1:]:
                if axis in axes_of[rank] and component[rank] is not component[axis_group[0]]:
                    component[axis_group[0]] += component[rank]
                    for other in component[rank]:
                        component[other] = component[axis_group[0]]
    return list({id(ranks): sorted(ranks) for ranks in component.values()}.values())


def _used_axes(graph: Graph) -> set[str]:
    """Return the mesh axes on which a program has collectives."""
    return {node.args[-1] for node in graph.nodes if node.op in COLLECTIVES}


# -- program of one rank: list scheduling of launches and waits ----------------------------------


class _Key(NamedTuple):
    """Scheduling priority of a unit: a position relative to an old node."""

    position: int  # number of the old node
    #: 0: before the old node and its waits; 1: one of its waits; 2: after its waits; 3: the old
    #: node; 4: after the old node
    side: int


def launched(analysis: CollectiveAnalysis, order: Sequence[Bucket], mesh: Mesh) -> Graph:
    """Return a rank's program with the buckets launched in this order.

    Launches and waits are placed by list scheduling; see ``_Units``.
    """
    units = _Units(analysis, order)
    metas = analysis.graph.values
    rows: list[NodeRow] = []
    old = rows_of(analysis.graph)
    for unit in units.in_order():
        if unit < len(old):
            rows.append(old[unit])
            continue
        number, half = divmod(unit - len(old), 2)  # half 0 is the bucket's launch, 1 its wait
        members = [old[analysis.collectives[position].node] for position in order[number].members]
        in_flight = len(metas) + number
        halves = _launch_and_wait(members, analysis, order[number], in_flight, mesh, metas)
        rows.append(halves[half])
    return rebuild(analysis.graph, rows)


class _Units:
    """Units of the list scheduling: nodes, launches and waits, with dependences and priorities.

    Old nodes keep their numbers; the launch and the wait of each bucket follow.

    Args:
        order: the buckets in the order of their launches.
    """

    def __init__(self, analysis: CollectiveAnalysis, order: Sequence[Bucket]) -> None:
        self.analysis, self.order = analysis, order
        nodes = analysis.graph.nodes
        self.count = len(nodes)
        #: position of the data-dependent node, which stays the last
        self.end = self.count - (nodes[-1].dynamic if nodes else 0)
        #: collective's node -> number of its bucket
        self.home = {
            analysis.collectives[position].node: number
            for number, bucket in enumerate(order)
            for position in bucket.members
        }
        self.readers = _readers(analysis.graph)
        #: views and casts of parameters that were moved to the launch of the gather
        self.pulled: set[int] = set()
        self.before: dict[int, set[int]] = {}
        self.keys: dict[int, _Key] = {}
        for node in range(self.count):
            if node not in self.home:
                self.before[node] = self._predecessors_of(node)
                self.keys[node] = _Key(node, 3)
        gathers: list[int] = []
        scatters: dict[str, int] = {}
        for number, bucket in enumerate(order):
            self._add_bucket(number, bucket, gathers)
            self._order_scatter(number, bucket, scatters)

    def launch(self, number: int) -> int:
        """Return the unit that launches bucket ``number``."""
        return self.count + 2 * number

    def wait(self, number: int) -> int:
        """Return the unit that waits for bucket ``number``."""
        return self.count + 2 * number + 1

    def _predecessors_of(self, node: int) -> set[int]:
        """Return the predecessors of a node, with each collective replaced by its wait."""
        return {
            self.wait(self.home[other]) if other in self.home else other
            for other in self.analysis.before[node]
        }

    def _add_bucket(self, number: int, bucket: Bucket, gathers: list[int]) -> None:
        """Add the launch and the wait of a bucket; launches keep the order of the buckets.

        Args:
            gathers: the buckets of stored parameters so far; this one is appended.
        """
        collectives = [self.analysis.collectives[position] for position in bucket.members]
        before = {
            other for collective in collectives for other in self._predecessors_of(collective.node)
        }
        if number:
            before.add(self.launch(number - 1))
        first_use = min(self.end, *(collective.first_use for collective in collectives))
        launch_key = _Key(max(collective.ready for collective in collectives), 4)
        if bucket.stored:
            launch_key = _Key(-1, 0)
            if gathers and bucket.limited:
                previous_wait = self.wait(gathers[-1])
                launch_key = _Key(
                    self.keys[previous_wait].position, 2 if self._copies(gathers[-1]) else 0
                )
                before |= {previous_wait} if self._copies(gathers[-1]) else set()
            if len(gathers) >= MAX_GATHERS and launch_key.position >= 0:
                before.add(self.wait(gathers[-MAX_GATHERS]))
            gathers.append(number)
            self._pull_to(before, launch_key)
        self.before[self.launch(number)] = before
        self.before[self.wait(number)] = {self.launch(number)}
        self.keys[self.launch(number)] = launch_key
        self.keys[self.wait(number)] = _Key(first_use, 1)

    def _copies(self, number: int) -> bool:
        """Return whether the wait copies weights out of a buffer, so that both use memory."""
        return len(self.order[number].members) > 1

    def _order_scatter(self, number: int, bucket: Bucket, scatters: dict[str, int]) -> None:
        """Order a reduce-scatter after the wait for the previous reduce-scatter on its axis.

        Args:
            scatters: axis -> the bucket of the last reduce-scatter so far.
        """
        first = self.analysis.collectives[bucket.members[0]]
        if first.kind != REDUCE_SCATTER:
            return
        if bucket.limited:
            wait = self.wait(number)
            ready = max(self.analysis.collectives[position].ready for position in bucket.members)
            self.keys[wait] = min(self.keys[wait], _Key(self.analysis.end_of_pass(ready), 0))
        previous = scatters.get(first.axis)
        scatters[first.axis] = number
        if previous is not None and bucket.limited:
            launch, wait = self.launch(number), self.wait(previous)
            self.before[launch].add(wait)
            self.keys[wait] = min(self.keys[wait], self.keys[launch])

    def _pull_to(self, units: set[int], key: _Key) -> None:
        """Move the views and casts of a parameter before its gather to the launch of the gather.

        No such node is scheduled later than ``key``. Nodes that only gathers read, such as a
        cast, are not scheduled earlier either.
        """
        for unit in units:
            if unit < self.count and (self.keys[unit] > key or self._is_for_gathers(unit)):
                self.pulled.add(unit)
                self.keys[unit] = key
                self._pull_to(self.before[unit], key)

    def _is_for_gathers(self, node: int) -> bool:
        """Return whether only gathers and pulled nodes read a node that is not pulled yet."""
        readers = self.readers[node]
        return (
            bool(readers)
            and node not in self.pulled
            and all(self._is_gather(reader) or reader in self.pulled for reader in readers)
        )

    def _is_gather(self, node: int) -> bool:
        return node in self.home and bool(self.order[self.home[node]].stored)

    def in_order(self) -> Iterator[int]:
        """Yield the units in topological order (Kahn's algorithm), ready ones by their keys."""
        successors: dict[int, list[int]] = {}
        for unit, others in self.before.items():
            for other in others:
                successors.setdefault(other, []).append(unit)
        in_degree = {unit: len(others) for unit, others in self.before.items()}
        ready = [(self.keys[unit], unit) for unit, count in in_degree.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, unit = heapq.heappop(ready)
            yield unit
            for successor in successors.get(unit, ()):
                in_degree[successor] -= 1
                if not in_degree[successor]:
                    heapq.heappush(ready, (self.keys[successor], successor))
        assert not any(in_degree.values()), "collectives wait for each other"


def _readers(graph: Graph) -> list[list[int]]:
    """Return for each node the numbers of the nodes that read its results."""
    producers = [-1] * len(graph.inputs)
    readers: list[list[int]] = [[] for _ in graph.nodes]
    for number, node in enumerate(graph.nodes):
        for value in node.refs():
            if producers[value] >= 0:
                readers[producers[value]].append(number)
        producers += [number] * len(node.results)
    return readers


# -- nodes of launches and waits -----------------------------------------------------------------


def _launch_and_wait(
    members: Sequence[NodeRow],
    analysis: CollectiveAnalysis,
    bucket: Bucket,
    in_flight: int,
    mesh: Mesh,
    metas: Sequence[TensorMeta | None],
) -> tuple[NodeRow, NodeRow]:
    """Return the launch and the wait of a bucket.

    Args:
        members: the collectives of the bucket.
        in_flight: the value number of the launch's result.
        metas: of the values of the graph.
    """
    collectives = [analysis.collectives[position] for position in bucket.members]
    first = collectives[0]
    values = [arg for row in members for arg in row.node.args if type(arg) is Ref]
    kind = first.kind.removeprefix("lazygt.")
    moves = () if first.kind == ALL_REDUCE else tuple(collective.move for collective in collectives)
    args = (kind, tuple(values), moves, first.op, first.axis)
    results = [value for row in members for value in row.results]
    received = tuple(row.node.fresh[0] for row in members)
    operands = [_known(metas[value.index]) for value in values]
    source = members[0].source
    if first.kind == ALL_REDUCE and len(members) == 1 and operands[0] == received[0]:
        target, meta = values[0].index, operands[0]
        launch = Node(LAUNCH_, args, (), (), (target,), (meta,))
        wait = Node(WAIT, (ref(in_flight), (), (), first.axis), (), (), (in_flight,), (meta,))
    else:
        kept_alive = tuple(values) if _sends_in_place(first.kind, len(members)) else ()
        length = _length(kind, operands, moves, mesh.size(first.axis), received)
        launch = Node(LAUNCH, args, (), (intern((length,), (1,), first.dtype),))
        wait = Node(WAIT, (ref(in_flight), kept_alive, (), first.axis), (), received)
    return NodeRow(launch, [in_flight], source), NodeRow(wait, results, source)


def _known(meta: TensorMeta | None) -> TensorMeta:
    """Return a meta that is not None."""
    assert meta is not None
    return meta


def _sends_in_place(kind: str, count: int) -> bool:
    """Return whether a launch may send its operand without a copy."""
    return count == 1 and kind in (ALL_GATHER, REDUCE_SCATTER)


def _length(
    kind: str,
    operands: Sequence[TensorMeta],
    moves: Sequence[Sequence[int]],
    axis_size: int,
    metas: Sequence[TensorMeta | None],
) -> int:
    """Return the number of elements of the buffer that a launch receives into."""
    if kind in ("all_to_all", "send_recv", "take_rows", "put_rows"):
        assert metas[0] is not None
        return metas[0].numel
    shapes = [meta.shape for meta in operands]
    layout = slots(kind, shapes, moves, axis_size, operands[0].dtype.itemsize)
    return buffer_length(kind, axis_size, layout.total, len(shapes))
