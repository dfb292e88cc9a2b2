"""Collectives among virtual ranks, inside one worker and between workers.

Reductions use pairwise summation in the order of the virtual ranks, ((0 + 1) + (2 + 3)), on any
number of workers: each worker reduces the complete subtrees of its own ranks, exchanges their
results, and reduces these in the same order. So the bits do not depend on the number of workers.
All other collectives only move elements. All results are row-major, in new memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lazygt.graph.node import Ref
from lazygt.graph.placement import TAKE_ROWS, block_size
from lazygt.passes.sharding.lower.builder import Builder

#: Most bytes of a value for which an all-reduce is one all-gather, not two collectives.
_SMALL = 64 << 10

#: (source rank, target rank, number of rows) of each send.
Rows = Sequence[tuple[int, int, int]]

_ADD = {
    "sum": "aten.add.Tensor",
    "prod": "aten.mul.Tensor",
    "max": "aten.maximum.default",
    "min": "aten.minimum.default",
}


@dataclass(frozen=True, slots=True)
class VirtualGroup:
    """Virtual ranks of one worker in an axis group."""

    axis: str
    workers: int  # number of workers of the axis group
    index: int  # of this worker
    per_worker: int  # number of virtual ranks of a worker

    @property
    def ranks(self) -> int:
        """Number of virtual ranks of the axis group."""
        return self.workers * self.per_worker

    def block(self, size: int, which: int) -> int:
        """Return the shard size of the worker's virtual rank ``which``, for a dim of ``size``."""
        return block_size(size, self.ranks, self.index * self.per_worker + which)

    def set_up(self, build: Builder) -> Builder:
        """Set the builder up for collectives among the workers of the axis group; return it."""
        build.axis, build.parts, build.index = self.axis, self.workers, self.index
        return build


def all_reduce(build: Builder, group: VirtualGroup, values: Sequence[Ref], op: str) -> Ref:
    """All-reduce over the virtual ranks by pairwise summation; return the result.

    A small value is all-gathered and reduced by every worker. For a large one the workers exchange
    chunks (all-to-all), reduce one chunk each, and all-gather the results.

    Args:
        values: one for each of the worker's ranks.
        op: ``sum``, ``prod``, ``max`` or ``min``.
    """
    subtrees = _subtrees(build, group, values, op)
    if group.workers == 1:
        return build.contiguous(_tree(build, subtrees, op))
    meta = build.meta(subtrees[0])
    count = len(subtrees) * group.workers
    stacked = _stacked(build, subtrees)
    if meta.nbytes <= _SMALL or (group.workers == 2 and len(subtrees) == 1):
        gathered = group.set_up(build).all_gather(stacked, 0, count)
        return _tree(build, _unstacked(build, gathered), op)
    flat = build.reshape(stacked, (len(subtrees), meta.numel))
    chunk = group.set_up(build).all_to_all(flat, 1, 0, count)
    reduced = _tree(build, _unstacked(build, chunk), op)
    result = group.set_up(build).all_gather(reduced, 0, meta.numel)
    return build.reshape(result, meta.shape)


def reduce_scatter(
    build: Builder, group: VirtualGroup, values: Sequence[Ref], dim: int, op: str
) -> list[Ref]:
    """Reduce-scatter by pairwise summation; return the block along ``dim`` of each virtual rank."""
    blocks = _subtrees(build, group, values, op)
    size = build.shape(blocks[0])[dim]
    if group.workers > 1:
        stacked = _padded(build, _stacked(build, blocks), dim + 1, _padded_size(group, size))
        count = len(blocks) * group.workers
        received = group.set_up(build).all_to_all(stacked, dim + 1, 0, count)
        blocks = _unstacked(build, received)
    return _local_blocks(build, group, _tree(build, blocks, op), dim, size)


