"""Execution of copy requests in a source process: copies, casts, checksums, comparisons.

The transport's `SourceEnd` provides the memory that blocks are copied to.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh
from lazygt.transfer.checksums import (
    Copy,
    CopyPool,
    as_bytes,
    checksum_named,
    needs_no_conversion,
    sha256,
    wire_bytes,
)
from lazygt.transfer.copy_request import (
    IS_THERE,
    SAME_AS_LAST,
    CopyItem,
    CopyReply,
    CopyRequest,
    transport_module,
)
from lazygt.transfer.layout import Bounds, slices
from lazygt.transfer.manifest import DTYPES
from lazygt.transfer.transports.transport import SourceEnd

#: Number of a transfer -> block -> SHA-256 of its bytes.
Digests = dict[int, dict[tuple[int, int, Bounds], bytes]]


class Copier:
    """Executor of senders' copy requests.

    Args:
        threads: number of copying threads; None: one for each core of this process, at most 4.
        device: device of the values.
        ends: transports' existing source ends, by kind.
    """

    def __init__(
        self,
        threads: int | None = None,
        device: torch.device | None = None,
        ends: Mapping[str, SourceEnd] | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._pool = CopyPool(threads)
        self._ends = dict(ends or {})
        self._digests: dict[str, Digests] = {}
        self._lock = threading.Lock()

    def copy_packed(
        self, packed: Any, value_of: Callable[[int], Tensor]
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Execute a packed request; like `copy`, with tuples as the result."""
        checks, handles = self.copy(CopyRequest.read(packed), value_of)
        return tuple(checks), tuple(handles)

    def copy(
        self, request: CopyRequest, value_of: Callable[[int], Tensor]
    ) -> tuple[Sequence[int], Sequence[Any]]:
        """Execute a request; return the checksums of the blocks, and the handles of their place.

        Raises:
            ProtocolError: the request does not fit the place or the values.
            OSError: the place does not exist any more.
            TransferError: the receivers did not take the copies.
        """
        with self._lock:
            for end in self._ends.values():
                end.let_go(request.sender, request.live)
            if not request.items:
                self._digests.pop(request.sender, None)
                return (), ()
            if request.compare is not None:
                return self._compare(request, request.compare, value_of), ()
            end = self._source_end(request.kind)
            blocks = [_block(value_of(item.key), item.source) for item in request.items]
            runs, copies = _plan_copies(end, request, blocks)
        checks = self._copy_all(request, copies)
        with self._lock:
            return checks, end.deliver(request.sender, request.place, runs)

    def close(self) -> None:
        """End the threads and drop all places."""
        self._pool.close()
        for end in self._ends.values():
            end.close()

    def _copy_all(self, request: CopyRequest, copies: Sequence[Copy]) -> list[int]:
        return self._pool.copy(copies, checksum_named(request.verify))

    def _source_end(self, kind: str) -> SourceEnd:
        if kind not in self._ends:
            self._ends[kind] = transport_module(kind).SOURCE(self._device)
        return self._ends[kind]

    def _compare(
        self,
        request: CopyRequest,
        numbers: tuple[int, int],
        value_of: Callable[[int], Tensor],
    ) -> list[int]:
        """Compare blocks by SHA-256 with those of earlier transfers.

        Returns:
            SAME_AS_LAST and IS_THERE flags of each block. Its digest is cached for later transfers.
        """
        by_transfer = self._digests.setdefault(request.sender, {})
        for expired in by_transfer.keys() - {*request.live, *numbers, request.transfer}:
            del by_transfer[expired]
        last_digests, slot_digests = (by_transfer.get(number, {}) for number in numbers)
        current = by_transfer.setdefault(request.transfer, {})
        values = [_block(value_of(item.key), item.source) for item in request.items]
        digests = self._pool.map(_digest, list(zip(request.items, values, strict=True)))
        flags = []
        for item, digest in zip(request.items, digests, strict=True):
            if digest is not None:
                current[item.name] = digest
            is_same = digest is not None and last_digests.get(item.name) == digest
            is_there = digest is not None and slot_digests.get(item.name) == digest
            flags.append(SAME_AS_LAST * is_same | IS_THERE * is_there)
        return flags


