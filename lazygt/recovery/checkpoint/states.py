"""States of registered objects, and the locations and bytes of their tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from lazygt.errors import CheckpointError, NoSession
from lazygt.graph.mesh import Placements, Region, VirtualMesh, regions_by_worker
from lazygt.graph.meta import TensorMeta, contiguous_stride, dtype_of
from lazygt.graph.placement import Placement, Replicate, Shard, SingleRank
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import is_lazy, storage_of, view_of
from lazygt.recovery.snapshot import view_with_meta
from lazygt.runtime.arenas import Arena
from lazygt.runtime.messages import Copied

# -- leaves ----------------------------------------------------------------------------------------
# The state of a registered object is a nested container. Each tensor in it is a *leaf* with a
# number; `encoding` encodes the rest as bytes.

#: Shape or strides of a tensor; torch allows 64 dimensions at most.
Sizes = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...], msgspec.Meta(max_length=64)
]


class Leaf(msgspec.Struct, frozen=True):
    """Description of a tensor in a state."""

    dtype: str
    shape: Sizes
    stride: Sizes
    lazy: bool = False  # True for a tensor of the session, False for a CPU tensor
    #: placements on the mesh, as text; empty: the full tensor is on every worker
    placements: tuple[Annotated[str, msgspec.Meta(pattern=r"^(R|[SH]\(\d{1,6}\))$")], ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype; raises ValueError if torch has none of that name."""
        return dtype_of(self.dtype)

    def fits(self, nbytes: int) -> bool:
        """Return whether a tensor of this dtype, shape and stride takes exactly ``nbytes``."""
        if len(self.shape) != len(self.stride):
            return False
        numel = math.prod(self.shape)
        extent = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return numel * self.torch_dtype.itemsize == nbytes and numel in (0, extent)


# -- one object ----------------------------------------------------------------------------


class _StateAccess(NamedTuple):
    """Getter and setter of the states of a class's instances."""

    kind: type
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _set_dict(target: dict[Any, Any], state: dict[Any, Any]) -> None:
    target.clear()
    target.update(state)


def _set_tensor(target: Tensor, state: Tensor) -> None:
    with torch.no_grad():
        target.copy_(state)


def check_numpy(position: Any, words: int = 624) -> None:
    """Raise ValueError for a position outside a generator's words: NumPy does not check."""
    if not 0 <= position <= words:
        raise ValueError(f"the place {position} among {words} words of a NumPy generator")


