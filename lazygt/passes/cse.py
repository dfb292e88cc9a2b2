"""cse: common subexpression elimination. Equal pure nodes become one.

Bit for bit. Never merged: random ops, uninitialised memory, nodes that write or are written,
fused nodes. A result is not kept alive for a later twin of its node either: a program that computes
something twice to save memory (activation checkpointing) keeps that saving.
"""

from __future__ import annotations

from typing import Any

from lazygt.graph.alias import has_effect, last_uses
from lazygt.graph.meta import exact
from lazygt.graph.node import Arg, Graph, Node, Ref
from lazygt.passes.base import Placed, placed, rebuild, written_through
from lazygt.passes.fold import is_view
from lazygt.passes.questions import ask, fits

# -- dce: dead code elimination. Values without readers are not computed ---------------------------
# Bit for bit. Random ops stay even without readers: each draws from the one generator, and the
# numbers of those after it must not depend on liveness.


class DeadCode:
    """Removal of nodes with unread results, from the last to the first."""

    name = "dce"

    def run(self, graph: Graph) -> Graph:
        needed = set(graph.outputs)
        kept = []
        for row in reversed(placed(graph)):
            if has_effect(row.node) or not needed.isdisjoint(row.results):
                needed.update(row.node.refs())
                needed.update(row.node.writes)
                kept.append(row)
        if len(kept) == len(graph.nodes):
            return graph
        kept.reverse()
        return rebuild(graph, kept)


# -- cse: common subexpression elimination. Equal pure nodes become one ----------------------------

#: A result of so many bytes may live longer for the sake of a later twin.
_SMALL = 4096


class CommonSubexpressions:
    """Replacement of a node by an earlier one with the same op and the same arguments."""

    name = "cse"

    def run(self, graph: Graph) -> Graph:
        uses = last_uses(graph)
        written = written_through(graph)
        first: dict[Any, Placed] = {}
        same: dict[int, int] = {}
        rows = []
        for row in placed(graph):
            if not may_merge(row, written):
                rows.append(row)
                continue
            key = key_of(row.node, same)
            earlier = first.setdefault(key, row)
            if earlier is row or not _alive(earlier, row.source, uses):
                first[key] = row
                rows.append(row)
                continue
            for value, kept in zip(row.results, earlier.results, strict=True):
                same[value] = kept
                uses[kept] = max(uses[kept], uses[value])
        return rebuild(graph, rows, same) if same else graph


def may_merge(row: Placed, written: set[int]) -> bool:
    """Return whether a node's results may be those of an equal one.

    Args:
        written: see ``written_through``.
    """
    node = row.node
    return not (
        has_effect(node)
        or node.writes
        or node.body is not None  # its members are not part of the key
        or ".empty" in node.op
        or ".new_empty" in node.op
    ) and written.isdisjoint(row.results)


def _alive(earlier: Placed, number: int, uses: list[int]) -> bool:
    """Return whether earlier results are alive at node ``number``, or cost next to nothing."""
    if is_view(earlier.node):
        return True
    return all(
        uses[value] >= number or meta is None or ask(fits, meta, given=(_SMALL,))
        for value, meta in zip(earlier.results, earlier.node.results, strict=True)
    )


def key_of(node: Node, same: dict[int, int]) -> Any:
    """Return a key that is equal for nodes that compute the same.

    Args:
        same: value -> the value that it is the same as.
    """
    kwargs = tuple([(name, _named(arg, same)) for name, arg in node.kwargs])
    return node.op, tuple([_named(arg, same) for arg in node.args]), kwargs


def _named(arg: Arg, same: dict[int, int]) -> Any:
    """Return an argument as part of a key."""
    kind = type(arg)
    if kind is Ref:
        return Ref, same.get(arg.index, arg.index)
    if kind is tuple:
        return tuple([_named(item, same) for item in arg])
    return exact(arg)
