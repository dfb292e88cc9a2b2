"""Tensors laid out in memory as programs lay them out: transposed, channels-last, sliced, expanded.

A layout takes a dense CPU tensor and its number among the operands, and gives the same values with
other strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Tensor = torch.Tensor
Layout = Callable[[Tensor, int], Tensor]


def permuted(t: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its dims in this order in memory."""
    return t.permute(*order).contiguous().permute([order.index(dim) for dim in range(t.dim())])


def turned(t: Tensor, number: int) -> Tensor:
    """The dims in reverse."""
    return permuted(t, range(t.dim())[::-1])


def channels_last(t: Tensor, number: int) -> Tensor:
    """The second dim laid out last, in two dimensions or three."""
    return permuted(t, [0, *range(2, t.dim()), 1]) if t.dim() > 2 else t.clone()


def mixed(t: Tensor, number: int) -> Tensor:
    """Every other operand turned, the others with their last two dims exchanged."""
    order = list(range(t.dim()))
    return turned(t, number) if number % 2 == 0 else permuted(t, [*order[:-2], *order[:-3:-1]])


def first_rows(t: Tensor, number: int) -> Tensor:
    """Row-major and channels-last operands by turns."""
    return channels_last(t, number) if number % 2 else t.contiguous()


def first_turned(t: Tensor, number: int) -> Tensor:
    """Turned and row-major operands by turns."""
    return t.contiguous() if number % 2 else turned(t, number)


def sliced(t: Tensor, number: int) -> Tensor:
    """Every second element of longer rows, from the second on."""
    if not t.dim():
        return t.clone()
    room = torch.zeros((*t.shape[:-1], 2 * t.shape[-1] + 1), dtype=t.dtype)
    view = room[..., 1::2]
    view.copy_(t)
    return view


def expanded(t: Tensor, number: int) -> Tensor:
    """Operands after the first repeat their first row, by a stride of 0."""
    return t[:1].expand(t.shape) if number and t.dim() and len(t) else t.clone()


def odd_ones(t: Tensor, number: int) -> Tensor:
    """Dims of one element with a stride that finds none."""
    pairs = zip(t.shape, t.contiguous().stride(), strict=True)
    steps = [7 * (number + 1) if size == 1 else step for size, step in pairs]
    view = torch.empty_strided(t.shape, steps, dtype=t.dtype)
    view.copy_(t)
    return view


LAYOUTS: list[Layout] = [
    turned, channels_last, mixed, first_rows, first_turned, sliced, expanded, odd_ones
]  # fmt: skip


def laid(value: Any, layout: Layout, device: str = "cpu") -> Any:
    """The same arguments on a device, each tensor a leaf that views memory in this layout."""
    known: dict[int, Tensor] = {}

    def leaf(t: Any) -> Any:
        if isinstance(t, torch.device):
            return torch.device(device)
        if not isinstance(t, Tensor):
            return t
        if id(t) not in known:
            view = _moved(layout(t.detach(), len(known)), device) if _strided(t) else t.to(device)
            known[id(t)] = view.detach().requires_grad_(t.requires_grad)
        return known[id(t)]

    return tree_map(leaf, value)


def _strided(t: Tensor) -> bool:
    return t.layout == torch.strided and not (t.is_conj() or t.is_neg())


def _moved(view: Tensor, device: str) -> Tensor:
    """A view of the same memory on another device."""
    if device == "cpu":
        return view
    memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    return memory.to(device).as_strided(view.shape, view.stride(), view.storage_offset())


def strides(value: Any) -> list[Any]:
    """Shape of each tensor, with the strides by which its elements are found."""
    found: list[Any] = []
    for t in tree_leaves(value):
        if isinstance(t, Tensor):
            tell = t.numel() > 1
            pairs = zip(t.shape, t.stride(), strict=True)
            found.append([(n, step if tell and n > 1 else None) for n, step in pairs])
    return found
