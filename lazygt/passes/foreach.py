"""foreach: merge of ops on small tensors to ``_foreach`` ops, and split of those on large tensors.

Many small tensors (an optimizer's biases, clipped gradients) cost a launch each, so runs of the
same op on them become one horizontal ``_foreach`` op. For large tensors a horizontal op saves
nothing, and keeps a temporary for every tensor at once. So large tensors get a node each, which can
be fused with its neighbours. On a CPU results do not change by a bit, since torch runs a horizontal
op as the single ones; on CUDA torch's horizontal kernels compute the same formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.meta import TensorMeta, typed_key
from lazygt.graph.node import Graph, Node, Param, Ref
from lazygt.graph.per_tensor import EACH, MERGE, SPLIT, ForeachForm, slice_node
from lazygt.graph.placement import COLLECTIVE_OPS
from lazygt.passes.base import NodeRow, dependencies, rebuild, rows_of, scheduled, view_source
from lazygt.passes.guards import fits, guard

#: Bytes up to which a tensor is small: its launch costs more than its arithmetic.
SMALL = 16 << 10
#: Fewer nodes than this are not merged.
_FEWEST = 4

Metas = Sequence[TensorMeta | None]


class Foreach:
    """Split of horizontal ops on large tensors, then merge of single ones on small tensors."""

    name = "foreach"

    def run(self, graph: Graph) -> Graph:
        return _merged(_split(graph))


# -- large tensors: one node each --------------------------------------------------------------


def _split(graph: Graph) -> Graph:
    """Return the graph with horizontal ops on large tensors split by tensor."""
    if not any(node.op in SPLIT for node in graph.nodes):
        return graph
    metas, memory = graph.values, dependencies(graph).memory
    rows = [new_row for row in rows_of(graph) for new_row in _split_node(row, metas, memory)]
    return rebuild(graph, rows) if len(rows) != len(graph.nodes) else graph


def _split_node(row: NodeRow, metas: Metas, memory: Sequence[int]) -> Iterator[NodeRow]:
    """Yield the node, or a node for each of its large tensors and one for the small ones."""
    node = row.node
    form = SPLIT.get(node.op)
    if form is None or not form.is_plain(node) or _sees_own_writes(node, form, memory):
        yield row
        return
    small_indices = [index for index, arg in enumerate(node.args[0]) if _is_small(metas[arg.index])]
    if len(small_indices) == len(node.args[0]):
        yield row
        return
    for index in range(len(node.args[0])):
        if len(small_indices) < 2 or index not in small_indices:
            yield _single_tensor_node(row, index)
    if len(small_indices) >= 2:
        yield _small_tensors_node(row, form, small_indices)


def _sees_own_writes(node: Node, form: ForeachForm, memory: Sequence[int]) -> bool:
    """Return whether the result for one tensor may depend on the write to another.

    ``_foreach_add_([a, b], [b, a])`` adds the new ``a`` to ``b``.
    """
    readers = Counter(
        tensor_memory
        for index in range(len(node.writes))
        for tensor_memory in {memory[arg.index] for arg in form.narrow(node.args, index)[0]
                     if type(arg) is Ref}
    )  # fmt: skip
    return any(readers[memory[target]] > 1 for target in node.writes)


def _is_small(meta: TensorMeta | None) -> bool:
    return meta is None or guard(fits, meta, constants=(SMALL,))


def _single_tensor_node(row: NodeRow, index: int) -> NodeRow:
    """Return the node for tensor number ``index`` of a horizontal op."""
    return NodeRow(slice_node(row.node, index), row.results[index : index + 1], row.source)


def _small_tensors_node(row: NodeRow, form: ForeachForm, indices: list[int]) -> NodeRow:
    """Return the horizontal node restricted to the tensors at ``indices``."""

    def selected(items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(items[index] for index in indices) if items else ()

    node = row.node
    args = tuple(
        selected(arg)
        if position < len(form.arg_kinds) and form.arg_kinds[position] is EACH
        else arg
        for position, arg in enumerate(node.args)
    )
    merged = replace(node, args=args, fresh=selected(node.fresh),
                     writes=selected(node.writes), written=selected(node.written))  # fmt: skip
    return NodeRow(merged, selected(row.results), row.source)


# -- small tensors: one node for many ----------------------------------------------------------


def _merged(graph: Graph) -> Graph:
    """Return the graph with runs of equal ops on small tensors merged to horizontal ops."""
    metas: Metas = graph.values
    keys = [_merge_key(node, metas) for node in graph.nodes]
    if not _is_any_frequent(keys):
        return graph
    before = dependencies(graph).before
    runs: dict[Any, list[int]] = {}
    for number, (key, level) in enumerate(zip(keys, _levels(keys, before), strict=True)):
        if key is not None:
            runs.setdefault((key, level), []).append(number)
    runs = {key: members for key, members in runs.items() if len(members) >= _FEWEST}
    waiters = _first_waiters(graph, keys, before) if runs else []
    groups = [group for members in runs.values() for group in _timely_groups(members, waiters)]
    if not groups:
        return graph
    rows = rows_of(graph)
    return rebuild(graph, [_merged_node(rows, unit, keys) for unit in scheduled(before, groups)])


def _first_waiters(graph: Graph, keys: list[Any], before: Sequence[set[int]]) -> list[int]:
    """Return for each node the first node that waits for it and cannot be delayed.

    Views can be delayed, and so can nodes that only produce operands of possible horizontal ops.

    Args:
        keys: for each node its merge key; None: it stays single.
        before: for each node the numbers of its predecessors.

    Returns:
        The number of nodes where nothing waits.
    """
    small = {node.results[0] for node, key in zip(graph.nodes, keys, strict=True) if key}
    waiters = [len(graph.nodes)] * len(graph.nodes)
    for number, node in reversed(list(enumerate(graph.nodes))):
        is_delayable = node.op == WRITE_BACK or view_source(node) is not None
        if not is_delayable and node.results and not node.dynamic and node.op not in COLLECTIVE_OPS:
            is_delayable = small.issuperset(node.results)
        waiter = waiters[number] if is_delayable else number
        for other in before[number]:
            waiters[other] = min(waiters[other], waiter)
    return waiters


def _timely_groups(members: list[int], waiters: Sequence[int]) -> list[list[int]]:
    """Return the members in groups, none of which delays another node.

    A group runs at the position of its last member. A backward that waited there for the next
    microbatch's loss would keep the activations of both.

    Args:
        members: node numbers, in order.
        waiters: for each node the first node that waits for it.
    """
    groups: list[list[int]] = []
    deadline = -1
    for number in members:
        if number >= deadline:
            groups.append([])
            deadline = len(waiters)
        groups[-1].append(number)
        deadline = min(deadline, waiters[number])
    return [group for group in groups if len(group) >= _FEWEST]


def _is_any_frequent(keys: list[Any]) -> bool:
    """Return whether enough nodes to merge have one key."""
    counts: dict[Any, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    counts.pop(None, None)
    return max(counts.values(), default=0) >= _FEWEST


def _merge_key(node: Node, metas: Metas) -> tuple[Any, ...] | None:
    """Return the key of nodes that may be merged with each other; None: the node stays single."""
    if len(node.results) != 1 or node.dynamic or not node.args:
        return None
    numbers = type(node.args[-1]) is not Ref or any(name == "value" for name, _ in node.kwargs)
    form = MERGE.get((node.op, numbers)) or MERGE.get((node.op, not numbers))
    if form is None or len(node.args) + bool(form.keyword) != len(form.arg_kinds):
        return None
    tensors = [arg.index for arg in node.args if type(arg) is Ref]
    scalars = form.wide.endswith(".ScalarList")
    if len(tensors) != len(form.arg_kinds) - scalars or not all(
        _is_small(metas[t]) for t in tensors
    ):
        return None
    shared_kwargs = () if form.keyword else node.kwargs
    if shared_kwargs and (scalars or any(type(arg) is Param for _, arg in shared_kwargs)):
        return None
    result = node.results[0]
    assert result is not None
    dtypes = tuple(str(metas[t].dtype) for t in tensors)  # type: ignore[union-attr]
    return form.wide, typed_key(shared_kwargs), dtypes, str(result.dtype)


def _levels(keys: list[Any], before: Sequence[set[int]]) -> list[int]:
    """Return for each node the number of mergeable nodes on the longest path to and with the node.

    Nodes of the same level cannot depend on each other, nor can their groups.
    """
    levels: list[int] = []
    for key, others in zip(keys, before, strict=True):
        depth = max((levels[other] for other in others), default=0)
        levels.append(depth + (key is not None))
    return levels


def _merged_node(rows: list[NodeRow], unit: list[int], keys: list[Any]) -> NodeRow:
    """Return the horizontal node for the nodes of a unit; a single node as it is."""
    if len(unit) == 1:
        return rows[unit[0]]
    nodes = [rows[number].node for number in unit]
    form = SPLIT[keys[unit[0]][0]]
    args, kwargs = form.widen([(node.args, node.kwargs) for node in nodes])
    merged = Node(
        form.wide,
        args,
        kwargs,
        tuple(meta for node in nodes for meta in node.fresh),
        tuple(value for node in nodes for value in node.writes),
        tuple(meta for node in nodes for meta in node.written),
    )
    return NodeRow(merged, [rows[number].results[0] for number in unit], unit[0])