def all_gather(
    build: Builder, group: VirtualGroup, values: Sequence[Ref], dim: int, size: int
) -> Ref:
    """All-gather along ``dim``; return the concatenated blocks, ``size`` elements together."""
    block = _concatenated(build, values, dim)
    if group.workers == 1:
        return block
    padded_size = _padded_size(group, size)
    padded = _padded(build, block, dim, padded_size // group.workers)
    return _narrow(build, group.set_up(build).all_gather(padded, dim, padded_size), dim, 0, size)


def all_to_all(
    build: Builder, group: VirtualGroup, values: Sequence[Ref], split: int, concat: int, size: int
) -> list[Ref]:
    """All-to-all from blocks along ``concat`` to blocks along ``split``, one for each virtual rank.

    Args:
        size: global size of the dim ``concat``.
    """
    local = _concatenated(build, values, concat)
    length = build.shape(local)[split]
    if group.workers > 1:
        padded_size = _padded_size(group, size)
        block = _padded(build, local, concat, padded_size // group.workers)
        block = _padded(build, block, split, _padded_size(group, length))
        received = group.set_up(build).all_to_all(block, split, concat, padded_size)
        local = _narrow(build, received, concat, 0, size)
    return _local_blocks(build, group, local, split, length)


def send_recv(
    build: Builder, group: VirtualGroup, values: Sequence[Ref], dim: int, sends: Rows
) -> list[Ref]:
    """Send rows along ``dim`` between virtual ranks; return the rows that each one receives.

    Rows between two ranks of the same worker are copied locally.

    Args:
        values: the rows that each of the worker's ranks sends, in the order of ``sends``.
    """
    ranks = range(group.index * group.per_worker, (group.index + 1) * group.per_worker)
    sent = {(source, target): count for source, target, count in sends}
    pieces: dict[tuple[int, int], Ref] = {}
    for source, value in zip(ranks, values, strict=True):
        start = 0
        for (from_rank, target), count in sent.items():
            if from_rank == source:
                pieces[from_rank, target] = _rows(build, value, dim, start, count)
                start += count
    pieces |= _received_rows(build, group, values[0], dim, sent, pieces)
    return [
        _copied(build, _concatenated(build, [pieces[pair] for pair in sent if pair[1] == rank] or
                [_rows(build, values[0], dim, 0, 0)], dim))
        for rank in ranks
    ]  # fmt: skip


def _received_rows(
    build: Builder,
    group: VirtualGroup,
    like: Ref,
    dim: int,
    sent: Mapping[tuple[int, int], int],
    pieces: Mapping[tuple[int, int], Ref],
) -> dict[tuple[int, int], Ref]:
    """Return the rows that virtual ranks of other workers send, by (source, target).

    Args:
        like: a value of the same dtype and other dims.
        sent: (source, target) -> number of rows.
        pieces: (source, target) -> rows that this worker's ranks send.
    """
    workers: Counter[tuple[int, int]] = Counter()
    for (source, target), count in sent.items():
        workers[source // group.per_worker, target // group.per_worker] += count
    worker_sends = tuple([(*pair, workers[pair]) for pair in sorted(workers) if pair[0] != pair[1]])
    if not worker_sends:
        return {}

    def between(*pair: int) -> list[tuple[int, int]]:
        """Return the (source, target) ranks of the sends from one worker to another."""
        return [
            ranks for ranks in sent if tuple([rank // group.per_worker for rank in ranks]) == pair
        ]

    others = [worker for worker in range(group.workers) if worker != group.index]
    outgoing = [pieces[pair] for worker in others for pair in between(group.index, worker)]
    send_buffer = _concatenated(build, outgoing or [_rows(build, like, dim, 0, 0)], dim)
    receive_buffer = group.set_up(build).send_recv(send_buffer, dim, worker_sends)
    received, start = {}, 0
    for worker in others:
        for pair in between(worker, group.index):
            received[pair] = _rows(build, receive_buffer, dim, start, sent[pair])
            start += sent[pair]
    return received


def _rows(build: Builder, value: Ref, dim: int, start: int, count: int) -> Ref:
    """Return ``count`` rows of a value along ``dim``, from ``start``."""
    rows: Ref = build.op("aten.slice.Tensor", value, dim, start, start + count)
    return rows


def exchange_rows(
    build: Builder, group: VirtualGroup, op: str, values: Sequence[Ref], rows: int, *args: int
) -> list[Ref]:
    """Index-select rows of all blocks for the worker's virtual ranks, or index-put rows into them.

    The ranks' blocks are adjacent, so the worker runs the concatenated operands as one rank.

    Args:
        values: each rank's operands, rank by rank: its block, its indices and, for a put, the rows.
        rows: number of rows of a block.
        args: the other arguments of the op.
    """
    count = len(values) // group.per_worker
    operands = [values[position::count] for position in range(count)]
    joined = [_concatenated(build, of_ranks, 0) for of_ranks in operands]
    result = _select_or_put_rows(build, group, op, joined, rows * group.per_worker, *args)
    block_sizes_of = operands[1] if op == TAKE_ROWS else operands[0]
    return _split_rows(build, result, [build.shape(value)[0] for value in block_sizes_of])


def _select_or_put_rows(
    build: Builder,
    group: VirtualGroup,
    op: str,
    operands: Sequence[Ref],
    worker_rows: int,
    global_rows: int,
    accumulate: int = False,
) -> Ref:
    """Select or put rows for all virtual ranks of a worker, which count as one rank.

    With one worker it is an index_select or index_put, with several a collective.

    Args:
        operands: the worker's block, the indices and, for a put, the rows.
        worker_rows: number of rows of the worker's block.
        global_rows: number of rows of the unsharded value.
        accumulate: add the rows that are put to those that are there.
    """
    value, index = operands[:2]
    if op == TAKE_ROWS:
        if group.workers > 1:
            return group.set_up(build).take_rows(value, index, worker_rows, global_rows)
        selected: Ref = build.op("aten.index_select.default", value, 0, index)
        return selected
    source, adds = operands[2], bool(accumulate)
    if group.workers > 1:
        return group.set_up(build).put_rows(value, index, source, worker_rows, global_rows, adds)
    result: Ref = build.op("aten.index_put.default", value, (index,), source, adds)
    return result


def _split_rows(build: Builder, value: Ref, lengths: Sequence[int]) -> list[Ref]:
    """Return consecutive pieces of these lengths along dim 0."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(shard(build, value, 0, start, start + length))
        start += length
    return pieces


def shard(build: Builder, value: Ref, dim: int, start: int, stop: int) -> Ref:
    """Return a block of a value, in new memory."""
    block = build.op("aten.slice.Tensor", value, dim, start, stop)
    return _copied(build, block)


def first(build: Builder, value: Ref, here: bool) -> Ref:
    """Return a copy of a value if ``here``, else zeros."""
    if here:
        return _copied(build, value)
    zeros: Ref = build.op("aten.zeros_like.default", value)
    return build.contiguous(zeros)


def _subtrees(build: Builder, group: VirtualGroup, values: Sequence[Ref], op: str) -> list[Ref]:
    """Reduce the worker's values to the subtrees of the reduction tree that the worker owns."""
    # the largest power of two that divides per_worker: subtrees of this size are complete
    size = group.per_worker & -group.per_worker
    contiguous = [build.contiguous(value) for value in values]
    return [
        _tree(build, contiguous[start : start + size], op)
        for start in range(0, len(contiguous), size)
    ]


def _tree(build: Builder, values: Sequence[Ref], op: str) -> Ref:
    """Reduce pairwise, level by level; the last of an odd number goes to the next level."""
    level = list(values)
    while len(level) > 1:
        pairs = [
            build.op(_ADD[op], *level[start : start + 2]) for start in range(0, len(level) - 1, 2)
        ]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def _stacked(build: Builder, values: Sequence[Ref]) -> Ref:
    """Return the values stacked along a new dim 0."""
    if len(values) == 1:
        return build.reshape(values[0], (1, *build.shape(values[0])))
    stacked: Ref = build.op("aten.stack.default", tuple(values))
    return build.contiguous(stacked)


def _unstacked(build: Builder, value: Ref) -> list[Ref]:
    """Return the slices of a value along dim 0."""
    count = build.shape(value)[0]
    return [build.op("aten.select.int", value, 0, index) for index in range(count)]


def _concatenated(build: Builder, values: Sequence[Ref], dim: int) -> Ref:
    if len(values) == 1:
        return build.contiguous(values[0])
    joined: Ref = build.op("aten.cat.default", tuple(values), dim)
    return build.contiguous(joined)


def _padded_size(group: VirtualGroup, size: int) -> int:
    """Return the size of a dim with all virtual ranks' blocks padded to the first one's size."""
    return group.ranks * block_size(size, group.ranks, 0)


def _padded(build: Builder, value: Ref, dim: int, size: int) -> Ref:
    """Return a value padded with zeros to ``size`` along ``dim``."""
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


def _local_blocks(
    build: Builder, group: VirtualGroup, value: Ref, dim: int, size: int
) -> list[Ref]:
    """Return the block of each of the worker's virtual ranks, of a dim of global ``size``.

    Args:
        value: the blocks of the worker's ranks, or of all ranks.
    """
    actual_size, block_length = build.shape(value)[dim], block_size(size, group.ranks, 0)
    if group.per_worker == 1 and actual_size == group.block(size, 0):
        return [build.contiguous(value)]
    starts = [min(index * block_length, actual_size) for index in range(group.per_worker)]
    return [
        shard(build, value, dim, start, start + group.block(size, index))
        for index, start in enumerate(starts)
    ]


def _copied(build: Builder, value: Ref) -> Ref:
    copy: Ref = build.op("aten.clone.default", value)
    return build.contiguous(copy)