def _set_numpy(generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Set a NumPy generator's state after checks that NumPy omits."""
    if isinstance(generator.bit_generator, np.random.MT19937):
        check_numpy(state["state"]["pos"])
    elif "buffer_pos" in state:
        check_numpy(state["buffer_pos"], len(state["buffer"]))
    generator.bit_generator.state = state


_ACCESSES = (
    _StateAccess(Tensor, lambda t: t.detach(), _set_tensor),
    _StateAccess(torch.Generator, lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    _StateAccess(random.Random, lambda r: r.getstate(), lambda r, state: r.setstate(state)),
    _StateAccess(
        np.random.Generator,
        lambda g: g.bit_generator.state,
        _set_numpy,
    ),
    _StateAccess(dict, dict, _set_dict),
)


def _access_of(obj: Any) -> _StateAccess | None:
    """Return the access to an object's state; None if it has no state."""
    if callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    ):
        return _StateAccess(
            object, lambda o: o.state_dict(), lambda o, state: o.load_state_dict(state)
        )
    return next((access for access in _ACCESSES if isinstance(obj, access.kind)), None)


def check_registered(name: str, obj: Any) -> None:
    """Raise TypeError for an object without a state that could be saved and loaded."""
    if _access_of(obj) is None:
        raise TypeError(
            f"register({name}={obj!r:.60}): a {type(obj).__name__} has no state_dict() and "
            f"load_state_dict(). A plain value goes with each checkpoint: "
            f"session.checkpoint(step, {name}=...)"
        )


def state_of(obj: Any) -> Any:
    """Return the state of a registered object; its tensors may be the object's own."""
    access = _access_of(obj)
    assert access is not None
    return access.get(obj)


def load(obj: Any, state: Any) -> None:
    """Load a state into a registered object."""
    access = _access_of(obj)
    assert access is not None
    access.set(obj, state)


def class_of(obj: Any) -> str:
    """Return the class name of an object; for a sharded module, the name of its plain class."""
    if isinstance(obj, Tensor):
        return Tensor.__qualname__
    kind: type = getattr(type(obj), "__plain_class__", type(obj))
    return kind.__qualname__


# -- comparison with a saved state ---------------------------------------------------------


def check(path: Any, name: str, obj: Any, saved_class: str, state: Any) -> None:
    """Raise CheckpointError unless a saved state can be this object's.

    Args:
        state: the saved state, with a ``Leaf`` for each tensor.
    """
    if saved_class != class_of(obj):
        reason = f"{name!r} was a {saved_class}, and is a {class_of(obj)} here"
    elif isinstance(obj, nn.Module | Tensor):
        reason = next(_differences(name, _tensors(state_of(obj)), _tensors(state)), "")
    elif isinstance(obj, torch.optim.Optimizer):
        groups = [len(group["params"]) for group in obj.param_groups]
        saved_groups = [len(group["params"]) for group in state["param_groups"]]
        reason = "" if groups == saved_groups else (
            f"{name!r} had {saved_groups} parameters in its groups, and has {groups} here"
        )  # fmt: skip
    else:
        reason = ""
    if reason:
        raise CheckpointError(path, f"it is of another program: {reason}. Nothing was loaded")


def _tensors(state: Any) -> dict[str, str]:
    """Return the dtype and shape of each tensor in a flat state, as text by key."""
    items = state.items() if isinstance(state, Mapping) else [("", state)]
    return {key: _described(value) for key, value in items if isinstance(value, Tensor | Leaf)}


def _described(value: Tensor | Leaf) -> str:
    """Return a tensor's dtype and shape, such as ``float32[2, 3]``."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}"


def _differences(name: str, current: Mapping[str, str], saved: Mapping[str, str]) -> Iterator[str]:
    """Describe each tensor with another dtype or shape than the saved one, or without one."""
    for key in {**current, **saved}:
        if current.get(key) != saved.get(key):
            full_name = f"{name}.{key}" if key else name
            yield (
                f"{full_name} was {saved.get(key, 'not there')}, and is "
                f"{current.get(key, 'not there')} here"
            )


def pairs(current: Any, saved: Any) -> Iterable[tuple[Tensor, Leaf]]:
    """Yield the tensors of a state, each with the leaf at the same path in a saved state."""
    if isinstance(saved, Leaf):
        if isinstance(current, Tensor):
            yield current, saved
    elif isinstance(saved, Mapping) and isinstance(current, Mapping):
        for key, value in saved.items():
            if key in current:
                yield from pairs(current[key], value)
    elif isinstance(saved, list | tuple) and isinstance(current, list | tuple):
        for item, other in zip(current, saved, strict=False):
            yield from pairs(item, other)


# -- locations of tensors --------------------------------------------------------------------------

#: Element size -> dtype that NumPy can copy; torch has no integers of 16 bytes.
_DTYPE_OF_SIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


class SavedBlock(NamedTuple):
    """Block of a value on a worker."""

    rank: int
    key: int  # id of the block on the worker
    region: Region | None  # range of the full value in each dim; None: all of it


class CapturedValues:
    """Tensors of states at one moment, numbered by ``leaf``."""

    def __init__(self, recorder: Recorder, mesh: VirtualMesh) -> None:
        self._recorder, self._mesh = recorder, mesh
        #: copies of CPU tensors, and handles of the session's tensors that are no views
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def leaf(self, t: Tensor) -> int:
        """Capture a tensor with its present values; return its number."""
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
        """Append a tensor, and return its number."""
        self._tensors.append(t)
        return len(self._tensors) - 1

    def ship(self) -> None:
        """Flush the session, so that the workers receive or compute all values; don't wait."""
        for t in self._tensors:
            if is_lazy(t) and storage_of(t).host is None and storage_of(t).remote is None:
                self._recorder.index_of(t)
        self._recorder.flush("checkpoint")

    def fetched(self) -> list[Tensor]:
        """Fetch all tensors to the CPU; a sync point.

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

    def sources(self) -> list[Tensor | list[SavedBlock]]:
        """Return the location of each tensor: a CPU tensor, or the blocks on workers."""
        return [self._source(t) for t in self._tensors]

    def _source(self, t: Tensor) -> Tensor | list[SavedBlock]:
        """Return the location of a captured tensor: a CPU tensor, or the blocks on workers."""
        if not is_lazy(t):
            return t
        storage = storage_of(t)
        if storage.host is not None:
            return _dense(storage.host)
        assert storage.remote is not None
        keys, sharding = storage.remote.ids, storage.remote.sharding
        if sharding is None:
            return [SavedBlock(0, keys[0], None)]
        # rank -> regions of its blocks, for ranks that have the full value together
        regions = regions_by_worker(self._mesh, sharding.placements, storage.meta.shape)
        return [
            SavedBlock(rank, keys[index], region)
            for rank, blocks in regions.items()
            for index, region in enumerate(blocks)
        ]


def _dense(t: Tensor) -> Tensor:
    """Return a copy of a CPU tensor, without gaps in its memory."""
    copy = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.preserve_format)
    return copy if _is_dense(copy) else copy.contiguous()


def _is_dense(t: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps or overlaps."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(t)
    return dense


def _leaf(t: Tensor) -> Leaf:
    """Return the description of a captured tensor."""
    dtype = str(t.dtype).removeprefix("torch.")
    if not is_lazy(t):
        return Leaf(dtype, tuple(t.shape), t.stride())
    meta, remote = storage_of(t).meta, storage_of(t).remote
    dense = meta.offset == 0 and meta.extent == meta.numel
    stride = meta.stride if dense else contiguous_stride(meta.shape)
    sharding = None if remote is None else remote.sharding
    placements = () if sharding is None else tuple(map(str, sharding.placements))
    return Leaf(dtype, meta.shape, stride, True, placements)


def placements_of(leaf: Leaf) -> Placements:
    """Parse the placements of a leaf."""
    return tuple(map(_placement, leaf.placements))


def _placement(text: str) -> Placement:
    """Parse a placement: R, S(dim) or H(rank)."""
    if text == "R":
        return Replicate()
    number = int(text[2:-1])
    return Shard(number) if text[0] == "S" else SingleRank(number)


# -- bytes ---------------------------------------------------------------------------------

#: Rank -> id of a value -> its copy in a snapshot.
SnapshotCopies = Mapping[int, Mapping[int, Copied]]


def sections(
    leaves: Sequence[Leaf],
    sources: Sequence[Tensor | list[SavedBlock]],
    copies: SnapshotCopies,
    memory: Callable[[int, Copied], Tensor],
) -> Iterator[memoryview]:
    """Yield the bytes of each value, with the blocks of sharded values assembled.

    Args:
        sources: location of each value; see ``CapturedValues.sources``.
        memory: returns the bytes of a rank's copy.
    """
    for leaf, source in zip(leaves, sources, strict=True):
        if isinstance(source, Tensor):
            yield _bytes(source)
            continue
        chunks = []
        for block in source:
            copy = copies[block.rank][block.key]
            chunks.append((block.region, view_with_meta(memory(block.rank, copy), copy.meta)))
        yield _bytes(_assembled(leaf, chunks))


def has_all_values(sources: Sequence[Tensor | list[SavedBlock]], copies: SnapshotCopies) -> bool:
    """Return whether a snapshot has all values; a failed value has no copy there."""
    blocks = (block for source in sources if isinstance(source, list) for block in source)
    return all(block.key in copies[block.rank] for block in blocks)


def _assembled(leaf: Leaf, chunks: list[tuple[Region | None, Tensor]]) -> Tensor:
    """Assemble the full CPU tensor from its blocks, in the layout of its leaf.

    Args:
        chunks: (region, tensor) of each block; no region: the full tensor.
    """
    region, first = chunks[0]
    meta = TensorMeta.of(first)
    has_other_layout = meta.offset or meta.conj or meta.neg or meta.stride != leaf.stride
    if region is None and not has_other_layout:
        return first
    full = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.torch_dtype, device="cpu")
    target = _as_numpy(full)
    for chunk_region, chunk in chunks:
        index: tuple[Any, ...] = (*(chunk_region or ()), ...)
        # NumPy copies on one thread, unlike torch
        np.copyto(target[index], _as_numpy(chunk.resolve_conj().resolve_neg()))
    return full


def _as_numpy(t: Tensor) -> np.ndarray:
    """Return a NumPy view of a tensor's elements, as numbers of the same size."""
    array: np.ndarray = t.detach().view(_DTYPE_OF_SIZE[t.element_size()]).numpy()
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
    """Return a function from (rank, copy) to the copy's bytes.

    Args:
        arenas: rank -> its snapshot memory.
        upload: the client's upload arena, which has the borrowed values.
    """

    def memory(rank: int, copy: Copied) -> Tensor:
        """Return the bytes of a copy; a borrowed one is in the upload arena."""
        arena = upload if copy.borrowed else arenas[rank]
        assert arena is not None
        return arena.view(copy.offset, copy.nbytes)

    return memory
