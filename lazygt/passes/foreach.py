"""foreach: one op on many small tensors, one tensor a node for large ones.

Many small tensors (an optimizer's biases, gradients that are clipped) cost a launch each, so runs
of the same op on them become one horizontal ``_foreach`` op. For large tensors a horizontal op
saves nothing, and keeps a temporary for every tensor at once: it is split for them, which also lets
them be fused op after op. Bit for bit on a CPU, where torch runs a horizontal op as the
single ones; on CUDA its horizontal kernels compute the same formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.meta import TensorMeta, exact
from lazygt.graph.node import Graph, Node, Param, Ref
from lazygt.graph.per_tensor import EACH, MERGE, SPLIT, ForeachForm, part
from lazygt.graph.placement import COLLECTIVE_OPS
from lazygt.passes.base import Placed, dependencies, placed, rebuild, scheduled, view_source
from lazygt.passes.questions import ask, fits

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
    if not any(node.op in SPLIT for node in graph.nodes):
        return graph
    metas, memory = graph.values, dependencies(graph).memory
    rows = [part for row in placed(graph) for part in _parts(row, metas, memory)]
    return rebuild(graph, rows) if len(rows) != len(graph.nodes) else graph


def _parts(row: Placed, metas: Metas, memory: Sequence[int]) -> Iterator[Placed]:
    """Yield the node, or a node for each of its large tensors and one for the small ones."""
    node = row.node
    form = SPLIT.get(node.op)
    if form is None or not form.is_plain(node) or _sees_own_writes(node, form, memory):
        yield row
        return
    small = [which for which, arg in enumerate(node.args[0]) if _is_small(metas[arg.index])]
    if len(small) == len(node.args[0]):
        yield row
        return
    for which in range(len(node.args[0])):
        if len(small) < 2 or which not in small:
            yield _part(row, which)
    if len(small) >= 2:
        yield _rest(row, form, small)


def _sees_own_writes(node: Node, form: ForeachForm, memory: Sequence[int]) -> bool:
    """Return whether the result for one tensor may depend on the write to another.

    ``_foreach_add_([a, b], [b, a])`` adds the new ``a`` to ``b``.
    """
    homes = Counter(
        home
        for which in range(len(node.writes))
        for home in {memory[arg.index] for arg in form.narrow(node.args, which)[0]
                     if type(arg) is Ref}
    )  # fmt: skip
    return any(homes[memory[target]] > 1 for target in node.writes)


def _is_small(meta: TensorMeta | None) -> bool:
    return meta is None or ask(fits, meta, given=(SMALL,))


def _part(row: Placed, which: int) -> Placed:
    return Placed(part(row.node, which), row.results[which : which + 1], row.source)


def _rest(row: Placed, form: ForeachForm, kept: list[int]) -> Placed:
    """Return the horizontal node for some of its tensors only."""

    def of(items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(items[which] for which in kept) if items else ()

    node = row.node
    args = tuple(
        of(arg) if position < len(form.takes) and form.takes[position] is EACH else arg
        for position, arg in enumerate(node.args)
    )
    rest = replace(node, args=args, fresh=of(node.fresh), writes=of(node.writes),
                   written=of(node.written))  # fmt: skip
    return Placed(rest, of(row.results), row.source)


# -- small tensors: one node for many ----------------------------------------------------------


def _merged(graph: Graph) -> Graph:
    metas: Metas = graph.values
    kinds = [_kind(node, metas) for node in graph.nodes]
    if not _has_run(kinds):
        return graph
    before = dependencies(graph).before
    runs: dict[Any, list[int]] = {}
    for number, (kind, level) in enumerate(zip(kinds, _levels(kinds, before), strict=True)):
        if kind is not None:
            runs.setdefault((kind, level), []).append(number)
    runs = {kind: members for kind, members in runs.items() if len(members) >= _FEWEST}
    waited = _waited_for(graph, kinds, before) if runs else []
    groups = [group for members in runs.values() for group in _in_time(members, waited)]
    if not groups:
        return graph
    rows = placed(graph)
    return rebuild(graph, [_wide(rows, unit, kinds) for unit in scheduled(before, groups)])


def _waited_for(graph: Graph, kinds: list[Any], before: Sequence[set[int]]) -> list[int]:
    """Return for each node the first that waits for it and cannot run later itself.

    Views can run later, and so can nodes with results that may all become part of a horizontal op.
    """
    small = {node.results[0] for node, kind in zip(graph.nodes, kinds, strict=True) if kind}
    waited = [len(graph.nodes)] * len(graph.nodes)
    for number, node in reversed(list(enumerate(graph.nodes))):
        later = node.op == WRITE_BACK or view_source(node) is not None
        if not later and node.results and not node.dynamic and node.op not in COLLECTIVE_OPS:
            later = small.issuperset(node.results)
        first = waited[number] if later else number
        for other in before[number]:
            waited[other] = min(waited[other], first)
    return waited


def _in_time(members: list[int], waited: Sequence[int]) -> list[list[int]]:
    """Return the members in groups, none of which delays another node.

    A group stands where its last member stood. A backward that waited there for the next
    microbatch's loss would keep the activations of both.
    """
    groups: list[list[int]] = []
    until = -1
    for number in members:
        if number >= until:
            groups.append([])
            until = len(waited)
        groups[-1].append(number)
        until = min(until, waited[number])
    return [group for group in groups if len(group) >= _FEWEST]


def _has_run(kinds: list[Any]) -> bool:
    counts: dict[Any, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    counts.pop(None, None)
    return max(counts.values(), default=0) >= _FEWEST


def _kind(node: Node, metas: Metas) -> tuple[Any, ...] | None:
    """Return the common key of nodes that may be merged; None for a node that stays as it is."""
    if len(node.results) != 1 or node.dynamic or not node.args:
        return None
    numbers = type(node.args[-1]) is not Ref or any(name == "value" for name, _ in node.kwargs)
    form = MERGE.get((node.op, numbers)) or MERGE.get((node.op, not numbers))
    if form is None or len(node.args) + bool(form.keyword) != len(form.takes):
        return None
    tensors = [arg.index for arg in node.args if type(arg) is Ref]
    scalars = form.wide.endswith(".ScalarList")
    if len(tensors) != len(form.takes) - scalars or not all(_is_small(metas[t]) for t in tensors):
        return None
    rest = () if form.keyword else node.kwargs
    if rest and (scalars or any(type(arg) is Param for _, arg in rest)):
        return None
    result = node.results[0]
    assert result is not None
    dtypes = tuple(str(metas[t].dtype) for t in tensors)  # type: ignore[union-attr]
    return form.wide, exact(rest), dtypes, str(result.dtype)


def _levels(kinds: list[Any], before: Sequence[set[int]]) -> list[int]:
    """Return the number of merging nodes on the longest path to each node, itself included.

    Nodes of the same level can't depend on each other, nor can the groups they form.
    """
    levels: list[int] = []
    for kind, others in zip(kinds, before, strict=True):
        above = max((levels[other] for other in others), default=0)
        levels.append(above + (kind is not None))
    return levels


def _wide(rows: list[Placed], unit: list[int], kinds: list[Any]) -> Placed:
    """Return one row for the nodes of a unit."""
    if len(unit) == 1:
        return rows[unit[0]]
    nodes = [rows[number].node for number in unit]
    form = SPLIT[kinds[unit[0]][0]]
    args, kwargs = form.widen([(node.args, node.kwargs) for node in nodes])
    wide = Node(
        form.wide,
        args,
        kwargs,
        tuple(meta for node in nodes for meta in node.fresh),
        tuple(value for node in nodes for value in node.writes),
        tuple(meta for node in nodes for meta in node.written),
    )
    return Placed(wide, [rows[number].results[0] for number in unit], unit[0])
