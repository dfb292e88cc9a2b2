"""The session's random generator: its state lives on the workers; here are the ops on it.

A session borrows the client's CPU generator: the first random op starts from its state, and a
session that ends well gives the advanced state back. So a script draws the same numbers with and
without the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazygt.graph.meta import TensorMeta, intern
from lazygt.graph.node import DEVICE, Node, Param, Ref

if TYPE_CHECKING:
    from lazygt.recorder import Recorder
    from lazygt.tensor import LazyTensor

_SEED, _GET, _SET = "lazygt.manual_seed", "lazygt.get_rng_state", "lazygt.set_rng_state"
_GPU_STATE_BYTES = 16


class SessionGenerator:
    """Records seeding, and reading and setting the state."""

    def __init__(self, recorder: Recorder, device_type: str) -> None:
        self._recorder = recorder
        self._on_cpu = device_type == "cpu"
        #: whether the workers' generator has been given its first state
        self.started = False

    def start(self) -> None:
        """Hand the client's state to the workers, before the first random op."""
        self.started = True
        if self._on_cpu:
            self.set_state(torch.default_generator.get_state())
        else:
            self.manual_seed(torch.initial_seed())

    def manual_seed(self, seed: int) -> None:
        """Record ``torch.manual_seed``; the seed is data, not part of the plan."""
        self.started = True
        stretch = self._recorder.stretch
        stretch.params.append(seed)
        node = Node(_SEED, (DEVICE, Param(len(stretch.params) - 1)))
        self._recorder.internal((_SEED,), node)

    def get_state(self) -> LazyTensor:
        """The state as a lazy tensor of bytes."""
        if not self.started:
            self.start()
        size = torch.default_generator.get_state().numel() if self._on_cpu else _GPU_STATE_BYTES
        meta: TensorMeta = intern((size,), (1,), torch.uint8)
        index = self._recorder.internal((_GET,), Node(_GET, (DEVICE,), (), (meta,)))
        return self._recorder.show(index, meta)

    def set_state(self, state: torch.Tensor) -> None:
        """Record setting the state."""
        self.started = True
        recorder = self._recorder
        lazy = state if state.device.type == "lazygt" else recorder.to_lazy(state)
        index = recorder.index_of(lazy)  # type: ignore[arg-type]
        recorder.internal((_SET, index), Node(_SET, (DEVICE, Ref(index))))

    def give_back(self) -> None:
        """The session ends: the client's CPU generator goes on where the workers stopped."""
        if self.started and self._on_cpu:
            state = self._recorder.fetch(self.get_state(), "generator")
            torch.default_generator.set_state(state)
