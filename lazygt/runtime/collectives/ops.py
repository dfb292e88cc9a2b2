"""Collectives as nodes of a plan: launched without waiting for other ranks, awaited later.

Several values of one kind travel in one flat buffer (see ``graph.collectives``). Shards are as
torch.chunk makes them: the first ranks of the axis hold ceil(n / ranks) rows, later ones the rest,
which may be nothing. For collectives that need equal blocks, the last ones are padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lazygt.errors import LazyGTError
from lazygt.graph.collectives import Slots, slots
from lazygt.graph.placement import block_size, shard_bounds
from lazygt.runtime.collectives import group, indexed
from lazygt.runtime.collectives.backends import Work, as_bytes

Moves = Sequence[Sequence[int]]
Unpack = Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class AsyncCollective:
    """Collective under way; an attribute of its buffer until the wait.

    Attributes:
        work: the backend's handle.
        sent: the tensor being sent, kept alive.
        unpack: computes the results from the received buffer.
    """

    work: Work
    sent: torch.Tensor | None
    unpack: Unpack


def launch(
    kind: str, values: Sequence[torch.Tensor], moves: Moves, op: str | None, axis: str
) -> torch.Tensor:
    """Begin a collective of several values; return its buffer for `wait`."""
    line = group.line(axis)
    device = values[0].device
    staged = not line.carries(device)
    if staged:
        values = [value.cpu() for value in values]
    begin = _OF_ROWS.get(kind)
    if begin is not None:
        begun = begin(line, *values, *moves[0])
        buffer, collective = begun.buffer, AsyncCollective(begun.work, begun.sent, begun.unpack)
    else:
        buffer, collective = _STARTS[kind](values, moves, op, line)
    if staged:
        collective = _returning(collective, device)
    buffer.collective = collective  # type: ignore[attr-defined]
    return buffer


def launch_(
    kind: str, values: Sequence[torch.Tensor], moves: Moves, op: str | None, axis: str
) -> None:
    """Begin an all-reduce, or a reduce-scatter, in the memory of its only operand."""
    (value,) = values
    line = group.line(axis)
    if kind == "reduce_scatter":
        value.collective = _scatter_over(value, moves, op, line)  # type: ignore[attr-defined]
        return
    if not line.carries(value.device):
        _launch_staged(value, str(op), line)
        return
    flat = value.view(-1)
    work = line.backend(flat, "all_reduce", flat.nbytes).all_reduce(flat, str(op))
    value.collective = AsyncCollective(work, None, _nothing)  # type: ignore[attr-defined]


def _nothing(_: torch.Tensor) -> list[torch.Tensor]:
    return []


def _scatter_over(
    value: torch.Tensor, moves: Moves, op: str | None, line: group.AxisGroup
) -> AsyncCollective:
    """Begin a reduce-scatter that writes over this rank's block, if blocks are equal."""
    if not line.carries(value.device):
        _, collective = _reduce_scatter([value.cpu()], moves, op, line)
        return _returning(collective, value.device)
    if value.shape[0] % line.size or not value.is_contiguous():
        return _reduce_scatter([value], moves, op, line)[1]
    blocks = value.view(line.size, -1)
    block = blocks[line.index]
    rows = value.shape[0] // line.size
    work = line.backend(block, "reduce_scatter", value.nbytes).reduce_scatter(
        block, blocks.view(-1), str(op)
    )
    return AsyncCollective(work, None, lambda _: [block.view(rows, *value.shape[1:])])


def _launch_staged(value: torch.Tensor, op: str, line: group.AxisGroup) -> None:
    """Begin an all-reduce in place, staged through the host's memory."""
    host = value.cpu()
    flat = host.view(-1)

    def unpack(_: torch.Tensor) -> list[torch.Tensor]:
        value.copy_(host)
        return []

    work = line.backend(flat, "all_reduce", flat.nbytes).all_reduce(flat, op)
    value.collective = AsyncCollective(work, flat, unpack)  # type: ignore[attr-defined]


def _returning(collective: AsyncCollective, device: torch.device) -> AsyncCollective:
    """Return a collective with its results copied back to ``device``."""

    def unpack(buffer: torch.Tensor) -> list[torch.Tensor]:
        return [made.to(device) for made in collective.unpack(buffer)]

    return AsyncCollective(collective.work, collective.sent, unpack)


