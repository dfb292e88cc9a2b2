"""Seeds: fused weights of several layers, each of which is best cut by itself.

The product with a weight of queries, keys and values is taken apart: by ``split`` or slices, or by
a view and ``unbind``. Its pieces are in blocks if a rank has a block of each of them in the weight.
So from the place where a value is taken apart the way goes back to a value that the user cut. That
this may be interleaved instead is one choice more: the solver weighs its exchange against that of
activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import NamedTuple

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
from lazygt.passes.sharding.def_use import DefUse
from lazygt.passes.sharding.halo import MOST_PIECES
from lazygt.passes.sharding.rules import packed, views
from lazygt.passes.sharding.rules.strategy import Call, LocalLowering, Metas
from lazygt.passes.sharding.strategies import StrategyCatalogue

# -- sets of placements as bit masks: a bit for each P(op), S(dim) and interleaved placement -------

_FIRST = len(REDUCE_OPS)
#: The bits of all partial placements.
SUMS = (1 << _FIRST) - 1


def partial_bit(placement: Placement) -> int:
    """Return the bit of a partial placement; 0 for any other."""
    return 1 << REDUCE_OPS.index(placement.op) if isinstance(placement, Partial) else 0


class Bits:
    """Bits of the placements that cut a dim.

    Dims have every second place; the others go to interleaved placements as they are met.

    Attributes:
        interleaved: the bits of all interleaved placements that were met.
    """

    def __init__(self) -> None:
        self._met: dict[StridedShard, int] = {}
        self.interleaved = 0

    def cut(self, placement: Placement) -> int:
        """Return the bit of a placement that cuts a dim; 0 for any other."""
        if isinstance(placement, Shard):
            return 1 << _FIRST + 2 * placement.dim
        return self._of(placement) if isinstance(placement, StridedShard) else 0

    def any(self, placement: Placement) -> int:
        """Return the bit of a placement; 0 for ``Replicate()``."""
        return partial_bit(placement) | self.cut(placement)

    def _of(self, placement: StridedShard) -> int:
        bit = self._met.get(placement)
        if bit is None:
            bit = self._met[placement] = 1 << _FIRST + 2 * len(self._met) + 1
            self.interleaved |= bit
        return bit

    def found(self, mask: int) -> tuple[StridedShard, ...]:
        """Return the interleaved placements of a set."""
        return tuple([placement for placement, bit in self._met.items() if bit & mask])


def union(
    strategies: Sequence[Sequence[Placement]], places: int, bit: Callable[[Placement], int]
) -> list[int]:
    """Return the mask of the placements at each place, over all strategies."""
    return [
        reduce(or_, [bit(placements[place]) for placements in strategies], 0)
        for place in range(places)
    ]


def same_blocks(
    bits: Bits,
    operands: Sequence[TensorMeta | None],
    masks: Sequence[int],
    result: TensorMeta | None,
) -> int:
    """Return the blocks of operands that a result can have as well: of dims of equal size."""
    mask = 0
    for operand, blocks in zip(operands, masks, strict=True):
        if operand is None or result is None:
            continue
        for dim, (size, other) in enumerate(zip(operand.shape, result.shape, strict=False)):
            if size == other:
                mask |= blocks & bits.cut(Shard(dim))
    return mask


# -- seeds: fused weights of several layers, each of which is best cut by itself -------------------

_PICKS = frozenset({"aten.unbind.int", "aten.unbind_copy.int", "aten.select.int"})
_APART = packed.TAKES_APART | _PICKS | {"aten.glu.default"}
_ASKED = _APART | packed.PUTS_AMONG


class Seeds(NamedTuple):
    """Values that may be interleaved.

    Attributes:
        values: a value that the user cut -> the placements that it may have besides.
        results: nodes, by number, that put gradients among zeros -> the placement of their sum.
    """

    values: Mapping[int, Collection[StridedShard]]
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
        reached: the mask of each value: blocks that pass where a value is taken apart need no seed.
    """
    cut = {
        value: annotation.placement
        for value, annotation in annotations.items()
        if annotation.kind in ("given", "free") and isinstance(annotation.placement, Shard)
    }
    asked = {number for number, node in enumerate(catalogue.firsts) if node.op in _ASKED}
    if not (cut and asked):
        return Seeds({}, {})
    search = _Search(chains, metas, catalogue, cut)
    nodes = [at for at, number in enumerate(catalogue.numbers) if number in asked]
    apart = _TakenApart(metas, catalogue.parts)
    for at in nodes:
        node = chains.nodes[at][0]
        if node.op in _APART and not node.dynamic:
            apart.add(node, reached, bits)
    for value, dim in apart.picked:
        search.back_beside(value, dim)
    for value, placement in apart.groups():
        search.back(value, placement)
    gradients = [(at, chains.nodes[at][0]) for at in nodes] if search.found else []
    puts = _put_together(gradients, metas, catalogue.parts)
    return Seeds(search.found, puts)


