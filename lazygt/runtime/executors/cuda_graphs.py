"""CUDA graphs of a worker: segments of a plan, captured once and replayed by one launch.

A graph reads and writes the memory that it was captured with. An operand with the same address in
each run (a weight, or a result of an earlier segment) is used in place; any other is copied to the
graph's own memory before a replay. Results lie in a pool that all graphs of the worker share, and
only during a run: the caller copies those that live on.
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
from lazygt.runtime.executors.exchange import unused_bytes
from lazygt.runtime.executors.interpreter import CheckedInterpreter
from lazygt.runtime.executors.kernels import clear_error, clone
from lazygt.runtime.executors.segments import GraphSegment
from lazygt.runtime.store import Value

#: Share of a GPU's free memory that graphs may take if no limit is set.
FREE_SHARE = 0.5
#: Number of failed captures after which a worker captures no more.
FAILURES = 3
#: Text in torch's error for an op that synchronizes in sync debug mode.
_SYNC_ERROR = "called a synchronizing CUDA operation"


class Uncapturable(Exception):
    """Error for a segment that can't be a graph, before any step of it has run."""


class CudaGraphs:
    """Capture of CUDA graphs, with the stream and the memory pool of one worker.

    Args:
        limit: bytes that the graphs may use; None: a share of the free memory.
        measured: use a plan's graphs only if timed runs show that they are faster.
        alignment: largest address alignment that kernels depend on, in bytes.
        cuda: ``torch.cuda``, or a stand-in for it.

    Attributes:
        stopped_at: the node at which the last capture failed; None: no node.
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
        self._captured: WeakSet[CapturedSegment] = WeakSet()
        #: graphs of failed captures: torch's allocator may use them until the process ends
        self._failed: list[Any] = []

    @property
    def usable(self) -> bool:
        """True while captures are allowed: each failed one leaks memory, so few may fail."""
        return len(self._failed) < FAILURES

    @property
    def nbytes(self) -> int:
        """Bytes of all graphs: their pool, and the memory of copied operands."""
        if not self._captured:
            return 0
        return self._pool_bytes + sum(segment.nbytes for segment in self._captured)

    @property
    def limit(self) -> int:
        """Bytes that the graphs may use: the setting, or a share of the free memory."""
        if self._limit is not None:
            return self._limit
        return self.nbytes + int(FREE_SHARE * unused_bytes(self.device, self._cuda))

    def room_for(self, peak: int) -> bool:
        """Return whether a plan with ``peak`` live bytes fits into the limit.

        The pool is shared: it has the size of the largest plan.
        """
        pool = self._pool_bytes if self._captured else 0
        return max(pool, peak) + self.nbytes - pool <= self.limit

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds of a call, with all of its GPU work, and the call's result."""
        self._cuda.synchronize(self.device)
        begin = self.clock()
        returned = run()
        self._cuda.synchronize(self.device)
        return self.clock() - begin, returned

    @contextlib.contextmanager
    def forbid_synchronization(self) -> Iterator[None]:
        """Context in which torch's ops raise a RuntimeError if they would synchronize."""
        before = self._cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode misses some ops: then the capture fails
            self._cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._cuda.set_sync_debug_mode(before)

    @staticmethod
    def is_synchronization_error(error: Exception) -> bool:
        """Return whether an error was raised by an op that ``forbid_synchronization`` forbids."""
        return _SYNC_ERROR in str(error)

    def captured(
        self,
        segment: GraphSegment,
        interpreter: CheckedInterpreter,
        values: dict[int, Value],
        params: tuple[Any, ...],
        steady: set[int],
    ) -> CapturedSegment:
        """Capture a segment as a graph, without running it.

        Args:
            values: all values that are alive before the segment; not changed.
            steady: numbers of the values with the same address in each run.

        Raises:
            Uncapturable: the segment can't be a graph.
            Exception: any error of a kernel or of CUDA; see ``stopped_at``.
        """
        copies = self._copies(segment, values, steady)
        graph_values = {number: copies.get(number, values[number]) for number in segment.inputs}

        def body() -> None:
            for number in range(segment.first, segment.end):
                self.stopped_at = number
                interpreter.step(number, graph_values, params)
            self.stopped_at = None

        graph = self._capture(body)
        captured_segment = CapturedSegment(segment, graph, self, copies, graph_values, values)
        self._captured.add(captured_segment)
        return captured_segment

    def _copies(
        self, segment: GraphSegment, values: dict[int, Value], steady: set[int]
    ) -> dict[int, torch.Tensor]:
        """Return copies of the segment's inputs that have no steady address: the graph's operands.

        Raises:
            Uncapturable: an input can't be copied, or the segment needs the input's own memory.
        """
        copies: dict[int, torch.Tensor] = {}
        shares = Counter(map(address, values.values()))
        for number in segment.inputs:
            value = _capturable_tensor(values[number], self.device)
            storage = address(value)
            if storage == 0 or number in steady:
                continue
            sole_owner = shares[storage] == 1 and number in segment.dying
            if number in segment.exposed and not sole_owner:
                raise Uncapturable("others would not see what is written to a copy")
            if torch.empty_like(value).stride() != value.stride():
                raise Uncapturable("a value whose elements do not lie side by side")
            if value.data_ptr() % self.alignment:
                raise Uncapturable("a value that begins where no copy does")
            copies[number] = clone(value)
        return copies

    def _capture(self, body: Callable[[], None]) -> Any:
        """Capture the kernel launches of ``body`` as a graph, without executing them.

        torch registers the device's generator with each capture: a replay draws the same random
        numbers as the kernels themselves, and advances the generator likewise.
        """
        cuda = self._cuda
        if self._stream is None:
            self._stream = cuda.Stream(self.device)
        if not self._captured:
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
        with contextlib.suppress(RuntimeError):  # repeats that the capture has failed
            graph.capture_end()
        if self.device.type == "cuda":
            index = self.device.index or torch.cuda.current_device()
            with contextlib.suppress(RuntimeError):  # capture_end may have ended it already
                torch._C._cuda_endAllocateToPool(index, self._pool)
        # before torch 2.13 the generator stays in capture mode until another capture ends
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns of the empty graph
            empty_graph = self._cuda.CUDAGraph()
            empty_graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            empty_graph.capture_end()
        clear_error(self.device)
        self._pool = self._cuda.graph_pool_handle()

    def _clear_workspaces(self) -> None:
        """Free cuBLAS's workspaces, so that a capture allocates one in the pool."""
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()


