"""CUDA graphs of a worker: stretches of a plan, captured once, replayed by one launch.

A graph reads and writes the memory that it was captured with. An operand is there already if it
lies at the same address in each run (weights, and results of an earlier stretch); any other is
copied to the graph's own memory before a replay. Results lie in a pool that all graphs of the
worker share, and only during a run: the caller copies those that live on.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.runtime.executors.interpreter import CheckedInterpreter
from lazygt.runtime.executors.segments import Stretch
from lazygt.runtime.host_copies import unused_bytes
from lazygt.runtime.kernels import clear_error, clone
from lazygt.runtime.store import Value

#: Share of a GPU's free memory that graphs may take if no limit is set.
FREE_SHARE = 0.5
#: Captures of a worker that may fail before it tries no more.
FAILURES = 3
#: Part of torch's error for an op that waits for the GPU while none may.
_WAITED = "called a synchronizing CUDA operation"


class Uncapturable(Exception):
    """Reason for which a stretch is run step by step; nothing of it has been run."""


class CudaGraphs:
    """The stream and the memory pool in which a worker captures.

    Args:
        limit: bytes that the graphs may keep; None: a share of the memory that is free now.
        measured: a plan's graphs are used only if they are faster.
        alignment: largest alignment of addresses that kernels look at, in bytes.
        cuda: ``torch.cuda``, or a stand-in for it.

    Attributes:
        stopped_at: the node at which the last capture failed; None: at none of them.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int | None,
        measured: bool = True,
        cuda: Any = torch.cuda,
        alignment: int = 256,
    ) -> None:
        self.device, self._limit, self.measured = device, limit, measured
        self.alignment = alignment
        self.stopped_at: int | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self._cuda = cuda
        self._stream: Any = None
        self._pool: Any = None
        self._pool_bytes = 0
        self._kept: WeakSet[CapturedStretch] = WeakSet()
        #: graphs of failed captures: the allocator may ask them until the process ends
        self._failed: list[Any] = []

    @property
    def usable(self) -> bool:
        """True while more may be captured: each failed capture leaves memory behind."""
        return len(self._failed) < FAILURES

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs keep: their pool, and the memory of copied operands."""
        if not self._kept:
            return 0
        return self._pool_bytes + sum(kept.nbytes for kept in self._kept)

    @property
    def limit(self) -> int:
        """Bytes that the graphs may keep; without a set limit, it depends on the free memory."""
        if self._limit is not None:
            return self._limit
        return self.nbytes + int(FREE_SHARE * unused_bytes(self.device, self._cuda))

    def room_for(self, peak: int) -> bool:
        """Return whether a plan with so many bytes alive at once fits into the limit."""
        pool = self._pool_bytes if self._kept else 0
        return max(pool, peak) + self.nbytes - pool <= self.limit

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """Return the time of a call with all of its work on the GPU, and its result."""
        self._cuda.synchronize(self.device)
        begin = self.clock()
        returned = run()
        self._cuda.synchronize(self.device)
        return self.clock() - begin, returned

    @contextlib.contextmanager
    def nobody_waits(self) -> Iterator[None]:
        """Context in which torch's ops raise if they would wait for the GPU; see ``waited``."""
        before = self._cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it may miss some: so a capture may fail
            self._cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._cuda.set_sync_debug_mode(before)

    @staticmethod
    def waited(error: Exception) -> bool:
        """Return whether an op raised this because it would have waited."""
        return _WAITED in str(error)

    def captured(
        self,
        stretch: Stretch,
        interpreter: CheckedInterpreter,
        values: dict[int, Value],
        params: tuple[Any, ...],
        steady: set[int],
    ) -> CapturedStretch:
        """Capture a stretch as a graph, without running it.

        Args:
            values: all values that are alive before it; they stay as they are.
            steady: those that lie at the same address in each run.

        Raises:
            Uncapturable: it can't be a graph.
            Exception: any error of a kernel or of CUDA; see ``stopped_at``.
        """
        copies = self._copies(stretch, values, steady)
        inside = {number: copies.get(number, values[number]) for number in stretch.takes}

        def body() -> None:
            for number in range(stretch.first, stretch.end):
                self.stopped_at = number
                interpreter.step(number, inside, params)
            self.stopped_at = None

        graph = self._capture(body)
        captured = CapturedStretch(stretch, graph, self, copies, inside, values)
        self._kept.add(captured)
        return captured

    def _copies(
        self, stretch: Stretch, values: dict[int, Value], steady: set[int]
    ) -> dict[int, torch.Tensor]:
        """Allocate copies of the stretch's operands that have no steady address."""
        copies: dict[int, torch.Tensor] = {}
        shares = Counter(map(address, values.values()))
        for number in stretch.takes:
            value = _plain(values[number], self.device)
            place = address(value)
            if place == 0 or number in steady:
                continue
            alone = shares[place] == 1 and number in stretch.drops
            if number in stretch.exposed and not alone:
                raise Uncapturable("others would not see what is written to a copy")
            if torch.empty_like(value).stride() != value.stride():
                raise Uncapturable("a value whose elements do not lie side by side")
            if value.data_ptr() % self.alignment:
                raise Uncapturable("a value that begins where no copy does")
            copies[number] = clone(value)
        return copies

    def _capture(self, body: Callable[[], None]) -> Any:
        """Capture the GPU's work of ``body`` as a graph, without doing it.

        Draws are from the device's own generator, which torch has in each capture: a replay draws
        the numbers that its kernels would have drawn, and advances the generator likewise.
        """
        cuda = self._cuda
        if self._stream is None:
            self._stream = cuda.Stream(self.device)
        if not self._kept:
            self._pool, self._pool_bytes = cuda.graph_pool_handle(), 0
        graph = cuda.CUDAGraph()
        cuda.synchronize(self.device)
        self._clear_workspaces()
        before = cuda.memory_reserved(self.device)
        with cuda.stream(self._stream):
            try:
                # other threads may go on meanwhile, as NCCL's watchdog does
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                body()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        self._clear_workspaces()
        cuda.synchronize(self.device)  # the side stream has written generator state for replays
        self._pool_bytes += max(cuda.memory_reserved(self.device) - before, 0)
        return graph

    def _abandon(self, graph: Any) -> None:
        """End a failed capture.

        Later ones have their own pool: torch's allocator may be left with half of this one.
        """
        self._failed.append(graph)
        with contextlib.suppress(RuntimeError):  # it says again that the capture has failed
            graph.capture_end()
        if self.device.type == "cuda":
            index = self.device.index or torch.cuda.current_device()
            with contextlib.suppress(RuntimeError):  # capture_end has come so far
                torch._C._cuda_endAllocateToPool(index, self._pool)
        # before torch 2.13 the generator takes itself for captured until another capture ends
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is empty
            mended = self._cuda.CUDAGraph()
            mended.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            mended.capture_end()
        clear_error(self.device)
        self._pool = self._cuda.graph_pool_handle()

    def _clear_workspaces(self) -> None:
        """Clear cuBLAS's workspaces: a capture allocates one in the pool, and it is freed after."""
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()


