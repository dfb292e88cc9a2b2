"""RemoteValue: what the client keeps of a value that the workers hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lazygt.graph.mesh import Stored
from lazygt.graph.source import CallSite


class RemoteValue:
    """A value that the workers hold. When nobody speaks of it any more, its id is freed with the
    next run."""

    __slots__ = ("_dead", "call_site", "id", "rest", "stored")

    def __init__(self, key: int, dead: deque[int]) -> None:
        self.id = key
        self._dead = dead
        #: how it lies on the mesh; None: every rank has all of it
        self.stored: Stored | None = None
        #: the further blocks of a value of which a rank holds several
        self.rest: Sequence[RemoteValue] = ()
        #: the user's line that made it, for whoever looks at its handle
        self.call_site: CallSite | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Of all its blocks."""
        return (self.id, *[block.id for block in self.rest])

    def __del__(self) -> None:
        self._dead.append(self.id)
