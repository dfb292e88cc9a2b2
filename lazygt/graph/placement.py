"""Placements of a value along one mesh axis, and the ops that move it between them.

A value on a mesh has one placement an axis.

The collectives are nodes of a rank's graph like any other. All give row-major results. Their
arguments:

    lazygt.all_reduce(value, op, axis)                   P(op) -> R
    lazygt.all_gather(value, dim, size, axis)            S(dim) -> R
    lazygt.reduce_scatter(value, dim, op, axis)          P(op) -> S(dim)
    lazygt.all_to_all(value, split, concat, size, axis)  S(concat) -> S(split)
    lazygt.send_recv(value, dim, rows, axis)             rows for other ranks -> rows from them
    lazygt.take_rows(value, index, rows, size, axis)     S(0) and S(0) -> S(0)
    lazygt.put_rows(value, index, given, rows, size, added, axis)    S(0), S(0) and S(0) -> S(0)
    lazygt.shard(value, dim, axis)                       R -> S(dim), nothing is sent
    lazygt.first(value, axis)                            R -> P(sum), nothing is sent
    lazygt.launch(kind, values, moves, op, axis)         begins a collective of several values
    lazygt.launch_(kind, values, moves, op, axis)        the same of one value, in its own memory
    lazygt.wait(flying, held, kept, axis)                ends it, and returns each value's result
    lazygt.send(value, peer, axis)                       H(this rank) -> H(peer), the sender's half
    lazygt.recv(peer, shape, dtype, device, axis)        H(peer) -> H(this rank), the other half

``size`` is the global size of the gathered dim; blocks are ``shard_bounds`` of it. ``rows`` has the
number of rows that each rank sends to each: ``((from, to, count), ...)`` in order. Along ``dim``, a
rank's sent rows are in the order of the receivers, received rows in the order of the senders.

``take_rows`` gathers rows from, and ``put_rows`` scatters rows into, a value that has ``rows`` of
its ``size`` on each rank but the last ones. An index is flat and counts in the full value; only its
values determine how many of its rows are on other ranks. The rows of all ranks are put, or added if
``added``, in the order of the ranks.

A launch does not wait for other ranks. ``kind`` is the collective's name without ``lazygt.``, and
``moves`` has the arguments between value and op of each of the values: ``(dim, size)`` for a
gather, ``(dim,)`` for a reduce-scatter. ``flying`` is a launch's result. Until the wait no op may
write ``held``: values that are sent without a copy. ``kept`` are the positions of results that
outlive the run, and get memory of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import gcd
from typing import Any

from lazygt.graph.meta import TensorMeta, contiguous_stride, intern

ALL_REDUCE = "lazygt.all_reduce"
ALL_GATHER = "lazygt.all_gather"
REDUCE_SCATTER = "lazygt.reduce_scatter"
ALL_TO_ALL = "lazygt.all_to_all"
SEND_RECV = "lazygt.send_recv"
TAKE_ROWS = "lazygt.take_rows"
PUT_ROWS = "lazygt.put_rows"
LAUNCH = "lazygt.launch"
LAUNCH_ = "lazygt.launch_"
WAIT = "lazygt.wait"
SHARD = "lazygt.shard"
REPLICATE_TO_PARTIAL = "lazygt.first"
SEND = "lazygt.send"
RECV = "lazygt.recv"

#: Exchanges whose numbers of rows depend on the values of an index.
EXCHANGES_OF_ROWS = frozenset({TAKE_ROWS, PUT_ROWS})
#: Ops for which all ranks of the axis must meet, in the same order.
COLLECTIVES = EXCHANGES_OF_ROWS | {
    ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND_RECV, LAUNCH, LAUNCH_
}  # fmt: skip
#: Ops for which two ranks of the axis must meet. A send does not wait for its receiver.
POINT_TO_POINT = frozenset({SEND, RECV})
#: Ops with a result that depends on the rank.
COLLECTIVE_OPS = COLLECTIVES | POINT_TO_POINT | {SHARD, REPLICATE_TO_PARTIAL, WAIT}

REDUCE_OPS = ("sum", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Replicate:
    """The full value on every rank."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Block i along ``dim`` (from 0) on rank i; blocks are ``shard_bounds``."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Block i of each group on rank i: ``dim`` is ``outer`` x size x ``inner``, sharded in size.

    A value ``[L, N, E]`` in S(1) has it when seen as ``[L * N, E]``: ``outer`` is L. Seen as ``[L,
    N * E]`` the value is in S(1) if all ranks have an equal share of N; else ``inner`` is E, and
    ``outer`` is 1. The placement occurs between two ops only, never at an input, output or
    annotation.

    If the groups have several sizes, ``widths`` has them, in units of the dim's size over
    ``outer``: for 256 queries, 128 keys and 128 values (2, 1, 1). ``inner`` is 1 then.
    """

    dim: int
    outer: int
    inner: int = 1
    widths: tuple[int, ...] = ()

    def __str__(self) -> str:
        within = f"*{self.inner}" if self.inner > 1 else ""
        groups = "+".join(map(str, self.widths)) or str(self.outer)
        return f"S({self.dim}/{groups}{within})"


@dataclass(frozen=True, slots=True)
class Partial:
    """A term of the full shape on every rank; the terms reduced with ``op`` are the value."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The full value on rank ``rank`` of the axis, nothing on the others (a pipeline stage)."""

    rank: int

    def __str__(self) -> str:
        return f"H({self.rank})"


@dataclass(frozen=True, slots=True)
class Unspecified:
    """No statement about this axis."""

    def __str__(self) -> str:
        return "?"


