"""Memory of a launch's results: its buffer, its operand's memory, or memory of their own.

Results of a bucketed collective are used where they lie in its buffer, which is freed when the
last of them dies. One that outlives the run would keep all of it, so it is copied out. Packed
values that are scattered come back in the pack, which has room for all ranks' blocks: a result is
copied out of it if it lives until the next launch.

A gradient that travels alone, and is read by its collective only, has its block written over it, if
the block dies as soon: it is added to the block of an earlier microbatch.
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
    """Choice of that memory for each wait; runs when all other writes are decided."""

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
            brief = [aliases.lives_until(value) < pair.following for value in wait.results]
            kept = [place for place, value in enumerate(wait.results) if value in outlive]
            if _packs(launch.node):
                kept = [place for place, short in enumerate(brief) if not short]
            elif _scatters(launch.node) and all(brief) and _is_free(launch, pair, aliases):
                rows[pair.launch] = launch._replace(node=_over_operand(launch.node, graph))
                wait = wait._replace(node=_waiting(wait.node, ()))
            if len(wait.results) > 1:
                wait = wait._replace(node=_waiting(wait.node, wait.node.args[1], tuple(kept)))
            rows[pair.wait] = wait
        return rebuild(graph, rows)


class _Pair(NamedTuple):
    """A launch, its wait, and the first launch after it; the wait itself if there is none."""

    launch: int
    wait: int
    following: int


def _pairs(graph: Graph) -> Iterator[_Pair]:
    """Yield the launches with results that may lie in their buffers."""
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
    return bool(launch.args[0] == "reduce_scatter")


def _packs(launch: Node) -> bool:
    """Return whether a launch scatters several values, in one buffer."""
    return _scatters(launch) and len(launch.args[1]) > 1


def _is_free(launch: Placed, pair: _Pair, aliases: Aliases) -> bool:
    """Return whether the block may be written over the operand.

    The operand's memory is the run's own, has the layout that is sent, and only the collective
    reads it from the launch on.
    """
    (operand,), ((dim,),) = launch.node.args[1:3]
    value, graph = operand.index, aliases.graph
    meta = graph.values[value]
    home = aliases.memory[value]
    ours = home >= len(graph.inputs) or home in aliases.owned
    others = [each for each in aliases.members[home] if each != value]
    between = graph.nodes[pair.launch + 1 : pair.wait]
    return (
        ours
        and dim == 0
        and meta is not None
        and meta.plain
        and aliases.uses[value] == pair.wait
        and all(aliases.uses[each] <= pair.launch for each in others)
        and not any(value in node.refs() for node in between)
    )


def _over_operand(launch: Node, graph: Graph) -> Node:
    """Return the launch that reduces into its only operand."""
    (operand,) = launch.args[1]
    meta = graph.values[operand.index]
    assert meta is not None
    return replace(launch, op=LAUNCH_, fresh=(), writes=(operand.index,), written=(meta,))


def _waiting(node: Node, held: tuple[Ref, ...], kept: tuple[int, ...] = ()) -> Node:
    flying, _, _, axis = node.args
    return replace(node, args=(flying, held, kept, axis))
