"""Report of ``s.memory()``: the memory of each worker, as measured by the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.graph.text import amount
from lazygt.printing.tables import Printed, plain_table


class RankMemory(NamedTuple):
    """A worker's memory in bytes."""

    rank: int
    #: category -> bytes of the worker's values: ``parameters`` (of optimizers that have stepped,
    #: and other ``nn.Parameter``\\ s), their ``gradients``, the state of ``optimizer``\\ s, and
    #: ``other``; memory shared by several values counts once
    kinds: Mapping[str, int]
    #: on a GPU the memory allocated by torch's allocator. On CPUs the memory allocated by malloc in
    #: the process; without glibc's malloc, ``living``.
    allocated: int
    peak: int  # on a GPU the peak of allocated memory; on CPUs the peak of resident memory
    resident: int  # resident memory of the process on the host

    @property
    def living(self) -> int:
        """Bytes of all values of the worker."""
        return sum(self.kinds.values())


@dataclass(frozen=True, repr=False)
class SessionMemory(Printed):
    """The memory of a session's workers. Prints as a table."""

    #: by rank. With ``launcher="inline"`` the only worker is this process; in a dry session values
    #: have sizes, but no memory.
    ranks: Sequence[RankMemory]

    @property
    def living(self) -> int:
        """Bytes of the values of all workers."""
        return sum(memory.living for memory in self.ranks)

    @property
    def peak(self) -> int:
        """Largest peak over the workers."""
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
