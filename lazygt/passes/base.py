"""Common base of passes: their contract, and the one way to rebuild a graph.

A pass never edits a graph. It gives the nodes in their new order and the values that replace
others, all in the numbers of the given graph; ``rebuild`` renumbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from lazygt.errors import GraphError
from lazygt.graph.alias import WRITE_BACK, has_effect, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Ref, params_in, ref, verify
from lazygt.graph.ops import viewed_argument
from lazygt.host.gc_pause import gc_paused


class Pass(Protocol):
    """Protocol of a pass: a name and one method.

    A pass may compare sizes for equality; all other decisions by sizes go through
    ``passes.questions``. It puts no computed size into a graph: it does not run again for a program
    in other sizes, as long as its questions have the same answers.
    """

    name: str

    def run(self, graph: Graph) -> Graph:
        """Return a graph with the same outputs for the same inputs; ``graph`` if it is best."""


class Placed(NamedTuple):
    """A node in its new place.

    Attributes:
        node: with values numbered as in the old graph.
        results: the old numbers of its results.
        source: the old node that it comes from, which gives its line and origin.
    """

    node: Node
    results: Sequence[int]
    source: int


@gc_paused()
def run_passes(
    graph: Graph,
    passes: Iterable[Pass],
    check: bool = False,
    stages: list[tuple[str, Graph]] | None = None,
) -> Graph:
    """Return the graph after all passes in turn.

    Args:
        check: verify the graph after every pass.
        stages: gets (name of the pass, the graph after it) for each.

    Raises:
        GraphError: with ``check``, naming the pass that broke a rule and those before it.
    """
    done: list[str] = []
    for step in passes:
        graph = step.run(graph)
        if check:
            try:
                verify(graph)
            except GraphError as error:
                before = ", ".join(done) or "no other pass"
                raise GraphError(
                    f"after pass {step.name} (before it: {before}): {error}"
                ) from error
        done.append(step.name)
        if stages is not None:
            stages.append((step.name, graph))
    return graph


def placed(graph: Graph) -> list[Placed]:
    """Return every node at its place."""
    return [
        Placed(node, results, number) for number, (node, results) in enumerate(graph.numbered())
    ]


def rebuild(graph: Graph, rows: Sequence[Placed], same: Mapping[int, int] | None = None) -> Graph:
    """Return the graph with these nodes in this order.

    Args:
        same: value -> the value that stands for it from now on.
    """
    numbers = _new_numbers(graph, rows, same or {})
    nodes = tuple([renumbered(row.node, numbers) for row in rows])
    outputs = tuple([numbers[value] for value in graph.outputs])
    lines = tuple([graph.line(row.source) for row in rows]) if graph.lines else ()
    origins = tuple([graph.origin(row.source) for row in rows])
    return Graph(graph.inputs, graph.params, nodes, outputs, lines, origins)


def _new_numbers(graph: Graph, rows: Sequence[Placed], same: Mapping[int, int]) -> dict[int, int]:
    numbers = {value: value for value in range(len(graph.inputs))}
    count = len(numbers)
    for row in rows:
        for value in row.results:
            numbers[value] = count
            count += 1
    for value in same:
        kept = value
        while kept in same:
            kept = same[kept]
        if kept in numbers:  # else both are dead
            numbers[value] = numbers[kept]
    return numbers


def renumbered(node: Node, numbers: Mapping[int, int]) -> Node:
    """Return the node with other numbers for the values; itself when they are the same."""
    changed = False
    args: list[Arg] = []
    for arg in node.args:
        new = _renumbered_arg(arg, numbers)
        changed = changed or new is not arg
        args.append(new)
    kwargs = node.kwargs
    if kwargs:
        kwargs = tuple([(name, _renumbered_arg(arg, numbers)) for name, arg in kwargs])
        changed = changed or kwargs != node.kwargs
    writes = node.writes
    if writes:
        writes = tuple([numbers[value] for value in writes])
        changed = changed or writes != node.writes
    if not changed:
        return node
    return Node(node.op, tuple(args), kwargs, node.fresh, writes, node.written, node.dynamic,
                node.body)  # fmt: skip


def _renumbered_arg(arg: Arg, numbers: Mapping[int, int]) -> Arg:
    kind = type(arg)
    if kind is Ref:
        index = numbers[arg.index]
        return arg if index == arg.index else ref(index)
    if kind is tuple and arg and type(arg[0]) is not int:
        items = tuple([_renumbered_arg(item, numbers) for item in arg])
        return arg if all(map(_is, items, arg)) else items
    return arg


def _is(a: Arg, b: Arg) -> bool:
    return a is b


def view_source(node: Node) -> int | None:
    """Return the value that a view op's results are views of; None for any other op."""
    f = op_facts(node)
    if f is None or not f.aliases or not node.args or node.writes:
        return None
    source = node.args[viewed_argument(f) if f.views else 0]
    return source.index if type(source) is Ref else None


