"""Values of a checkpoint's tensors: their locations, and their bytes in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lazygt.checkpoint.states import Leaf
from lazygt.errors import NoSession
from lazygt.graph.mesh import Placements, Region, VirtualMesh, sent
from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.placement import Placement, Replicate, Shard, SingleRank
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import is_lazy, storage_of, view_of
from lazygt.runtime.arenas import Arena
from lazygt.runtime.messages import Copied
from lazygt.runtime.recovery.snapshot import laid_out

#: Element size -> dtype for copies of any dtype's elements; torch has no integers of 16 bytes.
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Block(NamedTuple):
    """A part of a value, held by a worker under a number; no region: the whole value."""

    rank: int
    key: int
    region: Region | None


class Captured:
    """The tensors of states at one moment, by the numbers that ``leaf`` gives them."""

    def __init__(self, recorder: Recorder, mesh: VirtualMesh) -> None:
        self._recorder, self._mesh = recorder, mesh
        #: of a CPU tensor a copy; else a handle that is no view
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def leaf(self, t: Tensor) -> int:
        """Capture a tensor with its present values, and return its number."""
        if not is_lazy(t):
            return self._add(_dense(t.detach().cpu()))
        if storage_of(t).owner is not self._recorder:
            raise NoSession("a tensor of another session can't be saved in this one's checkpoints")
        if view_of(t) is not None:
            return self._add(t.detach().clone())
        key = id(storage_of(t))
        if key not in self._numbers:
            self._numbers[key] = self._add(t.detach())
        return self._numbers[key]

    def _add(self, t: Tensor) -> int:
        self._tensors.append(t)
        return len(self._tensors) - 1

    def ship(self) -> None:
        """Flush, so that the workers get or compute all values; does not wait."""
        for t in self._tensors:
            if is_lazy(t) and storage_of(t).host is None and storage_of(t).remote is None:
                self._recorder.index_of(t)
        self._recorder.flush("checkpoint")

    def fetched(self) -> list[Tensor]:
        """Return all tensors on the CPU; a sync point.

        Raises:
            ExecutionError: a value could not be computed.
        """
        return [
            _dense(self._recorder.fetch(t, "checkpoint")) if is_lazy(t) else t
            for t in self._tensors
        ]

    def leaves(self) -> list[Leaf]:
        """Return the description of each tensor."""
        return [_leaf(t) for t in self._tensors]

    def sources(self) -> list[Tensor | list[Block]]:
        """Return the location of each tensor: a CPU tensor, or the blocks on workers."""
        return [self._source(t) for t in self._tensors]

    def _source(self, t: Tensor) -> Tensor | list[Block]:
        if not is_lazy(t):
            return t
        storage = storage_of(t)
        if storage.host is not None:
            return _dense(storage.host)
        assert storage.remote is not None
        keys, sharding = storage.remote.ids, storage.remote.sharding
        if sharding is None:
            return [Block(0, keys[0], None)]
        regions = sent(self._mesh, sharding.placements, storage.meta.shape)
        return [
            Block(rank, keys[which], region)
            for rank, blocks in regions.items()
            for which, region in enumerate(blocks)
        ]


def _dense(t: Tensor) -> Tensor:
    """Return a copy of a CPU tensor, without gaps in its memory."""
    copy = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.preserve_format)
    return copy if _is_dense(copy) else copy.contiguous()


def _is_dense(t: Tensor) -> bool:
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(t)
    return dense


def _leaf(t: Tensor) -> Leaf:
    dtype = str(t.dtype).removeprefix("torch.")
    if not is_lazy(t):
        return Leaf(dtype, tuple(t.shape), t.stride())
    meta, remote = storage_of(t).meta, storage_of(t).remote
    dense = meta.offset == 0 and meta.extent == meta.numel
    stride = meta.stride if dense else contiguous_stride(meta.shape)
    sharding = None if remote is None else remote.sharding
    places = () if sharding is None else tuple(map(str, sharding.placements))
    return Leaf(dtype, meta.shape, stride, True, places)


def placements_of(leaf: Leaf) -> Placements:
    """Return the placements of a leaf."""
    return tuple(map(_placement, leaf.placements))


def _placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    number = int(text[2:-1])
    return Shard(number) if text[0] == "S" else SingleRank(number)


# -- bytes ---------------------------------------------------------------------------------

#: Rank -> value -> its copy in a snapshot.
Rows = Mapping[int, Mapping[int, Copied]]


def sections(
    leaves: Sequence[Leaf],
    sources: Sequence[Tensor | list[Block]],
    rows: Rows,
    memory: Callable[[int, Copied], Tensor],
) -> Iterator[memoryview]:
    """Yield the bytes of each value.

    Args:
        memory: returns the bytes of a rank's copy.
    """
    for leaf, source in zip(leaves, sources, strict=True):
        if isinstance(source, Tensor):
            yield _bytes(source)
            continue
        parts = []
        for block in source:
            row = rows[block.rank][block.key]
            parts.append((block.region, laid_out(memory(block.rank, row), row.meta)))
        yield _bytes(_whole(leaf, parts))


def are_there(sources: Sequence[Tensor | list[Block]], rows: Rows) -> bool:
    """Return whether a snapshot has all values: some may have failed."""
    blocks = (block for source in sources if isinstance(source, list) for block in source)
    return all(block.key in rows[block.rank] for block in blocks)


def _whole(leaf: Leaf, parts: list[tuple[Region | None, Tensor]]) -> Tensor:
    region, first = parts[0]
    meta = TensorMeta.of(first)
    moved = meta.offset or meta.conj or meta.neg or meta.stride != leaf.stride
    if region is None and not moved:
        return first
    whole = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.torch_dtype, device="cpu")
    target = _numbers(whole)
    for where, part in parts:
        place: tuple[Any, ...] = (*(where or ()), ...)
        # on one thread, unlike torch's
        np.copyto(target[place], _numbers(part.resolve_conj().resolve_neg()))
    return whole


def _numbers(t: Tensor) -> np.ndarray:
    array: np.ndarray = t.detach().view(_NUMBERS[t.element_size()]).numpy()
    return array


def _bytes(t: Tensor) -> memoryview:
    """Return a dense tensor's bytes in memory order."""
    if not t.numel():
        return memoryview(b"")
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy().data


def tensor_of(leaf: Leaf, data: memoryview) -> Tensor:
    """Return the tensor over a section's bytes.

    Raises:
        ValueError: the tensor needs another number of bytes.
    """
    if not leaf.fits(len(data)):
        raise ValueError(f"{leaf.dtype}{list(leaf.shape)} does not take {len(data)} bytes")
    if not len(data):
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.torch_dtype, device="cpu")
    flat = torch.frombuffer(data, dtype=torch.uint8).view(leaf.torch_dtype)
    return flat.as_strided(leaf.shape, leaf.stride)


def memory_of(arenas: Mapping[int, Arena], upload: Arena | None) -> Callable[[int, Copied], Tensor]:
    """Return the lookup of copies for ``sections``, in each rank's memory or the client's."""

    def memory(rank: int, row: Copied) -> Tensor:
        arena = upload if row.borrowed else arenas[rank]
        assert arena is not None
        return arena.view(row.offset, row.nbytes)

    return memory
