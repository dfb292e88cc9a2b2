"""Rows put into a cut dim at run-time places, as into a cache of keys.

Each rank writes those that lie in its block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.passes.sharding.rules.base import Call, Metas, Rule, S, Strategy, Values
from lazygt.passes.sharding.rules.indexing import own_indices

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


def along_the_index(rules: Mapping[str, Rule]) -> Mapping[str, Rule]:
    """Return rules of index_copy with their strategy for blocks of the indexed dim."""
    return {op: _with_blocks(rule) for op, rule in rules.items()}


def _with_blocks(rule: Rule) -> Rule:
    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        usual, shape = list(rule(node, metas, parts)), call.shape("self")
        dim = call.dim("dim", len(shape))
        if not shape or shape[dim] < 2:
            return usual

        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            args = build.bind(node, operands)
            value, index, source = (args[name] for name in ("self", "index", "source"))
            index = build.reshape(index, (build.meta(index).numel,))
            return (overwritten(build, value, dim, shape[dim], index, source),)

        return [*usual, call.strategy(S(dim), self=S(dim)).by(lower)]

    return strategies


def overwritten(build: Builder, block: Ref, dim: int, size: int, index: Ref, given: Ref) -> Ref:
    """Return a new version of this rank's block, with its rows that an index names.

    Args:
        size: of the dim, of all blocks together.
        index: flat, of the whole dim.
        given: a row for each index.
    """
    shape = build.shape(block)
    count, rows = build.meta(index).numel, shape[dim]
    local, outside = own_indices(build, index, size)
    if count == 1 and rows:
        # the row is written in place; where it is another rank's, by its old contents
        outside = build.reshape(outside, [1] * len(shape))
        before = build.op("aten.index_select.default", block, dim, local)
        given = build.op("aten.where.self", outside, before, given)
        written: Ref = build.op("aten.index_copy_.default", block, dim, local, given)
        return written
    # rows of others go to one more row, which is dropped
    dropped = build.op("aten.logical_and.default", outside, build.op("aten.eq.Scalar", local, 0))
    local = build.op("aten.masked_fill.Scalar", local, dropped, rows)
    spare = build.full((*shape[:dim], 1, *shape[dim + 1 :]), 0, like=block)
    wide = build.op("aten.cat.default", (block, spare), dim)
    wide = build.op("aten.index_copy_.default", wide, dim, local, given)
    kept = build.op("aten.slice.Tensor", wide, dim, 0, rows)
    copied: Ref = build.op("aten.copy_.default", block, kept)
    return copied
