"""The labels that every value of a program got, one axis after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lazygt.graph.label import Label
from lazygt.graph.node import Graph
from lazygt.passes.sharding.shard import AxisStep

#: For each axis by name the labels that a value has, the one that it was made with first.
Chosen = Mapping[str, tuple[Label, ...]]


def programs_of(decided: Iterable[AxisStep]) -> list[list[AxisStep]]:
    """The steps of each program that was cut: an axis goes on with what the one before made."""
    found: list[list[AxisStep]] = []
    for step in decided:
        if found and found[-1][-1].local.graph is step.graph:
            found[-1].append(step)
        else:
            found.append([step])
    return found


def chosen(steps: Sequence[AxisStep]) -> list[Chosen]:
    """For each value of the first step's graph the labels that it got on every axis.

    On later axes they are those of what rank 0 had of it as it was made.
    """
    found: list[Chosen] = []
    for value in range(len(steps[0].graph.values)):
        labels: dict[str, tuple[Label, ...]] = {}
        at: int | None = value
        for step in steps:
            have = step.local.values[at] if at is not None else {}
            labels[step.name] = tuple(have)
            at = next(iter(have.values()), None)
        found.append(labels)
    return found


def chosen_text(steps: Sequence[AxisStep]) -> tuple[Graph, list[str]]:
    """The program before it was cut, and for each value ``{data: P(sum) -> R, model: S(0)}``.

    An arrow leads to what was made of it for its users.
    """
    return steps[0].graph, [_text(labels) for labels in chosen(steps)]


def _text(labels: Chosen) -> str:
    shown = [f"{axis}: {' -> '.join(map(str, have))}" for axis, have in labels.items() if have]
    return f"{{{', '.join(shown)}}}" if shown else ""
