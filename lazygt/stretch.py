"""Stretch: what has been recorded since the last flush."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.ops import OpFacts
from lazygt.graph.source import Mark
from lazygt.tensor import Cell
from lazygt.trie import Step


class Shipper(Protocol):
    """What the recorder needs of the session."""

    def ship(self, stretch: Stretch, reason: str, fetch: Any, ask: bool) -> Any:
        """Turn a stretch into a run; returns the reply when something is fetched or asked."""

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> Any:
        """Take a copy of a CPU tensor for the workers now; returns its RemoteValue."""


class Stretch:
    """What has been recorded since the last flush."""

    __slots__ = ("count", "inputs", "marks", "owners", "params", "serial", "step")

    def __init__(self, serial: int, root: Step) -> None:
        self.serial = serial
        self.step = root
        self.count = 0
        #: value number -> the cell that shows it (None: nothing of the user's ever does)
        self.owners: list[weakref.ref[Cell] | None] = []
        #: (cell, remote value) a slot; input k is value number ~k
        self.inputs: list[tuple[weakref.ref[Cell], Any]] = []
        self.params: list[Any] = []
        #: the user's frame of each op, by op number
        self.marks: list[Mark | None] = []

    def alive(self) -> tuple[list[Cell], tuple[int, ...]]:
        """The cells that still show a value of this stretch, and those values' numbers."""
        cells, indices = [], []
        serial = self.serial
        for index, owner in enumerate(self.owners):
            cell = owner() if owner is not None else None
            if cell is not None and cell.index == index and cell.serial == serial:
                cells.append(cell)
                indices.append(index)
        return cells, tuple(indices)


def written_tensors(f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensors an op writes, in schema order (lists flattened, missing ones skipped)."""
    for position in f.writes:
        if position < len(args):
            yield from _each(args[position])
    for name in f.writes_named:
        if name in kwargs:
            yield from _each(kwargs[name])


def _each(a: Any) -> Any:
    if isinstance(a, (list, tuple)):
        for item in a:
            yield from _each(item)
    elif a is not None:
        yield a
