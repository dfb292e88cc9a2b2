"""The collectives of sharded plans, on one axis of the mesh each.

Shards are as torch.chunk makes them: the first ranks of the axis hold ceil(n / ranks) rows, later
ones what is left, which may be nothing. Where torch.distributed wants equal blocks, the last ones
are padded on their way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lazygt.graph.label import shard_bounds
from lazygt.runtime import group

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


# torch 2.13 renamed them
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(value: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    """The values of all ranks of the axis, reduced elementwise."""
    made = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(made, _OPS[op], group.line(axis).group)
    return made


def all_gather(value: torch.Tensor, dim: int, size: int, axis: str) -> torch.Tensor:
    """The blocks of all ranks of the axis side by side; ``size`` is that of ``dim`` then."""
    line = group.line(axis)
    block = shard_bounds(size, line.size, 0)[1]
    mine = _padded(value.movedim(dim, 0), block)
    made = mine.new_empty((line.size * block, *mine.shape[1:]))
    _gather(made, mine, group=line.group)
    return made[:size].movedim(0, dim).contiguous()


def reduce_scatter(value: torch.Tensor, dim: int, op: str, axis: str) -> torch.Tensor:
    """This rank's block of the reduced values."""
    line = group.line(axis)
    size = value.shape[dim]
    start, stop = shard_bounds(size, line.size, line.index)
    block = shard_bounds(size, line.size, 0)[1]
    whole = _padded(value.movedim(dim, 0), line.size * block)
    made = whole.new_empty((block, *whole.shape[1:]))
    _scatter(made, whole, _OPS[op], group=line.group)
    return made[: stop - start].movedim(0, dim).contiguous()


def all_to_all(
    value: torch.Tensor, split_dim: int, concat_dim: int, size: int, axis: str
) -> torch.Tensor:
    """Sharded along ``split_dim`` instead of along ``concat_dim``, whose whole size is ``size``."""
    line = group.line(axis)
    parts = range(line.size)
    splits = [_length(value.shape[split_dim], line.size, index) for index in parts]
    pieces = value.split(splits, split_dim)
    shape = list(value.shape)
    shape[split_dim] = splits[line.index]
    shapes = []
    for index in parts:
        shape[concat_dim] = _length(size, line.size, index)
        shapes.append(tuple(shape))
    counts = [torch.Size(one).numel() for one in shapes]
    made = value.new_empty(sum(counts))
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    dist.all_to_all_single(made, sent, counts, [p.numel() for p in pieces], group=line.group)
    received = [one.view(s) for one, s in zip(made.split(counts), shapes, strict=True)]
    return torch.cat(received, concat_dim)


def shard(value: torch.Tensor, dim: int, axis: str) -> torch.Tensor:
    """This rank's block of a value that every rank of the axis has whole."""
    line = group.line(axis)
    start, stop = shard_bounds(value.shape[dim], line.size, line.index)
    return value.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def first(value: torch.Tensor, axis: str) -> torch.Tensor:
    """The value on the first rank of the axis, zeros on the others: a sum over the ranks."""
    made = value.clone(memory_format=torch.contiguous_format)
    return made if group.line(axis).index == 0 else made.zero_()


def _padded(value: torch.Tensor, rows: int) -> torch.Tensor:
    """``value``, contiguous, with zeros below it."""
    if value.shape[0] == rows:
        return value.contiguous()
    made = value.new_zeros((rows, *value.shape[1:]))
    made[: value.shape[0]] = value
    return made


def _length(size: int, parts: int, index: int) -> int:
    start, stop = shard_bounds(size, parts, index)
    return stop - start
