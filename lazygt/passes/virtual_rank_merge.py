"""Merge of the programs of a worker's virtual ranks into one.

The ranks' nodes are added one rank after another, from collective to collective. Equal nodes on
equal values, such as replicated ones, are run once (value numbering), and so is every draw of
random numbers. Exchanges among the ranks of one worker are local (see ``reduction_tree``).

All workers run their collectives in the same order: collectives on a later axis of the mesh come
first, then the axis group with the fewest collectives so far, then the first axis group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lazygt.errors import GraphError
from lazygt.graph.alias import draws
from lazygt.graph.mesh import Placements, VirtualMesh
from lazygt.graph.meta import typed_key
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
from lazygt.passes import reduction_tree
from lazygt.passes.base import is_uninitialized, renumbered
from lazygt.passes.reduction_tree import VirtualGroup
from lazygt.passes.sharding.lower.builder import Builder


class VirtualRank:
    """Progress of the merge in one virtual rank's program.

    Attributes:
        rank: its number.
        at: number of the next node.
        values: local value -> its number in the worker's program; the work key of the allocation
            for memory that is still uninitialised.
        blanks: local value -> the node that allocates such memory, as late as possible.
        seen: number of times that each work key (see ``work``) has occurred.
        drawn: random draws so far.
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
        """The axis of the collective that is the next node; None for any other node."""
        node = self.node
        return node.args[-1] if node is not None and node.op in COLLECTIVES else None

    def work(self, node: Node) -> Any:
        """Return the value-numbering key of a node: equal for the same op on the same values."""
        return (
            node.op,
            _arg_key(node.args, self.values),
            _arg_key(node.kwargs, self.values),
            tuple([self.values[value] for value in node.writes]),
            node.fresh,
        )


def operands_of(node: Node) -> tuple[int, ...]:
    """Return the values that a node reads, with repeats, then those that it writes."""
    return (*node.refs(), *node.writes)


def _arg_key(arg: Arg, values: Sequence[Any]) -> Any:
    """Return the hashable key of an argument."""
    kind = type(arg)
    if kind is Ref:
        return Ref, values[arg.index]
    if kind is tuple:
        return tuple([_arg_key(item, values) for item in arg])
    return typed_key(arg)


#: Placements of each of several values.
ValuePlacements = Sequence[Placements]


def merged(
    graphs: Sequence[Graph], inputs: ValuePlacements, outputs: ValuePlacements, mesh: VirtualMesh
) -> tuple[Graph, ...]:
    """Return the program of each worker.

    Args:
        graphs: of each virtual rank.
        inputs, outputs: the placements of each on the mesh of virtual ranks. A worker's program has
            one input or output for each block that it owns (``VirtualMesh.holders``), in order.

    Raises:
        GraphError: the ranks do not draw the same random numbers.
    """
    workers = range(mesh.workers.world_size)
    programs = [_Merge(graphs, inputs, mesh, worker).run(outputs) for worker in workers]
    if not all(_have_same_collectives(programs, mesh, axis) for axis in mesh.workers.names):
        # some workers could share the collective of two axis groups and others not: share none
        programs = [_Merge(graphs, inputs, mesh, worker, False).run(outputs) for worker in workers]
    return tuple(programs)


def _have_same_collectives(graphs: Sequence[Graph], mesh: VirtualMesh, axis: str) -> bool:
    """Return whether the workers of every group of an axis run the same collectives."""
    axis_groups = mesh.workers.axis_groups(axis)
    return all(
        len({_collectives_on(graphs[worker], axis) for worker in axis_group}) == 1
        for axis_group in axis_groups
    )


def _collectives_on(graph: Graph, axis: str) -> tuple[Any, ...]:
    return tuple(
        [(n.op, n.args[1:]) for n in graph.nodes if n.op in COLLECTIVES and n.args[-1] == axis]
    )


