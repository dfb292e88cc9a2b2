"""cse: common subexpression elimination; dce: dead code elimination.

Results do not change by a bit. Never merged: random ops, uninitialised memory, nodes that write or
are written, fused nodes. A dead result is not kept alive for a later equal node either: a program
that computes a value twice to save memory (activation checkpointing) keeps that saving.
"""

from __future__ import annotations

from typing import Any

from lazygt.graph.alias import has_effect, last_uses
from lazygt.graph.meta import typed_key
from lazygt.graph.node import Arg, Graph, Node, Ref
from lazygt.passes.base import NodeRow, rebuild, rows_of, written_through
from lazygt.passes.fold import is_view
from lazygt.passes.guards import fits, guard

# -- dce: dead code elimination --------------------------------------------------------------------
# Random ops stay even without readers: each advances the one generator, and the numbers of later
# random ops must not depend on liveness.


class DeadCode:
    """Dead code elimination in one walk from the last node to the first."""

    name = "dce"

    def run(self, graph: Graph) -> Graph:
        live = set(graph.outputs)
        live_rows = []
        for row in reversed(rows_of(graph)):
            if has_effect(row.node) or not live.isdisjoint(row.results):
                live.update(row.node.refs())
                live.update(row.node.writes)
                live_rows.append(row)
        if len(live_rows) == len(graph.nodes):
            return graph
        live_rows.reverse()
        return rebuild(graph, live_rows)


# -- cse: common subexpression elimination ---------------------------------------------------------

#: Most bytes of a dead result that is kept alive for a later equal node.
_SMALL = 4096


class CommonSubexpressions:
    """Replacement of a node by an earlier one with the same op and the same arguments."""

    name = "cse"

    def run(self, graph: Graph) -> Graph:
        uses = last_uses(graph)
        written = written_through(graph)
        first: dict[Any, NodeRow] = {}  # key -> the latest node with it that was not merged
        merged: dict[int, int] = {}  # result of a merged node -> the value that replaces it
        rows = []
        for row in rows_of(graph):
            if not may_merge(row, written):
                rows.append(row)
                continue
            key = key_of(row.node, merged)
            earlier = first.setdefault(key, row)
            if earlier is row or not _alive(earlier, row.source, uses):
                first[key] = row
                rows.append(row)
                continue
            for value, earlier_value in zip(row.results, earlier.results, strict=True):
                merged[value] = earlier_value
                uses[earlier_value] = max(uses[earlier_value], uses[value])
        return rebuild(graph, rows, merged) if merged else graph


def may_merge(row: NodeRow, written: set[int]) -> bool:
    """Return whether a node may be replaced by an equal earlier node.

    Args:
        written: values that some node writes; see ``written_through``.
    """
    node = row.node
    return not (
        has_effect(node)
        or node.writes
        or node.body is not None  # its members are not part of the key
        or ".empty" in node.op
        or ".new_empty" in node.op
    ) and written.isdisjoint(row.results)


def _alive(earlier: NodeRow, number: int, uses: list[int]) -> bool:
    """Return whether earlier results are alive at node ``number``, are views, or are small."""
    if is_view(earlier.node):
        return True
    return all(
        uses[value] >= number or meta is None or guard(fits, meta, constants=(_SMALL,))
        for value, meta in zip(earlier.results, earlier.node.results, strict=True)
    )


def key_of(node: Node, merged: dict[int, int]) -> Any:
    """Return a hashable key that is equal for nodes that compute the same.

    Args:
        merged: merged value -> the value that replaces it.
    """
    kwargs = tuple([(name, _arg_key(arg, merged)) for name, arg in node.kwargs])
    return node.op, tuple([_arg_key(arg, merged) for arg in node.args]), kwargs


def _arg_key(arg: Arg, merged: dict[int, int]) -> Any:
    """Return the hashable key of an argument."""
    kind = type(arg)
    if kind is Ref:
        return Ref, merged.get(arg.index, arg.index)
    if kind is tuple:
        return tuple([_arg_key(item, merged) for item in arg])
    return typed_key(arg)
