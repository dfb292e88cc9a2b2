"""Merge of the programs of a worker's virtual ranks into one.

They run one after another from collective to collective. Equal work on equal values, as on values
that all ranks have, is done once, and so is every draw of random numbers. Exchanges among the ranks
of one worker do not leave it (see ``reduction_tree``).

Workers meet in the same order: collectives on a later axis of the mesh come first, then the line
that has met least often, then the first line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lazygt.errors import GraphError
from lazygt.graph.alias import draws
from lazygt.graph.mesh import Placements, VirtualMesh
from lazygt.graph.meta import exact
from lazygt.graph.node import Arg, Graph, Node, Ref, ref
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVE_OPS,
    COLLECTIVES,
    EXCHANGES_OF_ROWS,
    REDUCE_SCATTER,
    REPLICATE_TO_PARTIAL,
    SEND_RECV,
    SHARD,
    shard_bounds,
)
from lazygt.passes.base import is_uninitialized, renumbered
from lazygt.passes.sharding.builder import Builder
from lazygt.passes.virtual_ranks import reduction_tree
from lazygt.passes.virtual_ranks.reduction_tree import VirtualGroup


class VirtualRank:
    """One virtual rank's program, as far as it has been taken over.

    Attributes:
        rank: its number.
        at: number of the next node.
        values: local value -> its number in the worker's program; for memory that is still
            unwritten a description of it.
        blanks: local value -> the node that makes such memory.
        seen: number of times that each piece of work has come.
        drawn: draws so far.
    """

    def __init__(self, rank: int, graph: Graph, inputs: Sequence[int]) -> None:
        self.rank, self.graph, self.at, self.drawn = rank, graph, 0, 0
        self.values: list[Any] = list(inputs)
        self.blanks: dict[int, Node] = {}
        self.seen: Counter[Any] = Counter()

    @property
    def node(self) -> Node | None:
        """The next node; None at the end."""
        return self.graph.nodes[self.at] if self.at < len(self.graph.nodes) else None

    @property
    def axis(self) -> str | None:
        """The axis on which it waits for others; None if it does not."""
        node = self.node
        return node.args[-1] if node is not None and node.op in COLLECTIVES else None

    def work(self, node: Node) -> Any:
        """Return a node's work as a key: equal for the same op on the same values."""
        return (
            node.op,
            _named(node.args, self.values),
            _named(node.kwargs, self.values),
            tuple([self.values[value] for value in node.writes]),
            node.fresh,
        )


def operands_of(node: Node) -> tuple[int, ...]:
    """Return the values that a node reads, with repeats, and those that it writes."""
    return (*node.refs(), *node.writes)


def _named(arg: Arg, values: Sequence[Any]) -> Any:
    """Return an argument as part of a key."""
    kind = type(arg)
    if kind is Ref:
        return Ref, values[arg.index]
    if kind is tuple:
        return tuple([_named(item, values) for item in arg])
    return exact(arg)


ValuePlacements = Sequence[Placements]


def merged(
    graphs: Sequence[Graph], inputs: ValuePlacements, outputs: ValuePlacements, mesh: VirtualMesh
) -> tuple[Graph, ...]:
    """Return the program of each worker.

    Args:
        graphs: of each virtual rank.
        inputs, outputs: the placements of each on the mesh of virtual ranks. A worker's program has
            one for each of the blocks that it holds (``VirtualMesh.holders``), in order.

    Raises:
        GraphError: the ranks do not draw the same random numbers.
    """
    workers = range(mesh.workers.world_size)
    programs = [_Merge(graphs, inputs, mesh, worker).run(outputs) for worker in workers]
    if not all(_agree(programs, mesh, axis) for axis in mesh.workers.names):
        # two lines exchange the same on some workers only, so each line exchanges its own
        programs = [_Merge(graphs, inputs, mesh, worker, False).run(outputs) for worker in workers]
    return tuple(programs)


def _agree(graphs: Sequence[Graph], mesh: VirtualMesh, axis: str) -> bool:
    """Return whether the workers of every line of an axis meet in the same collectives."""
    lines = mesh.workers.lines(axis)
    return all(len({_met(graphs[worker], axis) for worker in line}) == 1 for line in lines)


def _met(graph: Graph, axis: str) -> tuple[Any, ...]:
    return tuple(
        [(n.op, n.args[1:]) for n in graph.nodes if n.op in COLLECTIVES and n.args[-1] == axis]
    )


