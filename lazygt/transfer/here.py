"""This process as an origin: for models that no worker holds, and receivers that hold blocks."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lazygt.graph.mesh import Mesh
from lazygt.transfer.orders import Order
from lazygt.transfer.origins import Written
from lazygt.transfer.writer import Writer, threads


class Here:
    """One rank that has all of the values; it writes in a thread, so its caller sees deaths.

    Args:
        device: where it sends from.

    Attributes:
        value_of: key -> tensor.
    """

    mesh = Mesh(("here",), (1,))

    def __init__(self, device: torch.device) -> None:
        nothing: dict[int, Tensor] = {}
        self.value_of: Callable[[int], Tensor] = nothing.__getitem__
        self._writer = Writer(threads(), device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lazygt-transfer-here")
        self._answers: queue.SimpleQueue[Written] = queue.SimpleQueue()

    def order(self, rank: int, number: int, order: Order) -> None:
        """See `Holders`."""
        self._thread.submit(self._write, number, order)

    def answers(self, seconds: float) -> list[Written]:
        """See `Holders`."""
        try:
            return [self._answers.get(timeout=seconds)]
        except queue.Empty:
            return []

    def let_go(self, sender: str) -> None:
        """See `Holders`."""
        self._thread.submit(self._write, 0, Order(sender, (), None, "none", ()))

    def close(self) -> None:
        """End the threads, after what they have begun."""
        self._thread.shutdown()
        self._writer.close()

    def _write(self, number: int, order: Order) -> None:
        try:
            done = self._writer.write(order, self.value_of)
            self._answers.put(Written(0, number, done.checks, "", done.handles))
        except Exception as error:  # noqa: BLE001 - it is the answer
            self._answers.put(Written(0, number, (), f"{type(error).__name__}: {error}"))
