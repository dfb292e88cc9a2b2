"""Base class of backends that execute collectives on a thread, in launch order."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from lazygt.runtime.collectives.backends import Work, as_bytes

_CLOSE_SECONDS = 5.0  # a running collective ends at once if the connections are closed


Parts = list[torch.Tensor]


class InTurn(ABC):
    """`Backend` with collectives on a thread of its own; after a failure, none run.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def close(self) -> None:
        """Release everything after the current collective; close connections before.

        Waits for the end, since a process that ends meanwhile would stop the thread within torch's
        C++, which aborts.
        """
        self._failure = self._failure or ConnectionError("this rank has left")
        self._tasks.put(None)
        if self._thread is None:
            self._close()
        else:
            self._thread.join(_CLOSE_SECONDS)

    def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
        """See `Backend`."""
        return self._enqueue(lambda: self._all_reduce(buffer, op))

    def all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> Work:
        """See `Backend`."""
        return self._enqueue(lambda: self._all_gather(as_bytes(buffer), as_bytes(sent)))

    def reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> Work:
        """See `Backend`."""
        return self._enqueue(lambda: self._reduce_scatter(buffer, sent, op))

    def all_to_all(
        self, buffer: torch.Tensor, sent: torch.Tensor, into: Sequence[int], out: Sequence[int]
    ) -> Work:
        """See `Backend`."""
        received = list(as_bytes(buffer).split([count * buffer.itemsize for count in into]))
        chunks = list(as_bytes(sent).split([count * sent.itemsize for count in out]))
        return self._enqueue(lambda: self._all_to_all(received, chunks))

    @abstractmethod
    def _all_reduce(self, buffer: torch.Tensor, op: str) -> None:
        """Do ``all_reduce`` on the thread."""

    @abstractmethod
    def _all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        """Do ``all_gather`` on the thread, with both tensors as bytes."""

    @abstractmethod
    def _reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> None: ...

    @abstractmethod
    def _all_to_all(self, received: Parts, chunks: Parts) -> None:
        """Do ``all_to_all`` on the thread: bytes to each rank, and buffers for those of each."""

    def _enqueue(self, run: Callable[[], None]) -> Work:
        """Queue a collective for the thread; after a failure, return it failed."""
        task = _Task(run)
        if self._failure is not None:
            task.end(self._failure)
            return task
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_tasks, name=self._name, daemon=True)
            self._thread.start()
        return task

    def _run_tasks(self) -> None:
        """Execute queued collectives until ``close``; after a failure, fail the rest."""
        while (task := self._tasks.get()) is not None:
            try:
                if self._failure is None:
                    task.run()
            except BaseException as error:  # noqa: BLE001 - raised by the task's `wait`
                self._failure = error
            task.end(self._failure)
            del task
        self._close()

    def _close(self) -> None:  # noqa: B027 - one has nothing
        """Release all resources: no collective runs any more."""


class _Task:
    """Collective for the thread to execute."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def end(self, failure: BaseException | None) -> None:
        """Release the waiting thread."""
        self._failure = failure
        self._ended.set()

    def wait(self) -> None:
        """See `Work`. Every wait of the thread has a timeout."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
