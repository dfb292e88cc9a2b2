"""Copies of blocks in a source process: casts, checksums and comparisons, by several threads.

Threads of Python rather than of OpenMP: many small copies lose most of their time in OpenMP's
barriers on a busy machine, and memmove and crc32 run without the interpreter's lock. The
transport's `Destination` provides the memory that blocks are copied to.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh
from lazygt.host.files import crc32 as _crc32
from lazygt.transfer.copy_request import (
    IS_THERE,
    SAME_AS_LAST,
    CopyItem,
    CopyReply,
    CopyRequest,
    Destination,
    OpenDestination,
    transport_module,
)
from lazygt.transfer.layout import Bounds, slices
from lazygt.transfer.manifest import DTYPES

THREADS = 4
_JOB_BYTES = 2 << 20  # small copies share a job: submitting one costs as much as copying 200 KB
_BLOCK = 2 << 20  # fits a core's cache until its CRC is computed; smaller ones make threads contend

_EMPTY_ADDRESS = ctypes.addressof(
    ctypes.c_ubyte()
)  # stands for an empty tensor's null pointer; no byte is read from it

Checksum = Callable[[Tensor], int]
A = TypeVar("A")
B = TypeVar("B")


class Copy(NamedTuple):
    """Copy between two tensors of one shape; two dtypes make it a cast.

    The target of a source that is sent unchanged may also be its bytes, flat uint8.
    """

    source: Tensor
    target: Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def wire_bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a tensor on the wire: cast, contiguous, flat uint8.

    A view of the same memory if the tensor is sent unchanged; else a copy.
    """
    return as_bytes(tensor.detach().to(dtype).contiguous().resolve_conj().resolve_neg())