def wait(buffer: torch.Tensor, held: Sequence[torch.Tensor], kept: Sequence[int], axis: str) -> Any:
    """Wait for a launch; return its result, or the list of them.

    Args:
        held: tensors that the launch sends without a copy.
        kept: indices of results that get memory of their own; others may be views of the buffer.

    Raises:
        LazyGTError: the buffer has no collective under way.
        OSError, RuntimeError: another rank has left, or did not come in time.
    """
    collective: AsyncCollective | None = buffer.__dict__.pop("collective", None)
    if collective is None:
        raise LazyGTError(f"nothing is under way on axis {axis!r} in this buffer")
    collective.work.wait()
    results = collective.unpack(buffer)
    for position in kept:
        results[position] = results[position].clone()
    return results[0] if len(results) == 1 else results


def at_once(
    kind: str, value: torch.Tensor, move: Sequence[int], op: str | None, axis: str
) -> torch.Tensor:
    """Return the result of a collective of one value."""
    result: torch.Tensor = wait(launch(kind, [value], [move], op, axis), (), (), axis)
    return result


# -- the kinds: each returns its receive buffer, and the collective --------------------------------

Started = tuple[torch.Tensor, AsyncCollective]


def _all_reduce(
    values: Sequence[torch.Tensor], moves: Moves, op: str | None, line: group.AxisGroup
) -> Started:
    shapes = [value.shape for value in values]
    if len(values) == 1:
        buffer = values[0].clone(memory_format=torch.contiguous_format).view(-1)
        where = slots("all_reduce", shapes, moves, line.size, buffer.itemsize)
    else:
        where = slots("all_reduce", shapes, moves, line.size, values[0].itemsize)
        buffer = values[0].new_empty(where.total)
        _pack(_parts(buffer, where, shapes), values)
    work = line.backend(buffer, "all_reduce", buffer.nbytes).all_reduce(buffer, str(op))
    return buffer, AsyncCollective(work, None, lambda made: _parts(made, where, shapes))


def _all_gather(
    values: Sequence[torch.Tensor], moves: Moves, op: str | None, line: group.AxisGroup
) -> Started:
    where = slots("all_gather", [v.shape for v in values], moves, line.size, values[0].itemsize)
    turned = [value.movedim(move[0], 0) for value, move in zip(values, moves, strict=True)]
    blocks = [block_size(move[1], line.size, 0) for move in moves]
    shapes = [(rows, *value.shape[1:]) for rows, value in zip(blocks, turned, strict=True)]
    if len(values) == 1:
        sent = _padded(turned[0], blocks[0]).view(-1)
    else:
        sent = values[0].new_empty(where.total)
        rooms = _parts(sent, where, shapes)
        _pack([room[: t.shape[0]] for room, t in zip(rooms, turned, strict=True)], turned)
    buffer = sent.new_empty(line.size * where.total)

    def unpack(made: torch.Tensor) -> list[torch.Tensor]:
        ranks = made.view(line.size, where.total)
        return [
            ranks[:, start : start + length]
            .reshape(line.size * shape[0], *shape[1:])[: move[1]]
            .movedim(0, move[0])
            .contiguous()
            for start, length, shape, move in zip(
                where.starts, where.lengths, shapes, moves, strict=True
            )
        ]

    work = line.backend(sent, "all_gather", buffer.nbytes).all_gather(buffer, sent)
    return buffer, AsyncCollective(work, sent, unpack)


