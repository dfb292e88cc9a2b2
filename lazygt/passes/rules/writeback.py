"""``lazygt.write_back``: a block of the written view goes back into the same block of its base.

A dim passes when every view of the chain keeps it and names none of its sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.alias import WRITE_BACK, ViewStepKey
from lazygt.graph.label import Label
from lazygt.graph.meta import TensorMeta
from lazygt.graph.metarun import run_on_metas
from lazygt.graph.node import Node, Ref
from lazygt.graph.ops import facts, overload
from lazygt.passes.rules import moving, views
from lazygt.passes.rules.base import Lower, Metas, P, R, Row, Rule, S, Values, splittable

if TYPE_CHECKING:
    from lazygt.passes.build import Builder

_VIEWS = {**moving.RULES, **views.RULES}


def _rows(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    base, chain = metas[node.args[0].index], node.args[2]
    if base is None:
        return ()
    found = [Row((R, R), (R,), _laid_out(base)), Row((P, P), (P,), _laid_out(base))]
    steps = _steps(base, chain)
    for dim in splittable(base.shape):
        label = _through(steps, S(dim), parts)
        if label is not None:
            found.append(Row((S(dim), label), (S(dim),), _written))
    return found


def _steps(base: TensorMeta, chain: Sequence[ViewStepKey]) -> list[tuple[Node, TensorMeta, int]]:
    """Each view as a node on value 0, the meta of that value, and the result that is used."""
    found = []
    for op, position, args, kwargs, which in chain:
        operands = (*args[:position], Ref(0), *args[position + 1 :])
        results = run_on_metas(facts(overload(op)), operands, kwargs, {0: base}, (), "cpu")
        assert results is not None, f"{op}: a view whose shape depends on values"
        found.append((Node(op, operands, kwargs, results[0]), base, which))
        made = results[0][which]
        assert made is not None
        base = made
    return found


def _through(
    steps: Sequence[tuple[Node, TensorMeta, int]], label: Label, parts: int
) -> Label | None:
    """The label behind the views of what has ``label`` before them; None when they cut it."""
    for node, meta, which in steps:
        rule = _VIEWS.get(node.op)
        rows = rule(node, (meta,), parts) if rule else ()
        same = [row for row in rows if row.inputs == (label,) and row.lower is None]
        if not same:
            return None
        label = same[0].outputs[which]
    return label


def _written(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    base, value = operands
    return build.add(Node(WRITE_BACK, (base, value, node.args[2]), (), (build.meta(base),)))


def _laid_out(meta: TensorMeta) -> Lower:
    """On a whole base in memory laid out as recorded, which the views may ask for."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        base, value = operands
        if build.meta(base).stride != meta.stride and meta.extent == meta.numel:
            base = build.restrided(base, meta.stride)
        return _written(build, node, (base, value))

    return lower


RULES: dict[str, Rule] = {WRITE_BACK: _rows}
