"""The random stream of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lazygt.runtime import kernels, wire


class RandomStream:
    """The generator that a worker's ops draw from.

    Args:
        inline: it is the client's generator, too, so it is lent to a run and put back.
    """

    def __init__(self, device: torch.device, inline: bool) -> None:
        self._device = device
        self._inline = torch.default_generator.get_state() if inline else None
        self._first = kernels.get_rng_state(device)

    @property
    def is_lent(self) -> bool:
        """True if it has to be lent to a run that draws."""
        return self._inline is not None

    @property
    def state(self) -> torch.Tensor:
        """The generator's state, as bytes."""
        return kernels.get_rng_state(self._device) if self._inline is None else self._inline

    def set(self, state: bytes) -> None:
        """Set the generator to a snapshot's state, or to its initial state if that is empty."""
        generator = wire.received(state) if state else self._first
        if self._inline is None:
            kernels.set_rng_state(self._device, generator)
        else:
            self._inline = generator

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Context of a run that draws; in the client's own process, its generator is restored."""
        if self._inline is None:
            yield
            return
        theirs = torch.default_generator.get_state()
        torch.default_generator.set_state(self._inline)
        try:
            yield
        finally:
            self._inline = torch.default_generator.get_state()
            torch.default_generator.set_state(theirs)