def _reduce_scatter(
    values: Sequence[torch.Tensor], moves: Moves, op: str | None, line: group.AxisGroup
) -> Started:
    where = slots("reduce_scatter", [v.shape for v in values], moves, line.size,
                  values[0].itemsize)  # fmt: skip
    turned = [value.movedim(move[0], 0) for value, move in zip(values, moves, strict=True)]
    blocks = [block_size(value.shape[0], line.size, 0) for value in turned]
    mine = [block_size(value.shape[0], line.size, line.index) for value in turned]
    shapes = [(rows, *value.shape[1:]) for rows, value in zip(blocks, turned, strict=True)]
    if len(values) == 1:
        sent = _padded(turned[0], line.size * blocks[0]).view(-1)
        buffer = block = sent.new_empty(where.total)
    else:
        buffer = sent = values[0].new_empty(line.size * where.total)
        _pack_blocks(sent.view(line.size, where.total), where, shapes, turned)
        block = sent.view(line.size, where.total)[line.index]  # no other rank reads this rank's own

    def unpack(_: torch.Tensor) -> list[torch.Tensor]:
        return [
            part[:rows].movedim(0, move[0]).contiguous()
            for part, rows, move in zip(_parts(block, where, shapes), mine, moves, strict=True)
        ]

    work = line.backend(block, "reduce_scatter", sent.nbytes).reduce_scatter(block, sent, str(op))
    return buffer, AsyncCollective(work, sent, unpack)


def _all_to_all(
    values: Sequence[torch.Tensor], moves: Moves, op: str | None, line: group.AxisGroup
) -> Started:
    (value,), ((split_dim, concat_dim, size),) = values, moves
    parts = range(line.size)
    splits = [block_size(value.shape[split_dim], line.size, index) for index in parts]
    pieces = value.split(splits, split_dim)
    shape = list(value.shape)
    shape[split_dim] = splits[line.index]
    shapes = []
    for index in parts:
        shape[concat_dim] = block_size(size, line.size, index)
        shapes.append(tuple(shape))
    counts = [torch.Size(one).numel() for one in shapes]
    buffer = value.new_empty(sum(counts))
    sent = torch.cat([piece.reshape(-1) for piece in pieces])

    def unpack(made: torch.Tensor) -> list[torch.Tensor]:
        received = [one.view(s) for one, s in zip(made.split(counts), shapes, strict=True)]
        return [torch.cat(received, concat_dim)]

    shape[split_dim], shape[concat_dim] = splits[0], block_size(size, line.size, 0)
    largest = torch.Size(shape).numel() * value.itemsize  # all ranks have to choose alike
    out = [piece.numel() for piece in pieces]
    work = line.backend(buffer, "all_to_all", line.size * largest).all_to_all(
        buffer, sent, counts, out
    )
    return buffer, AsyncCollective(work, sent, unpack)


def _send_recv(
    values: Sequence[torch.Tensor], moves: Sequence[Any], op: str | None, line: group.AxisGroup
) -> Started:
    (value,), ((dim, rows),) = values, moves
    sizes = list(value.shape)
    sizes[dim] = 1
    row = math.prod(sizes)
    out, into, most = ([0] * line.size for _ in range(3))
    for source, target, count in rows:
        most[source] += count * row * value.itemsize
        if source == line.index:
            out[target] += count
        if target == line.index:
            into[source] += count
    pieces = value.split(out, dim)
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    buffer = value.new_empty(sum(into) * row)

    def unpack(come: torch.Tensor) -> list[torch.Tensor]:
        received = come.split([count * row for count in into])
        shapes = [(*sizes[:dim], count, *sizes[dim + 1 :]) for count in into]
        return [torch.cat([one.view(s) for one, s in zip(received, shapes, strict=True)], dim)]

    work = line.backend(buffer, "send_recv", max(most)).all_to_all(
        buffer, sent, [count * row for count in into], [count * row for count in out]
    )
    return buffer, AsyncCollective(work, sent, unpack)


