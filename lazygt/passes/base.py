"""Common base of passes: their contract, the one way to rebuild a graph, ranks with equal programs.

A pass never edits a graph. It passes *rows* (the nodes in their new order, with values numbered as
in the old graph) and a map of replaced values to ``rebuild``, which numbers all values anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

from lazygt.errors import GraphError
from lazygt.graph.alias import WRITE_BACK, has_effect, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Ref, params_in, ref, verify
from lazygt.graph.ops import viewed_argument
from lazygt.host.gc_pause import gc_paused


class Pass(Protocol):
    """Protocol of a pass: a name and one method.

    A pass may compare sizes for equality; all other decisions by sizes go through
    ``passes.guards``. A pass puts no computed size into a graph, because its result is reused
    for the same program in other sizes as long as its guards hold.
    """

    name: str

    def run(self, graph: Graph) -> Graph:
        """Return an equivalent graph; ``graph`` itself where nothing changes."""


class NodeRow(NamedTuple):
    """Node of a new graph, described in the value numbers of the old graph."""

    node: Node  # with values numbered as in the old graph
    results: Sequence[int]  # the numbers of its results in the old graph
    source: int  # the number of the old node that gives the source line and origin


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
        stages: list to which (name of the pass, the graph after it) is appended.

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


def rows_of(graph: Graph) -> list[NodeRow]:
    """Return every node in order, with the numbers of its results."""
    return [
        NodeRow(node, results, number) for number, (node, results) in enumerate(graph.numbered())
    ]


def rebuild(
    graph: Graph, rows: Sequence[NodeRow], replaced: Mapping[int, int] | None = None
) -> Graph:
    """Return the graph with these nodes in this order, all values numbered anew.

    Args:
        replaced: replaced value -> the value that its readers use instead.
    """
    numbers = _new_numbers(graph, rows, replaced or {})
    nodes = tuple([renumbered(row.node, numbers) for row in rows])
    outputs = tuple([numbers[value] for value in graph.outputs])
    lines = tuple([graph.line(row.source) for row in rows]) if graph.lines else ()
    origins = tuple([graph.origin(row.source) for row in rows])
    return Graph(graph.inputs, graph.params, nodes, outputs, lines, origins)


def _new_numbers(
    graph: Graph, rows: Sequence[NodeRow], replaced: Mapping[int, int]
) -> dict[int, int]:
    """Return old number -> new number of every value; a replaced value gets its target's number."""
    numbers = {value: value for value in range(len(graph.inputs))}
    count = len(numbers)
    for row in rows:
        for value in row.results:
            numbers[value] = count
            count += 1
    for value in replaced:
        target = value
        while target in replaced:
            target = replaced[target]
        if target in numbers:  # otherwise both are dead
            numbers[value] = numbers[target]
    return numbers


def renumbered(node: Node, numbers: Mapping[int, int]) -> Node:
    """Return the node with its values renumbered; the same object if no number changes."""
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
    """Return an argument with renumbered values; the same object if no number changes."""
    kind = type(arg)
    if kind is Ref:
        index = numbers[arg.index]
        return arg if index == arg.index else ref(index)
    if kind is tuple and arg and type(arg[0]) is not int:
        items = tuple([_renumbered_arg(item, numbers) for item in arg])
        return arg if all(map(_is, items, arg)) else items
    return arg


def _is(a: Arg, b: Arg) -> bool:
    """Return whether two arguments are one object."""
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
        Value -> the view that sets the offset. Two of these views may overlap although their metas
        differ, and be disjoint although their metas are equal.
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
    """Return the values that some node writes, and the bases of views that some node writes.

    Replacing such a value would be correct, but would turn a write in place into a copy.
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
    """Constraints on the order of a graph's nodes."""

    #: for each node the numbers of its predecessors: the producers of its operands; for a write the
    #: earlier readers of that memory (write after read); for a read the last write to that memory
    #: (read after write); for a node with an effect the previous node with one
    before: list[set[int]]
    #: for each value the first value in the same memory, which identifies the memory
    memory: list[int]


def dependencies(graph: Graph, is_ordered: Callable[[Node], bool] = has_effect) -> Dependencies:
    """Return the constraints on the order of the nodes; linear in their number.

    Args:
        is_ordered: predicate of the nodes that keep their order among each other.
    """
    count = len(graph.values)
    producer = [-1] * count
    memory_of = list(range(count))
    #: memory -> nodes that read the memory since its last write
    readers_of: dict[int, list[int]] = {}
    #: memory -> the node of its last write
    writer_of: dict[int, int] = {}
    last_ordered = -1
    constraints = []
    for number, (node, results) in enumerate(graph.numbered()):
        predecessors = {producer[value] for value in node.refs()}
        predecessors.update(writer_of.get(memory_of[value], -1) for value in node.refs())
        for target in written_values(node):
            predecessors.add(producer[target])
            predecessors.update(readers_of.pop(memory_of[target], ()))
            writer_of[memory_of[target]] = number
        for value in node.refs():
            readers_of.setdefault(memory_of[value], []).append(number)
        if is_ordered(node):
            predecessors.add(last_ordered)
            last_ordered = number
        for value, alias in zip(results, _memory_aliases(node, results), strict=True):
            producer[value], memory_of[value] = number, memory_of[alias]
        predecessors.discard(-1)
        predecessors.discard(number)
        constraints.append(predecessors)
    return Dependencies(constraints, memory_of)


