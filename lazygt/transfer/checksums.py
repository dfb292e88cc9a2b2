"""Bytes of tensors: wire format, and copies and checksums by several threads.

Threads of Python rather than of OpenMP: many small copies lose most of their time in OpenMP's
barriers on a busy machine, and memmove and crc32 run without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lazygt.host.files import crc32 as _crc32

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


# -- checksums -----------------------------------------------------------------------------


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


# -- threads -------------------------------------------------------------------------------


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
