"""Reading of a receiver's weights, one complete version at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from lazygt.transfer.connection import Deadline
from lazygt.transfer.errors import SenderGone, TransferError
from lazygt.transfer.version import Version


class Readings:
    """The current version of the weights, for reader threads of this process.

    Attributes:
        name: name of the receiver in errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._current: Version | None = None
        self._changed = threading.Condition()
        self._ended: str | None = None

    @property
    def version(self) -> int:
        """Number of the current version; 0: none yet."""
        current = self._current
        return 0 if current is None else current.number

    @contextmanager
    def reading(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """The current version and its parameters, fixed for the whole block.

        Tied names share a tensor. Do not write to the tensors, and clone those that must outlive
        the block: the mapping is emptied at its end, and a tensor that is kept all the same holds
        back memory that the next but one transfer needs.

        Raises:
            TransferError: there is no version yet.
        """
        current = self._current
        if current is None:
            raise TransferError(
                f"receiver {self.name!r} has no weights yet; call wait_for_version(1) first"
            )
        params = dict(current.params)
        number = current.number
        del current
        try:
            yield number, params
        finally:
            params.clear()

    def load_into(self, module: nn.Module) -> int:
        """Copy the current version into a module's parameters and buffers; return its number.

        Raises:
            RuntimeError: names or shapes differ from the module's.
            TransferError: there is no version yet.
        """
        with self.reading() as (number, params):
            module.load_state_dict(dict(params))
        return number

    def load_weights(
        self, load: Callable[[Iterator[tuple[str, Tensor]]], object], *, ties: bool = False
    ) -> int:
        """Give the current version to an engine as (name, tensor) pairs; return its number.

        Args:
            load: function that takes such pairs and copies them, such as ``model.load_weights``
                of vLLM and SGLang.
            ties: include names that are tied to an earlier one; checkpoints leave them out.

        Raises:
            TransferError: there is no version yet.
        """
        with self.reading() as (number, params):
            load(_pairs(params, ties))
        return number

    def wait_for_version(self, number: int = 1, timeout: float = 60.0) -> int:
        """Wait for version ``number`` or a newer one; return its number.

        Raises:
            SenderGone: the sender has gone, or has turned this receiver away.
            TransferError: no such version came within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        with self._changed:
            while self.version < number:
                if self._ended is not None:
                    raise SenderGone(f"receiver {self.name!r}: {self._ended}")
                if deadline.expired:
                    raise TransferError(
                        f"receiver {self.name!r} waited {timeout:g} s for version {number}; it "
                        f"has version {self.version}"
                    )
                self._changed.wait(deadline.remaining)
        return self.version

    def _flip(self, version: Version) -> None:
        """Make a version the current one, atomically for readers."""
        with self._changed:
            self._current = version
            self._changed.notify_all()

    def _end(self, why: str) -> None:
        """End the waits for a newer version: there will be none."""
        with self._changed:
            self._ended = why
            self._changed.notify_all()


def _pairs(params: Mapping[str, Tensor], ties: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, in the order of the manifest."""
    seen: set[int] = set()
    for name, tensor in params.items():
        if ties or id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