def written_values(node: Node) -> Sequence[int]:
    """Return the values that a node writes."""
    return (node.args[0].index,) if node.op == WRITE_BACK else node.writes


def new_versions(node: Node, results: range) -> Iterator[tuple[int, int]]:
    """Yield the pairs of a value that a node writes and the result that is its new version."""
    first = 0 if node.op == WRITE_BACK else len(node.fresh)
    return zip(written_values(node), results[first:], strict=False)


def _memory_aliases(node: Node, results: range) -> list[int]:
    """Return for each result a value in the same memory: the result itself for new memory."""
    if node.op == WRITE_BACK:
        return [node.args[0].index]
    source = view_source(node)
    if source is not None:
        return [source] * len(results)
    new_outputs = list(results[: len(node.fresh)])
    return [*new_outputs, *node.writes] if not node.dynamic else new_outputs


def scheduled(before: Sequence[set[int]], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return a topological order (Kahn's algorithm) with the members of each group side by side.

    Each group is contracted to one unit, at the position of its last member. All other nodes keep
    their order. No path may lead from one member of a group to another through a node outside of
    the group.

    Args:
        before: for each node the numbers of its predecessors.
        groups: lists of node numbers.

    Returns:
        The groups and single nodes, as lists of node numbers.
    """
    unit_of = list(range(len(before)))
    for group in groups:
        for member in group:
            unit_of[member] = group[-1]
    members: dict[int, list[int]] = {}
    for number, unit in enumerate(unit_of):
        members.setdefault(unit, []).append(number)
    predecessors: dict[int, set[int]] = {
        unit: {unit_of[other] for number in unit_members for other in before[number]} - {unit}
        for unit, unit_members in members.items()
    }
    successors: dict[int, list[int]] = {}
    for unit, others in predecessors.items():
        for other in others:
            successors.setdefault(other, []).append(unit)
    in_degree = {unit: len(others) for unit, others in predecessors.items()}
    ready = [unit for unit, count in in_degree.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        unit = heapq.heappop(ready)
        order.append(members[unit])
        for successor in successors.get(unit, ()):
            in_degree[successor] -= 1
            if not in_degree[successor]:
                heapq.heappush(ready, successor)
    assert len(order) == len(members), "groups depend on each other"
    return order


# -- uninitialised memory --------------------------------------------------------------------------


def is_uninitialized(node: Node) -> bool:
    """Return whether a node allocates uninitialised memory."""
    return ".empty" in node.op or ".new_empty" in node.op


def uninitialized(meta: TensorMeta) -> Node:
    """Return the node that allocates an uninitialised tensor of this meta."""
    kwargs = (("dtype", meta.dtype), ("device", DEVICE))
    return Node("aten.empty_strided.default", (meta.shape, meta.stride), kwargs, (meta,))


def without_likenesses(graph: Graph) -> Graph:
    """Return the graph with ``empty_like`` and the like replaced by ``empty_strided``.

    The new nodes have no operands, so they depend on no other value.
    """
    nodes = list(graph.nodes)
    for number, node in enumerate(nodes):
        if is_uninitialized(node) and node.refs() and (meta := node.fresh[0]) is not None:
            nodes[number] = uninitialized(meta)
    return replace(graph, nodes=tuple(nodes))


# -- ranks with equal programs ---------------------------------------------------------------------
# Ranks with equal programs are an equivalence class: in a list of the ranks' graphs they share one
# graph object, and each class is processed once.

T = TypeVar("T")


def classes(graphs: Sequence[Graph]) -> list[Graph]:
    """Return the distinct graph objects, in the order of their first ranks."""
    return list({id(graph): graph for graph in graphs}.values())


def by_class(change: Callable[[Graph], T], graphs: Sequence[Graph]) -> list[T]:
    """Map a function over the ranks' graphs, with one call for each distinct graph object."""
    results = {id(graph): change(graph) for graph in classes(graphs)}
    return [results[id(graph)] for graph in graphs]


def same(a: Graph, b: Graph) -> bool:
    """Return whether two graphs are equal, even if they are different objects."""
    return a is b or (a.inputs == b.inputs and a == b)


def classified(graphs: Sequence[Graph]) -> list[Graph]:
    """Return the graphs with equal ones replaced by one object."""
    distinct: list[Graph] = []

    def canonical(graph: Graph) -> Graph:
        equal = next((candidate for candidate in distinct if same(candidate, graph)), None)
        if equal is None:
            distinct.append(graph)
        return equal or graph

    return by_class(canonical, graphs)