_STARTS: dict[str, Callable[..., Started]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


_OF_ROWS: dict[str, Callable[..., indexed.Begun]] = {
    "take_rows": indexed.take,
    "put_rows": indexed.put,
}


# -- slots -------------------------------------------------------------------------------------


def _parts(
    buffer: torch.Tensor, where: Slots, shapes: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Return views of the values in a buffer."""
    return [
        buffer[start : start + length].view(tuple(shape))
        for start, length, shape in zip(where.starts, where.lengths, shapes, strict=True)
    ]


def _pack(rooms: list[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(rooms, list(values))


def _pack_blocks(
    ranks: torch.Tensor,
    where: Slots,
    shapes: Sequence[Sequence[int]],
    values: Sequence[torch.Tensor],
) -> None:
    """Copy every rank's block of every value into that rank's row."""
    rooms, blocks = [], []
    for start, length, shape, value in zip(
        where.starts, where.lengths, shapes, values, strict=True
    ):
        for rank, block in enumerate(value.split(max(shape[0], 1))):
            rooms.append(ranks[rank, start : start + length].view(tuple(shape))[: block.shape[0]])
            blocks.append(block)
    _pack(rooms, blocks)


def _padded(value: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``value``, contiguous, padded with zeros to ``rows`` rows."""
    if value.shape[0] == rows:
        return value.contiguous()
    padded = value.new_zeros((rows, *value.shape[1:]))
    padded[: value.shape[0]] = value
    return padded


def all_reduce(value: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    """Reduce the values of all ranks of the axis elementwise."""
    return at_once("all_reduce", value, (), op, axis)


def all_gather(value: torch.Tensor, dim: int, size: int, axis: str) -> torch.Tensor:
    """Concatenate the blocks of all ranks of the axis; ``dim`` then has size ``size``."""
    return at_once("all_gather", value, (dim, size), None, axis)


def reduce_scatter(value: torch.Tensor, dim: int, op: str, axis: str) -> torch.Tensor:
    """Return this rank's block of the reduced values."""
    return at_once("reduce_scatter", value, (dim,), op, axis)


def all_to_all(
    value: torch.Tensor, split_dim: int, concat_dim: int, size: int, axis: str
) -> torch.Tensor:
    """Change a value's sharding from ``concat_dim``, of full ``size``, to ``split_dim``."""
    return at_once("all_to_all", value, (split_dim, concat_dim, size), None, axis)


def send_recv(value: torch.Tensor, dim: int, rows: Any, axis: str) -> torch.Tensor:
    """Send rows to other ranks; return the received ones; see ``graph.placement``."""
    return at_once("send_recv", value, (dim, rows), None, axis)


def take_rows(
    value: torch.Tensor, index: torch.Tensor, count: int, size: int, axis: str
) -> torch.Tensor:
    """Gather rows of a value of ``size`` rows, sharded in blocks of ``count`` rows.

    The last ranks may have fewer.
    """
    flying = launch("take_rows", [value, index], [(count, size)], None, axis)
    result: torch.Tensor = wait(flying, (), (), axis)
    return result


def put_rows(
    value: torch.Tensor,
    index: torch.Tensor,
    given: torch.Tensor,
    count: int,
    size: int,
    added: bool,
    axis: str,
) -> torch.Tensor:
    """Return this rank's rows of such a value, with all ranks' rows put or added."""
    flying = launch("put_rows", [value, index, given], [(count, size, added)], None, axis)
    result: torch.Tensor = wait(flying, (), (), axis)
    return result


def shard(value: torch.Tensor, dim: int, axis: str) -> torch.Tensor:
    """Return this rank's block of a value that every rank of the axis has whole."""
    line = group.line(axis)
    start, stop = shard_bounds(value.shape[dim], line.size, line.index)
    return value.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def first(value: torch.Tensor, axis: str) -> torch.Tensor:
    """Return the value on the first rank of the axis, zeros on the others.

    The sum over the ranks is the value.
    """
    result = value.clone(memory_format=torch.contiguous_format)
    return result if group.line(axis).index == 0 else result.zero_()


def send(value: torch.Tensor, peer: int, axis: str) -> None:
    """Send a value to the rank at place ``peer`` of the axis; does not wait for it to arrive.

    A copy is sent: the value's memory may be written as soon as this returns.
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
        carrier = line.one_way(line.index, peer)
        group.pending_sends().keep(dist.isend(flat, group=carrier, group_dst=peer), data)


def recv(
    peer: int, shape: list[int], dtype: torch.dtype, device: torch.device, axis: str
) -> torch.Tensor:
    """Receive the next value from the rank at place ``peer`` of the axis; row-major."""
    line = group.line(axis)
    through = device if line.carries(device) else torch.device("cpu")
    received = torch.empty(shape, dtype=dtype, device=through)
    if received.numel():
        flat = as_bytes(received.view(-1))
        if flat.device.type == "cpu":
            line.single(peer).receive(flat.numpy().data)
        else:
            dist.recv(flat, group=line.one_way(peer, line.index), group_src=peer)
    return received.to(device)
