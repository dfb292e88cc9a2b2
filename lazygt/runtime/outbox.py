"""What this rank sends to single other ranks: kept until it has left.

A send returns at once. It must: the receiver may wait for another value of this rank first.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch

from lazygt.errors import LazyGTError


class Outbox:
    """Sends on their way, with the memory that they are read from."""

    def __init__(self) -> None:
        #: None: nothing more will come
        self._sent: queue.SimpleQueue[tuple[Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._flying: list[tuple[Any, torch.Tensor]] = []
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def keep(self, work: Any, data: torch.Tensor) -> None:
        """Keep ``data`` for as long as torch's ``work`` reads it.

        Raises:
            LazyGTError: an earlier send failed.
        """
        if self._failure is not None:
            raise LazyGTError(f"an earlier send failed: {self._failure}") from self._failure
        if data.is_cuda:  # to wait would hold up the stream; NCCL says when a send is done
            self._flying = [one for one in self._flying if not one[0].is_completed()]
            self._flying.append((work, data))
            return
        if self._thread is None:  # Gloo only says so to somebody who waits
            self._thread = threading.Thread(target=self._wait, name="lazygt-sends", daemon=True)
            self._thread.start()
        self._sent.put((work, data))

    def close(self) -> None:
        """Keep nothing any more: this rank leaves, and what has not arrived will not."""
        self._flying.clear()
        self._sent.put(None)

    def _wait(self) -> None:
        while self._failure is None and (sent := self._sent.get()) is not None:
            work, _ = sent
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - raised again by the next `keep`
                self._failure = error
            del work, sent
