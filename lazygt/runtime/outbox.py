"""What NCCL sends from this rank to single other ranks: kept until it has left.

A send returns at once. It must: the receiver may wait for another value of this rank first.
"""

from __future__ import annotations

from typing import Any

import torch


class Outbox:
    """Sends on their way, with the memory that they are read from."""

    def __init__(self) -> None:
        self._flying: list[tuple[Any, torch.Tensor]] = []

    def keep(self, work: Any, data: torch.Tensor) -> None:
        """Keep ``data`` for as long as torch's ``work`` reads it."""
        # to wait would hold up the stream; NCCL says when a send is done
        self._flying = [one for one in self._flying if not one[0].is_completed()]
        self._flying.append((work, data))

    def close(self) -> None:
        """Keep nothing any more: this rank leaves, and what has not arrived will not."""
        self._flying.clear()