def moving_views(graph: Graph) -> dict[int, int]:
    """Return the values at offsets that are known only when the graph runs.

    Returns:
        Each with the view that begins there. Two such views may overlap although their metas
        differ, and lie apart although their metas are equal.
    """
    views: dict[int, int] = {}
    for node, results in graph.numbered():
        source = view_source(node)
        if source is not None and (source in views or params_in(node.args)):
            views.update((result, result) for result in results)
        versions = results[len(node.fresh) :]
        views.update(
            (version, views[target])
            for target, version in zip(node.writes, versions, strict=False)
            if target in views
        )
    return views


def written_through(graph: Graph) -> set[int]:
    """Return the values that some node writes, and all the values that those are views of.

    Replacing one of them would be right, but would turn a write in place into a copy.
    """
    sources: dict[int, int] = {}
    written: set[int] = set()
    for node, results in graph.numbered():
        source = view_source(node)
        if source is not None:
            sources.update(dict.fromkeys(results, source))
        targets = node.refs() if node.op == WRITE_BACK else node.writes
        for target in targets:
            value: int | None = target
            while value is not None and value not in written:
                written.add(value)
                value = sources.get(value)
    return written


# -- order of nodes --------------------------------------------------------------------------------


class Dependencies(NamedTuple):
    """Constraints on the order of a graph's nodes.

    Attributes:
        before: for each node the numbers of the nodes that have to run before it: the makers of
            its operands; for a write the earlier readers of that memory, so that a write in place
            stays one; for a read of memory the last write to it, so that old and new versions
            never meet in one node; for a node with an effect the last such before it.
        memory: for each value the first value in the same memory.
    """

    before: list[set[int]]
    memory: list[int]


def dependencies(graph: Graph, in_turn: Callable[[Node], bool] = has_effect) -> Dependencies:
    """Return the constraints on the order of the nodes; linear in their number.

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
    constraints = []
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
        constraints.append(before)
    return Dependencies(constraints, home)


def _targets(node: Node) -> Sequence[int]:
    return (node.args[0].index,) if node.op == WRITE_BACK else node.writes


def _homes(node: Node, results: range) -> list[int]:
    """Return for each result a value in the same memory: its own number for new memory."""
    if node.op == WRITE_BACK:
        return [node.args[0].index]
    source = view_source(node)
    if source is not None:
        return [source] * len(results)
    fresh = list(results[: len(node.fresh)])
    return [*fresh, *node.writes] if not node.dynamic else fresh


def scheduled(before: Sequence[set[int]], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return a topological order of all nodes, the members of a group side by side.

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


# -- uninitialised memory --------------------------------------------------------------------------


def is_uninitialized(node: Node) -> bool:
    """Return whether a node makes uninitialised memory."""
    return ".empty" in node.op or ".new_empty" in node.op


def uninitialized(meta: TensorMeta) -> Node:
    """Return the node that makes such memory."""
    kwargs = (("dtype", meta.dtype), ("device", DEVICE))
    return Node("aten.empty_strided.default", (meta.shape, meta.stride), kwargs, (meta,))


def without_likenesses(graph: Graph) -> Graph:
    """Return the graph with such memory made by its shape, not in the likeness of a value."""
    nodes = list(graph.nodes)
    for number, node in enumerate(nodes):
        if is_uninitialized(node) and node.refs() and (meta := node.fresh[0]) is not None:
            nodes[number] = uninitialized(meta)
    return replace(graph, nodes=tuple(nodes))
