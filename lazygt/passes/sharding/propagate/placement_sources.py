"""Sources of placements: user annotations with what follows from them, and fused weights.

A fixed placement holds for the full step: a view or a cast of a fixed value is fixed, to the
placement that follows from the operand's. A value computed elementwise from stored values only (a
cast, the sum of two weights) is stored, too: it is computed on the shards, and gathered for its
users.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.liveness import DefUse
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import (
    COLLECTIVE_OPS,
    Cut,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    Unspecified,
    side_by_side,
)
from lazygt.passes.base import new_versions, view_source
from lazygt.passes.sharding.choose.catalogue import StrategyCatalogue, StrategySet
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.lower.halo import MAX_PIECES
from lazygt.passes.sharding.marks import (
    ENTER,
    PLACE,
    REDUCE_AS,
    Annotation,
    reduce_as_node,
    sharding_of_mark,
)
from lazygt.passes.sharding.rules import pointwise, slicing, views
from lazygt.passes.sharding.rules.strategy import (
    PARTIALS,
    Call,
    LocalLowering,
    Metas,
    Strategy,
    Values,
    shardable_dims,
)

#: Ops with results that have their operand's elements, in new memory.
COPIES = frozenset({"aten._to_copy.default", "aten.clone.default"})


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
        for target, version in new_versions(node, results):
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


# -- seeds: interleaved placements of fused weights ------------------------------------------------
# The product with a fused weight, such as one of queries, keys and values, is split: by ``split``
# or slices, or by a view and ``unbind``. All pieces are sharded without communication if the weight
# is interleaved, so that each rank has a shard of every piece. A backward search from the split
# finds the weight that the user sharded. The interleaved placement is an additional choice: the
# solver compares the redistribution of the weight with that of activations.

_PICKS = frozenset({"aten.unbind.int", "aten.unbind_copy.int", "aten.select.int"})
_SPLITS = slicing.TAKES_APART | _PICKS | {"aten.glu.default"}
_SEED_OPS = _SPLITS | slicing.PUTS_AMONG


class Seeds(NamedTuple):
    """Values that may be interleaved."""

    #: a value that the user sharded -> its additional placements
    values: Mapping[int, Collection[StridedShard]]
    #: nodes, by number, that embed gradients in zeros -> the placement of the sum
    results: Mapping[int, StridedShard]


def find_seeds(
    chains: DefUse,
    metas: Metas,
    catalogue: StrategyCatalogue,
    annotations: Mapping[int, Annotation],
    is_sharded_otherwise: Callable[[int, int], bool],
) -> Seeds:
    """Return the values of a graph that may be interleaved.

    Args:
        is_sharded_otherwise: (value, dim) -> whether another dim of the value is sharded; then the
            value needs no interleaved placement.
    """
    sharded = {
        value: annotation.placement
        for value, annotation in annotations.items()
        if annotation.kind in ("given", "free") and isinstance(annotation.placement, Shard)
    }
    seed_kinds = {number for number, node in enumerate(catalogue.firsts) if node.op in _SEED_OPS}
    if not (sharded and seed_kinds):
        return Seeds({}, {})
    search = _Search(chains, metas, catalogue, sharded)
    nodes = [
        node_number for node_number, number in enumerate(catalogue.numbers) if number in seed_kinds
    ]
    splits = _SplitValues(metas, catalogue.axis_size)
    for node_number in nodes:
        node = chains.nodes[node_number][0]
        if node.op in _SPLITS and not node.dynamic:
            splits.add(node, is_sharded_otherwise)
    for value, dim in splits.picked:
        search.back_beside(value, dim)
    for value, placement in splits.groups():
        search.back(value, placement)
    gradients = (
        [(node_number, chains.nodes[node_number][0]) for node_number in nodes]
        if search.found
        else []
    )
    embedded = _embedded_gradients(gradients, metas, catalogue.axis_size)
    return Seeds(search.found, embedded)


class _SplitValues:
    """Values that a graph splits.

    Attributes:
        picked: (value, dim) pairs with single elements selected along the dim.
    """

    def __init__(self, metas: Metas, axis_size: int) -> None:
        self._metas, self._axis_size = metas, axis_size
        self.picked: set[tuple[int, int]] = set()
        #: (value, dim) -> starts and ends of the pieces
        self._borders: defaultdict[tuple[int, int], set[int]] = defaultdict(set)

    def add(self, node: Node, is_sharded_otherwise: Callable[[int, int], bool]) -> None:
        """Add the value that a node splits, unless it is sharded along another dim."""
        call = Call(node, self._metas, self._axis_size)
        value, shape = node.refs()[0], call.shape("self")
        dim = call.dim("dim", len(shape))
        if is_sharded_otherwise(value, dim):
            return
        if node.op in _PICKS:
            self.picked.add((value, dim))
            return
        borders = slicing.borders(call, dim)
        if any(stop - start == 1 for start, stop in pairwise(borders)):
            self.picked.add((value, dim))
        else:
            self._borders[value, dim].update(borders)

    def groups(self) -> Iterator[tuple[int, Cut]]:
        """Yield the split values, each with the placement that shards every piece."""
        for (value, dim), borders in self._borders.items():
            meta = self._metas[value]
            assert meta is not None
            placement = _grouped_placement(borders, dim, meta.shape[dim])
            if placement is not None:
                yield value, placement


def _grouped_placement(borders: Collection[int], dim: int, size: int) -> StridedShard | None:
    """Return the placement of a dim that shards each group between these borders; None if none."""
    all_borders = sorted({0, size, *borders})
    sizes = [stop - start for start, stop in pairwise(all_borders)]
    if min(sizes, default=0) < 2 or len(sizes) > MAX_PIECES:
        return None
    placement = side_by_side(dim, sizes)
    return placement if isinstance(placement, StridedShard) else None


class _Search:
    """Backward search for values that the user sharded.

    Args:
        sharded: those values, with the user's placements.

    Attributes:
        found: value -> the interleaved placements in which it is also useful.
    """

    def __init__(
        self,
        chains: DefUse,
        metas: Metas,
        catalogue: StrategyCatalogue,
        sharded: Mapping[int, Shard],
    ) -> None:
        self.found: dict[int, set[StridedShard]] = {}
        self._chains, self._metas, self._catalogue = chains, metas, catalogue
        self._sharded = sharded
        self._visited: set[tuple[int, Cut]] = set()

    def back_beside(self, value: int, dim: int) -> None:
        """Search from the dim after one with selected elements, if a view produced both dims."""
        nodes, producers = self._chains.nodes, self._chains.producers
        while (producer := producers[value]) and nodes[producer[0]][0].op not in views.RESHAPES:
            sources = list(self._sharded_operands(value, Shard(dim)))
            if len(sources) != 1 or not isinstance(sources[0][1], Shard):
                return
            value, dim = sources[0][0], sources[0][1].dim
        meta = self._metas[value]
        if producer is not None and meta is not None and dim + 1 < len(meta.shape):
            self.back(value, Shard(dim + 1))

    def back(self, value: int, placement: Cut) -> None:
        """Find the user's sharded values that become a value in a placement, if interleaved."""
        stack = [(value, placement)]
        while stack:
            value, placement = stack.pop()
            if (value, placement) in self._visited:
                continue
            self._visited.add((value, placement))
            user_placement = self._sharded.get(value)
            if user_placement is None:
                stack += self._sharded_operands(value, placement)
            elif isinstance(placement, StridedShard) and placement.dim == user_placement.dim:
                self.found.setdefault(value, set()).add(placement)

    def _sharded_operands(self, value: int, placement: Cut) -> Iterator[tuple[int, Cut]]:
        """Yield the operands with the placements that give a value a placement locally."""
        producer = self._chains.producers[value]
        if producer is None:
            return
        number, result_index = producer
        node, refs, _ = self._chains.nodes[number]
        if node.op in views.RESHAPES:
            result_shape, operand_shape = (self._shape(either) for either in (value, refs[0]))
            source = views.viewed(placement, result_shape, operand_shape, self._catalogue.axis_size)
            if source is not None:
                yield refs[0], source
            return
        for strategy in self._catalogue.entries[self._catalogue.numbers[number]].strategies:
            if strategy.outputs[result_index] != Shard(placement.dim) or strategy.comm:
                continue
            if strategy.lower is None or isinstance(strategy.lower, LocalLowering):
                for ref, operand in zip(refs, strategy.inputs, strict=True):
                    if isinstance(operand, Shard):
                        yield ref, replace(placement, dim=operand.dim)

    def _shape(self, value: int) -> tuple[int, ...]:
        meta = self._metas[value]
        assert meta is not None
        return meta.shape


def _embedded_gradients(
    nodes: Sequence[tuple[int, Node]], metas: Metas, axis_size: int
) -> dict[int, StridedShard]:
    """Return the interleaved placements of gradients that are embedded in zeros of one shape.

    The sum of these gradients has a group for each, and every group is sharded.
    """
    borders: defaultdict[tuple[tuple[int, ...], int], set[int]] = defaultdict(set)
    embedded = []
    for node_number, node in nodes:
        call = Call(node, metas, axis_size)
        if node.op in slicing.PUTS_AMONG and type(call["start"]) is type(call["end"]) is int:
            shape = tuple(call["input_sizes"])
            dim = call.dim("dim", len(shape))
            first, last, _ = slice(call["start"], call["end"]).indices(shape[dim])
            borders[shape, dim].update((first, last))
            embedded.append((node_number, (shape, dim)))
    placements = {
        key: _grouped_placement(all_borders, key[1], key[0][key[1]])
        for key, all_borders in borders.items()
    }
    return {
        node_number: placement
        for node_number, key in embedded
        if (placement := placements[key]) is not None
    }
