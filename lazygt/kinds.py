"""Kinds: what the workers' values are to the program, as far as the client knows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from lazygt.record.recorder import Recorder
from lazygt.record.tensor import is_lazy, storage_of

PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = "parameters", "gradients", "optimizer", "other"


class Kinds:
    """Which values are parameters, gradients and an optimizer's state.

    Optimizers tell of their parameters once they step. Those that no optimizer has are looked for
    among all that Python has: no list of them is kept, which every session would pay for.

    Args:
        recorder: of the session whose values are meant.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: identity -> an optimizer that has stepped; no callback, in which a Ctrl-C would be lost
        self.optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        #: parameters that no optimizer may have, as they were last looked for
        self._others: list[weakref.ref[torch.Tensor]] = []

    @property
    def trains(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self.optimizers)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped for the first time; those that are no more are forgotten."""
        alive = {key: other for key, other in self.optimizers.items() if other() is not None}
        self.optimizers = {**alive, id(optimizer): weakref.ref(optimizer)}

    def by_id(self, everywhere: bool = True) -> dict[int, str]:
        """The kinds of values that handles show, by id; of all others nothing is known.

        Args:
            everywhere: look for parameters that no optimizer has, too; else those count that were
                there when they were last looked for.
        """
        kinds: dict[int, str] = {}
        if everywhere:
            self._others = [weakref.ref(parameter) for parameter in _all_parameters()]
        others = [parameter for other in self._others if (parameter := other()) is not None]
        optimizers = [
            optimizer for known in self.optimizers.values() if (optimizer := known()) is not None
        ]
        parameters = [p for optimizer in optimizers for p in _parameters(optimizer)]
        for parameter in [*parameters, *others]:
            self._note(kinds, parameter, PARAMETERS)
            self._note(kinds, parameter.grad, GRADIENTS)
        for optimizer in optimizers:
            for value in _state(optimizer):
                self._note(kinds, value, OPTIMIZER)
        return kinds

    def _note(self, kinds: dict[int, str], t: object, kind: str) -> None:
        """Note the kind of what a handle shows, if it is one and the workers have it."""
        if not is_lazy(t):
            return
        storage = storage_of(t)
        if storage.owner is self._recorder and (remote := storage.remote) is not None:
            for key in remote.ids:
                kinds.setdefault(key, kind)


def by_kind(kinds: Mapping[int, str]) -> dict[str, list[int]]:
    """The ids of each kind that is known."""
    groups: dict[str, list[int]] = {PARAMETERS: [], GRADIENTS: [], OPTIMIZER: []}
    for key, kind in kinds.items():
        groups[kind].append(key)
    return groups


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _state(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    for values in optimizer.state.values():
        if isinstance(values, dict):
            yield from values.values()


def _all_parameters() -> Iterable[torch.Tensor]:
    """Those that Python's garbage collector knows, which has all but those of other languages."""
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
