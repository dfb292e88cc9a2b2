"""The marks of pipeline stages: on any other axis of the mesh they are the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.label import Label
from lazygt.graph.node import Node, Ref
from lazygt.passes.rules.base import Metas, R, Row, Rule, S, Values, splittable
from lazygt.passes.rules.views import PARTIALS
from lazygt.passes.sharding.places import ENTER, LEAVE

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


def _labels(node: Node, metas: Metas) -> Sequence[Label]:
    meta = metas[node.args[0].index]
    return () if meta is None else (R, *map(S, splittable(meta.shape)), *PARTIALS)


def _enter(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    return [Row((label,), (label,), _again) for label in _labels(node, metas)]


def _leave(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """The value only says which stage it is on, so it is taken however it lies."""
    labels = _labels(node, metas)
    return [Row((label, value), (label,), _again) for label in labels for value in labels]


def _again(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    marked = node.refs()
    args = (*operands, *node.args[len(marked) :])
    return build.add(Node(node.op, args, (), (build.meta(operands[0]),)))


RULES: dict[str, Rule] = {ENTER: _enter, LEAVE: _leave}
