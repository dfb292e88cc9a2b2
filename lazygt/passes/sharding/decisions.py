"""What was decided: the placements that every value of a program got, one axis after another; and
what had to be put together, for ops that have no strategy for blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lazygt.graph.node import Graph, Node
from lazygt.graph.ops import title
from lazygt.graph.placement import Cut, Placement, Replicate
from lazygt.graph.text import amount
from lazygt.passes.sharding import rules
from lazygt.passes.sharding.axis import AxisStep
from lazygt.passes.sharding.rules import Metas

#: For each axis by name the placements that a value has, the one that it was made with first.
Decisions = Mapping[str, tuple[Placement, ...]]


def programs_of(decided: Iterable[AxisStep]) -> list[list[AxisStep]]:
    """The steps of each program that was cut: an axis goes on with what the one before made."""
    groups: list[list[AxisStep]] = []
    for step in decided:
        if groups and groups[-1][-1].local.graph is step.graph:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def decisions(steps: Sequence[AxisStep]) -> list[Decisions]:
    """For each value of the first step's graph the placements that it got on every axis.

    On later axes they are those of what rank 0 had of it as it was made.
    """
    of_values: list[Decisions] = []
    for value in range(len(steps[0].graph.values)):
        placements: dict[str, tuple[Placement, ...]] = {}
        at: int | None = value
        for step in steps:
            have = step.local.values[at] if at is not None else {}
            placements[step.name] = tuple(have)
            at = next(iter(have.values()), None)
        of_values.append(placements)
    return of_values


def decisions_text(steps: Sequence[AxisStep]) -> tuple[Graph, list[str]]:
    """The program before it was cut, and for each value ``{data: P(sum) -> R, model: S(0)}``.

    An arrow leads to what was made of it for its users.
    """
    return steps[0].graph, [_text(placements) for placements in decisions(steps)]


def _text(placements: Decisions) -> str:
    shown = [f"{axis}: {' -> '.join(map(str, have))}" for axis, have in placements.items() if have]
    return f"{{{', '.join(shown)}}}" if shown else ""


# -- ops that have no strategy for blocks ----------------------------------------------------------

R = Replicate()


class ReplicateFallback(NamedTuple):
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


def fallbacks(decided: Iterable[AxisStep]) -> list[ReplicateFallback]:
    """What was gathered for ops without a rule; nothing for those that rules let choose."""
    return [found for step in decided for found in _on_axis(step)]


def _on_axis(step: AxisStep) -> Iterator[ReplicateFallback]:
    metas, values = step.graph.values, step.local.values
    parts = step.axis.parts
    cut = [bool(have) and isinstance(next(iter(have)), Cut) for have in values]
    for number, node in enumerate(step.graph.nodes):
        taken = [v for v in dict.fromkeys(node.refs()) if cut[v] and R in values[v]]
        if not taken or not _has_no_rule(node, metas, parts):
            continue
        shown = [f"{metas[value]} in {next(iter(values[value]))}" for value in taken]
        nbytes = sum(meta.nbytes for value in taken if (meta := metas[value]) is not None)
        yield ReplicateFallback(
            title(node.op), tuple(shown), nbytes, step.name, step.graph.line(number)
        )


def _has_no_rule(node: Node, metas: Metas, parts: int) -> bool:
    if node.op.startswith("lazygt."):  # annotations, and the collectives of earlier axes
        return False
    return len(rules.strategies_of(node, metas, parts)) == 1
