"""Overlap of collectives with computation.

Every bucket becomes a launch, which does not block, and a wait. A launch stands as early as its
operands are there, a wait right before the first node that computes with a result; everything else
keeps its order. A gather of stored parameters is launched when the one before it is waited for, so
two are under way at most, or right after it, where its weights are copied out of their buffer. A
reduce-scatter is launched when the one before it has been waited for, and is waited for before its
backward ends: unreduced gradients die as a backward goes, and only their blocks remain.

There is no deadlock: all ranks launch the same collectives in the same order and wait only for
launched ones, so the first one that is not complete always can be.
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
from lazygt.passes.base import Placed, placed, rebuild
from lazygt.passes.classes import by_class
from lazygt.passes.collectives.bucket import (
    Bucket,
    Caps,
    CollectiveAnalysis,
    agree,
    analyse_collectives,
    buckets,
    one_each,
    unhooked,
)

#: Gathers of stored parameters under way at most; PyTorch's FSDP has found no use for more.
MOST_GATHERS = 2


def overlapped(
    graphs: Sequence[Graph], mesh: Mesh, caps: Caps, backward: Collection[int] = ()
) -> tuple[Graph, ...]:
    """Return each rank's program, collectives bucketed, launched early, waited for late.

    Args:
        graphs: of each rank; equal programs are one object, here and in the result.
        backward: the recorded ops of a backward pass, by number.
    """
    known: dict[tuple[int, ...], dict[int, Graph]] = {}
    programs: list[Graph] = list(graphs)
    for ranks in _connected(graphs, mesh):
        distinct = {id(graphs[rank]): graphs[rank] for rank in ranks}
        together = known.get(tuple(distinct))
        if together is None:
            together = known[tuple(distinct)] = _together(distinct, mesh, caps, backward)
        for rank in ranks:
            programs[rank] = together[id(graphs[rank])]
    return tuple(programs)


def _together(
    graphs: dict[int, Graph], mesh: Mesh, caps: Caps, backward: Collection[int]
) -> dict[int, Graph]:
    """Return the new programs of ranks that meet each other."""
    analyses = {
        key: analyse_collectives(unhooked(graph), backward) for key, graph in graphs.items()
    }
    if not any(one.collectives for one in analyses.values()):
        return graphs
    alike = list(analyses.values())
    # programs that meet in different collectives have blocks of different sizes on two axes
    shared = buckets(alike, caps) if agree(alike) else None
    return {key: launched(one, shared or one_each(one), mesh) for key, one in analyses.items()}


def _connected(graphs: Sequence[Graph], mesh: Mesh) -> list[list[int]]:
    """Return the connected components of ranks that meet."""
    group = {rank: [rank] for rank in range(len(graphs))}
    axes = by_class(_axes, graphs)
    for axis in mesh.names:
        for line in mesh.lines(axis):
            for rank in line[1:]:
                if axis in axes[rank] and group[rank] is not group[line[0]]:
                    group[line[0]] += group[rank]
                    for other in group[rank]:
                        group[other] = group[line[0]]
    return list({id(ranks): sorted(ranks) for ranks in group.values()}.values())


def _axes(graph: Graph) -> set[str]:
    return {node.args[-1] for node in graph.nodes if node.op in COLLECTIVES}


# -- one rank's program --------------------------------------------------------------------------


class _Key(NamedTuple):
    """Place at which a node is wanted, by an old node.

    Attributes:
        side: 0: before the old node and its waits; 1: one of its waits; 2: after its waits; 3: the
            old node; 4: after it.
    """

    place: int
    side: int


def launched(analysis: CollectiveAnalysis, order: Sequence[Bucket], mesh: Mesh) -> Graph:
    """Return a rank's program with the buckets launched in this order."""
    units = _Units(analysis, order)
    metas = analysis.graph.values
    rows: list[Placed] = []
    old = placed(analysis.graph)
    for unit in units.in_order():
        if unit < len(old):
            rows.append(old[unit])
            continue
        number, second = divmod(unit - len(old), 2)
        members = [old[analysis.collectives[place].node] for place in order[number].members]
        flying = len(metas) + number
        halves = _halves(members, analysis, order[number], flying, mesh, metas)
        rows.append(halves[second])
    return rebuild(analysis.graph, rows)


