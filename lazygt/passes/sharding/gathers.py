"""Ops that have no row for blocks: what had to be put together for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lazygt.graph.amounts import amount
from lazygt.graph.label import Cut, Replicated
from lazygt.graph.node import Node
from lazygt.graph.ops import title
from lazygt.passes import rules
from lazygt.passes.rules import Metas
from lazygt.passes.sharding.shard import AxisStep

R = Replicated()


class Gather(NamedTuple):
    """What one op took whole, since no rule says how it runs on blocks.

    Attributes:
        op: the aten overload.
        operands: the gathered ones, as ``f32[8, 16] in S(0)``.
        nbytes: of them, whole.
        axis: of the mesh.
        line: the user's ``file:line``.
    """

    op: str
    operands: tuple[str, ...]
    nbytes: int
    axis: str
    line: str

    def __str__(self) -> str:
        return (
            f"{self.op} has no sharding rule for blocks along {self.axis!r}: "
            f"{', '.join(self.operands)} ({amount(self.nbytes, 'B')}) is gathered on every worker "
            f"that runs it, at {self.line}"
        )


def gathers(decided: Iterable[AxisStep]) -> list[Gather]:
    """What was gathered for ops without a rule; nothing for those that rules let choose."""
    return [found for step in decided for found in _on_axis(step)]


def _on_axis(step: AxisStep) -> Iterator[Gather]:
    metas, values = step.graph.values, step.local.values
    parts = step.axis.parts
    cut = [bool(have) and isinstance(next(iter(have)), Cut) for have in values]
    for number, node in enumerate(step.graph.nodes):
        taken = [v for v in dict.fromkeys(node.refs()) if cut[v] and R in values[v]]
        if not taken or not _has_no_rule(node, metas, parts):
            continue
        shown = [f"{metas[value]} in {next(iter(values[value]))}" for value in taken]
        nbytes = sum(meta.nbytes for value in taken if (meta := metas[value]) is not None)
        yield Gather(title(node.op), tuple(shown), nbytes, step.name, step.graph.line(number))


def _has_no_rule(node: Node, metas: Metas, parts: int) -> bool:
    if node.op.startswith("lazygt."):  # annotations, and the collectives of earlier axes
        return False
    return len(rules.rows_of(node, metas, parts)) == 1