def needs_no_conversion(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `wire_bytes` would alias the tensor's own memory."""
    return (
        tensor.dtype == dtype
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


# -- checksums -------------------------------------------------------------------------------------


def crc32(data: Tensor) -> int:
    """Return the CRC-32 of a flat uint8 tensor; a tensor on a GPU is copied to the host."""
    host = data.cpu()
    return _crc32(_buffer(host))


def xor64(data: Tensor) -> int:
    """Return the xor of a flat uint8 tensor's 64-bit words, on its device.

    The result does not depend on the order of the words.
    """
    words = data.numel() // 8
    if data.storage_offset() % 8:  # torch views words where they begin at a multiple of 8 alone
        data = data.clone()
    folded = 0
    if words:
        folded = int(torch.hash_tensor(data[: words * 8].view(torch.int64)).item())
    return (folded & (1 << 64) - 1) ^ int.from_bytes(bytes(data[words * 8 :].tolist()), "little")


def sha256(data: Tensor) -> bytes:
    """Return the SHA-256 of a flat uint8 tensor on the CPU."""
    return hashlib.sha256(_buffer(data)).digest()


def _buffer(data: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Return a CPU tensor's memory as a ctypes array; the tensor must outlive it."""
    return _memory(data.data_ptr() or _EMPTY_ADDRESS, data.numel())


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return ``size`` bytes at an address as a ctypes array."""
    return (ctypes.c_ubyte * size).from_address(address)


CHECKSUMS: dict[str, Checksum | None] = {"none": None, "crc32": crc32, "xor64": xor64}


def checksum_named(name: str) -> Checksum | None:
    """Look up a checksum function by name; None for "none".

    Raises:
        ValueError: no checksum has this name.
    """
    if name not in CHECKSUMS:
        raise ValueError(f"verify={name!r}: expected one of {', '.join(CHECKSUMS)}")
    return CHECKSUMS[name]


# -- threads ---------------------------------------------------------------------------------------


class CopyPool:
    """Thread pool for copies and checksums on the CPU; to be closed after use.

    Args:
        threads: number of threads; None: one for each core of this process, at most `THREADS`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._count = threads or min(THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="lazygt-transfer")

    def copy(self, copies: Sequence[Copy], check: Checksum | None) -> list[int]:
        """Copy, and return the checksum of each copy's bytes (0 without ``check``)."""

        def job(chunk: Sequence[Copy]) -> list[int]:
            return [_copy(copy, check) for copy in chunk]

        chunks = self._chunks(copies, [copy.target.nbytes for copy in copies])
        return [value for checks in self._run_all(job, chunks) for value in checks]

    def check(self, runs: Sequence[Tensor], check: Checksum) -> list[int]:
        """Return the checksums of the tensors' bytes, in order."""
        return self.copy([Copy(run, run) for run in runs], check)

    def map(self, function: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Return the function's results for the items, in order."""
        return list(self._pool.map(function, items))

    def close(self) -> None:
        """Cancel the waiting jobs, and end the threads after the running ones."""
        self._pool.shutdown(cancel_futures=True)

    def _run_all(self, job: Callable[[A], B], chunks: Sequence[A]) -> list[B]:
        """Run a job for each chunk, and return its results when all have ended."""
        if len(chunks) == 1:
            return [job(chunks[0])]
        futures = [self._pool.submit(job, chunk) for chunk in chunks]
        wait(futures)
        return [future.result() for future in futures]

    def _chunks(self, copies: Sequence[Copy], sizes: Sequence[int]) -> list[Sequence[Copy]]:
        """Split a list of copies into chunks, in order: several a thread, and none too small."""
        chunk_bytes = max(_JOB_BYTES, sum(sizes) // (4 * self._count))
        chunks: list[Sequence[Copy]] = []
        begin = nbytes = 0
        for end, size in enumerate(sizes, start=1):
            nbytes += size
            if nbytes >= chunk_bytes or end == len(sizes):
                chunks.append(copies[begin:end])
                begin, nbytes = end, 0
        return chunks


def _copy(copy: Copy, check: Checksum | None) -> int:
    """Copy or cast one tensor, and return the checksum of the target's bytes (0 without one)."""
    source, target = copy
    if source is target:
        return check(as_bytes(source.contiguous())) if check is not None else 0
    unconverted = target.is_contiguous() and needs_no_conversion(source, target.dtype)
    if unconverted or target.shape != source.shape:
        if source.is_cpu and target.is_cpu:
            return _copy_bytes(source, target, check)
        source = as_bytes(source) if target.dtype == torch.uint8 else source
    target.copy_(source)
    return check(as_bytes(target.contiguous())) if check is not None else 0


def _copy_bytes(source: Tensor, target: Tensor, check: Checksum | None) -> int:
    """Copy host memory byte by byte, and return its checksum."""
    if source.nbytes != target.nbytes:
        raise RuntimeError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
    if check is crc32:
        return _copy_with_crc32(source, target)
    # unlike an assignment between memoryviews, this lets other threads run
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    return check(as_bytes(source)) if check is not None else 0


def _copy_with_crc32(source: Tensor, target: Tensor) -> int:
    """Copy block by block, and return the CRC-32."""
    read, written, size = source.data_ptr(), target.data_ptr(), source.nbytes
    value = 0
    for start in range(0, size, _BLOCK):
        count = min(_BLOCK, size - start)
        ctypes.memmove(written + start, read + start, count)
        value = _crc32(_memory(read + start, count), value)
    return value


# -- copy requests ---------------------------------------------------------------------------------

#: Number of a transfer -> block -> SHA-256 of its bytes.
Digests = dict[int, dict[tuple[int, int, Bounds], bytes]]


class Copier:
    """Executor of senders' copy requests.

    Args:
        threads: number of copying threads; None: one for each core of this process, at most 4.
        device: device of the values.
        openers: functions that open a destination, by kind; else the transport's `DESTINATION`.
    """

    def __init__(
        self,
        threads: int | None = None,
        device: torch.device | None = None,
        openers: Mapping[str, OpenDestination] | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._pool = CopyPool(threads)
        self._openers = dict(openers or {})
        #: address of a sender -> number of a destination -> the destination
        self._destinations: dict[str, dict[int, Destination]] = {}
        self._digests: dict[str, Digests] = {}
        self._lock = threading.Lock()

    def reply(
        self, number: int, request: Any, value_of: Callable[[int], Tensor], rank: int = 0
    ) -> CopyReply:
        """Execute a request, packed or not; an error is the reply."""
        try:
            if not isinstance(request, CopyRequest):
                request = CopyRequest.read(request)
            checks, handles = self.copy(request, value_of)
        except Exception as error:  # noqa: BLE001 - it is the reply
            return CopyReply(rank, number, (), f"{type(error).__name__}: {error}")
        return CopyReply(rank, number, checks, "", handles)

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
            self._let_go(request.sender, request.live)
            if not request.items:
                self._digests.pop(request.sender, None)
                return (), ()
            if request.compare is not None:
                return self._compare(request, request.compare, value_of), ()
            destination = self._destination(request)
            blocks = [_block(value_of(item.key), item.source) for item in request.items]
            runs, copies = _plan_copies(destination, request, blocks)
        checks = self._copy_all(request, copies)
        with self._lock:
            return checks, destination.deliver(request.place, runs)

    def close(self) -> None:
        """End the threads and drop all destinations."""
        self._pool.close()
        for sender in list(self._destinations):
            self._let_go(sender, ())

    def _copy_all(self, request: CopyRequest, copies: Sequence[Copy]) -> list[int]:
        return self._pool.copy(copies, checksum_named(request.verify))

    def _destination(self, request: CopyRequest) -> Destination:
        """Return the destination of a request, opened when a request first names it."""
        opened = self._destinations.setdefault(request.sender, {})
        number = request.place.number
        if number not in opened:
            opener = self._openers.get(request.kind) or transport_module(request.kind).DESTINATION
            opened[number] = opener(self._device, request.place)
        return opened[number]

    def _let_go(self, sender: str, live: Sequence[int]) -> None:
        """Drop the destinations of a sender with other numbers than ``live``."""
        opened = self._destinations.pop(sender, {})
        for expired in opened.keys() - set(live):
            opened.pop(expired).close()
        if opened:
            self._destinations[sender] = opened

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
    destination: Destination, request: CopyRequest, blocks: Sequence[Tensor]
) -> tuple[list[Tensor], list[Copy]]:
    """Return each block's bytes in its place, and the copies that fill them."""
    place, lent_device = request.place, destination.borrows
    runs: list[Tensor] = []
    copies: list[Copy] = []
    for item, block in zip(request.items, blocks, strict=True):
        dtype = DTYPES[item.dtype]
        unconverted = needs_no_conversion(block, dtype)
        if unconverted and block.device == lent_device:
            runs.append(as_bytes(block))
            copies.append(Copy(block, block))
            continue
        flat = destination.view(place, item.offset, math.prod(item.shape) * dtype.itemsize)
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
        openers: see `Copier`.
        concurrency: number of concurrent requests; one is prepared while another is copied.

    Attributes:
        value_of: key -> tensor.
    """

    mesh = Mesh(("here",), (1,))

    def __init__(
        self, device: torch.device, openers: Mapping[str, OpenDestination], concurrency: int = 1
    ) -> None:
        no_tensors: dict[int, Tensor] = {}
        self.turn = threading.Lock()
        self.value_of: Callable[[int], Tensor] = no_tensors.__getitem__
        self._copier = Copier(None, device, openers)
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
        self._replies.put(self._copier.reply(number, request, self.value_of))


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
