"""Memory of a launch's results: the launch's buffer, the operand's memory, or new memory.

Results of a bucketed collective are views of its buffer, which is freed when the last of them dies.
A result that outlives the run would keep the full buffer alive, so it is copied out. The buffer of
a reduce-scatter of several values has the size of all ranks' blocks, so a result is copied out if
it lives until the next launch.

A reduce-scatter of a single gradient writes its block over the gradient, if only the collective
reads the gradient, and the block dies before the next launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lazygt.graph.alias import Aliases
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT
from lazygt.passes.base import Placed, placed, rebuild


class Unpack:
    """Choice of the memory of each wait's results; runs after all other passes that add writes."""

    name = "unpack"

    def run(self, graph: Graph) -> Graph:
        pairs = list(_pairs(graph))
        if not pairs:
            return graph
        aliases = Aliases(graph)
        aliases.run()
        outlive = {aliases.memory[value] for value in graph.outputs}
        rows = placed(graph)
        for pair in pairs:
            launch, wait = rows[pair.launch], rows[pair.wait]
            short_lived = [aliases.lives_until(value) < pair.following for value in wait.results]
            copied = [position for position, value in enumerate(wait.results) if value in outlive]
            if _packs(launch.node):
                copied = [position for position, is_short in enumerate(short_lived) if not is_short]
            elif (
                _scatters(launch.node)
                and all(short_lived)
                and _may_overwrite_operand(launch, pair, aliases)
            ):
                rows[pair.launch] = launch._replace(node=_over_operand(launch.node, graph))
                wait = wait._replace(node=_waiting(wait.node, ()))
            if len(wait.results) > 1:
                wait = wait._replace(node=_waiting(wait.node, wait.node.args[1], tuple(copied)))
            rows[pair.wait] = wait
        return rebuild(graph, rows)


class _Pair(NamedTuple):
    """Numbers of a launch, its wait, and the first launch after the wait (else the wait)."""

    launch: int
    wait: int
    following: int


def _pairs(graph: Graph) -> Iterator[_Pair]:
    """Yield the launches with results that may be views of their buffers, with their waits."""
    launches: dict[int, int] = {}
    waits: list[tuple[int, int]] = []
    for number, (node, results) in enumerate(graph.numbered()):
        if node.op == LAUNCH:
            launches[results[0]] = number
        elif node.op == WAIT and node.args[0].index in launches:
            waits.append((launches[node.args[0].index], number))
    starts = sorted(launches.values())
    for launch, wait in waits:
        following = next((start for start in starts if start > wait), wait)
        node = graph.nodes[launch]
        if len(node.args[1]) > 1 or _scatters(node):
            yield _Pair(launch, wait, following)


def _scatters(launch: Node) -> bool:
    """Return whether a launch is a reduce-scatter."""
    return bool(launch.args[0] == "reduce_scatter")


def _packs(launch: Node) -> bool:
    """Return whether a launch reduce-scatters several values in one buffer."""
    return _scatters(launch) and len(launch.args[1]) > 1


def _may_overwrite_operand(launch: Placed, pair: _Pair, aliases: Aliases) -> bool:
    """Return whether the block may be written over the operand.

    That requires memory that belongs to the run, in the layout that is sent, and no other reader
    from the launch on.
    """
    (operand,), ((dim,),) = launch.node.args[1:3]
    value, graph = operand.index, aliases.graph
    meta = graph.values[value]
    memory = aliases.memory[value]
    is_owned = memory >= len(graph.inputs) or memory in aliases.owned
    others = [alias for alias in aliases.members[memory] if alias != value]
    between = graph.nodes[pair.launch + 1 : pair.wait]
    return (
        is_owned
        and dim == 0
        and meta is not None
        and meta.plain
        and aliases.uses[value] == pair.wait
        and all(aliases.uses[alias] <= pair.launch for alias in others)
        and not any(value in node.refs() for node in between)
    )


def _over_operand(launch: Node, graph: Graph) -> Node:
    """Return the launch that reduces into its only operand."""
    (operand,) = launch.args[1]
    meta = graph.values[operand.index]
    assert meta is not None
    return replace(launch, op=LAUNCH_, fresh=(), writes=(operand.index,), written=(meta,))


def _waiting(node: Node, kept_alive: tuple[Ref, ...], copied: tuple[int, ...] = ()) -> Node:
    """Return the wait with other arguments.

    Args:
        kept_alive: operands that the launch reads until the wait.
        copied: positions of the results that are copied out of the buffer.
    """
    in_flight, _, _, axis = node.args
    return replace(node, args=(in_flight, kept_alive, copied, axis))