class _Merge:
    """Program of one worker, while it is written.

    Args:
        share: lines that exchange the same values meet once.
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        inputs: ValuePlacements,
        mesh: VirtualMesh,
        worker: int,
        share: bool = True,
    ) -> None:
        self.mesh, self.worker, self.share = mesh, worker, share
        held = [mesh.holders(worker, placements) for placements in inputs]
        members = mesh.of_worker(worker)
        metas = [graphs[rank].inputs[which] for which, ranks in enumerate(held) for rank in ranks]
        self.build = Builder(metas, graphs[members[0]].params, axis="", parts=1, index=0)
        numbers = {each: number for number, each in enumerate(
            (which, rank) for which, ranks in enumerate(held) for rank in ranks)}  # fmt: skip
        self.ranks = [
            VirtualRank(rank, graphs[rank], [numbers[which, mesh.holder(rank, placements)]
                                       for which, placements in enumerate(inputs)])
            for rank in members
        ]  # fmt: skip
        #: a piece of work and how often it has come -> its operands and results, by number
        self.made: dict[Any, tuple[Sequence[int], Sequence[int | None]]] = {}
        self.draws: list[Any] = []
        self.met: Counter[tuple[VirtualRank, ...]] = Counter()
        self.lines: list[str] = []
        self.origins: list[int] = []

    def run(self, outputs: ValuePlacements) -> Graph:
        """Return the whole program."""
        for rank in self.ranks:
            self._go_on(rank)
        while line := self._next_line():
            self._meet(line)
            for rank in line:
                self._go_on(rank)
        held = [ref(value) for value in self._outputs(outputs)]
        if self.ranks[0].node is not None:
            self._last()
        self._from(self.ranks[0])
        return replace(self.build.graph(held), lines=tuple(self.lines), origins=tuple(self.origins))

    # work of a single rank

    def _go_on(self, rank: VirtualRank) -> None:
        """Take a rank's nodes over until it waits for others, or is at its end."""
        while (node := rank.node) is not None and not node.dynamic and rank.axis is None:
            if is_uninitialized(node):
                rank.blanks[len(rank.values)] = node
                rank.values.append(rank.work(node))
            else:
                self._take(rank, node)
            rank.at += 1

    def _take(self, rank: VirtualRank, node: Node) -> None:
        """Do a node's work, unless another rank has done the same already."""
        work = rank.work(node)
        if node.op in (SHARD, REPLICATE_TO_PARTIAL):
            work = work, self.mesh.ranks.index(rank.rank, node.args[-1])
        rank.seen[work] += 1
        key = work, rank.seen[work]
        if draws(node):
            self._check_draw(rank, key)
        if key not in self.made:
            numbers = {value: self._number(rank, value) for value in operands_of(node)}
            results = self._written(rank, node, numbers)
            self.made[key] = [rank.values[value] for value in operands_of(node)], results
            self._from(rank)
        operands, results = self.made[key]
        for value, number in zip(operands_of(node), operands, strict=True):
            rank.values[value] = number
        rank.values.extend(results)

    def _written(
        self, rank: VirtualRank, node: Node, numbers: dict[int, int]
    ) -> Sequence[int | None]:
        """Add a node; return the numbers of its results."""
        if node.op not in COLLECTIVE_OPS:
            results = self.build.add(renumbered(node, numbers))
            return [None if one is None else one.index for one in results]
        assert node.op in (SHARD, REPLICATE_TO_PARTIAL), node.op
        axis, whole = node.args[-1], ref(numbers[node.args[0].index])
        index, parts = self.mesh.ranks.index(rank.rank, axis), self.mesh.ranks.size(axis)
        if node.op == REPLICATE_TO_PARTIAL:
            return [reduction_tree.first(self.build, whole, index == 0).index]
        start, stop = shard_bounds(self.build.shape(whole)[node.args[1]], parts, index)
        return [reduction_tree.shard(self.build, whole, node.args[1], start, stop).index]

    def _check_draw(self, rank: VirtualRank, work: Any) -> None:
        """Raise unless a rank draws as the ranks before it did.

        All ranks draw whole values in the order of the program, so they draw the same.
        """
        if rank.drawn == len(self.draws):
            self.draws.append(work)
        elif self.draws[rank.drawn] != work:
            raise GraphError(
                f"{work[0][0]} ({rank.graph.line(rank.at)}): virtual rank {rank.rank} draws other "
                f"random numbers than those before it; leave invariant= out, and report this"
            )
        rank.drawn += 1

    def _number(self, rank: VirtualRank, value: int) -> int:
        """Return the number of a value; make memory that is still unwritten."""
        if type(rank.values[value]) is not int:
            node = rank.blanks[value]
            numbers = {operand: self._number(rank, operand) for operand in operands_of(node)}
            (result,) = self.build.add(renumbered(node, numbers))
            assert result is not None
            rank.values[value] = result.index
        number: int = rank.values[value]
        return number

    # work of several ranks together

    def _next_line(self) -> tuple[VirtualRank, ...]:
        """Return ranks that all wait for each other; none when all are at their end."""
        lines: dict[tuple[VirtualRank, ...], tuple[int, int, int]] = {}
        for number, rank in enumerate(self.ranks):
            if rank.axis is not None:
                line = self._line(rank, rank.axis)
                if all(other.axis == rank.axis for other in line):
                    depth = self.mesh.ranks.names.index(rank.axis)
                    lines.setdefault(line, (-depth, self.met[line], number))
        return min(lines, key=lines.__getitem__) if lines else ()

    def _line(self, rank: VirtualRank, axis: str) -> tuple[VirtualRank, ...]:
        """Return the worker's ranks that differ from one along an axis only."""
        grid = self.mesh.ranks
        others = [name for name in grid.names if name != axis]
        return tuple(
            other
            for other in self.ranks
            if all(grid.index(other.rank, n) == grid.index(rank.rank, n) for n in others)
        )

    def _meet(self, line: tuple[VirtualRank, ...]) -> None:
        """Add one collective of the ranks of a line, and of those of other workers."""
        first, node = line[0], line[0].node
        assert node is not None
        self.met[line] += 1
        args, axis = node.args[len(node.refs()) : -1], node.args[-1]
        numbers = [
            self._number(rank, value)
            for rank in line
            if rank.node is not None
            for value in rank.node.refs()
        ]
        work = node.op, (*args, axis), tuple(numbers), () if self.share else first.rank
        first.seen[work] += 1
        key = work, first.seen[work]
        if key not in self.made:
            values = [ref(number) for number in numbers]
            place = self.mesh.workers.index(self.worker, axis)
            workers, per_worker = self.mesh.workers.size(axis), self.mesh.per_worker(axis)
            met = _exchange(
                self.build, VirtualGroup(axis, workers, place, per_worker), node.op, values, args
            )
            self.made[key] = numbers, [one.index for one in met]
            self._from(first)
        for rank, number in zip(line, self.made[key][1], strict=True):
            rank.values.append(number)
            rank.at += 1

    def _last(self) -> None:
        """Add the data-dependent node at the end, which all ranks run on whole values."""
        first, node = self.ranks[0], self.ranks[0].node
        assert node is not None
        numbers = {value: self._number(first, value) for value in operands_of(node)}
        self.build.add(renumbered(node, numbers))

    def _outputs(self, outputs: ValuePlacements) -> list[int]:
        """Return for each output the blocks that this worker holds."""
        ranks = {rank.rank: rank for rank in self.ranks}
        return [
            self._number(ranks[holder], ranks[holder].graph.outputs[which])
            for which, placements in enumerate(outputs)
            for holder in self.mesh.holders(self.worker, placements)
        ]

    def _from(self, rank: VirtualRank) -> None:
        """Give the nodes added since the last call the source line of a rank's next node."""
        added = len(self.build.nodes) - len(self.lines)
        if added:
            number = min(rank.at, len(rank.graph.nodes) - 1)
            self.lines += [rank.graph.line(number)] * added
            self.origins += [rank.graph.origin(number)] * added


def _exchange(
    build: Builder, line: VirtualGroup, op: str, values: Sequence[Ref], args: Sequence[Any]
) -> list[Ref]:
    """Add a collective; return the result of each of the worker's ranks."""
    if op == ALL_REDUCE:
        return [reduction_tree.all_reduce(build, line, values, *args)] * line.per_worker
    if op == ALL_GATHER:
        return [reduction_tree.all_gather(build, line, values, *args)] * line.per_worker
    if op == REDUCE_SCATTER:
        return reduction_tree.reduce_scatter(build, line, values, *args)
    if op == SEND_RECV:
        return reduction_tree.send_recv(build, line, values, *args)
    if op in EXCHANGES_OF_ROWS:
        return reduction_tree.exchange_rows(build, line, op, values, *args)
    assert op == ALL_TO_ALL, op
    return reduction_tree.all_to_all(build, line, values, *args)