def graphs_of(device: torch.device, setting: str, limit: int | None) -> CudaGraphs | None:
    """Make the graphs of a device; None: nothing is captured there.

    Args:
        setting, limit: of ``lazygt.session(cuda_graphs=..., max_cuda_graph_bytes=...)``.
    """
    if device.type != "cuda" or setting == "off":
        return None
    return CudaGraphs(device, limit, setting == "auto")


class CapturedStretch:
    """A stretch as a graph.

    Args:
        copies: value -> the memory that it is copied to before each replay.
        inside: the values at the end of the capture.
        outside: the values before it.

    Attributes:
        in_place: addresses of storages, not the graph's own, that it reads or writes.
        storages: addresses of those that each replay overwrites.
        nbytes: bytes of the memory of copied operands.

    Raises:
        Uncapturable: one of its results can't be handed out.
    """

    def __init__(
        self,
        stretch: Stretch,
        graph: Any,
        graphs: CudaGraphs,
        copies: dict[int, torch.Tensor],
        inside: dict[int, Value],
        outside: dict[int, Value],
    ) -> None:
        device = graphs.device
        self.stretch, self._graph = stretch, graph
        self._alignment = graphs.alignment
        self._copies = [
            (numbers, [copies[number] for number in numbers]) for numbers in _by_dtype(copies)
        ]
        self.nbytes = sum(copy.untyped_storage().nbytes() for copy in copies.values())
        homes = {
            address(outside[number]): number for number in stretch.takes if number not in copies
        }
        homes.pop(0, None)
        self.in_place = set(homes)
        #: values in the graph's own memory
        self._static: dict[int, Any] = {}
        #: (value, the operand with its storage, its meta if that differs from the operand's)
        self._shared: list[tuple[int, int, TensorMeta | None]] = []
        for number in stretch.gives:
            value = inside[number]
            home = homes.get(address(value))
            if home is None:
                self._static[number] = _plain(value, device)
                continue
            meta = TensorMeta.of(_plain(value, device))
            same = meta == TensorMeta.of(_plain(outside[home], device))
            self._shared.append((number, home, None if same else meta))
        self.storages = {address(value) for value in self._static.values()} - {0}
        self.storages |= {address(copy) for copy in copies.values()} - {0}

    def replay(self, values: dict[int, Any]) -> bool:
        """Replay the graph on the values that are alive.

        Returns:
            False, and nothing is done, if a value has another layout than at the capture.
        """
        loads = [
            (copies, [values[number] for number in numbers]) for numbers, copies in self._copies
        ]
        if not all(self._fits(c, v) for load in loads for c, v in zip(*load, strict=True)):
            return False
        for copies, sources in loads:
            torch._foreach_copy_(copies, sources)
        shared = [(number, values[home], meta) for number, home, meta in self._shared]
        self._graph.replay()
        for number in self.stretch.drops:
            values.pop(number, None)
        values.update(self._static)
        for number, source, meta in shared:
            values[number] = source if meta is None else _view(source, meta)
        return True

    def _fits(self, copy: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether kernels treat a copy as they would the value.

        Some depend on strides, and on the alignment of the address.
        """
        round_enough = value.data_ptr() % self._alignment == 0
        return round_enough and copy.stride() == value.stride() and copy.device == value.device


def address(value: Any) -> int:
    """Return the address of a value's storage; 0: it has no memory."""
    if not isinstance(value, torch.Tensor) or value._is_zerotensor():
        return 0
    storage = value.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def copied(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy values with the very same strides, in few launches."""
    results: dict[int, torch.Tensor] = {}
    dense: dict[int, torch.Tensor] = {}
    for position, value in enumerate(values):
        copy = torch.empty_like(value)
        lazy = value.is_conj() or value.is_neg() or value._is_zerotensor()
        if lazy or copy.stride() != value.stride():
            results[position] = clone(value)
        else:
            results[position], dense[position] = copy, value
    for positions in _by_dtype(dense):
        torch._foreach_copy_([results[p] for p in positions], [dense[p] for p in positions])
    return [results[position] for position in range(len(values))]


def own_storages(values: dict[int, Any], storages: set[int]) -> dict[int, Any]:
    """Replace values in these storages by copies; values that shared memory share it again."""
    copies: dict[int, torch.UntypedStorage] = {}
    for number, value in values.items():
        place = address(value)
        if place in storages:
            if place not in copies:
                copies[place] = value.untyped_storage().clone()
            values[number] = _view(value, TensorMeta.of(value), copies[place])
    return values


def _plain(value: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value._is_zerotensor():
        raise Uncapturable("a value without memory")
    if value.is_conj() or value.is_neg():
        raise Uncapturable("a value with a lazy bit")
    if value.device.type != device.type:
        raise Uncapturable(f"a value on the {value.device.type}")
    return value


def _by_dtype(values: dict[int, torch.Tensor]) -> Iterable[list[int]]:
    """Return the keys in groups that one launch copies."""
    groups: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for number, value in values.items():
        groups[value.dtype].append(number)
    return groups.values()


def _view(
    value: torch.Tensor, meta: TensorMeta, storage: torch.UntypedStorage | None = None
) -> torch.Tensor:
    """Return a tensor of this meta in the storage of a value, or in another one."""
    view = torch.empty(0, dtype=meta.dtype, device=value.device)
    view.set_(storage or value.untyped_storage(), meta.offset, meta.shape, meta.stride)
    if meta.conj:
        view = torch._conj(view)
    return torch._neg_view(view) if meta.neg else view
