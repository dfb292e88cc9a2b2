"""Bytes of tensors: as they travel, copied and checked by several threads.

Threads of Python rather than of OpenMP: many small copies lose most of their time in OpenMP's
barriers on a busy machine, and memmove and crc32 run without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor

THREADS = 4
_JOB_BYTES = 8 << 20  # pieces share a job: handing one over costs as much as copying 200 KB
_BLOCK = 2 << 20  # checked while a core's cache has it; for smaller ones threads queue up

_NOWHERE = ctypes.addressof(ctypes.c_ubyte())  # of an empty tensor; nothing is read there

Checksum = Callable[[Tensor], int]


def _fastest_crc32() -> Callable[..., int]:
    """ISA-L's, which is ten times as fast, where the package ``isal`` is there; else zlib's."""
    for name in ("isal.isal_zlib", "zlib"):
        try:
            found: Callable[..., int] = importlib.import_module(name).crc32
        except ImportError:
            continue
        return found
    raise ImportError("this Python has no zlib")


_crc32 = _fastest_crc32()


class Copy(NamedTuple):
    """What to move between two tensors of one shape; two dtypes make it a cast."""

    source: Tensor
    target: Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as a flat uint8 tensor; nothing is copied."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def wire_bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a tensor as they travel: cast, contiguous, flat uint8.

    The same memory where the tensor travels as it is; else a copy.
    """
    return as_bytes(tensor.detach().to(dtype).contiguous().resolve_conj().resolve_neg())


def travels_as_it_is(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether `wire_bytes` would alias the tensor's own memory."""
    return (
        tensor.dtype == dtype
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


# -- checksums -----------------------------------------------------------------------------


def crc32(data: Tensor) -> int:
    """CRC-32 of a flat uint8 tensor; a tensor on a GPU is copied to the host for it."""
    host = data.cpu()
    return _crc32(_buffer(host))


def xor64(data: Tensor) -> int:
    """All 64-bit words of a flat uint8 tensor, xor-ed where it lies; blind to moved words."""
    words = data.numel() // 8
    folded = 0
    if words:
        folded = int(torch.hash_tensor(data[: words * 8].view(torch.int64)).item())
    return (folded & (1 << 64) - 1) ^ int.from_bytes(bytes(data[words * 8 :].tolist()), "little")


def sha256(data: Tensor) -> bytes:
    """SHA-256 of a flat uint8 tensor on the CPU."""
    return hashlib.sha256(_buffer(data)).digest()


def _buffer(data: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory of a CPU tensor, which must outlive it."""
    return _memory(data.data_ptr() or _NOWHERE, data.numel())


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * size).from_address(address)


CHECKSUMS: dict[str, Checksum | None] = {"none": None, "crc32": crc32, "xor64": xor64}


def checksum_named(name: str) -> Checksum | None:
    """The checksum of a name; None for "none".

    Raises:
        ValueError: there is none of this name.
    """
    if name not in CHECKSUMS:
        raise ValueError(f"verify={name!r}: expected one of {', '.join(CHECKSUMS)}")
    return CHECKSUMS[name]


# -- threads -------------------------------------------------------------------------------


class Crew:
    """Threads that copy and check; CPU work only. Close it when it is no longer needed."""

    def __init__(self, threads: int | None = None) -> None:
        count = threads or min(THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="lazygt-transfer")

    def copy(self, copies: Sequence[Copy], check: Checksum | None) -> Work:
        """Begin to copy; the result is the checksum of each run (0 without ``check``)."""

        def job(part: Sequence[Copy]) -> list[int]:
            return [_copy_one(copy, check) for copy in part]

        return Work([self._pool.submit(job, part) for part in _parts(copies)])

    def check(self, runs: Sequence[Tensor], check: Checksum) -> list[int]:
        """The checksums of the tensors' bytes, in order."""
        copies = [Copy(run, run) for run in runs]

        def job(part: Sequence[Copy]) -> list[int]:
            return [check(as_bytes(copy.source.contiguous())) for copy in part]

        return Work([self._pool.submit(job, part) for part in _parts(copies)]).result()

    def close(self) -> None:
        """End the threads; what they have begun is done first."""
        self._pool.shutdown(cancel_futures=True)


class Work:
    """What a crew is doing for one request."""

    def __init__(self, jobs: list[Future[list[int]]]) -> None:
        self._jobs = jobs

    def done(self) -> bool:
        return all(job.done() for job in self._jobs)

    def result(self) -> list[int]:
        """The checksums, in order; waits for them, which takes as long as a copy does."""
        return [value for job in self._jobs for value in job.result()]

    def wait(self) -> None:
        """Return when nothing is touched any more, whether it succeeded or not."""
        wait(self._jobs)


def _copy_one(copy: Copy, check: Checksum | None) -> int:
    source, target = copy
    on_cpu = source.device.type == "cpu"
    if on_cpu and target.is_contiguous() and travels_as_it_is(source, target.dtype):
        if check is crc32:
            return _copy_with_crc32(source, target)
        # unlike an assignment between memoryviews, this lets other threads run
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return check(as_bytes(source)) if check is not None else 0
    target.copy_(source)
    return check(as_bytes(target.contiguous())) if check is not None else 0


def _copy_with_crc32(source: Tensor, target: Tensor) -> int:
    """The checksum of what was copied, block by block."""
    read, written, size = source.data_ptr(), target.data_ptr(), source.nbytes
    value = 0
    for start in range(0, size, _BLOCK):
        count = min(_BLOCK, size - start)
        ctypes.memmove(written + start, read + start, count)
        value = _crc32(_memory(read + start, count), value)
    return value


def _parts(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Cut a list of copies into jobs of some size, in order."""
    parts: list[list[Copy]] = []
    room = 0
    for copy in copies:
        if room <= 0:
            parts.append([])
            room = _JOB_BYTES
        parts[-1].append(copy)
        room -= copy.target.nbytes
    return parts
