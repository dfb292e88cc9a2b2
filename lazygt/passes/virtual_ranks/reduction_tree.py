"""Collectives among virtual ranks, inside one worker and between workers.

Sums of the virtual ranks' values are added pairwise in their order, ((0 + 1) + (2 + 3)), on any
number of workers: each worker adds the subtrees within its own ranks, the rest travels unreduced
and is added in that order again. So the bits do not depend on the number of workers. All other
collectives only move elements. All results are row-major, in memory of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lazygt.graph.node import Ref
from lazygt.graph.placement import TAKE_ROWS, block_size
from lazygt.passes.sharding.builder import Builder

#: Payloads up to which unreduced values are gathered by all: one launch instead of two.
_SMALL = 64 << 10

#: (from, to, how many) of the rows that virtual ranks send each other.
Rows = Sequence[tuple[int, int, int]]

_ADD = {
    "sum": "aten.add.Tensor",
    "prod": "aten.mul.Tensor",
    "max": "aten.maximum.default",
    "min": "aten.minimum.default",
}


@dataclass(frozen=True, slots=True)
class VirtualGroup:
    """One worker's part of a line of virtual ranks along one axis.

    Attributes:
        workers: number of workers on the line.
        index: of this worker.
        per_worker: virtual ranks that a worker stands for.
    """

    axis: str
    workers: int
    index: int
    per_worker: int

    @property
    def ranks(self) -> int:
        """Number of virtual ranks on the line."""
        return self.workers * self.per_worker

    def block(self, size: int, which: int) -> int:
        """Return the elements that the worker's virtual rank ``which`` has of a dim of ``size``."""
        return block_size(size, self.ranks, self.index * self.per_worker + which)

    def meet(self, build: Builder) -> Builder:
        """Set the builder up for collectives among the workers of the line; return it."""
        build.axis, build.parts, build.index = self.axis, self.workers, self.index
        return build


def all_reduce(build: Builder, line: VirtualGroup, values: Sequence[Ref], op: str) -> Ref:
    """Return the values of all virtual ranks, reduced."""
    subtrees = _subtrees(build, line, values, op)
    if line.workers == 1:
        return build.contiguous(_tree(build, subtrees, op))
    meta = build.meta(subtrees[0])
    count = len(subtrees) * line.workers
    stacked = _stacked(build, subtrees)
    if meta.nbytes <= _SMALL or (line.workers == 2 and len(subtrees) == 1):
        everyone = line.meet(build).all_gather(stacked, 0, count)
        return _tree(build, _unstacked(build, everyone), op)
    flat = build.reshape(stacked, (len(subtrees), meta.numel))
    part = line.meet(build).all_to_all(flat, 1, 0, count)
    reduced = _tree(build, _unstacked(build, part), op)
    whole = line.meet(build).all_gather(reduced, 0, meta.numel)
    return build.reshape(whole, meta.shape)


def reduce_scatter(
    build: Builder, line: VirtualGroup, values: Sequence[Ref], dim: int, op: str
) -> list[Ref]:
    """Return each virtual rank's block along ``dim`` of the reduced values."""
    blocks = _subtrees(build, line, values, op)
    size = build.shape(blocks[0])[dim]
    if line.workers > 1:
        stacked = _padded(build, _stacked(build, blocks), dim + 1, _even(line, size))
        count = len(blocks) * line.workers
        part = line.meet(build).all_to_all(stacked, dim + 1, 0, count)
        blocks = _unstacked(build, part)
    return _cut(build, line, _tree(build, blocks, op), dim, size)


