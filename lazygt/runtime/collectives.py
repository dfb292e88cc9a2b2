"""The exchanges of sharded plans, on one axis of the mesh each, waited for at once.

Those under way while something else is computed are ``flights``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lazygt.graph.label import shard_bounds
from lazygt.runtime import group
from lazygt.runtime.carriers import as_bytes
from lazygt.runtime.flights import at_once


def all_reduce(value: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    """The values of all ranks of the axis, reduced elementwise."""
    return at_once("all_reduce", value, (), op, axis)


def all_gather(value: torch.Tensor, dim: int, size: int, axis: str) -> torch.Tensor:
    """The blocks of all ranks of the axis side by side; ``size`` is that of ``dim`` then."""
    return at_once("all_gather", value, (dim, size), None, axis)


def reduce_scatter(value: torch.Tensor, dim: int, op: str, axis: str) -> torch.Tensor:
    """This rank's block of the reduced values."""
    return at_once("reduce_scatter", value, (dim,), op, axis)


def all_to_all(
    value: torch.Tensor, split_dim: int, concat_dim: int, size: int, axis: str
) -> torch.Tensor:
    """Sharded along ``split_dim`` instead of along ``concat_dim``, whose whole size is ``size``."""
    return at_once("all_to_all", value, (split_dim, concat_dim, size), None, axis)


def shard(value: torch.Tensor, dim: int, axis: str) -> torch.Tensor:
    """This rank's block of a value that every rank of the axis has whole."""
    line = group.line(axis)
    start, stop = shard_bounds(value.shape[dim], line.size, line.index)
    return value.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def first(value: torch.Tensor, axis: str) -> torch.Tensor:
    """The value on the first rank of the axis, zeros on the others: a sum over the ranks."""
    made = value.clone(memory_format=torch.contiguous_format)
    return made if group.line(axis).index == 0 else made.zero_()


def send(value: torch.Tensor, peer: int, axis: str) -> None:
    """Send a value to the rank at place ``peer`` of the axis; does not wait for it to arrive.

    What is sent is a copy: the value's memory may be written as soon as this returns.
    """
    line = group.line(axis)
    data = value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if not line.carries(data.device):
        data = data.cpu()
    if not data.numel():
        return
    flat = as_bytes(data.view(-1))
    if flat.device.type == "cpu":
        line.single(peer).send(flat.numpy().data, given=True)
    else:
        group.outbox().keep(dist.isend(flat, group=line.group, group_dst=peer), data)


def recv(
    peer: int, shape: list[int], dtype: torch.dtype, device: torch.device, axis: str
) -> torch.Tensor:
    """The next value that the rank at place ``peer`` of the axis sends; row-major."""
    line = group.line(axis)
    through = device if line.carries(device) else torch.device("cpu")
    made = torch.empty(shape, dtype=dtype, device=through)
    if made.numel():
        flat = as_bytes(made.view(-1))
        if flat.device.type == "cpu":
            line.single(peer).receive(flat.numpy().data)
        else:
            dist.recv(flat, group=line.group, group_src=peer)
    return made.to(device)