def graphs_of(device: torch.device, setting: str, limit: int | None) -> CudaGraphs | None:
    """Create the capture of CUDA graphs for a device; None if it is off.

    Args:
        setting, limit: ``cuda_graphs`` and ``max_cuda_graph_bytes`` of ``lazygt.Compile``.
    """
    if device.type != "cuda" or setting == "off":
        return None
    return CudaGraphs(device, limit, setting == "auto")


class CapturedSegment:
    """Segment of a plan, captured as a CUDA graph.

    Args:
        graph: the captured CUDA graph.
        copies: value -> the memory that it is copied to before each replay.
        graph_values: the values at the end of the capture.
        outer_values: the values before the segment.

    Attributes:
        in_place: addresses of other storages that the graph reads or writes.
        storages: addresses of the storages that each replay overwrites.
        nbytes: bytes of the memory of copied operands.

    Raises:
        Uncapturable: a result has no plain memory.
    """

    def __init__(
        self,
        segment: GraphSegment,
        graph: Any,
        graphs: CudaGraphs,
        copies: dict[int, torch.Tensor],
        graph_values: dict[int, Value],
        outer_values: dict[int, Value],
    ) -> None:
        device = graphs.device
        self.segment, self._graph = segment, graph
        self._alignment = graphs.alignment
        self._copies = [
            (numbers, [copies[number] for number in numbers]) for numbers in _by_dtype(copies)
        ]
        self.nbytes = sum(copy.untyped_storage().nbytes() for copy in copies.values())
        operand_at = {
            address(outer_values[number]): number
            for number in segment.inputs
            if number not in copies
        }
        operand_at.pop(0, None)
        self.in_place = set(operand_at)
        #: values in the graph's own memory
        self._static: dict[int, Any] = {}
        #: (value, the operand with its storage, its meta if that differs from the operand's)
        self._shared: list[tuple[int, int, TensorMeta | None]] = []
        for number in segment.outputs:
            value = graph_values[number]
            operand = operand_at.get(address(value))
            if operand is None:
                self._static[number] = _capturable_tensor(value, device)
                continue
            meta = TensorMeta.of(_capturable_tensor(value, device))
            same = meta == TensorMeta.of(_capturable_tensor(outer_values[operand], device))
            self._shared.append((number, operand, None if same else meta))
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
        shared = [(number, values[operand], meta) for number, operand, meta in self._shared]
        self._graph.replay()
        for number in self.segment.dying:
            values.pop(number, None)
        values.update(self._static)
        for number, source, meta in shared:
            values[number] = source if meta is None else _view_in_storage(source, meta)
        return True

    def _fits(self, copy: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether kernels give the same bits for a copy as for the value.

        Some kernels depend on strides and on the alignment of the address.
        """
        is_aligned = value.data_ptr() % self._alignment == 0
        return is_aligned and copy.stride() == value.stride() and copy.device == value.device


def address(value: Any) -> int:
    """Return the address of a value's storage; 0 for a value without memory."""
    if not isinstance(value, torch.Tensor) or value._is_zerotensor():
        return 0
    storage = value.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def copied(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy values with the same strides, with few kernel launches (foreach copies)."""
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


def copy_storages(values: dict[int, Any], storages: set[int]) -> dict[int, Any]:
    """Replace values in these storages by copies; views of one storage share the copy."""
    copies: dict[int, torch.UntypedStorage] = {}
    for number, value in values.items():
        storage = address(value)
        if storage in storages:
            if storage not in copies:
                copies[storage] = value.untyped_storage().clone()
            values[number] = _view_in_storage(value, TensorMeta.of(value), copies[storage])
    return values


def _capturable_tensor(value: Any, device: torch.device) -> torch.Tensor:
    """Return ``value``; raise Uncapturable unless it is a plain tensor on the device."""
    if not isinstance(value, torch.Tensor) or value._is_zerotensor():
        raise Uncapturable("a value without memory")
    if value.is_conj() or value.is_neg():
        raise Uncapturable("a value with a lazy bit")
    if value.device.type != device.type:
        raise Uncapturable(f"a value on the {value.device.type}")
    return value


def _by_dtype(values: dict[int, torch.Tensor]) -> Iterable[list[int]]:
    """Group the keys by dtype: one foreach launch copies each group."""
    groups: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for number, value in values.items():
        groups[value.dtype].append(number)
    return groups.values()


def _view_in_storage(
    value: torch.Tensor, meta: TensorMeta, storage: torch.UntypedStorage | None = None
) -> torch.Tensor:
    """Return a tensor of this meta in the storage of a value, or in another one."""
    view = torch.empty(0, dtype=meta.dtype, device=value.device)
    view.set_(storage or value.untyped_storage(), meta.offset, meta.shape, meta.stride)
    if meta.conj:
        view = torch._conj(view)
    return torch._neg_view(view) if meta.neg else view
