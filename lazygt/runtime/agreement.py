"""Before a plan's first run: whether all ranks are about to meet in the same collectives.

They are, by construction; a mistake there would leave ranks waiting for each other for ever. So
each rank tells what it is about to run, in the store where the ranks have met, and reads what
those tell that it will meet. Once a plan; no collective is needed for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from lazygt.graph.label import LAUNCH, LAUNCH_, MEETINGS
from lazygt.graph.node import Graph, Node
from lazygt.runtime.group import Group
from lazygt.runtime.wire import MISMATCH, Failure

_NOTHING = "nothing more"


class Met(NamedTuple):
    """One collective as all ranks of its axis must describe it.

    Attributes:
        node: its number in the graph.
        text: kind, reduce op, dtype and sizes; none that differs from rank to rank.
    """

    axis: str
    text: str
    node: int


def signature(graph: Graph) -> list[Met]:
    """The collectives of a rank's steps, in their order."""
    values = graph.values
    found = []
    for number, node in enumerate(graph.nodes):
        if node.op in MEETINGS:
            operand = (node.args[1] if node.op in (LAUNCH, LAUNCH_) else node.args)[0].index
            meta = values[operand]
            dtype = "" if meta is None else str(meta.dtype).removeprefix("torch.")
            found.append(Met(node.args[-1], f"{_what(node)} of {dtype}", number))
    return found


def _what(node: Node) -> str:
    if node.op not in (LAUNCH, LAUNCH_):
        return f"{node.op.removeprefix('lazygt.')}{node.args[1:-1]}"
    kind, values, moves, op, _ = node.args
    made = node.results[0]
    assert made is not None
    # blocks differ in size, what they are padded to does not; of an all-to-all all arguments are
    # in its moves
    length = "" if kind == "all_to_all" else f" [{made.numel}]"
    return f"{kind}{'' if op is None else ' ' + op} of {len(values)} {moves}{length}"


def mismatch(group: Group, run: int, graph: Graph, own: bool) -> Failure | None:
    """Compare a rank's plan with those of all ranks that it meets; None: they agree.

    If they do not, this rank leaves the group: others, who agree with it, are about to wait.

    Args:
        run: number of the run, equal on all ranks.
        own: ranks have plans of their own, so that others may meet where this one does not.

    Raises:
        LazyGTError: this rank could not join the others.
    """
    mine = signature(graph)
    group.tell(f"plan/{run}", "\n".join(f"{met.axis}\t{met.text}" for met in mine))
    for axis in group.mesh.names if own else {met.axis: None for met in mine}:
        for rank in _others(group, axis):
            found = _compared(group, mine, rank, f"plan/{run}", axis)
            if found is not None:
                group.wait()
                group.abandon(found.detail)
                return found
    return None


def _compared(group: Group, mine: list[Met], rank: int, key: str, axis: str) -> Failure | None:
    """What a rank has told against what this one is about to run, on one axis."""
    try:
        told = group.told(key, rank)
    except RuntimeError as error:
        why = f"rank {rank} did not say in time what it is about to run: {error}"
        return Failure(mine[0].node if mine else 0, MISMATCH, why)
    found = _first_difference(mine, told, axis)
    return None if found is None else _failure(found, group.rank, rank, axis)


def _others(group: Group, axis: str) -> Iterator[int]:
    line = next(ranks for ranks in group.mesh.lines(axis) if group.rank in ranks)
    return (rank for rank in line if rank != group.rank)


class _Difference(NamedTuple):
    place: int
    mine: str
    theirs: str
    node: int


def _first_difference(mine: list[Met], told: str, axis: str) -> _Difference | None:
    """The first place where two ranks do not meet in the same collective of an axis."""
    ours = [met for met in mine if met.axis == axis]
    rows = [row.split("\t") for row in told.splitlines()]
    theirs = [text for where, text in rows if where == axis]
    for place, (met, text) in enumerate(zip_longest(ours, theirs)):
        if met is None or met.text != text:
            node = ours[min(place, len(ours) - 1)].node if ours else 0
            have = _NOTHING if met is None else met.text
            return _Difference(place, have, _NOTHING if text is None else text, node)
    return None


def _failure(found: _Difference, rank: int, other: int, axis: str) -> Failure:
    first, second = (rank, found.mine), (other, found.theirs)
    if other < rank:
        first, second = second, first
    detail = (
        f"collective {found.place + 1} on axis {axis!r}: rank {first[0]} is about to run "
        f"{first[1]}, rank {second[0]} {second[1]}"
    )
    return Failure(found.node, MISMATCH, detail)
