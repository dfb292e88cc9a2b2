"""What has to come before what, for the passes that move nodes about."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lazygt.graph.alias import WRITE_BACK, has_effect
from lazygt.graph.node import Graph, Node
from lazygt.passes.base import view_source


class Order(NamedTuple):
    """What constrains the order of a graph's nodes.

    Attributes:
        before: for each node the numbers of the nodes that have to run before it: those that
            make what it reads; for a write those that read that memory before it, so that a
            write in place stays one; for a read of memory the last write to it, so that old and
            new versions never meet in one node; for a node with an effect the last such before
            it.
        memory: for each value the value that was first in the same memory.
    """

    before: list[set[int]]
    memory: list[int]


def dependencies(graph: Graph, in_turn: Callable[[Node], bool] = has_effect) -> Order:
    """What constrains the order of the nodes; linear in their number.

    Args:
        in_turn: the nodes that keep their order among each other.
    """
    count = len(graph.values)
    maker = [-1] * count
    home = list(range(count))
    #: memory -> nodes that have read it since it was last written
    readers: dict[int, list[int]] = {}
    #: memory -> the node that wrote it last
    writer: dict[int, int] = {}
    last_effect = -1
    found = []
    for number, (node, results) in enumerate(graph.numbered()):
        before = {maker[value] for value in node.refs()}
        before.update(writer.get(home[value], -1) for value in node.refs())
        for target in _targets(node):
            before.add(maker[target])
            before.update(readers.pop(home[target], ()))
            writer[home[target]] = number
        for value in node.refs():
            readers.setdefault(home[value], []).append(number)
        if in_turn(node):
            before.add(last_effect)
            last_effect = number
        for value, where in zip(results, _homes(node, results), strict=True):
            maker[value], home[value] = number, home[where]
        before.discard(-1)
        before.discard(number)
        found.append(before)
    return Order(found, home)


def _targets(node: Node) -> Sequence[int]:
    return (node.args[0].index,) if node.op == WRITE_BACK else node.writes


def _homes(node: Node, results: range) -> list[int]:
    """For each result the value in whose memory it lives: its own number for new memory."""
    if node.op == WRITE_BACK:
        return [node.args[0].index]
    source = view_source(node)
    if source is not None:
        return [source] * len(results)
    fresh = list(results[: len(node.fresh)])
    return [*fresh, *node.writes] if not node.dynamic else fresh


def scheduled(before: Sequence[set[int]], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """All nodes in an order that keeps ``before``, the members of a group side by side.

    A group stands where its last member stood, everything else as early as it did. No path may
    lead from one member of a group to another by way of a node outside of it.

    Returns:
        The groups and single nodes, as lists of node numbers.
    """
    unit = list(range(len(before)))
    for group in groups:
        for member in group:
            unit[member] = group[-1]
    members: dict[int, list[int]] = {}
    for number, name in enumerate(unit):
        members.setdefault(name, []).append(number)
    waits: dict[int, set[int]] = {
        name: {unit[other] for number in inside for other in before[number]} - {name}
        for name, inside in members.items()
    }
    followers: dict[int, list[int]] = {}
    for name, others in waits.items():
        for other in others:
            followers.setdefault(other, []).append(name)
    missing = {name: len(others) for name, others in waits.items()}
    ready = [name for name, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        name = heapq.heappop(ready)
        order.append(members[name])
        for follower in followers.get(name, ()):
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)
    assert len(order) == len(members), "groups depend on each other"
    return order
