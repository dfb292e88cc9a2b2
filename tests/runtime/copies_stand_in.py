"""Stand-in for torch.cuda, as far as copies between a GPU and the host go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


class Stream:
    """Counts the waits for it; those for events take until a test says that they are reached."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def wait_event(self, event: Event) -> None:
        assert event.came.wait(60.0)


class Event:
    """Is reached when a test says so.

    Attributes:
        came: set once it is reached.
        stream: on which it was recorded.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.came = cuda, threading.Event()
        self.stream: Stream | None = None

    def record(self) -> None:
        self.stream = self._cuda.on

    def synchronize(self) -> None:
        assert self.stream is not None, "not recorded"
        self.stream.waits += 1

    def query(self) -> bool:
        return self.came.is_set()


class Cuda:
    """As ``torch.cuda``; all of its memory is the host's.

    Args:
        error: what cudaHostRegister answers.
        free: bytes of the GPU that nobody has.
    """

    def __init__(self, error: int = 0, free: int = 1 << 30) -> None:
        self.free = free
        self.error, self.kernels, self.side = error, Stream(), Stream()
        self.on: Stream = self.kernels
        self.events: list[Event] = []
        #: address -> bytes
        self.registered: dict[int, int] = {}
        self.asked = 0

    def Stream(self, _: torch.device) -> Stream:
        return self.side

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.on, before = stream, self.on
        yield
        self.on = before

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return self.free, 1 << 30

    def memory_reserved(self, _: torch.device) -> int:
        return 0

    def memory_allocated(self, _: torch.device) -> int:
        return 0

    def Event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        self.asked += 1
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def holds(self, value: torch.Tensor) -> bool:
        """Whether a tensor lies in registered memory."""
        begin, end = value.data_ptr(), value.data_ptr() + value.nbytes
        return any(a <= begin and end <= a + n for a, n in self.registered.items())
