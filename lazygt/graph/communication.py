"""The collectives of a rank's graph, as they are counted and explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazygt.graph.label import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    MEETINGS,
    REDUCE_SCATTER,
)
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node

#: What each does for the op that asked for it.
_PURPOSE = {
    ALL_REDUCE: "adds up what each rank made with",
    ALL_GATHER: "puts together the blocks made by",
    REDUCE_SCATTER: "adds up, and cuts into blocks, what each rank made with",
    ALL_TO_ALL: "cuts along another dim the blocks made by",
}


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        reduce_op: ``sum``, ``max``, ``min`` or ``prod``; None for one that reduces nothing.
        nbytes: payload of the rank: the operand of an all-reduce, the gathered result of an
            all-gather, the unreduced operand of a reduce-scatter, the local operand of an
            all-to-all.
        mesh_dim: the axis of the mesh along which ranks meet.
        source: the user's ``file:line``.
        why: which op's result it moves, and for which.
    """

    kind: str
    reduce_op: str | None
    nbytes: int
    mesh_dim: str
    source: str
    why: str


def communications(graph: Graph) -> tuple[Communication, ...]:
    """The collectives of one rank's graph, in the order in which they are launched."""
    if all(node.op not in MEETINGS for node in graph.nodes):
        return ()
    values = graph.values
    makers = _makers(graph)
    users = _users(graph)
    return tuple([
        Communication(
            node.op.removeprefix("lazygt."),
            _reduce_op(node),
            _payload(node, values),
            node.args[-1],
            graph.line(number),
            _why(node, makers[node.args[0].index], users.get(results[0])),
        )
        for number, (node, results) in enumerate(graph.numbered())
        if node.op in MEETINGS
    ])  # fmt: skip


def _reduce_op(node: Node) -> str | None:
    if node.op == ALL_REDUCE:
        return str(node.args[1])
    return str(node.args[2]) if node.op == REDUCE_SCATTER else None


def _payload(node: Node, values: Sequence[TensorMeta | None]) -> int:
    meta = node.fresh[0] if node.op == ALL_GATHER else values[node.args[0].index]
    return 0 if meta is None else meta.nbytes


def _makers(graph: Graph) -> list[str]:
    """The op that made each value."""
    found = ["an input"] * len(graph.inputs)
    for node in graph.nodes:
        found += [node.op] * len(node.results)
    return found


def _users(graph: Graph) -> dict[int, str]:
    """The op that reads each value first."""
    found: dict[int, str] = {}
    for node in graph.nodes:
        for value in node.refs():
            found.setdefault(value, node.op)
    return found


def _why(node: Node, maker: str, user: str | None) -> str:
    return f"{_PURPOSE[node.op]} {maker}, for {user or 'the result'}"