class _Merge:
    """Merge of the virtual ranks of one worker.

    Args:
        share: run one collective for axis groups that exchange the same values.
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
        owners = [mesh.holders(worker, placements) for placements in inputs]
        members = mesh.of_worker(worker)
        metas = [graphs[rank].inputs[index] for index, ranks in enumerate(owners) for rank in ranks]
        self.build = Builder(metas, graphs[members[0]].params, axis="", parts=1, index=0)
        numbers = {key: number for number, key in enumerate(
            (index, rank) for index, ranks in enumerate(owners) for rank in ranks)}  # fmt: skip
        self.ranks = [
            VirtualRank(rank, graphs[rank], [numbers[index, mesh.holder(rank, placements)]
                                       for index, placements in enumerate(inputs)])
            for rank in members
        ]  # fmt: skip
        #: (work key, number of its occurrence) -> operands and results, by number
        self.results_of: dict[Any, tuple[Sequence[int], Sequence[int | None]]] = {}
        self.draws: list[Any] = []
        self.collective_count: Counter[tuple[VirtualRank, ...]] = Counter()
        self.lines: list[str] = []
        self.origins: list[int] = []

    def run(self, outputs: ValuePlacements) -> Graph:
        """Return the worker's program."""
        for rank in self.ranks:
            self._merge_until_collective(rank)
        while axis_group := self._next_group():
            self._merge_collective(axis_group)
            for rank in axis_group:
                self._merge_until_collective(rank)
        output_refs = [ref(value) for value in self._outputs(outputs)]
        if self.ranks[0].node is not None:
            self._add_dynamic_node()
        self._set_source_lines(self.ranks[0])
        return replace(
            self.build.graph(output_refs), lines=tuple(self.lines), origins=tuple(self.origins)
        )

    # work of a single rank

    def _merge_until_collective(self, rank: VirtualRank) -> None:
        """Merge a rank's nodes up to its next collective, or to the end."""
        while (node := rank.node) is not None and not node.dynamic and rank.axis is None:
            if is_uninitialized(node):
                rank.blanks[len(rank.values)] = node
                rank.values.append(rank.work(node))
            else:
                self._merge_node(rank, node)
            rank.at += 1

    def _merge_node(self, rank: VirtualRank, node: Node) -> None:
        """Add a node, unless another rank has added an equal one."""
        work = rank.work(node)
        if node.op in (SHARD, REPLICATE_TO_PARTIAL):
            work = work, self.mesh.ranks.index(rank.rank, node.args[-1])
        rank.seen[work] += 1
        key = work, rank.seen[work]
        if draws(node):
            self._check_draw(rank, key)
        if key not in self.results_of:
            operand_numbers = {value: self._number(rank, value) for value in operands_of(node)}
            results = self._add_node(rank, node, operand_numbers)
            self.results_of[key] = [rank.values[value] for value in operands_of(node)], results
            self._set_source_lines(rank)
        operands, results = self.results_of[key]
        for value, number in zip(operands_of(node), operands, strict=True):
            rank.values[value] = number
        rank.values.extend(results)

    def _add_node(
        self, rank: VirtualRank, node: Node, numbers: dict[int, int]
    ) -> Sequence[int | None]:
        """Add a node to the worker's program; return the numbers of its results."""
        if node.op not in COLLECTIVE_OPS:
            results = self.build.add(renumbered(node, numbers))
            return [None if result is None else result.index for result in results]
        assert node.op in (SHARD, REPLICATE_TO_PARTIAL), node.op
        axis, operand = node.args[-1], ref(numbers[node.args[0].index])
        index, axis_size = self.mesh.ranks.index(rank.rank, axis), self.mesh.ranks.size(axis)
        if node.op == REPLICATE_TO_PARTIAL:
            return [reduction_tree.first(self.build, operand, index == 0).index]
        start, stop = shard_bounds(self.build.shape(operand)[node.args[1]], axis_size, index)
        return [reduction_tree.shard(self.build, operand, node.args[1], start, stop).index]

    def _check_draw(self, rank: VirtualRank, work: Any) -> None:
        """Raise unless a rank draws the same random numbers as the ranks before it.

        All ranks draw unsharded values in program order, so they draw the same.
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
        """Return the number of a value; allocate it first if that was deferred."""
        if type(rank.values[value]) is not int:
            node = rank.blanks[value]
            numbers = {operand: self._number(rank, operand) for operand in operands_of(node)}
            (result,) = self.build.add(renumbered(node, numbers))
            assert result is not None
            rank.values[value] = result.index
        number: int = rank.values[value]
        return number

    # collectives

    def _next_group(self) -> tuple[VirtualRank, ...]:
        """Return the next ranks that all wait in one collective; none when all have ended."""
        priorities: dict[tuple[VirtualRank, ...], tuple[int, int, int]] = {}
        for number, rank in enumerate(self.ranks):
            if rank.axis is not None:
                axis_group = self._axis_group(rank, rank.axis)
                if all(other.axis == rank.axis for other in axis_group):
                    depth = self.mesh.ranks.names.index(rank.axis)
                    priorities.setdefault(
                        axis_group, (-depth, self.collective_count[axis_group], number)
                    )
        return min(priorities, key=priorities.__getitem__) if priorities else ()

    def _axis_group(self, rank: VirtualRank, axis: str) -> tuple[VirtualRank, ...]:
        """Return the worker's ranks that differ from ``rank`` along ``axis`` only."""
        grid = self.mesh.ranks
        others = [name for name in grid.names if name != axis]
        return tuple(
            other
            for other in self.ranks
            if all(grid.index(other.rank, n) == grid.index(rank.rank, n) for n in others)
        )

    def _merge_collective(self, axis_group: tuple[VirtualRank, ...]) -> None:
        """Add one collective of the ranks of an axis group, on this and other workers."""
        first, node = axis_group[0], axis_group[0].node
        assert node is not None
        self.collective_count[axis_group] += 1
        args, axis = node.args[len(node.refs()) : -1], node.args[-1]
        numbers = [
            self._number(rank, value)
            for rank in axis_group
            if rank.node is not None
            for value in rank.node.refs()
        ]
        work = node.op, (*args, axis), tuple(numbers), () if self.share else first.rank
        first.seen[work] += 1
        key = work, first.seen[work]
        if key not in self.results_of:
            values = [ref(number) for number in numbers]
            worker_index = self.mesh.workers.index(self.worker, axis)
            workers, per_worker = self.mesh.workers.size(axis), self.mesh.per_worker(axis)
            results = _exchange(
                self.build,
                VirtualGroup(axis, workers, worker_index, per_worker),
                node.op,
                values,
                args,
            )
            self.results_of[key] = numbers, [result.index for result in results]
            self._set_source_lines(first)
        for rank, number in zip(axis_group, self.results_of[key][1], strict=True):
            rank.values.append(number)
            rank.at += 1

    def _add_dynamic_node(self) -> None:
        """Add the data-dependent node at the end, which all ranks run on unsharded values."""
        first, node = self.ranks[0], self.ranks[0].node
        assert node is not None
        numbers = {value: self._number(first, value) for value in operands_of(node)}
        self.build.add(renumbered(node, numbers))

    def _outputs(self, outputs: ValuePlacements) -> list[int]:
        """Return for each output the blocks that this worker owns."""
        ranks = {rank.rank: rank for rank in self.ranks}
        return [
            self._number(ranks[owner], ranks[owner].graph.outputs[index])
            for index, placements in enumerate(outputs)
            for owner in self.mesh.holders(self.worker, placements)
        ]

    def _set_source_lines(self, rank: VirtualRank) -> None:
        """Give the nodes added since the last call the source line of a rank's next node."""
        added = len(self.build.nodes) - len(self.lines)
        if added:
            number = min(rank.at, len(rank.graph.nodes) - 1)
            self.lines += [rank.graph.line(number)] * added
            self.origins += [rank.graph.origin(number)] * added


def _exchange(
    build: Builder, axis_group: VirtualGroup, op: str, values: Sequence[Ref], args: Sequence[Any]
) -> list[Ref]:
    """Add a collective; return the result for each of the worker's ranks."""
    if op == ALL_REDUCE:
        return [reduction_tree.all_reduce(build, axis_group, values, *args)] * axis_group.per_worker
    if op == ALL_GATHER:
        return [reduction_tree.all_gather(build, axis_group, values, *args)] * axis_group.per_worker
    if op == REDUCE_SCATTER:
        return reduction_tree.reduce_scatter(build, axis_group, values, *args)
    if op == SEND_RECV:
        return reduction_tree.send_recv(build, axis_group, values, *args)
    if op in EXCHANGES_OF_ROWS:
        return reduction_tree.exchange_rows(build, axis_group, op, values, *args)
    assert op == ALL_TO_ALL, op
    return reduction_tree.all_to_all(build, axis_group, values, *args)
