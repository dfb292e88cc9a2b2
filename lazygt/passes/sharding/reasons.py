"""Why there is a collective: what led to it, and what the best program without it would cost.

On demand only, since each answer solves the placements of one axis again; see ``without``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lazygt.graph.communication import Communication, communications
from lazygt.graph.label import MEETINGS, Anyhow, Replicated
from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph
from lazygt.passes.rules.views import RESHAPES
from lazygt.passes.sharding.cost import collective_seconds
from lazygt.passes.sharding.places import PLACE, stored_by
from lazygt.passes.sharding.shard import AxisStep
from lazygt.passes.sharding.without import label_of, without
from lazygt.passes.solver import solve

#: Collectives that are looked into, the dearest first.
MOST = 20
R = Replicated()


class Reason(NamedTuple):
    """Collectives of one kind at one of the user's lines.

    Attributes:
        times, nbytes, seconds: how many, and of all together the payload and the estimated time,
            as it was when their axis was decided; later axes may cut what they move.
        cause: the annotation that leads there, or ``""``.
        instead: what the best program without them exchanges in their place.
        extra: how many seconds longer that would take (fewer where the annotations ask for more
            than would be best); None: there is no such program.
    """

    kind: str
    reduce_op: str | None
    axis: str
    line: str
    why: str
    times: int
    nbytes: int
    seconds: float
    cause: str
    instead: str
    extra: float | None


class _Met(NamedTuple):
    """A collective of rank 0's program: what it moves, or the node that it is inside of."""

    record: Communication
    value: int | None
    node: int | None


def reasons(decided: Iterable[AxisStep]) -> list[Reason]:
    """The dearest collectives of a program, at most ``MOST``, in the order of their time."""
    found = [(step, group) for step in decided for group in _groups(step)]
    found.sort(key=lambda each: -_seconds(each[0], [met.record for met in each[1]]))
    costs: dict[int, float] = {}
    made = []
    for step, group in found[:MOST]:
        if id(step) not in costs:
            costs[id(step)] = solve(step.question().problem).cost
        made.append(_reason(step, group, costs[id(step)]))
    return made


def _reason(step: AxisStep, group: Sequence[_Met], cost: float) -> Reason:
    first = group[0].record
    values = {met.value for met in group if met.value is not None}
    inside = {met.node for met in group if met.node is not None}
    instead, extra = without(step, values, inside, cost)
    records = [met.record for met in group]
    return Reason(
        first.kind, first.reduce_op, step.name, first.source, first.why, len(group),
        sum(record.nbytes for record in records), _seconds(step, records), _cause(step, group[0]),
        instead, extra,
    )  # fmt: skip


def _seconds(step: AxisStep, records: Iterable[Communication]) -> float:
    machine, parts = step.axis.machine, step.axis.parts
    return sum(collective_seconds(machine, each.kind, each.nbytes, parts) for each in records)


# -- what there is -------------------------------------------------------------------------------


def _groups(step: AxisStep) -> list[list[_Met]]:
    """The collectives of one axis, alike ones of one line together."""
    groups: defaultdict[tuple[str, str | None, str], list[_Met]] = defaultdict(list)
    for met in _met(step):
        groups[met.record.kind, met.record.reduce_op, met.record.source].append(met)
    return list(groups.values())


def _met(step: AxisStep) -> Iterator[_Met]:
    values = step.local.values
    moved = {at: value for value, have in enumerate(values) for at in list(have.values())[1:]}
    ends = _ends(step)
    # what is interleaved is moved in another shape
    shown = {node.refs()[0]: results[0] for node, results in step.local.graph.numbered()
             if node.op in RESHAPES}  # fmt: skip
    meetings = [
        (node, results[0])
        for node, results in step.local.graph.numbered()
        if node.op in MEETINGS
    ]  # fmt: skip
    for (node, result), record in zip(meetings, _records(step, step.local.graph), strict=True):
        if node.args[-1] != step.name:
            continue  # of an earlier axis
        inside = next((number for end, number in ends if end > result), None)
        value = moved.get(result, moved.get(shown.get(result, result)))
        yield _Met(record, value, inside if value is None else None)


def _ends(step: AxisStep) -> list[tuple[int, int]]:
    """For each node the number of its last local result, and its own; in their order."""
    found = []
    for number, (_, results) in enumerate(step.graph.numbered()):
        made = [next(iter(step.local.values[v].values())) for v in results if step.local.values[v]]
        if made:
            found.append((max(made), number))
    return found


def _records(step: AxisStep, graph: Graph) -> tuple[Communication, ...]:
    mesh: Mesh = step.axis.mesh
    return communications(graph, mesh)


def _cause(step: AxisStep, met: _Met) -> str:
    """The nearest annotation that led to a collective, through values that are not whole."""
    graph, values = step.graph, step.local.values
    makers = {value: n for n, (_, results) in enumerate(graph.numbered()) for value in results}
    ahead = list(graph.nodes[met.node].refs()) if met.node is not None else [met.value]
    seen = set(ahead)
    for value in ahead:  # grows meanwhile: nearest first
        if value is None or all(label == R for label in values[value]):
            continue
        if value not in makers:
            if (label := label_of(step, value)) != R:
                return f"input {graph.values[value]} stored {label}"
            continue
        node = graph.nodes[makers[value]]
        label = stored_by(node).labels[step.axis.at] if node.op == PLACE else R
        if label not in (R, Anyhow()):
            return f"placed {label} at {graph.line(makers[value])}"
        fresh = [ref for ref in node.refs() if ref not in seen]
        seen.update(fresh)
        ahead += fresh
    return ""