#: ``SingleRank`` occurs only on the axis of pipeline stages, which no sharding rule sees;
#: ``Unspecified`` only in annotations.
Placement = Replicate | Shard | StridedShard | Partial | SingleRank | Unspecified
#: Placements that shard a dim: each rank has a block, or a block of each group.
Cut = Shard | StridedShard


def outer_and_inner(placement: Cut) -> tuple[int, int]:
    """Return (outer, inner) of a sharded dim as outer x size x inner; (1, 1) for plain blocks."""
    return (placement.outer, placement.inner) if isinstance(placement, StridedShard) else (1, 1)


def whole_groups(placement: StridedShard, axis_size: int) -> bool:
    """Return whether a plain ``Shard`` of the dim would give each rank full groups."""
    return placement.inner == 1 and placement.outer % axis_size == 0 and not placement.widths


def groups(placement: Cut) -> int:
    """Return the ratio of the sharded dim to the size that is split among ranks."""
    outer, inner = outer_and_inner(placement)
    return outer * inner


def side_by_side(dim: int, sizes: Sequence[int]) -> Cut:
    """Return the placement of a dim that concatenates pieces of these sizes, each sharded."""
    unit = gcd(*sizes)
    if len(sizes) == 1 or not unit:
        return Shard(dim)
    if len(set(sizes)) == 1:
        return StridedShard(dim, len(sizes))
    widths = tuple([size // unit for size in sizes])
    return StridedShard(dim, sum(widths), widths=widths)


def uneven(placement: Placement) -> bool:
    """Return whether a placement has groups of several sizes."""
    return isinstance(placement, StridedShard) and bool(placement.widths)


def group_sizes(placement: Cut, size: int) -> tuple[int, ...]:
    """Return the sizes of the groups of a dim of ``size``; a rank has one block of each."""
    if not isinstance(placement, StridedShard):
        return (size,)
    unit = size // placement.outer
    return tuple([width * unit for width in placement.widths]) or (unit,) * placement.outer


def shard_bounds(size: int, block_count: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of block ``index`` of ``block_count`` blocks, as ``torch.chunk`` splits.

    The first blocks have ``ceil(size / block_count)`` elements, the later ones the rest, maybe 0.
    """
    block = -(-size // block_count)
    return min(block * index, size), min(block * (index + 1), size)


def block_size(size: int, block_count: int, index: int) -> int:
    """Return the number of elements of block ``index`` of ``block_count`` blocks."""
    start, stop = shard_bounds(size, block_count, index)
    return stop - start


def local_size(placement: Cut, size: int, axis_size: int, index: int) -> int:
    """Return the number of elements that rank ``index`` has of a sharded dim of ``size``."""
    if uneven(placement):
        return sum([block_size(group, axis_size, index) for group in group_sizes(placement, size)])
    count = groups(placement)
    return count * block_size(size // count, axis_size, index)


def local_shape(
    shape: tuple[int, ...], placement: Placement, axis_size: int, index: int
) -> tuple[int, ...]:
    """Return the shape of rank ``index``'s block of a value of ``shape``."""
    if isinstance(placement, SingleRank) and placement.rank != index:
        return (0,)
    if not isinstance(placement, Cut):
        return shape
    block = local_size(placement, shape[placement.dim], axis_size, index)
    return (*shape[: placement.dim], block, *shape[placement.dim + 1 :])


def local_meta(meta: TensorMeta, placement: Placement, axis_size: int, index: int) -> TensorMeta:
    """Return the meta of rank ``index``'s block of a value: row-major if a dim is sharded."""
    if isinstance(placement, SingleRank) and placement.rank != index:
        return intern((0,), (1,), meta.dtype)
    if not isinstance(placement, Cut):
        return meta
    shape = local_shape(meta.shape, placement, axis_size, index)
    return intern(shape, contiguous_stride(shape), meta.dtype, 0, meta.conj, meta.neg)


def as_placement(argument: Any, dims: int | None = None) -> Placement:
    """Return lazygt's placement for a user's argument, torch's own or lazygt's.

    Args:
        dims: number of dims of the tensor, to count a negative dim from the front; None: the dim
            stays negative.

    Raises:
        ValueError: a dim that the tensor does not have, or no placement that lazygt knows.
    """
    placement = _known(argument)
    if dims is None or not isinstance(placement, Shard):
        return placement
    if not -dims <= placement.dim < dims:
        raise ValueError(f"{argument}: a tensor of {dims} dims has no dim {placement.dim}")
    return Shard(placement.dim % dims)


def _known(argument: Any) -> Placement:
    """Return lazygt's placement for torch's or lazygt's own; ValueError for anything else."""
    if isinstance(argument, Replicate | Shard | Partial):
        return argument
    # A caller with a placement of torch's has loaded the module, which takes 0.3 s.
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(argument, dtensor.Replicate):
        return Replicate()
    if dtensor is not None and type(argument) is dtensor.Shard:
        return Shard(argument.dim)
    if dtensor is not None and isinstance(argument, dtensor.Partial):
        op = {"product": "prod"}.get(argument.reduce_op, argument.reduce_op)
        if op in REDUCE_OPS:
            return Partial(op)
    raise ValueError(
        f"{argument!r} is no placement that lazygt knows: use Replicate(), Shard(dim) or "
        f"Partial(op) with op one of {', '.join(REDUCE_OPS)}"
    )


def placement_to_torch(placement: Placement) -> Any:
    """Return torch's DTensor placement; ``SingleRank``, which torch lacks, is returned itself."""
    if isinstance(placement, SingleRank):
        return placement
    dtensor = import_module(
        "torch.distributed.tensor"
    )  # takes 0.3 s: only for values that are shown
    if isinstance(placement, Shard):
        return dtensor.Shard(placement.dim)
    if isinstance(placement, Partial):
        return dtensor.Partial({"prod": "product"}.get(placement.op, placement.op))
    return dtensor.Replicate()