def copier_for(device: torch.device) -> Copier:
    """Return a worker's `Copier`, with a thread for each of its cores."""
    return Copier(max(torch.get_num_threads(), 1), device)


def _plan_copies(
    end: SourceEnd, request: CopyRequest, blocks: Sequence[Tensor]
) -> tuple[list[Tensor], list[Copy]]:
    """Return each block's bytes in its place, and the copies that fill them."""
    lent_device, view_at = end.borrows(request.place), end.buffer(request.sender, request.place)
    runs: list[Tensor] = []
    copies: list[Copy] = []
    for item, block in zip(request.items, blocks, strict=True):
        dtype = DTYPES[item.dtype]
        unconverted = needs_no_conversion(block, dtype)
        if unconverted and block.device == lent_device:
            runs.append(as_bytes(block))
            copies.append(Copy(block, block))
            continue
        flat = view_at(item.offset, math.prod(item.shape) * dtype.itemsize)
        runs.append(flat)
        if unconverted and block.shape == item.shape and _is_full(item.target, item.shape):
            copies.append(Copy(block, flat))
            continue
        target = _block(flat.view(dtype).view(item.shape), item.target)
        if block.shape != target.shape:
            raise ProtocolError(
                f"a block of shape {list(block.shape)} does not fit one of {list(target.shape)}"
            )
        copies.append(Copy(block.detach(), target))
    return runs, copies


class LocalSource:
    """`WeightSource` of this process: one rank with all of the values.

    Threads copy the blocks, so that the caller can watch its receivers meanwhile.

    Args:
        ends: see `Copier`.
        concurrency: number of concurrent requests; one is prepared while another is copied.

    Attributes:
        value_of: key -> tensor.
    """

    mesh = Mesh(("here",), (1,))

    def __init__(
        self, device: torch.device, ends: Mapping[str, SourceEnd], concurrency: int = 1
    ) -> None:
        no_tensors: dict[int, Tensor] = {}
        self.turn = threading.Lock()
        self.value_of: Callable[[int], Tensor] = no_tensors.__getitem__
        self._copier = Copier(None, device, ends)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="lazygt-transfer-source")
        self._replies: queue.SimpleQueue[CopyReply] = queue.SimpleQueue()

    def request(self, rank: int, number: int, request: CopyRequest) -> None:
        """See `WeightSource`."""
        self._threads.submit(self._copy, number, request)

    def replies(self, seconds: float) -> list[CopyReply]:
        """See `WeightSource`."""
        try:
            return [self._replies.get(timeout=seconds)]
        except queue.Empty:
            return []

    def let_go(self, sender: str) -> None:
        """See `WeightSource`."""
        self._threads.submit(self._copy, 0, CopyRequest(sender, ()))

    def close(self) -> None:
        """End the threads after all requested copies."""
        self._threads.shutdown()
        self._copier.close()

    def _copy(self, number: int, request: CopyRequest) -> None:
        try:
            checks, handles = self._copier.copy(request, self.value_of)
            self._replies.put(CopyReply(0, number, checks, "", handles))
        except Exception as error:  # noqa: BLE001 - it is the reply
            self._replies.put(CopyReply(0, number, (), f"{type(error).__name__}: {error}"))


def _digest(pair: tuple[CopyItem, Tensor]) -> bytes | None:
    """Return the SHA-256 of a block's wire bytes; None outside of the host's memory."""
    item, block = pair
    if block.device.type != "cpu":
        return None
    return sha256(wire_bytes(block, DTYPES[item.dtype]))


def _block(tensor: Tensor, bounds: Bounds) -> Tensor:
    """Return a block of a tensor; the tensor itself if the block is all of it."""
    if _is_full(bounds, tensor.shape):
        return tensor
    if len(bounds) != tensor.dim() or any(
        not 0 <= start < stop <= size
        for (start, stop), size in zip(bounds, tensor.shape, strict=True)
    ):
        raise ProtocolError(f"a tensor of shape {list(tensor.shape)} has no block {bounds}")
    return tensor.detach()[slices(tuple(bounds))]


def _is_full(bounds: Bounds, shape: Sequence[int]) -> bool:
    return bounds == tuple((0, size) for size in shape)