def all_gather(
    build: Builder, line: VirtualGroup, values: Sequence[Ref], dim: int, size: int
) -> Ref:
    """Return the blocks of all virtual ranks side by side."""
    block = _side_by_side(build, values, dim)
    if line.workers == 1:
        return block
    even = _even(line, size)
    padded = _padded(build, block, dim, even // line.workers)
    return _narrow(build, line.meet(build).all_gather(padded, dim, even), dim, 0, size)


def all_to_all(
    build: Builder, line: VirtualGroup, values: Sequence[Ref], split: int, concat: int, size: int
) -> list[Ref]:
    """Exchange blocks along ``concat``, of ``size`` together, for blocks along ``split``."""
    whole = _side_by_side(build, values, concat)
    length = build.shape(whole)[split]
    if line.workers > 1:
        even = _even(line, size)
        block = _padded(build, whole, concat, even // line.workers)
        block = _padded(build, block, split, _even(line, length))
        part = line.meet(build).all_to_all(block, split, concat, even)
        whole = _narrow(build, part, concat, 0, size)
    return _cut(build, line, whole, split, length)


def send_recv(
    build: Builder, line: VirtualGroup, values: Sequence[Ref], dim: int, rows: Rows
) -> list[Ref]:
    """Return the rows that each of the worker's virtual ranks gets of others.

    Rows between two of the worker's own ranks do not leave it.
    """
    ranks = range(line.index * line.per_worker, (line.index + 1) * line.per_worker)
    sent = {(source, target): count for source, target, count in rows}
    pieces: dict[tuple[int, int], Ref] = {}
    for source, value in zip(ranks, values, strict=True):
        start = 0
        for (of, target), count in sent.items():
            if of == source:
                pieces[of, target] = _rows(build, value, dim, start, count)
                start += count
    pieces |= _from_others(build, line, values[0], dim, sent, pieces)
    return [
        _copied(build, _side_by_side(build, [pieces[one] for one in sent if one[1] == rank] or
                [_rows(build, values[0], dim, 0, 0)], dim))
        for rank in ranks
    ]  # fmt: skip


def _from_others(
    build: Builder,
    line: VirtualGroup,
    like: Ref,
    dim: int,
    sent: Mapping[tuple[int, int], int],
    pieces: Mapping[tuple[int, int], Ref],
) -> dict[tuple[int, int], Ref]:
    """Return the rows that virtual ranks of other workers send, by (source, target)."""
    workers: Counter[tuple[int, int]] = Counter()
    for (source, target), count in sent.items():
        workers[source // line.per_worker, target // line.per_worker] += count
    among = tuple([(*pair, workers[pair]) for pair in sorted(workers) if pair[0] != pair[1]])
    if not among:
        return {}

    def between(*pair: int) -> list[tuple[int, int]]:
        return [one for one in sent if tuple([rank // line.per_worker for rank in one]) == pair]

    others = [worker for worker in range(line.workers) if worker != line.index]
    out = [pieces[one] for worker in others for one in between(line.index, worker)]
    given = _side_by_side(build, out or [_rows(build, like, dim, 0, 0)], dim)
    got = line.meet(build).send_recv(given, dim, among)
    received, start = {}, 0
    for worker in others:
        for pair in between(worker, line.index):
            received[pair] = _rows(build, got, dim, start, sent[pair])
            start += sent[pair]
    return received


def _rows(build: Builder, value: Ref, dim: int, start: int, count: int) -> Ref:
    rows: Ref = build.op("aten.slice.Tensor", value, dim, start, start + count)
    return rows


def exchange_rows(
    build: Builder, line: VirtualGroup, op: str, values: Sequence[Ref], rows: int, *args: int
) -> list[Ref]:
    """Take rows of all blocks for the worker's virtual ranks, or put rows into them.

    Args:
        values: each rank's operands, rank by rank. Its blocks are neighbours, and its indices and
            rows come in the order of the ranks, so the worker does all of it as one rank.
    """
    count = len(values) // line.per_worker
    operands = [values[place::count] for place in range(count)]
    together = [_side_by_side(build, of_all, 0) for of_all in operands]
    rows_of_all = _rows_of_worker(build, line, op, together, rows * line.per_worker, *args)
    like = operands[1] if op == TAKE_ROWS else operands[0]
    return _in_turn(build, rows_of_all, [build.shape(value)[0] for value in like])


def _rows_of_worker(
    build: Builder,
    line: VirtualGroup,
    op: str,
    operands: Sequence[Ref],
    rows: int,
    size: int,
    added: int = False,
) -> Ref:
    value, index = operands[:2]
    if op == TAKE_ROWS:
        if line.workers > 1:
            return line.meet(build).take_rows(value, index, rows, size)
        taken: Ref = build.op("aten.index_select.default", value, 0, index)
        return taken
    given, is_added = operands[2], bool(added)
    if line.workers > 1:
        return line.meet(build).put_rows(value, index, given, rows, size, is_added)
    put: Ref = build.op("aten.index_put.default", value, (index,), given, is_added)
    return put


def _in_turn(build: Builder, value: Ref, lengths: Sequence[int]) -> list[Ref]:
    """Return pieces of these lengths, one after another."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(shard(build, value, 0, start, start + length))
        start += length
    return pieces


def shard(build: Builder, value: Ref, dim: int, start: int, stop: int) -> Ref:
    """Return a block of a value, in memory of its own."""
    part = build.op("aten.slice.Tensor", value, dim, start, stop)
    return _copied(build, part)


def first(build: Builder, value: Ref, here: bool) -> Ref:
    """Return a value if ``here``, else zeros, in memory of its own."""
    if here:
        return _copied(build, value)
    zeros: Ref = build.op("aten.zeros_like.default", value)
    return build.contiguous(zeros)


def _subtrees(build: Builder, line: VirtualGroup, values: Sequence[Ref], op: str) -> list[Ref]:
    """Add the worker's values as far as the tree over all ranks stays within them."""
    # the largest power of two in it: such subtrees are whole
    size = line.per_worker & -line.per_worker
    contiguous = [build.contiguous(value) for value in values]
    return [_tree(build, contiguous[at : at + size], op) for at in range(0, len(contiguous), size)]


def _tree(build: Builder, values: Sequence[Ref], op: str) -> Ref:
    """Reduce neighbours pairwise, level by level; the last of an odd number waits."""
    level = list(values)
    while len(level) > 1:
        pairs = [build.op(_ADD[op], *level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def _stacked(build: Builder, values: Sequence[Ref]) -> Ref:
    if len(values) == 1:
        return build.reshape(values[0], (1, *build.shape(values[0])))
    stacked: Ref = build.op("aten.stack.default", tuple(values))
    return build.contiguous(stacked)


def _unstacked(build: Builder, value: Ref) -> list[Ref]:
    count = build.shape(value)[0]
    return [build.op("aten.select.int", value, 0, index) for index in range(count)]


def _side_by_side(build: Builder, values: Sequence[Ref], dim: int) -> Ref:
    if len(values) == 1:
        return build.contiguous(values[0])
    joined: Ref = build.op("aten.cat.default", tuple(values), dim)
    return build.contiguous(joined)


def _even(line: VirtualGroup, size: int) -> int:
    """Return ``size`` with the blocks of all virtual ranks padded to the size of the first."""
    return line.ranks * block_size(size, line.ranks, 0)


def _padded(build: Builder, value: Ref, dim: int, size: int) -> Ref:
    shape = build.shape(value)
    if shape[dim] == size:
        return value
    pads = (0, 0) * (len(shape) - dim - 1) + (0, size - shape[dim])
    padded: Ref = build.op("aten.constant_pad_nd.default", value, pads, 0)
    return build.contiguous(padded)


def _narrow(build: Builder, value: Ref, dim: int, start: int, size: int) -> Ref:
    if build.shape(value)[dim] == size:
        return value
    return shard(build, value, dim, start, start + size)


def _cut(build: Builder, line: VirtualGroup, value: Ref, dim: int, size: int) -> list[Ref]:
    """Return the blocks of the worker's virtual ranks, of a dim of global ``size``.

    Args:
        value: the blocks of the worker, or of all.
    """
    have, step = build.shape(value)[dim], block_size(size, line.ranks, 0)
    if line.per_worker == 1 and have == line.block(size, 0):
        return [build.contiguous(value)]
    starts = [min(which * step, have) for which in range(line.per_worker)]
    return [
        shard(build, value, dim, start, start + line.block(size, which))
        for which, start in enumerate(starts)
    ]


def _copied(build: Builder, value: Ref) -> Ref:
    copy: Ref = build.op("aten.clone.default", value)
    return build.contiguous(copy)
