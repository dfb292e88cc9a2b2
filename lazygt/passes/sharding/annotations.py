"""User annotations of values, and their propagation to derived values and to users.

A fixed placement holds for the full step: a view or a cast of a fixed value is fixed, to the
placement that follows from the operand's. A value computed elementwise from stored values only (a
cast, the sum of two weights) is stored, too: it is computed on the shards, and gathered for its
users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.liveness import DefUse
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import (
    COLLECTIVE_OPS,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    Unspecified,
)
from lazygt.passes.base import view_source
from lazygt.passes.sharding.builder import Builder
from lazygt.passes.sharding.marks import ENTER, PLACE, REDUCE_AS, reduce_as_node, sharding_of_mark
from lazygt.passes.sharding.rules import pointwise
from lazygt.passes.sharding.rules.strategy import Metas, Strategy, Values, shardable_dims
from lazygt.passes.sharding.rules.views import PARTIALS
from lazygt.passes.sharding.strategies import StrategySet

#: Ops with results that have their operand's elements, in new memory.
COPIES = frozenset({"aten._to_copy.default", "aten.clone.default"})


@dataclass(frozen=True, slots=True)
class Annotation:
    """Annotated placement of a value."""

    placement: Placement
    #: of an input, **given**: it is stored so, and may be moved at its cost; **stored**: the same,
    #: but ``gathers_operand`` ops gather it (FSDP); **free**: it is not stored yet, the placement
    #: is preferred where others cost the same. **fixed**: it is stored, or made, and used so and
    #: not otherwise. For a value that an op makes, given and free are wishes: they open strategies.
    kind: Literal["given", "stored", "free", "fixed"] = "given"


def infer_annotations(
    chains: DefUse,
    metas: Metas,
    entries: Sequence[StrategySet],
    numbers: Sequence[int],
    annotations: Mapping[int, Annotation],
) -> dict[int, Annotation]:
    """Return the annotations with those of derived values, in one forward pass.

    Args:
        annotations: value -> the user's annotation.
        entries: the strategies of each kind of node.
        numbers: the kind of each node.
    """
    inferred = dict(annotations)
    for (node, refs, results), number in zip(chains.nodes, numbers, strict=True):
        if inferred.keys().isdisjoint(refs) or not results or node.dynamic:
            continue
        result_annotations = _inferred(node, metas, entries[number], inferred)
        for value, annotation in zip(results, result_annotations, strict=False):
            inferred.setdefault(value, annotation)
    return inferred


def _inferred(
    node: Node, metas: Metas, entry: StrategySet, known: Mapping[int, Annotation]
) -> Sequence[Annotation]:
    """Return the annotations of a node's results; empty where nothing follows."""
    first = known.get(node.refs()[0])
    if first is not None and first.kind == "fixed" and moves_elements(node):
        strategies = {
            strategy.outputs
            for strategy in entry.strategies
            if strategy.inputs == (first.placement,) and not strategy.comm
        }
        placements = strategies.pop() if len(strategies) == 1 else ()
        is_interleaved = any(isinstance(placement, StridedShard) for placement in placements)
        return (
            () if is_interleaved else [Annotation(placement, "fixed") for placement in placements]
        )
    if is_elementwise(node, metas):
        operand_annotations = [
            known.get(value) for value in node.refs() if not _is_number(metas, value)
        ]
        annotation = operand_annotations[0] if operand_annotations else None
        if annotation is None or annotation.kind != "stored":
            return ()
        return (annotation,) if all(other == annotation for other in operand_annotations) else ()
    return ()


def moves_elements(node: Node) -> bool:
    """Return whether a node is a view, copy or collective of its only operand."""
    if len(node.refs()) != 1 or node.op == PLACE:
        return False
    return node.op in COPIES or node.op in COLLECTIVE_OPS or view_source(node) is not None


def is_elementwise(node: Node, metas: Metas) -> bool:
    """Return whether a pure node is elementwise, without broadcasting.

    Operands have the shape of the result, or a single element.
    """
    if len(node.fresh) != 1 or node.writes or not node.refs() or node.op.startswith("lazygt."):
        return False
    (result,) = node.fresh
    if result is None or not (pointwise.is_pointwise(node.op) or node.op in pointwise.RULES):
        return False
    operands = [metas[value] for value in node.refs()]
    return all(
        meta is not None and (meta.shape == result.shape or meta.numel == 1) for meta in operands
    )


