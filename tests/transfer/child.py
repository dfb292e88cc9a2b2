"""Processes for the tests: a reader that takes commands, and a sender that meets with accidents."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lazygt.transfer import (
    BroadcastTransferReceiver,
    BroadcastTransferSender,
    Chunk,
    CudaIpcTransferReceiver,
    CudaIpcTransferSender,
    Manifest,
    ModuleExtractor,
    Receiver,
    Sender,
    SharedMemoryTransferReceiver,
    SharedMemoryTransferSender,
    TransferError,
)
from lazygt.transfer.transports.cuda_ipc import HostDevice

#: forked from a process that has loaded torch: a new one starts in 20 ms
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.transfer.child"])

KIB = 1 << 10
GIB = 1 << 30


class CountingDevice(HostDevice):
    """A stand-in for a GPU that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = 0
        self.exports = 0

    def allocate(self, nbytes: int) -> Tensor:
        self.allocated += nbytes
        return super().allocate(nbytes)

    def export(self, buffer: Tensor) -> list[Any]:
        self.exports += 1
        return super().export(buffer)


SENDERS: Mapping[str, Callable[..., Sender]] = {
    "shared-memory": lambda **k: SharedMemoryTransferSender(**{"threshold_gb": 8 * KIB / GIB, **k}),
    "broadcast": BroadcastTransferSender,
    "cuda-ipc": lambda **k: CudaIpcTransferSender(
        **{"threshold_gb": 8 * KIB / GIB, "device": HostDevice(), "verify": "crc32", **k}
    ),
}
RECEIVERS: Mapping[str, Callable[..., Receiver]] = {
    "shared-memory": SharedMemoryTransferReceiver,
    "broadcast": BroadcastTransferReceiver,
    "cuda-ipc": lambda *a, **k: CudaIpcTransferReceiver(*a, device=HostDevice(), **k),
}
#: of tests that need GPUs
GPU_RECEIVERS: Mapping[str, Callable[..., Receiver]] = {
    "gpu": CudaIpcTransferReceiver,
    "host": BroadcastTransferReceiver,
    "nccl": lambda *a, **k: BroadcastTransferReceiver(*a, device="cuda:1", **k),
}


class Reader:
    """A process with a receiver, commanded through a pipe."""

    def __init__(self, strategy: str, address: str, name: str, **options: Any) -> None:
        self.name = name
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(
            target=read, args=(theirs, strategy, address, name), kwargs=options
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, command: str, *args: Any, seconds: float = 20.0) -> Any:
        """Run a command of `_Commands` there; its answer or its exception comes back."""
        self._pipe.send((command, args))
        assert self._pipe.poll(seconds), f"reader {self.name} did not answer {command}"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def signal(self, number: int) -> None:
        send_signal(self.pid, number)

    def close(self) -> None:
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._process.join()
        self._pipe.close()


class Clock:
    """Seconds since it was made.

    Attributes:
        late: of them, those in which this thread was ready to run and the machine had no core free.
    """

    def __init__(self) -> None:
        self._begin, self._late = time.monotonic(), _seconds_without_a_core()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    @property
    def late(self) -> float:
        return _seconds_without_a_core() - self._late


def _seconds_without_a_core() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def send_signal(pid: int, number: int) -> None:
    """Send a signal; return when a stop has taken hold of all threads."""
    os.kill(pid, number)
    while number == signal.SIGSTOP and psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        os.sched_yield()


def read(pipe: Connection, strategy: str, address: str, name: str, **options: Any) -> None:
    """The main function of a reader's process; ``options`` are the receiver's."""
    make = {**RECEIVERS, **GPU_RECEIVERS}[strategy]
    with make(address, name=name, **options) as receiver:
        commands = _Commands(receiver)
        while True:
            try:
                command, args = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(getattr(commands, command)(*args))
            except Exception as error:  # noqa: BLE001 - it belongs to the test
                pipe.send(error)


