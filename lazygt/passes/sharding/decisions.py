"""What was decided: the placements that every value of a program got, one axis after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lazygt.graph.node import Graph
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.axis import AxisStep

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