def gathers_operand(node: Node, value: int, metas: Metas) -> bool:
    """Return whether a stored operand is all-gathered for a node (FSDP).

    A node that writes the operand (an optimizer), that is elementwise, or that has no other operand
    runs on shards.
    """
    if value in node.writes or node.op in (PLACE, WRITE_BACK) or is_elementwise(node, metas):
        return False
    return len(node.refs()) > 1 or moves_elements(node)


def _is_number(metas: Metas, value: int) -> bool:
    meta = metas[value]
    return meta is not None and meta.numel == 1


# -- shardings of the stored values of a program ---------------------------------------------------

R, P = Replicate(), Partial("sum")


def stored_shardings(graph: Graph, mesh: Mesh, inputs: Sequence[Sharding]) -> dict[int, Sharding]:
    """Return value -> sharding of the stored values of a program.

    Stored values are inputs, placed values, results of nodes without operands (a weight before its
    initialisation), and new versions of all these.
    """
    shardings = dict(enumerate(inputs))
    replicated = Sharding((R,) * len(mesh.names))
    for node, results in graph.numbered():
        if node.op == PLACE:
            shardings[results[0]] = sharding_of_mark(node)
        elif node.op == ENTER and node.args[0].index in shardings:
            shardings[results[0]] = shardings[node.args[0].index]
        elif not node.refs():
            shardings.update(dict.fromkeys(results, replicated))
        if node.op == WRITE_BACK:
            versions = zip((node.args[0].index,), results, strict=False)
        elif node.writes:
            versions = zip(node.writes, results[len(node.fresh) :], strict=False)
        else:
            continue
        for target, version in versions:
            if target in shardings:
                shardings[version] = shardings[target]
    return shardings


def annotations_of(
    graph: Graph, shardings: Mapping[int, Sharding], mesh: Mesh, axis_index: int
) -> dict[int, Annotation]:
    """Return the user's annotations of a graph's values, for one mesh axis.

    Args:
        shardings: the sharding of each stored value.
        axis_index: number of the mesh axis.
    """
    annotations = {}
    for value, sharding in shardings.items():
        placement = sharding.placements[axis_index]
        if isinstance(placement, Unspecified):
            continue
        if (
            sharding.unit is not None
            and sharding.unit.axis == mesh.names[axis_index]
            and placement != R
        ):
            annotations[value] = Annotation(placement, "stored")
        elif sharding.fixed:
            annotations[value] = Annotation(placement, "fixed")
        elif value < len(graph.inputs) and placement != R:
            annotations[value] = Annotation(placement)
    for node, results in graph.numbered():
        placement = (
            shardings[results[0]].placements[axis_index] if node.op == PLACE else Unspecified()
        )
        if not isinstance(placement, Unspecified):
            annotations.setdefault(results[0], Annotation(placement, "free"))
    return annotations


def mark_strategies(node: Node, axis_index: int) -> Sequence[Strategy]:
    """Return the strategies of a mark (``place`` or ``reduce_as``) on one mesh axis.

    A shard is computed at the mark, so that later nodes can shard it again on another axis.
    """
    (meta,) = node.fresh
    assert meta is not None
    if node.op == REDUCE_AS:
        all_placements: list[Placement] = [R, P, *map(Shard, shardable_dims(meta.shape))]
        return [
            Strategy((placement,), (placement,), _lower_reduce_as) for placement in all_placements
        ]
    marked = sharding_of_mark(node).placements[axis_index]
    placements: list[Placement] = [R, *(Shard(dim) for dim in shardable_dims(meta.shape))]
    if isinstance(marked, Shard):
        placements = [marked]
    elif isinstance(marked, Unspecified):
        placements += PARTIALS
    return [Strategy((placement,), (placement,), _lower_place) for placement in placements]


def _lower_reduce_as(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    (value,), (meta,) = operands, node.fresh
    assert meta is not None
    return build.add(reduce_as_node(value.index, build.meta(value), meta.dtype))


def _lower_place(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    (value,) = operands
    return build.add(Node(PLACE, (value, *node.args[1:]), (), (build.meta(value),)))