class _Commands:
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._held: Any = None

    def wait(self, number: int, seconds: float = 10.0) -> int:
        return self._receiver.wait_for_version(number, seconds)

    def version(self) -> int:
        return self._receiver.version

    def connected(self) -> bool:
        return self._receiver.connected

    def checksums(self) -> tuple[int, dict[str, int]]:
        with self._receiver.reading() as (number, params):
            return number, checksums(params)

    def layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        with self._receiver.reading() as (_, params):
            return [(name, str(p.dtype), tuple(p.shape)) for name, p in params.items()]

    def shares(self, one: str, other: str) -> bool:
        with self._receiver.reading() as (_, params):
            return params[one].data_ptr() == params[other].data_ptr()

    def hold(self, name: str) -> None:
        with self._receiver.reading() as (_, params):
            self._held = params[name]

    def held(self) -> int:
        return checksums({"held": self._held})["held"]

    def let_go(self) -> None:
        self._held = None

    def leave(self) -> None:
        self._receiver.close()

    def hammer(self, last: int) -> tuple[int, int, list[tuple[int, list[float]]]]:
        """Read until a version is there; how often, how many versions, and what was torn."""
        torn: list[tuple[int, list[float]]] = []
        seen: set[int] = set()
        readings = 0
        while self._receiver.version < last:
            with self._receiver.reading() as (number, params):
                stamps = {float(edge) for p in params.values() for edge in (p[0], p[-1], p[0])}
                if stamps != {float(number)}:
                    torn.append((number, sorted(stamps)))
            seen.add(number)
            readings += 1
        return readings, len(seen), torn

    def footprint(self) -> tuple[int, int, int]:
        return footprint()


def footprint() -> tuple[int, int, int]:
    """Open descriptors, mappings, and resident KiB of this process."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
    return descriptors, mappings, resident


def checksums(params: Mapping[str, Tensor]) -> dict[str, int]:
    """CRC-32 of every parameter's bytes."""
    return {
        name: zlib.crc32(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, p in params.items()
    }


def weights(version: int) -> dict[str, Tensor]:
    """A model of several modules and dtypes, with a parameter bigger than the 8 KiB requests."""
    made = torch.Generator().manual_seed(version)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    embedding = draw(50, 64)
    return {
        "embed.weight": embedding,
        "layer.0.weight": draw(24, 24),
        "layer.0.bias": draw(24).to(torch.bfloat16),
        "layer.1.weight": draw(90, 100).t(),
        "layer.1.steps": torch.tensor(version),
        "layer.1.empty": torch.empty(0, 3),
        "layer.2.weight": draw(17).to(torch.float16),
        "head.weight": embedding,
        "head.bias": draw(5) > 0,
    }


CHUNKS = 5  # of `weights`: embed, layer.0, layer.1, layer.2, head


SENDER_SECONDS = 1.0


class Accident:
    """An extractor that lets something happen before chunk ``at`` (or after the last one)."""

    def __init__(self, version: int, at: int, happen: Callable[[], object]) -> None:
        self._inner = ModuleExtractor(weights(version))
        self._at, self._happen = at, happen

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def chunks(self) -> Iterator[Chunk]:
        number = -1
        for number, chunk in enumerate(self._inner.chunks()):
            if number == self._at:
                self._happen()
            yield chunk
        assert number + 1 == CHUNKS
        if self._at == CHUNKS:
            self._happen()


def send_with_accident(pipe: Connection, strategy: str, at: int, number: int) -> None:
    """Send version 1, then version 2 with a signal to this very process before chunk ``at``."""
    sender = SENDERS[strategy]()
    pipe.send(sender.address)
    sender.wait_for_receivers(1, 10.0)
    sender.send(ModuleExtractor(weights(1)), timeout=10.0)

    def happen() -> None:
        pipe.send(time.monotonic())
        os.kill(os.getpid(), number)

    # a stopped sender is to be too late; a killed one must not be too late before
    seconds = SENDER_SECONDS if number == signal.SIGSTOP else 20.0
    try:
        sender.send(Accident(2, at, happen), timeout=seconds)
        pipe.send("sent")
    except TransferError as error:
        pipe.send(f"failed: {error}")
    sender.close()