class _TakenApart:
    """Values that a graph takes apart.

    Attributes:
        picked: (value, dim) of which single elements are taken.
    """

    def __init__(self, metas: Metas, parts: int) -> None:
        self._metas, self._parts = metas, parts
        self.picked: set[tuple[int, int]] = set()
        #: (value, dim) -> where pieces of it begin and end
        self._borders: defaultdict[tuple[int, int], set[int]] = defaultdict(set)

    def add(self, node: Node, reached: Sequence[int], bits: Bits) -> None:
        """Note the value that a node takes apart, unless it is cut along another dim."""
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
        """Yield values with the placement in which each piece of them is in blocks."""
        for (value, dim), borders in self._borders.items():
            meta = self._metas[value]
            assert meta is not None
            placement = _within(borders, dim, meta.shape[dim])
            if placement is not None:
                yield value, placement


def _within(borders: Collection[int], dim: int, size: int) -> StridedShard | None:
    """Return the placement of a dim with groups between these borders, each in blocks."""
    every = sorted({0, size, *borders})
    sizes = [stop - start for start, stop in pairwise(every)]
    if min(sizes, default=0) < 2 or len(sizes) > MOST_PIECES:
        return None
    placement = side_by_side(dim, sizes)
    return placement if isinstance(placement, StridedShard) else None


class _Search:
    """Search back for values that the user cut.

    Attributes:
        found: see ``Seeds.values``.
    """

    def __init__(
        self, chains: DefUse, metas: Metas, catalogue: StrategyCatalogue, cut: Mapping[int, Shard]
    ) -> None:
        self.found: dict[int, set[StridedShard]] = {}
        self._chains, self._metas, self._catalogue, self._cut = chains, metas, catalogue, cut
        self._seen: set[tuple[int, Cut]] = set()

    def back_beside(self, value: int, dim: int) -> None:
        """Search from the dim behind one with picked elements, where a view made both."""
        nodes, makers = self._chains.nodes, self._chains.makers
        while (maker := makers[value]) and nodes[maker[0]][0].op not in views.RESHAPES:
            before = list(self._before(value, Shard(dim)))
            if len(before) != 1 or not isinstance(before[0][1], Shard):
                return
            value, dim = before[0][0], before[0][1].dim
        meta = self._metas[value]
        if maker is not None and meta is not None and dim + 1 < len(meta.shape):
            self.back(value, Shard(dim + 1))

    def back(self, value: int, placement: Cut) -> None:
        """Note the values cut by the user that lead to a value so, if they are interleaved."""
        waiting = [(value, placement)]
        while waiting:
            value, placement = waiting.pop()
            if (value, placement) in self._seen:
                continue
            self._seen.add((value, placement))
            cut = self._cut.get(value)
            if cut is None:
                waiting += self._before(value, placement)
            elif isinstance(placement, StridedShard) and placement.dim == cut.dim:
                self.found.setdefault(value, set()).add(placement)

    def _before(self, value: int, placement: Cut) -> Iterator[tuple[int, Cut]]:
        """Yield the operands that lead to a value so, each with its cut."""
        maker = self._chains.makers[value]
        if maker is None:
            return
        number, place = maker
        node, refs, _ = self._chains.nodes[number]
        if node.op in views.RESHAPES:
            result, have = (self._shape(which) for which in (value, refs[0]))
            source = views.viewed(placement, result, have, self._catalogue.parts)
            if source is not None:
                yield refs[0], source
            return
        for strategy in self._catalogue.entries[self._catalogue.numbers[number]].strategies:
            if strategy.outputs[place] != Shard(placement.dim) or strategy.comm:
                continue
            if strategy.lower is None or isinstance(strategy.lower, LocalLowering):
                for ref, operand in zip(refs, strategy.inputs, strict=True):
                    if isinstance(operand, Shard):
                        yield ref, replace(placement, dim=operand.dim)

    def _shape(self, value: int) -> tuple[int, ...]:
        meta = self._metas[value]
        assert meta is not None
        return meta.shape


def _put_together(
    nodes: Sequence[tuple[int, Node]], metas: Metas, parts: int
) -> dict[int, StridedShard]:
    """Return the placements of gradients that are put side by side among zeros of one shape.

    Each of them is in blocks.
    """
    borders: defaultdict[tuple[tuple[int, ...], int], set[int]] = defaultdict(set)
    puts = []
    for at, node in nodes:
        call = Call(node, metas, parts)
        if node.op in packed.PUTS_AMONG and type(call["start"]) is type(call["end"]) is int:
            shape = tuple(call["input_sizes"])
            dim = call.dim("dim", len(shape))
            first, last, _ = slice(call["start"], call["end"]).indices(shape[dim])
            borders[shape, dim].update((first, last))
            puts.append((at, (shape, dim)))
    placements = {key: _within(every, key[1], key[0][key[1]]) for key, every in borders.items()}
    return {at: placement for at, key in puts if (placement := placements[key]) is not None}
