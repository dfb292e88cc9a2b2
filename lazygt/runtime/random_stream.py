"""The random stream of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lazygt.runtime import kernels, wire


class RandomStream:
    """The generator that a worker's ops draw from.

    Args:
        inline: it is the client's own, so it is lent to a run and put back.
    """

    def __init__(self, device: torch.device, inline: bool) -> None:
        self._device = device
        self._inline = torch.default_generator.get_state() if inline else None
        self._first = kernels.get_rng_state(device)

    @property
    def is_lent(self) -> bool:
        """Whether a run that draws has to be lent it."""
        return self._inline is not None

    @property
    def state(self) -> torch.Tensor:
        """Where it stands."""
        return kernels.get_rng_state(self._device) if self._inline is None else self._inline

    def set(self, state: bytes) -> None:
        """Have it stand as a snapshot says, or as in the beginning."""
        generator = wire.received(state) if state else self._first
        if self._inline is None:
            kernels.set_rng_state(self._device, generator)
        else:
            self._inline = generator

    @contextmanager
    def lent(self) -> Iterator[None]:
        """In the client's own process its generator is put back afterwards."""
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