class _Units:
    """A program's nodes, launches and waits, with their dependences and wanted places.

    Units are numbered: old nodes by their own numbers, then launch and wait of each bucket.
    """

    def __init__(self, analysis: CollectiveAnalysis, order: Sequence[Bucket]) -> None:
        self.analysis, self.order = analysis, order
        nodes = analysis.graph.nodes
        self.count = len(nodes)
        #: a data-dependent node stays the last
        self.end = self.count - (nodes[-1].dynamic if nodes else 0)
        #: collective's node -> number of its bucket
        self.home = {
            analysis.collectives[place].node: number
            for number, bucket in enumerate(order)
            for place in bucket.members
        }
        self.readers = _readers(analysis.graph)
        #: nodes that parameters go through before they are gathered
        self.pulled: set[int] = set()
        self.before: dict[int, set[int]] = {}
        self.keys: dict[int, _Key] = {}
        for node in range(self.count):
            if node not in self.home:
                self.before[node] = self._mapped(node)
                self.keys[node] = _Key(node, 3)
        gathers: list[int] = []
        scatters: dict[str, int] = {}
        for number, bucket in enumerate(order):
            self._bucket(number, bucket, gathers)
            self._follow(number, bucket, scatters)

    def launch(self, number: int) -> int:
        return self.count + 2 * number

    def wait(self, number: int) -> int:
        return self.count + 2 * number + 1

    def _mapped(self, node: int) -> set[int]:
        """Return the dependences of a node; a collective is replaced by its wait."""
        return {
            self.wait(self.home[other]) if other in self.home else other
            for other in self.analysis.before[node]
        }

    def _bucket(self, number: int, bucket: Bucket, gathers: list[int]) -> None:
        """Add a bucket's launch, in turn, and its wait.

        Args:
            gathers: the buckets of stored parameters so far.
        """
        collectives = [self.analysis.collectives[place] for place in bucket.members]
        before = {other for collective in collectives for other in self._mapped(collective.node)}
        if number:
            before.add(self.launch(number - 1))
        needed = min(self.end, *(collective.used for collective in collectives))
        wanted = _Key(max(collective.ready for collective in collectives), 4)
        if bucket.stored:
            wanted = _Key(-1, 0)
            if gathers and bucket.limited:
                former = self.wait(gathers[-1])
                wanted = _Key(self.keys[former].place, 2 if self._copies(gathers[-1]) else 0)
                before |= {former} if self._copies(gathers[-1]) else set()
            if len(gathers) >= MOST_GATHERS and wanted.place >= 0:
                before.add(self.wait(gathers[-MOST_GATHERS]))
            gathers.append(number)
            self._pull(before, wanted)
        self.before[self.launch(number)] = before
        self.before[self.wait(number)] = {self.launch(number)}
        self.keys[self.launch(number)] = wanted
        self.keys[self.wait(number)] = _Key(needed, 1)

    def _copies(self, number: int) -> bool:
        """Return whether weights are copied from their buffer at the wait, so that both live."""
        return len(self.order[number].members) > 1

    def _follow(self, number: int, bucket: Bucket, scatters: dict[str, int]) -> None:
        """Order a reduce-scatter after the end of the one before it on its axis.

        Args:
            scatters: the last one of each axis so far.
        """
        first = self.analysis.collectives[bucket.members[0]]
        if first.kind != REDUCE_SCATTER:
            return
        if bucket.limited:
            wait = self.wait(number)
            ready = max(self.analysis.collectives[place].ready for place in bucket.members)
            self.keys[wait] = min(self.keys[wait], _Key(self.analysis.end_of_turn(ready), 0))
        former = scatters.get(first.axis)
        scatters[first.axis] = number
        if former is not None and bucket.limited:
            launch, wait = self.launch(number), self.wait(former)
            self.before[launch].add(wait)
            self.keys[wait] = min(self.keys[wait], self.keys[launch])

    def _pull(self, units: set[int], wanted: _Key) -> None:
        """Move the nodes that a parameter goes through before its gather to the gather's place.

        None is wanted later; nodes for gathers alone, such as a cast, are wanted no earlier either.
        """
        for unit in units:
            if unit < self.count and (self.keys[unit] > wanted or self._is_for_gathers(unit)):
                self.pulled.add(unit)
                self.keys[unit] = wanted
                self._pull(self.before[unit], wanted)

    def _is_for_gathers(self, node: int) -> bool:
        """Return whether a node, not yet pulled, is read by gathers and pulled nodes alone."""
        readers = self.readers[node]
        return (
            bool(readers)
            and node not in self.pulled
            and all(self._is_gather(reader) or reader in self.pulled for reader in readers)
        )

    def _is_gather(self, node: int) -> bool:
        return node in self.home and bool(self.order[self.home[node]].stored)

    def in_order(self) -> Iterator[int]:
        """Yield units in a topological order; of ready ones the one that is wanted first."""
        followers: dict[int, list[int]] = {}
        for unit, others in self.before.items():
            for other in others:
                followers.setdefault(other, []).append(unit)
        missing = {unit: len(others) for unit, others in self.before.items()}
        ready = [(self.keys[unit], unit) for unit, count in missing.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, unit = heapq.heappop(ready)
            yield unit
            for follower in followers.get(unit, ()):
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, (self.keys[follower], follower))
        assert not any(missing.values()), "collectives wait for each other"


