"""User annotations: as nodes of the graph (*marks*), and as the annotated placement of a value.

A mark returns its first operand.

Every session records marks, also one that does not shard, so this module imports nothing of the
sharding passes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from lazygt.graph.mesh import FSDPUnit, Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import Placement, Replicate, Shard, SingleRank, Unspecified
from lazygt.passes.base import rebuild, rows_of

# -- forward and backward passes of a step with several microbatches -------------------------------


def pass_numbers(graph: Graph, backward: Collection[int]) -> list[int]:
    """Return the pass number of each node: even in a forward, odd in a backward pass.

    The number counts the changes between forward and backward before the node. lazygt's own ops
    belong to the pass around them.

    Args:
        backward: numbers of the recorded ops of a backward pass.
    """
    count, numbers = 0, []
    for number, node in enumerate(graph.nodes):
        if not node.op.startswith("lazygt."):
            count += (graph.origin(number) in backward) != count % 2
        numbers.append(count)
    return numbers


# -- user annotations as nodes of the graph --------------------------------------------------------

#: ``place(value, placements, fixed[, unit])``: the value; ``placements`` has one placement an
#: axis, as text.
PLACE = "lazygt.place"
#: ``enter_stage(value, stage, axis[, again])``: the value, on a stage of a pipeline along an axis;
#: ``again`` in the recomputation of a backward pass.
ENTER = "lazygt.enter_stage"
#: ``leave_stage(gradient, value, axis)``: the gradient, returned to the stage of the value.
LEAVE = "lazygt.leave_stage"
#: ``reduce_as(gradient)``: the gradient in the result's dtype; partial gradients are cast before
#: their reduction, which runs in that dtype.
REDUCE_AS = "lazygt.reduce_as"
MARKS = frozenset({PLACE, ENTER, LEAVE, REDUCE_AS})


def without_places(graph: Graph, marks: Collection[str] = (PLACE,)) -> Graph:
    """Return the graph with marks of these kinds replaced by their operands.

    ``reduce_as`` marks become casts.
    """
    rows = [row._replace(node=_lower_reduce_as(row.node)) for row in rows_of(graph)]
    marks = {*marks} - {REDUCE_AS}
    replaced = {row.results[0]: row.node.args[0].index for row in rows if row.node.op in marks}
    retained = [row for row in rows if row.node.op not in marks]
    casts = any(node.op == REDUCE_AS for node in graph.nodes)
    return rebuild(graph, retained, replaced) if replaced or casts else graph


def _lower_reduce_as(node: Node) -> Node:
    """Return the cast of a ``reduce_as``; any other node unchanged."""
    if node.op != REDUCE_AS:
        return node
    (meta,) = node.fresh
    assert meta is not None
    return Node("aten._to_copy.default", node.args, (("dtype", meta.dtype),), (meta,))


def reduce_as_node(value: int, meta: TensorMeta, dtype: torch.dtype) -> Node:
    """Return the ``reduce_as`` mark of a gradient.

    Args:
        value, meta: the gradient.
        dtype: of its reduction.
    """
    return Node(REDUCE_AS, (Ref(value),), (), (TensorMeta.of(meta.empty("meta").to(dtype)),))


def place_node(value: int, meta: TensorMeta, sharding: Sharding) -> Node:
    """Return the ``place`` mark of a value."""
    unit = () if sharding.unit is None else (tuple(sharding.unit),)
    args = (Ref(value), tuple(map(str, sharding.placements)), sharding.fixed, *unit)
    return Node(PLACE, args, (), (meta,))


def sharding_of_mark(node: Node) -> Sharding:
    """Return the sharding of a ``place`` mark."""
    placements, fixed, *unit = node.args[1:]
    return Sharding(tuple(map(_placement, placements)), fixed, FSDPUnit(*unit[0]) if unit else None)


def _placement(text: str) -> Placement:
    """Parse a placement: ``R``, ``S(1)``, ``H(0)`` or ``?``."""
    if text == "?":
        return Unspecified()
    if text[0] == "H":
        return SingleRank(int(text[2:-1]))
    return Replicate() if text == "R" else Shard(int(text[2:-1]))


# -- annotated placements --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Annotation:
    """Annotated placement of a value.

    Attributes:
        kind: **fixed**: the value is stored or produced with the placement, and used with no other.
            For an input, **given**: it is stored with the placement, and may be redistributed at
            its cost; **stored**: the same, but ops for which ``gathers_operand`` holds gather it
            (FSDP); **free**: it is not stored yet, and the placement is preferred among others of
            the same cost. For the result of an op, given and free are hints: they only open
            strategies to the solver.
    """

    placement: Placement
    kind: Literal["given", "stored", "free", "fixed"] = "given"
