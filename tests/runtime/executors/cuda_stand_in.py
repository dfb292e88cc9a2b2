"""A stand-in for torch.cuda's graphs, on the CPU.

A capture notes each call that reaches a kernel, with the storages of its tensors, and leaves all
memory as it was. A replay makes these calls again on these very storages. So whatever is wrong
with addresses, numbers or the order of things is wrong here, too: memory that a graph made is
filled with NaN before each replay, and that of values which had died by the end of the capture
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from lazygt.runtime.executors.cuda_graphs import CudaGraphs
from lazygt.runtime.worker import shipped_plans

#: Ops that wait for the GPU, as far as tests use them.
WAITING = {
    "aten.linalg_inv_ex.default",
    "aten.bincount.default",
    "aten._local_scalar_dense.default",
}


class Lies(NamedTuple):
    """Where a tensor lies; its storage by number."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool


class _Recording(TorchDispatchMode):
    def __init__(self, graph: StandInGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.graph.note(func, args, kwargs)


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in WAITING:
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


class StandInGraph:
    """As ``torch.cuda.CUDAGraph``."""

    def __init__(self, cuda: StandInCuda) -> None:
        self.cuda = cuda
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.storages: list[torch.UntypedStorage] = []
        self.numbers: dict[int, int] = {}
        #: numbers of storages made in the capture, and of those that were dead at its end
        self.fresh: set[int] = set()
        self.dead: set[int] = set()
        self.before: dict[int, torch.UntypedStorage] = {}

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert self.cuda.capturing is None
        assert self.cuda.current is not None, "captured on the default stream"
        assert pool is self.cuda.pools[-1]
        assert capture_error_mode == "thread_local"
        self.cuda.capturing = self
        self.state = torch.default_generator.get_state()
        self.mode = _Recording(self)
        self.mode.__enter__()

    def capture_end(self) -> None:
        if self.cuda.capturing is not self:
            raise RuntimeError("no capture is under way")
        self.mode.__exit__(None, None, None)
        self.cuda.capturing = None
        torch.default_generator.set_state(self.state)
        for number, storage in self.before.items():
            self.storages[number].copy_(storage)
        self.before.clear()
        self.cuda.ended += 1
        self.cuda.stuck = self.cuda.ended == self.cuda.failing
        if self.cuda.stuck:
            raise RuntimeError("operation failed due to a previous error during capture")
        counts = {n: torch._C._storage_Use_Count(self.storages[n]._cdata) for n in self.fresh}
        self.dead = {number for number, count in counts.items() if count == 1}
        self.cuda.reserved += sum(self.storages[number].nbytes() for number in self.fresh)
        self.cuda.captured += bool(self.calls)

    def note(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = [self.lies(t) for t in given]
        written = self.written(func, args, kwargs)
        for tensor in written:
            place = self.lies(tensor).storage
            if place not in self.fresh and place not in self.before:
                self.before[place] = self.storages[place].clone()
        noted = self.packed(args), self.packed(kwargs)
        returned = func(*args, **kwargs)
        del known
        old = set(range(len(self.storages)))
        results = self.packed(returned)
        new = {x.storage for x in _lies(results)} - old
        self.fresh |= new
        if new or written:
            self.calls.append((func, *noted, results))
        return returned

    @staticmethod
    def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        written = []
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            unsaid = "native_batch_norm" in str(func) and argument.name.startswith("running")
            if unsaid or (argument.alias_info is not None and argument.alias_info.is_write):
                written += [t for t in tree_iter(value) if isinstance(t, torch.Tensor)]
        return written

    def lies(self, tensor: torch.Tensor) -> Lies:
        storage = tensor.untyped_storage()
        number = self.numbers.get(storage._cdata)
        if number is None:
            number = self.numbers[storage._cdata] = len(self.storages)
            self.storages.append(storage)
        return Lies(number, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(),
                    tensor.dtype, tensor.is_conj(), tensor.is_neg())  # fmt: skip

    def packed(self, tree: Any) -> Any:
        return tree_map(lambda x: self.lies(x) if isinstance(x, torch.Tensor) else x, tree)

    def tensor(self, lies: Lies) -> torch.Tensor:
        tensor = torch.empty(0, dtype=lies.dtype)
        tensor.set_(self.storages[lies.storage], lies.offset, lies.shape, lies.stride)
        tensor = torch._conj(tensor) if lies.conj else tensor
        return torch._neg_view(tensor) if lies.neg else tensor

    def replay(self) -> None:
        assert self.cuda.capturing is None
        for number in self.fresh:
            self.storages[number].fill_(0xFF)
        for func, args, kwargs, results in self.calls:
            returned = func(*self.unpacked(args), **self.unpacked(kwargs))
            pairs = zip(_lies(results), _tensors(returned), strict=True)
            for lies, tensor in pairs:
                place = self.storages[lies.storage].data_ptr()
                if lies.storage in self.fresh and tensor.untyped_storage().data_ptr() != place:
                    self.tensor(lies).copy_(tensor)
        for number in self.dead:
            self.storages[number].fill_(0xFF)
        self.cuda.replays += 1

    def unpacked(self, tree: Any) -> Any:
        return tree_map(
            lambda x: self.tensor(x) if isinstance(x, Lies) else x,
            tree,
            is_leaf=lambda x: isinstance(x, Lies),
        )


def _lies(tree: Any) -> list[Lies]:
    return [x for x in tree_iter(tree, is_leaf=lambda x: isinstance(x, Lies)) if type(x) is Lies]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


class StandInCuda:
    """As ``torch.cuda``, as far as graphs go.

    Attributes:
        captured, replays: counts of graphs.
        ended: captures, failed ones too.
        failing: which of them, from 1, fails at its end, as CUDA does when one is invalid.
        stuck: whether the generator takes itself for captured.
    """

    def __init__(self) -> None:
        self.captured = self.replays = self.reserved = 0
        #: bytes that nobody has, and that the allocator has and nobody uses
        self.free = self.unused = 0
        self.ended = self.failing = 0
        self.stuck = False
        self.current: object = None
        self.capturing: StandInGraph | None = None
        self.pools: list[object] = []
        self.sync_mode: str | int = 0
        self.watching: _Watching | None = None

    def CUDAGraph(self) -> StandInGraph:
        return StandInGraph(self)

    def Stream(self, device: torch.device) -> object:
        return object()

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> object:
        self.pools.append(object())
        return self.pools[-1]

    def synchronize(self, device: torch.device) -> None:
        assert self.capturing is None

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return self.reserved - self.unused

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, self.free + self.reserved

    def get_sync_debug_mode(self) -> str | int:
        return self.sync_mode

    def set_sync_debug_mode(self, mode: str | int) -> None:
        if mode == "error":
            self.watching = _Watching()
            self.watching.__enter__()
        elif self.watching is not None:
            self.watching.__exit__(None, None, None)
            self.watching = None
        self.sync_mode = mode


def stand_in(measured: bool = False, limit: int | None = 1 << 40) -> tuple[CudaGraphs, StandInCuda]:
    """What captures on the CPU, and what it captures with."""
    cuda = StandInCuda()
    return CudaGraphs(torch.device("cpu"), limit, measured, cuda, alignment=64), cuda


@contextmanager
def captured(
    measured: bool = False, limit: int = 1 << 40, clock: Callable[[], float] | None = None
) -> Iterator[StandInCuda]:
    """Workers made meanwhile in this process capture their plans as if they had a GPU."""
    graphs, cuda = stand_in(measured, limit)
    if clock is not None:
        graphs.clock = clock
    before = shipped_plans.graphs_of
    shipped_plans.graphs_of = lambda device, setting, limit: graphs  # type: ignore[attr-defined]
    try:
        yield cuda
    finally:
        shipped_plans.graphs_of = before  # type: ignore[attr-defined]
