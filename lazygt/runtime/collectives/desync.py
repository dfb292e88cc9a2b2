"""Check before a plan's first run that all ranks are about to run the same collectives.

They are, by construction; a mistake there would leave ranks waiting for each other for ever. So
each rank sends the ranks of every axis the collectives that it is about to run there, and reads
those of the ranks that it will meet. This happens once per plan and process group, and delays no
collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from lazygt.errors import LazyGTError
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.graph.placement import COLLECTIVES, LAUNCH, LAUNCH_
from lazygt.runtime.collectives.backends import TextExchange
from lazygt.runtime.collectives.group import Group
from lazygt.runtime.messages import MISMATCH, Failure

_NOTHING = "nothing more"


class Met(NamedTuple):
    """Collective as all ranks of its axis must describe it.

    Attributes:
        node: number of its node in the graph.
        text: kind, reduce op, dtype and the sizes that are equal on all ranks.
    """

    axis: str
    text: str
    node: int


def signature(graph: Graph) -> list[Met]:
    """Return the collectives of a rank's steps, in their order."""
    values = graph.values
    collectives = []
    for number, node in enumerate(graph.nodes):
        if node.op in COLLECTIVES:
            operand = (node.args[1] if node.op in (LAUNCH, LAUNCH_) else node.args)[0].index
            meta = values[operand]
            dtype = "" if meta is None else str(meta.dtype).removeprefix("torch.")
            collectives.append(Met(node.args[-1], f"{_what(node, values)} of {dtype}", number))
    return collectives


_EXCHANGES = ("all_to_all", "send_recv", "take_rows", "put_rows")


def _what(node: Node, values: Sequence[TensorMeta | None]) -> str:
    if node.op not in (LAUNCH, LAUNCH_):
        return f"{node.op.removeprefix('lazygt.')}{node.args[1:-1]}"
    kind, operands, moves, op, _ = node.args
    # blocks differ in size, their padded size does not; a scattered value is whole, wherever its
    # block goes; of exchanges all arguments are in their moves
    metas = (
        [values[ref.index] for ref in operands] if kind == "reduce_scatter" else node.results[:1]
    )
    count = sum(meta.numel for meta in metas if meta is not None)
    length = "" if kind in _EXCHANGES else f" [{count}]"
    return f"{kind}{'' if op is None else ' ' + op} of {len(operands)} {moves}{length}"


def check(group: Group, run: int, graph: Graph, own: bool) -> Failure | None:
    """Compare a rank's plan with those of all ranks that it meets; return None if they agree.

    If they do not, this rank leaves the group: other ranks, which agree with it, are about to wait.

    Args:
        run: number of the run, equal on all ranks.
        own: True if ranks have plans of their own, so that others may run collectives on an axis
            without this one.
    """
    if group.abandoned:
        return None  # its collectives say so
    mine = signature(graph)
    try:
        group.wait()
    except LazyGTError:
        return None  # this rank could not join; its collectives say so
    failure = _difference(group, run, mine, own)
    if failure is not None:
        group.abandon(failure.detail)
    return failure


def _difference(group: Group, run: int, mine: list[Met], own: bool) -> Failure | None:
    meets = {met.axis for met in mine}
    told = [(axis, _tell(group, axis, run, mine)) for axis in group.mesh.names]
    for axis, theirs in told:
        if own or axis in meets:
            failure = _compared(group, mine, theirs, run, axis)
            if failure is not None:
                return failure
    return None


def _tell(group: Group, axis: str, run: int, mine: list[Met]) -> TextExchange:
    rows = [str(run), *(met.text for met in mine if met.axis == axis)]
    return group.line(axis).sockets.exchange_text("\n".join(rows))


def _compared(
    group: Group, mine: list[Met], theirs: TextExchange, run: int, axis: str
) -> Failure | None:
    """Compare the collectives of other ranks on an axis with this rank's."""
    node = mine[0].node if mine else 0
    try:
        theirs.wait()
    except ConnectionError:
        return None  # a rank has left before this run: the collectives of the axis say so
    except TimeoutError as error:
        return Failure(node, MISMATCH, f"it is not known what others are about to run: {error}")
    for rank, text in theirs.texts.items():
        number, *rows = text.split("\n")
        if number != str(run):
            why = f"rank {group.rank} is in run {run}, rank {rank} in run {number}"
            return Failure(node, MISMATCH, why)
        difference = _first_difference(mine, rows, axis)
        if difference is not None:
            return _failure(difference, group.rank, rank, axis)
    return None


class _Difference(NamedTuple):
    place: int
    mine: str
    theirs: str
    node: int


def _first_difference(mine: list[Met], theirs: list[str], axis: str) -> _Difference | None:
    """Return the first place where two ranks' collectives of an axis differ."""
    ours = [met for met in mine if met.axis == axis]
    for place, (met, text) in enumerate(zip_longest(ours, theirs)):
        if met is None or met.text != text:
            node = ours[min(place, len(ours) - 1)].node if ours else 0
            have = _NOTHING if met is None else met.text
            return _Difference(place, have, _NOTHING if text is None else text, node)
    return None


def _failure(difference: _Difference, rank: int, other: int, axis: str) -> Failure:
    first, second = (rank, difference.mine), (other, difference.theirs)
    if other < rank:
        first, second = second, first
    detail = (
        f"collective {difference.place + 1} on axis {axis!r}: rank {first[0]} is about to run "
        f"{first[1]}, rank {second[0]} {second[1]}"
    )
    return Failure(difference.node, MISMATCH, detail)
