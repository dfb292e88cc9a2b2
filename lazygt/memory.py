"""Report of ``s.memory()``: the memory of each worker, as measured there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.graph.text import amount
from lazygt.printed import Printed, plain_table


class RankMemory(NamedTuple):
    """A worker's memory in bytes.

    Attributes:
        kinds: of the values that it holds: ``parameters`` (of optimizers that have stepped, and
            other ``nn.Parameter``\\ s), their ``gradients``, the state of ``optimizer``\\ s, and
            ``other``; memory that several values share counts once.
        allocated: memory that torch's allocator has handed out on a GPU. On CPUs malloc's, of the
            whole process; where malloc does not say (it is not glibc's), ``living``.
        peak: on a GPU the most that was allocated; on CPUs the most that was resident, ever.
        resident: of the process in the host's memory.
    """

    rank: int
    kinds: Mapping[str, int]
    allocated: int
    peak: int
    resident: int

    @property
    def living(self) -> int:
        """Of all values that it holds."""
        return sum(self.kinds.values())


@dataclass(frozen=True, repr=False)
class SessionMemory(Printed):
    """The memory of a session's workers. Prints as a table.

    Attributes:
        ranks: by rank. With ``launcher="inline"`` the one there is is this process, and in a dry
            session values have their sizes, but no memory.
    """

    ranks: Sequence[RankMemory]

    @property
    def living(self) -> int:
        """Bytes of the values that all workers hold."""
        return sum(memory.living for memory in self.ranks)

    @property
    def peak(self) -> int:
        """Of the worker that needed the most."""
        return max(memory.peak for memory in self.ranks)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("memory of the workers, as measured", style="bold")
        kinds = list(self.ranks[0].kinds)
        columns = (*kinds, "living", "allocated", "peak", "resident")
        table = plain_table("rank", *(f">{name}" for name in columns))
        for memory in self.ranks:
            sizes = (*memory.kinds.values(), memory.living, *memory[2:])
            table.add_row(str(memory.rank), *(amount(size, "B") for size in sizes))
        yield table
