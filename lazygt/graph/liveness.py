"""Liveness: the values alive at each node of a graph, their bytes, and the peak.

The *home* of a value stands for its memory: the first value in the same memory. A *pack* is the
temporary buffer into which a launch copies several values that it sends together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from lazygt.graph.alias import COPY, WRITE_BACK, analyse, op_facts
from lazygt.graph.cost import family
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.ops import viewed_argument
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT

# -- def-use chains of a graph: the producer of each value, and the nodes that read it -------------

#: Positions of some operands of a node.
Positions = tuple[int, ...]


class DefUse(NamedTuple):
    """Nodes of a graph, linked by its values."""

    #: each with the values that it reads and the numbers of its results
    nodes: Sequence[tuple[Node, tuple[int, ...], range]]
    params: tuple[str, ...]  # the kinds of the run-time numbers
    #: for each value (number of its producer, index of the result); None for an input
    producers: Sequence[tuple[int, int] | None]
    #: for each value: number of a node that reads it -> positions of the operands
    users: Sequence[Mapping[int, Positions]]


def def_use(graph: Graph) -> DefUse:
    """Return the def-use chains of a graph."""
    nodes = []
    producers: list[tuple[int, int] | None] = [None] * len(graph.inputs)
    users: list[dict[int, Positions]] = [{} for _ in graph.inputs]
    for number, (node, results) in enumerate(graph.numbered()):
        refs = node.refs()
        nodes.append((node, refs, results))
        for position in range(len(results)):
            producers.append((number, position))
            users.append({})
        for position, value in enumerate(refs):
            readers = users[value]
            readers[number] = (*readers[number], position) if number in readers else (position,)
    return DefUse(nodes, graph.params, producers, users)


# -- liveness: the values alive at each node of a graph, their bytes, and the peak -----------------


class Change(NamedTuple):
    """Allocation or release of memory."""

    home: int  # the first value in the memory; of a pack that is being sent, the launch's result
    nbytes: int  # its bytes; negative for a release
    packed: bool = False  # True for a pack that is being sent


def peak_bytes(graph: Graph, frees: Sequence[Collection[int]]) -> int:
    """Return the most bytes alive at once while the nodes run in order; see ``alive_bytes``."""
    return max(alive_bytes(graph, frees), default=sum(map(extent_bytes, graph.inputs)))


def alive_bytes(graph: Graph, frees: Sequence[Collection[int]]) -> list[int]:
    """Return the bytes alive while each node runs; see ``alive_changes``."""
    homes = homes_of(graph)
    sizes = list(map(extent_bytes, graph.values))
    now = sum(sizes[home] for home in set(homes[: len(graph.inputs)]))
    history, freed = [], 0
    for allocated, freed_by_node in alive_changes(graph, frees, homes):
        now += freed + sum(change.nbytes for change in allocated)
        freed = sum(change.nbytes for change in freed_by_node)
        history.append(now)
    return history


def alive_changes(
    graph: Graph, frees: Sequence[Collection[int]], homes: Sequence[int]
) -> Iterator[tuple[list[Change], list[Change]]]:
    """Yield for each node the allocations before it, and the releases after it.

    Values that share memory (views, versions written in place, results that lie in their receive
    buffer) count once, while any of them is alive. So does a pack of values that is being sent.
    Temporary memory of a node (workspaces, the values between the members of a fused node) is not
    counted. Before the first node all inputs are alive.

    Args:
        frees: for each node the values that are dropped after it, inputs among them; an input
            that is never dropped counts from the first node to the last.
        homes: see ``homes_of``.
    """
    sizes = list(map(extent_bytes, graph.values))
    alive = Counter(homes[: len(graph.inputs)])
    packs: dict[int, int] = {}
    for (node, results), dropped in zip(graph.numbered(), frees, strict=True):
        allocated, freed = [], []
        for home in homes[results.start : results.stop]:
            if not alive[home]:
                allocated.append(Change(home, sizes[home]))
            alive[home] += 1
        if node.op == LAUNCH and len(node.args[1]) > 1 and node.args[0] == "all_gather":
            packs[results[0]] = sum(sizes[value.index] for value in node.args[1])
            allocated.append(Change(results[0], packs[results[0]], True))
        if node.op == WAIT and (pack := packs.pop(node.args[0].index, 0)):
            freed.append(Change(node.args[0].index, -pack, True))
        for value in dropped:
            home = homes[value]
            alive[home] -= 1
            if not alive[home]:
                freed.append(Change(home, -sizes[home]))
        yield allocated, freed


def extent_bytes(meta: TensorMeta | None) -> int:
    """Return the bytes from a tensor's first element in memory to its last."""
    return meta.extent * meta.dtype.itemsize if meta is not None else 0


def homes_of(graph: Graph) -> list[int]:
    """Return for each value the first value in the same memory (its alias set's representative)."""
    homes = list(range(len(graph.values)))
    launches = {
        results[0]: node for node, results in graph.numbered() if node.op in (LAUNCH, LAUNCH_)
    }
    for (node, results), modes in zip(graph.numbered(), analyse(graph).modes, strict=True):
        fresh, versions = results[: len(node.fresh)], results[len(node.fresh) :]
        if node.op == WRITE_BACK and modes != (COPY,):
            homes[fresh[0]] = homes[node.args[0].index]
        elif node.op == WAIT and fresh:
            launch = launches.get(node.args[0].index)
            for position in _in_receive_buffer(launch, node.args[2]) if launch else ():
                homes[fresh[position]] = homes[node.args[0].index]
        elif node.body is None and family(node) == "view":
            facts = op_facts(node)
            source = node.args[viewed_argument(facts) if facts and facts.views else 0]
            if isinstance(source, Ref):
                homes[fresh.start : fresh.stop] = [homes[source.index]] * len(fresh)
        for target, mode, version in zip(node.writes, modes, versions, strict=False):
            if mode != COPY:
                homes[version] = homes[target]
    return homes


#: Kinds of launches with results that are copied together from the received blocks.
_COPIED_RESULTS = ("all_to_all", "send_recv", "take_rows", "put_rows")


def _in_receive_buffer(launch: Node, outliving: Sequence[int]) -> list[int]:
    """List the values of a launch whose results are used in place in its receive buffer.

    A block of a later dim than the first is not contiguous there, so it is copied.

    Args:
        outliving: positions of the results that the wait copies, as they outlive the buffer.

    Returns:
        Positions among the values.
    """
    kind, values, moves, _, _ = launch.args  # of ``moves``, the first entry is the dim
    copied = kind in _COPIED_RESULTS or (kind == "all_gather" and len(values) > 1)
    return [
        position
        for position in range(len(values))
        if position not in outliving
        and not copied
        and (kind == "all_reduce" or moves[position][0] == 0)
    ]
