"""Seeds: interleaved placements of fused weights, such as one of queries, keys and values.

The product with a fused weight is split: by ``split`` or slices, or by a view and ``unbind``. All
pieces are sharded without communication if the weight is interleaved, so that each rank has a shard
of every piece. A backward search from the split finds the weight that the user sharded. The
interleaved placement is an additional choice: the solver compares the redistribution of the weight
with that of activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import NamedTuple

from lazygt.graph.liveness import DefUse
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.graph.placement import (
    REDUCE_OPS,
    Cut,
    Partial,
    Placement,
    Shard,
    StridedShard,
    side_by_side,
)
from lazygt.passes.sharding.annotations import Annotation
from lazygt.passes.sharding.halo import MOST_PIECES
from lazygt.passes.sharding.rules import packed, views
from lazygt.passes.sharding.rules.strategy import Call, LocalLowering, Metas
from lazygt.passes.sharding.strategies import StrategyCatalogue

# -- sets of placements as bit masks ---------------------------------------------------------------
# There is one bit for each P(op), S(dim) and interleaved placement.

_FIRST = len(REDUCE_OPS)
#: The bits of all partial placements.
SUMS = (1 << _FIRST) - 1


def partial_bit(placement: Placement) -> int:
    """Return the bit of a partial placement; 0 for any other."""
    return 1 << REDUCE_OPS.index(placement.op) if isinstance(placement, Partial) else 0


class Bits:
    """Assignment of bits to the placements that shard a dim.

    S(dim) placements have every second bit; interleaved placements get the other bits on first use.

    Attributes:
        interleaved: the bits of all interleaved placements so far.
    """

    def __init__(self) -> None:
        self._bit_of: dict[StridedShard, int] = {}
        self.interleaved = 0

    def cut(self, placement: Placement) -> int:
        """Return the bit of a placement that shards a dim; 0 for any other."""
        if isinstance(placement, Shard):
            return 1 << _FIRST + 2 * placement.dim
        return self._interleaved_bit(placement) if isinstance(placement, StridedShard) else 0

    def any(self, placement: Placement) -> int:
        """Return the bit of a placement; 0 for ``Replicate()``."""
        return partial_bit(placement) | self.cut(placement)

    def _interleaved_bit(self, placement: StridedShard) -> int:
        bit = self._bit_of.get(placement)
        if bit is None:
            bit = self._bit_of[placement] = 1 << _FIRST + 2 * len(self._bit_of) + 1
            self.interleaved |= bit
        return bit

    def found(self, mask: int) -> tuple[StridedShard, ...]:
        """Return the interleaved placements of a set."""
        return tuple([placement for placement, bit in self._bit_of.items() if bit & mask])


def union(
    strategies: Sequence[Sequence[Placement]], count: int, bit: Callable[[Placement], int]
) -> list[int]:
    """Return for each position the mask of its placements over all strategies.

    Args:
        strategies: of each strategy the placements of its operands, or results.
        count: number of positions.
        bit: gives the bit of a placement.
    """
    return [
        reduce(or_, [bit(placements[position]) for placements in strategies], 0)
        for position in range(count)
    ]


def same_blocks(
    bits: Bits,
    operands: Sequence[TensorMeta | None],
    masks: Sequence[int],
    result: TensorMeta | None,
) -> int:
    """Return the mask of the operands' shards that a result can have: of dims of equal size."""
    mask = 0
    for operand, operand_mask in zip(operands, masks, strict=True):
        if operand is None or result is None:
            continue
        for dim, (size, other) in enumerate(zip(operand.shape, result.shape, strict=False)):
            if size == other:
                mask |= operand_mask & bits.cut(Shard(dim))
    return mask


# -- seeds: interleaved placements of fused weights ------------------------------------------------

