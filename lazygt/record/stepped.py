"""Optimizers' state in the client: saved before a step, for when that is undone.

Steps are counted in CPU tensors (Adam's ``step``), and a first step creates a parameter's state.
Workers know of neither.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch


class Stepped(NamedTuple):
    """Optimizer's state before a step.

    Attributes:
        numbers, values: the optimizer's CPU tensors, and copies of them, stacked where all are
            alike.
        known: the parameters that had a state; None: all had.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    numbers: list[torch.Tensor]
    values: torch.Tensor | list[torch.Tensor]
    known: list[torch.Tensor] | None

    def restore(self) -> None:
        """Restore the optimizer's state."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        with torch.no_grad():
            for number, value in zip(self.numbers, self.values, strict=True):
                number.copy_(value)
        if self.known is not None:
            known = set(map(id, self.known))
            for parameter in [p for p in optimizer.state if id(p) not in known]:
                del optimizer.state[parameter]


class Watched:
    """Optimizers that step, with their tensors in the client."""

    def __init__(self) -> None:
        #: optimizer -> its state's identity and length, and the CPU tensors in it
        self._numbers: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[int, int, list[torch.Tensor], bool]
        ] = weakref.WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer) -> Stepped:
        """Save the state in the client that a step may change."""
        state: dict[Any, Any] = optimizer.state
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        known = list(state) if len(state) < total else None
        numbers, alike = self._numbers_of(optimizer, state)
        with torch.no_grad():
            values = torch.stack(numbers) if alike else [t.clone() for t in numbers]
        return Stepped(weakref.ref(optimizer), numbers, values, known)

    def _numbers_of(
        self, optimizer: torch.optim.Optimizer, state: dict[Any, Any]
    ) -> tuple[list[torch.Tensor], bool]:
        """Return the CPU tensors, and True if there are any, all of one shape and dtype."""
        identity, length, numbers, alike = self._numbers.get(optimizer, (0, 0, [], False))
        if (identity, length) != (id(state), len(state)):
            numbers = [
                value
                for values in state.values()
                if isinstance(values, dict)
                for value in values.values()
                if isinstance(value, torch.Tensor) and value.device.type == "cpu"
            ]
            alike = len({(t.shape, t.dtype) for t in numbers}) == 1
            self._numbers[optimizer] = id(state), len(state), numbers, alike
        return numbers, alike