def _readers(graph: Graph) -> list[list[int]]:
    """Return for each node those that take its results."""
    makers = [-1] * len(graph.inputs)
    readers: list[list[int]] = [[] for _ in graph.nodes]
    for number, node in enumerate(graph.nodes):
        for value in node.refs():
            if makers[value] >= 0:
                readers[makers[value]].append(number)
        makers += [number] * len(node.results)
    return readers


# -- the nodes -----------------------------------------------------------------------------------


def _halves(
    members: Sequence[Placed],
    analysis: CollectiveAnalysis,
    bucket: Bucket,
    flying: int,
    mesh: Mesh,
    metas: Sequence[TensorMeta | None],
) -> tuple[Placed, Placed]:
    """Return the launch and the wait of a bucket.

    Args:
        flying: the number of the launch's result.
        metas: of the values of the graph.
    """
    collectives = [analysis.collectives[place] for place in bucket.members]
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
        begin = Node(LAUNCH_, args, (), (), (target,), (meta,))
        end = Node(WAIT, (ref(flying), (), (), first.axis), (), (), (flying,), (meta,))
    else:
        held = tuple(values) if _sends_from_there(first.kind, len(members)) else ()
        length = _length(kind, operands, moves, mesh.size(first.axis), received)
        begin = Node(LAUNCH, args, (), (intern((length,), (1,), first.dtype),))
        end = Node(WAIT, (ref(flying), held, (), first.axis), (), received)
    return Placed(begin, [flying], source), Placed(end, results, source)


def _known(meta: TensorMeta | None) -> TensorMeta:
    assert meta is not None
    return meta


def _sends_from_there(kind: str, count: int) -> bool:
    """Return whether a launch may send its operand without a copy."""
    return count == 1 and kind in (ALL_GATHER, REDUCE_SCATTER)


def _length(
    kind: str,
    operands: Sequence[TensorMeta],
    moves: Sequence[Sequence[int]],
    parts: int,
    metas: Sequence[TensorMeta | None],
) -> int:
    """Return the number of elements of the buffer that a launch receives into."""
    if kind in ("all_to_all", "send_recv", "take_rows", "put_rows"):
        assert metas[0] is not None
        return metas[0].numel
    shapes = [meta.shape for meta in operands]
    where = slots(kind, shapes, moves, parts, operands[0].dtype.itemsize)
    return buffer_length(kind, parts, where.total, len(shapes))
