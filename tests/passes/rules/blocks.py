"""A value cut into what each rank has of it, and put together again."""

from __future__ import annotations

from typing import Any

import torch

from lazygt.graph.label import Interleaved, Label, Partial, Sharded, local_shape, shard_bounds

Tensor = torch.Tensor


def blocks(whole: Tensor, label: Label, parts: int) -> list[Tensor]:
    """What each rank has of a value."""
    if isinstance(label, Sharded):
        bounds = [shard_bounds(whole.shape[label.dim], parts, i) for i in range(parts)]
        return [
            whole.narrow(label.dim, a, b - a).clone(memory_format=torch.contiguous_format)
            for a, b in bounds
        ]
    if isinstance(label, Interleaved):
        apart = _in_groups(whole, label)
        shapes = [local_shape(tuple(whole.shape), label, parts, rank) for rank in range(parts)]
        pieces = blocks(apart, Sharded(label.dim + 1), parts)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    if isinstance(label, Partial):
        return summands(whole, label.op, parts)
    return [whole.clone() for _ in range(parts)]


def _in_groups(value: Tensor, label: Interleaved) -> Tensor:
    size = value.shape[label.dim] // (label.outer * label.inner)
    return value.unflatten(label.dim, (label.outer, size, label.inner))


def summands(whole: Tensor, op: str, parts: int) -> list[Tensor]:
    """Values that reduce to ``whole``, with identities among them."""
    if op == "sum":
        rest = [(torch.rand(whole.shape) * 8 - 4).to(whole.dtype) for _ in range(parts - 1)]
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


def _identity(dtype: torch.dtype, op: str) -> Any:
    if dtype.is_floating_point:
        return -torch.inf if op == "max" else torch.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def joined(pieces: list[Tensor], label: Label, shape: tuple[int, ...], parts: int) -> Tensor:
    """The value that the ranks' pieces are of."""
    if isinstance(label, Sharded):
        for rank, piece in enumerate(pieces):
            start, stop = shard_bounds(shape[label.dim], parts, rank)
            block = (*shape[: label.dim], stop - start, *shape[label.dim + 1 :])
            assert tuple(piece.shape) == block, f"rank {rank}: {list(piece.shape)} of {list(shape)}"
        return torch.cat(pieces, label.dim)
    if isinstance(label, Interleaved):
        for rank, piece in enumerate(pieces):
            assert tuple(piece.shape) == local_shape(shape, label, parts, rank), f"rank {rank}"
        apart = [_in_groups(piece, label) for piece in pieces]
        return torch.cat(apart, label.dim + 1).reshape(shape)
    for piece in pieces:
        assert tuple(piece.shape) == shape, f"{label}: {list(piece.shape)} of {list(shape)}"
    if isinstance(label, Partial):
        return reduced(pieces, label.op)
    for piece in pieces[1:]:
        torch.testing.assert_close(piece, pieces[0], equal_nan=True, rtol=0, atol=0)
    return pieces[0]


def reduced(pieces: list[Tensor], op: str) -> Tensor:
    """All pieces reduced, as an all-reduce would."""
    stacked = torch.stack(pieces)
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "prod":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)
