"""Decisions: the placements that every value of a program got, axis by axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lazygt.graph.node import Graph
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.axis import AxisStep

#: For each axis by name the placements that a value has, the one that it was made with first.
Decisions = Mapping[str, tuple[Placement, ...]]


def programs_of(decided: Iterable[AxisStep]) -> list[list[AxisStep]]:
    """Group the steps by program: an axis goes on with the program that the one before made."""
    groups: list[list[AxisStep]] = []
    for step in decided:
        if groups and groups[-1][-1].local.graph is step.graph:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def decisions(steps: Sequence[AxisStep]) -> list[Decisions]:
    """Return the placements that each value of the first step's graph got on every axis.

    On later axes they are those of rank 0's part of the value as it was made.
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
    """Return the program before the cut, and a text for each value.

    The text is ``{data: P(sum) -> R, model: S(0)}``: an arrow leads to a placement that was made of
    it for its users.
    """
    return steps[0].graph, [_text(placements) for placements in decisions(steps)]


def _text(placements: Decisions) -> str:
    shown = [f"{axis}: {' -> '.join(map(str, have))}" for axis, have in placements.items() if have]
    return f"{{{', '.join(shown)}}}" if shown else ""
