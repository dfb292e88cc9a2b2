"""Mesh: the workers as a grid with named axes. Ranks run through the last axis fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lazygt.config import mesh_axes
from lazygt.graph.label import Label

#: How a value lies on a mesh: one label an axis, in its order.
Placement = tuple[Label, ...]


class FSDPUnit(NamedTuple):
    """Parameters that are stored in blocks along an axis and gathered together to be used (FSDP).

    Attributes:
        name: of the module that the parameters belong to.
        axis: of the mesh.
        cap_bytes: so much is gathered, or reduced, at once.
        reshard_after_forward: the backward gathers again what the forward has used.
        limit_all_gathers: at most two gathers are under way at a time.
    """

    name: str
    axis: str
    cap_bytes: int
    reshard_after_forward: bool = True
    limit_all_gathers: bool = True


class Stored(NamedTuple):
    """How a value is kept between two runs.

    Attributes:
        pinned: it is also used so, and never moved for an op that would be faster otherwise.
        unit: along this one's axis it is gathered to be used, whatever ``pinned`` says.
    """

    labels: Placement
    pinned: bool = False
    unit: FSDPUnit | None = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks.

    Attributes:
        names: of the axes, outermost first.
        sizes: ranks along each axis.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(axes: Mapping[str, Any]) -> Mesh:
        """The mesh with these axes.

        Raises:
            ValueError: an axis without a name, or with less than one rank.
        """
        for name, size in axes.items():
            if not name.isidentifier():
                raise ValueError(f"mesh axis {name!r}: expected a name such as 'data'")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh axis {name!r} of size {size!r}: expected an integer >= 1")
        return Mesh(tuple(axes), tuple(axes.values()))

    @staticmethod
    def parse(text: str) -> Mesh:
        """The mesh that ``data=2,model=4`` names.

        Raises:
            ValueError: for any other text.
        """
        return Mesh.of(mesh_axes(text))

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along an axis.

        Raises:
            ValueError: there is no such axis.
        """
        if axis not in self.names:
            raise ValueError(f"the mesh {self} has no axis {axis!r}")
        return self.sizes[self.names.index(axis)]

    def index(self, rank: int, axis: str) -> int:
        """Where a rank stands along an axis."""
        inner = math.prod(self.sizes[self.names.index(axis) + 1 :])
        return rank // inner % self.size(axis)

    def lines(self, axis: str) -> list[tuple[int, ...]]:
        """The ranks that differ along one axis only, in its order; the same list on every rank."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            others = tuple(self.index(rank, name) for name in self.names if name != axis)
            found.setdefault(others, []).append(rank)
        return [tuple(line) for line in found.values()]
