"""A value cut into what each rank has of it, and put together again."""

from __future__ import annotations

import math
from typing import Any

import torch

from lazygt.graph.placement import (
    Partial,
    Placement,
    Shard,
    StridedShard,
    block_size,
    group_sizes,
    local_shape,
    shard_bounds,
    uneven,
)

Tensor = torch.Tensor


def blocks(whole: Tensor, placement: Placement, parts: int) -> list[Tensor]:
    """What each rank has of a value."""
    if isinstance(placement, Shard):
        bounds = [shard_bounds(whole.shape[placement.dim], parts, i) for i in range(parts)]
        return [
            whole.narrow(placement.dim, a, b - a).clone(memory_format=torch.contiguous_format)
            for a, b in bounds
        ]
    if uneven(placement):
        dim = placement.dim
        groups = whole.split(group_sizes(placement, whole.shape[dim]), dim)
        cut = [blocks(group, Shard(dim), parts) for group in groups]
        return [torch.cat(pieces, dim) for pieces in zip(*cut, strict=True)]
    if isinstance(placement, StridedShard):
        apart = _in_groups(whole, placement)
        shapes = [local_shape(tuple(whole.shape), placement, parts, rank) for rank in range(parts)]
        pieces = blocks(apart, Shard(placement.dim + 1), parts)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    if isinstance(placement, Partial):
        return summands(whole, placement.op, parts)
    return [whole.clone() for _ in range(parts)]


def _in_groups(value: Tensor, placement: StridedShard) -> Tensor:
    size = value.shape[placement.dim] // (placement.outer * placement.inner)
    return value.unflatten(placement.dim, (placement.outer, size, placement.inner))


def summands(whole: Tensor, op: str, parts: int) -> list[Tensor]:
    """Values that reduce to ``whole``, with identities among them."""
    if op == "sum":
        unit = _unit(whole)
        rest = [((torch.rand(whole.shape) * 8 - 4).round().double() * unit).to(whole.dtype)
                for _ in range(parts - 1)]  # fmt: skip
        return [whole - sum(rest), *rest]
    assert op in ("max", "min"), op
    if whole.dtype == torch.bool:
        others = torch.full_like(whole, op == "min")
        return [whole.clone(), *[others] * (parts - 1)]
    owner = torch.randint(parts, whole.shape)
    none = torch.full_like(whole, _identity(whole.dtype, op))
    far = whole - 1 if op == "max" else whole + 1
    other = torch.where(torch.rand(whole.shape) < 0.5, none, far)
    return [torch.where(owner == i, whole, other) for i in range(parts)]


def _unit(whole: Tensor) -> float:
    """The power of two beside which no value is large: sums of few multiples lose nothing."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return 1.0
    largest = whole.abs().double().nan_to_num(0, 0, 0).max().item() if whole.numel() else 0.0
    return 2.0 ** (math.frexp(largest)[1] - 4)


def _identity(dtype: torch.dtype, op: str) -> Any:
    if dtype.is_floating_point:
        return -torch.inf if op == "max" else torch.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def joined(
    pieces: list[Tensor], placement: Placement, shape: tuple[int, ...], parts: int
) -> Tensor:
    """The value that the ranks' pieces are of."""
    if isinstance(placement, Shard):
        for rank, piece in enumerate(pieces):
            start, stop = shard_bounds(shape[placement.dim], parts, rank)
            block = (*shape[: placement.dim], stop - start, *shape[placement.dim + 1 :])
            assert tuple(piece.shape) == block, f"rank {rank}: {list(piece.shape)} of {list(shape)}"
        return torch.cat(pieces, placement.dim)
    if isinstance(placement, StridedShard):
        for rank, piece in enumerate(pieces):
            assert tuple(piece.shape) == local_shape(shape, placement, parts, rank), f"rank {rank}"
        if uneven(placement):
            return _of_groups(pieces, placement, shape, parts)
        apart = [_in_groups(piece, placement) for piece in pieces]
        return torch.cat(apart, placement.dim + 1).reshape(shape)
    for piece in pieces:
        assert tuple(piece.shape) == shape, f"{placement}: {list(piece.shape)} of {list(shape)}"
    if isinstance(placement, Partial):
        return reduced(pieces, placement.op)
    for piece in pieces[1:]:
        torch.testing.assert_close(piece, pieces[0], equal_nan=True, rtol=0, atol=0)
    return pieces[0]


def _of_groups(
    pieces: list[Tensor], placement: StridedShard, shape: tuple[int, ...], parts: int
) -> Tensor:
    """The value whose groups, of several sizes, ranks have blocks of."""
    sizes, dim = group_sizes(placement, shape[placement.dim]), placement.dim
    cut = [
        piece.split([block_size(size, parts, rank) for size in sizes], dim)
        for rank, piece in enumerate(pieces)
    ]
    return torch.cat([torch.cat(of_group, dim) for of_group in zip(*cut, strict=True)], dim)


def reduced(pieces: list[Tensor], op: str) -> Tensor:
    """All pieces reduced, as an all-reduce would."""
    stacked = torch.stack(pieces)
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "prod":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)