_PICKS = frozenset({"aten.unbind.int", "aten.unbind_copy.int", "aten.select.int"})
_SPLITS = packed.TAKES_APART | _PICKS | {"aten.glu.default"}
_SEED_OPS = _SPLITS | packed.PUTS_AMONG


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
    reached: Sequence[int],
    bits: Bits,
) -> Seeds:
    """Return the seeds of a graph.

    Args:
        reached: the mask of each value. A value that is sharded along another dim than the one that
            is split needs no seed.
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
    splits = _SplitValues(metas, catalogue.parts)
    for node_number in nodes:
        node = chains.nodes[node_number][0]
        if node.op in _SPLITS and not node.dynamic:
            splits.add(node, reached, bits)
    for value, dim in splits.picked:
        search.back_beside(value, dim)
    for value, placement in splits.groups():
        search.back(value, placement)
    gradients = (
        [(node_number, chains.nodes[node_number][0]) for node_number in nodes]
        if search.found
        else []
    )
    embedded = _embedded_gradients(gradients, metas, catalogue.parts)
    return Seeds(search.found, embedded)


class _SplitValues:
    """Values that a graph splits.

    Attributes:
        picked: (value, dim) pairs with single elements selected along the dim.
    """

    def __init__(self, metas: Metas, parts: int) -> None:
        self._metas, self._parts = metas, parts
        self.picked: set[tuple[int, int]] = set()
        #: (value, dim) -> starts and ends of the pieces
        self._borders: defaultdict[tuple[int, int], set[int]] = defaultdict(set)

    def add(self, node: Node, reached: Sequence[int], bits: Bits) -> None:
        """Add the value that a node splits, unless it is sharded along another dim."""
        call = Call(node, self._metas, self._parts)
        value, shape = node.refs()[0], call.shape("self")
        dim = call.dim("dim", len(shape))
        if reached[value] & ~SUMS & ~bits.cut(Shard(dim)):
            return
        if node.op in _PICKS:
            self.picked.add((value, dim))
            return
        borders = packed.borders(call, dim)
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
    if min(sizes, default=0) < 2 or len(sizes) > MOST_PIECES:
        return None
    placement = side_by_side(dim, sizes)
    return placement if isinstance(placement, StridedShard) else None


class _Search:
    """Backward search for values that the user sharded.

    Attributes:
        found: see ``Seeds.values``.
    """

    def __init__(
        self,
        chains: DefUse,
        metas: Metas,
        catalogue: StrategyCatalogue,
        sharded: Mapping[int, Shard],
    ) -> None:
        self.found: dict[int, set[StridedShard]] = {}
        self._chains, self._metas, self._catalogue, self._cut = chains, metas, catalogue, sharded
        self._seen: set[tuple[int, Cut]] = set()

    def back_beside(self, value: int, dim: int) -> None:
        """Search from the dim after one with selected elements, if a view produced both dims."""
        nodes, makers = self._chains.nodes, self._chains.makers
        while (producer := makers[value]) and nodes[producer[0]][0].op not in views.RESHAPES:
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
            if (value, placement) in self._seen:
                continue
            self._seen.add((value, placement))
            user_placement = self._cut.get(value)
            if user_placement is None:
                stack += self._sharded_operands(value, placement)
            elif isinstance(placement, StridedShard) and placement.dim == user_placement.dim:
                self.found.setdefault(value, set()).add(placement)

    def _sharded_operands(self, value: int, placement: Cut) -> Iterator[tuple[int, Cut]]:
        """Yield the operands with the placements that give a value a placement locally."""
        producer = self._chains.makers[value]
        if producer is None:
            return
        number, result_index = producer
        node, refs, _ = self._chains.nodes[number]
        if node.op in views.RESHAPES:
            result_shape, operand_shape = (self._shape(either) for either in (value, refs[0]))
            source = views.viewed(placement, result_shape, operand_shape, self._catalogue.parts)
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
        if node.op in packed.PUTS_AMONG and type(call["start"]) is type(call["end"]) is int:
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
