"""Stretch: what has been recorded since the last flush."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Protocol

import torch

from lazygt.graph.mesh import Mesh
from lazygt.graph.meta import TensorMeta
from lazygt.graph.ops import OpFacts, returned_write
from lazygt.graph.source import Mark, user_mark
from lazygt.tensor import Cell
from lazygt.trie import Step

#: An op and the user's frame that it was recorded at.
Place = tuple[OpFacts | None, Mark | None]


class Shipper(Protocol):
    """What the recorder needs of the session."""

    mesh: Mesh

    def ship(self, stretch: Stretch, reason: str, fetch: Any, ask: bool) -> Any:
        """Turn a stretch into a run; returns the reply when something is fetched or asked."""

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> Any:
        """Take a copy of a CPU tensor for the workers now; returns its RemoteValue."""

    def after_backward(self) -> None:
        """The sync point at the end of ``.backward()``."""


class Stretch:
    """What has been recorded since the last flush."""

    __slots__ = ("inputs", "marks", "owners", "params", "serial", "step")

    def __init__(self, serial: int, root: Step) -> None:
        self.serial = serial
        self.step = root
        #: value number -> the cell that shows it (None: nothing of the user's ever does)
        self.owners: list[weakref.ref[Cell] | None] = []
        #: (cell, remote value) a slot; input k is value number ~k
        self.inputs: list[tuple[weakref.ref[Cell], Any]] = []
        self.params: list[Any] = []
        #: the user's frame of each op, by op number
        self.marks: list[Mark | None] = []

    def settle(self) -> None:
        """Make the lists agree with the step that was reached, after an exception in an op.

        Numbers and inputs are noted before a step is reached, marks and owners after it, so that
        the step always tells what belongs to the stretch.
        """
        step = self.step
        del self.params[step.params :]
        del self.inputs[step.inputs :]
        self.marks.extend([user_mark(1)] * (step.ops - len(self.marks)))
        self.owners.extend([None] * (step.values - len(self.owners)))

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

    def bytes_alive(self) -> int:
        """Bytes of what this stretch made and handles still show; autograd's count, too."""
        entered = {id(cell()) for cell, _ in self.inputs}
        cells, _ = self.alive()
        return sum(cell.meta.nbytes for cell in cells if id(cell) not in entered)

    def here(self) -> Place:
        """Where the stretch stands now."""
        return self.step.facts, self.marks[-1] if self.marks else None

    def rarest_repeated(self) -> Place | None:
        """The place that the stretch came by least often, but more than once."""
        ops = [step for step in self.step.path() if step.node is not None]
        seen = Counter((step.facts, mark) for step, mark in zip(ops, self.marks, strict=True))
        repeated = [place for place, times in seen.items() if times > 1]
        return min(repeated, key=lambda place: seen[place], default=None)


def written_tensors(f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors an op writes, in schema order (lists flattened, missing ones skipped)."""
    written = [args[position] for position in f.writes if position < len(args)]
    written += [kwargs[name] for name in f.writes_named if name in kwargs]
    found: list[Any] = []
    for a in written:
        if isinstance(a, (list, tuple)):
            found.extend(a)
        else:
            found.append(a)
    return [t for t in found if t is not None]


def returned(
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: list[Any],
    ints: tuple[int, ...] = (),
) -> Any:
    """What an op returns, out of its fresh handles, the tensors it wrote, and its numbers."""
    if f.outputs == ("fl",):
        return made
    out: list[Any] = []
    numbers = iter(ints)
    single = sum(kind != "fl" for kind in f.outputs)
    for position, kind in enumerate(f.outputs):
        if kind[0] == "w":
            which = returned_write(f, position)
            out.append(kwargs[which] if isinstance(which, str) else args[which])
        elif kind == "i":
            out.append(next(numbers))
        elif kind == "fl":
            taken = len(made) - (single - len(out))
            out.append(made[:taken])
            made = made[taken:]
        else:
            out.append(made.pop(0))
    if not out:
        return None
    return out[0] if len(out) == 1 else tuple(out)
