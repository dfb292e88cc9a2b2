"""Values of a checkpoint's tensors: their locations, and their bytes in the file."""

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
from lazygt.graph.mesh import Placements, Region, VirtualMesh, sent
from lazygt.graph.meta import TensorMeta, contiguous_stride, dtype_of
from lazygt.graph.placement import Placement, Replicate, Shard, SingleRank
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import is_lazy, storage_of, view_of
from lazygt.recovery.snapshot import laid_out
from lazygt.runtime.arenas import Arena
from lazygt.runtime.messages import Copied

# -- states of registered objects: nested containers, with the tensors in them separate ------------
# Each tensor is a *leaf* with a number; `encoding` has the rest as bytes.

#: Sizes or strides of a tensor; torch has 64 dimensions at most.
Sizes = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...], msgspec.Meta(max_length=64)
]


class Leaf(msgspec.Struct, frozen=True):
    """A tensor of a state.

    Attributes:
        lazy: True if it is a tensor of the session, not of the CPU.
        placements: its placements on the mesh, as text; none: whole on every worker.
    """

    dtype: str
    shape: Sizes
    stride: Sizes
    lazy: bool = False
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


class _Way(NamedTuple):
    """Getter and setter of the state of a kind of objects."""

    kind: type
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]


def _set_dict(given: dict[Any, Any], state: dict[Any, Any]) -> None:
    given.clear()
    given.update(state)


def _set_tensor(given: Tensor, state: Tensor) -> None:
    with torch.no_grad():
        given.copy_(state)


def check_numpy(position: Any, words: int = 624) -> None:
    """Raise ValueError for a position outside a generator's words: NumPy does not check."""
    if not 0 <= position <= words:
        raise ValueError(f"the place {position} among {words} words of a NumPy generator")


def _set_numpy(given: np.random.Generator, state: dict[str, Any]) -> None:
    if isinstance(given.bit_generator, np.random.MT19937):
        check_numpy(state["state"]["pos"])
    elif "buffer_pos" in state:
        check_numpy(state["buffer_pos"], len(state["buffer"]))
    given.bit_generator.state = state


_WAYS = (
    _Way(Tensor, lambda t: t.detach(), _set_tensor),
    _Way(torch.Generator, lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    _Way(random.Random, lambda r: r.getstate(), lambda r, state: r.setstate(state)),
    _Way(
        np.random.Generator,
        lambda g: g.bit_generator.state,
        _set_numpy,
    ),
    _Way(dict, dict, _set_dict),
)


def _way(given: Any) -> _Way | None:
    if callable(getattr(given, "state_dict", None)) and callable(
        getattr(given, "load_state_dict", None)
    ):
        return _Way(object, lambda o: o.state_dict(), lambda o, state: o.load_state_dict(state))
    return next((way for way in _WAYS if isinstance(given, way.kind)), None)


def check_registered(name: str, given: Any) -> None:
    """Raise TypeError for an object without a state that could be saved and loaded."""
    if _way(given) is None:
        raise TypeError(
            f"register({name}={given!r:.60}): a {type(given).__name__} has no state_dict() and "
            f"load_state_dict(). A plain value goes with each checkpoint: "
            f"session.checkpoint(step, {name}=...)"
        )


def state_of(given: Any) -> Any:
    """Return the state of a registered object; its tensors may be the object's own."""
    way = _way(given)
    assert way is not None
    return way.get(given)


def load(given: Any, state: Any) -> None:
    """Load a state into a registered object."""
    way = _way(given)
    assert way is not None
    way.set(given, state)


def class_of(given: Any) -> str:
    """Return the class name of an object; of a sharded module, that of its plain class."""
    if isinstance(given, Tensor):
        return Tensor.__qualname__
    kind: type = getattr(type(given), "__plain_class__", type(given))
    return kind.__qualname__


# -- comparison with a saved state ---------------------------------------------------------


def check(path: Any, name: str, given: Any, saved_class: str, state: Any) -> None:
    """Raise CheckpointError unless a saved state can be this object's.

    Args:
        state: the saved state, with a ``Leaf`` for each tensor.
    """
    if saved_class != class_of(given):
        why = f"{name!r} was a {saved_class}, and is a {class_of(given)} here"
    elif isinstance(given, nn.Module | Tensor):
        why = next(_differences(name, _tensors(state_of(given)), _tensors(state)), "")
    elif isinstance(given, torch.optim.Optimizer):
        groups = [len(group["params"]) for group in given.param_groups]
        saved = [len(group["params"]) for group in state["param_groups"]]
        why = "" if groups == saved else (
            f"{name!r} had {saved} parameters in its groups, and has {groups} here"
        )  # fmt: skip
    else:
        why = ""
    if why:
        raise CheckpointError(path, f"it is of another program: {why}. Nothing was loaded")


def _tensors(state: Any) -> dict[str, str]:
    """Return the tensors of a flat state, each described for errors."""
    items = state.items() if isinstance(state, Mapping) else [("", state)]
    return {key: _told(value) for key, value in items if isinstance(value, Tensor | Leaf)}


def _told(value: Tensor | Leaf) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}"


def _differences(name: str, here: Mapping[str, str], saved: Mapping[str, str]) -> Iterator[str]:
    for key in {**here, **saved}:
        if here.get(key) != saved.get(key):
            whole = f"{name}.{key}" if key else name
            yield (
                f"{whole} was {saved.get(key, 'not there')}, and is "
                f"{here.get(key, 'not there')} here"
            )


def pairs(here: Any, saved: Any) -> Iterable[tuple[Tensor, Leaf]]:
    """Yield the tensors of a state, each with the leaf in its place in a saved state."""
    if isinstance(saved, Leaf):
        if isinstance(here, Tensor):
            yield here, saved
    elif isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key, value in saved.items():
            if key in here:
                yield from pairs(here[key], value)
    elif isinstance(saved, list | tuple) and isinstance(here, list | tuple):
        for item, other in zip(here, saved, strict=False):
            yield from pairs(item, other)


# -- values of a checkpoint's tensors: their locations, and their bytes in the file ----------------

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
