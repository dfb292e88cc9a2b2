"""Desync check before a plan's first run: all ranks must run the same collectives.

A bug in planning would otherwise be a deadlock. Each rank sends the ranks of every axis the
descriptions of its collectives there, and compares those that it receives. The check happens once
per plan and process group, and delays no collective.
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

_END_TEXT = "nothing more"


class Met(NamedTuple):
    """Description of a collective, which must be equal on all ranks of its axis."""

    axis: str
    text: str  # kind, reduce op, dtype and the sizes that are equal on all ranks
    node: int  # number of its node in the graph


def signature(graph: Graph) -> list[Met]:
    """Return the collectives of a rank's steps, in their order."""
    values = graph.values
    collectives = []
    for number, node in enumerate(graph.nodes):
        if node.op in COLLECTIVES:
            operand = (node.args[1] if node.op in (LAUNCH, LAUNCH_) else node.args)[0].index
            meta = values[operand]
            dtype = "" if meta is None else str(meta.dtype).removeprefix("torch.")
            collectives.append(
                Met(node.args[-1], f"{_description(node, values)} of {dtype}", number)
            )
    return collectives


_EXCHANGES = ("all_to_all", "send_recv", "take_rows", "put_rows")


def _description(node: Node, values: Sequence[TensorMeta | None]) -> str:
    """Return kind, reduce op, moves and size of a collective, as text."""
    if node.op not in (LAUNCH, LAUNCH_):
        return f"{node.op.removeprefix('lazygt.')}{node.args[1:-1]}"
    kind, operands, moves, op, _ = node.args
    # Blocks may differ in size between ranks, but their padded size does not. The operand of a
    # reduce-scatter has its full size. For exchanges, the moves contain all sizes.
    metas = (
        [values[ref.index] for ref in operands] if kind == "reduce_scatter" else node.results[:1]
    )
    count = sum(meta.numel for meta in metas if meta is not None)
    length = "" if kind in _EXCHANGES else f" [{count}]"
    return f"{kind}{'' if op is None else ' ' + op} of {len(operands)} {moves}{length}"


def check(group: Group, run: int, graph: Graph, plans_differ: bool) -> Failure | None:
    """Compare a plan's collectives with those of all peers; return None if they agree.

    After a mismatch this rank leaves the group, since other ranks are about to wait for it.

    Args:
        run: number of the run, equal on all ranks.
        plans_differ: True if ranks have different plans, so that others may run collectives on an
            axis without this rank.
    """
    if group.abandoned:
        return None  # its collectives raise the reason
    local = signature(graph)
    try:
        group.wait()
    except LazyGTError:
        return None  # this rank could not join; its collectives raise the reason
    failure = _difference(group, run, local, plans_differ)
    if failure is not None:
        group.abandon(failure.detail)
    return failure


def _difference(group: Group, run: int, local: list[Met], plans_differ: bool) -> Failure | None:
    """Exchange descriptions on all axes; return the first mismatch."""
    local_axes = {met.axis for met in local}
    exchanges = [
        (axis, _exchange_descriptions(group, axis, run, local)) for axis in group.mesh.names
    ]
    for axis, exchange in exchanges:
        if plans_differ or axis in local_axes:
            failure = _compare_with_peers(group, local, exchange, run, axis)
            if failure is not None:
                return failure
    return None


def _exchange_descriptions(group: Group, axis: str, run: int, local: list[Met]) -> TextExchange:
    lines = [str(run), *(met.text for met in local if met.axis == axis)]
    return group.axis_group(axis).sockets.exchange_text("\n".join(lines))


def _compare_with_peers(
    group: Group, local: list[Met], exchange: TextExchange, run: int, axis: str
) -> Failure | None:
    """Compare the collectives of other ranks on an axis with this rank's."""
    node = local[0].node if local else 0
    try:
        exchange.wait()
    except ConnectionError:
        return None  # a rank left before this run; the collectives of the axis raise that
    except TimeoutError as error:
        return Failure(node, MISMATCH, f"it is not known what others are about to run: {error}")
    for rank, text in exchange.texts.items():
        number, *remote = text.split("\n")
        if number != str(run):
            why = f"rank {group.rank} is in run {run}, rank {rank} in run {number}"
            return Failure(node, MISMATCH, why)
        difference = _first_difference(local, remote, axis)
        if difference is not None:
            return _failure(difference, group.rank, rank, axis)
    return None


class _Difference(NamedTuple):
    position: int
    local: str
    remote: str
    node: int


def _first_difference(local: list[Met], remote: list[str], axis: str) -> _Difference | None:
    """Return the first difference of two ranks' collectives on an axis."""
    on_axis = [met for met in local if met.axis == axis]
    for index, (met, text) in enumerate(zip_longest(on_axis, remote)):
        if met is None or met.text != text:
            node = on_axis[min(index, len(on_axis) - 1)].node if on_axis else 0
            local_text = _END_TEXT if met is None else met.text
            return _Difference(index, local_text, _END_TEXT if text is None else text, node)
    return None


def _failure(difference: _Difference, rank: int, other: int, axis: str) -> Failure:
    first, second = (rank, difference.local), (other, difference.remote)
    if other < rank:
        first, second = second, first
    detail = (
        f"collective {difference.position + 1} on axis {axis!r}: rank {first[0]} is about to run "
        f"{first[1]}, rank {second[0]} {second[1]}"
    )
    return Failure(difference.node, MISMATCH, detail)
