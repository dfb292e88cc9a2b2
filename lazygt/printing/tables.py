"""Objects that print as tables: by rich in a terminal, elsewhere as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

Row = TypeVar("Row", bound=tuple[Any, ...])
_MAX_WIDTH = 1_000
#: Minimum width of a column of texts.
_MIN_TEXT_WIDTH = 20
_HTML = '<pre style="line-height:normal;font-family:monospace">{code}</pre>'


class Printed:
    """Mixin that prints the ``__rich_console__`` of a class everywhere: ``str``, ``repr``, HTML."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        raise NotImplementedError(f"{type(self).__name__} does not define __rich_console__")

    def __str__(self) -> str:
        console = Console(
            file=io.StringIO(), width=_MAX_WIDTH, color_system=None, legacy_windows=False
        )
        with console.capture() as captured:
            console.print(self)
        return "\n".join(row.rstrip() for row in captured.get().rstrip().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), width=_MAX_WIDTH, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format=_HTML)


def plain_table(*columns: str) -> Table:
    """Build a table without lines; columns with names that begin with ``>`` are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"), no_wrap=right, overflow="fold",
            justify="right" if right else "left",
        )  # fmt: skip
    return table


class PlainTable(Printed):
    """Table without lines that fits the width in which it is printed; its texts are wrapped.

    Args:
        columns: names of the columns; those that begin with ``>`` are right-aligned.
        rows: cells of the first rows; cells are no markup.
        spare: optional columns, dropped one after another if the width is too small.
        truncated: column with texts that are truncated instead of wrapped.
        styles: text of a cell -> its style.
    """

    def __init__(
        self,
        *columns: str,
        rows: Iterable[Iterable[object]] = (),
        spare: Sequence[str] = (),
        truncated: str = "",
        styles: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.columns, self.spare, self.truncated = columns, spare, truncated
        self.styles = styles
        self.rows: list[tuple[str, ...]] = []
        for row in rows:
            self.add_row(*row)

    def add_row(self, *cells: object) -> None:
        """Add a row."""
        self.rows.append(tuple(map(str, cells)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.fitting(options.max_width)

    def fitting(self, width: int) -> Table:
        """Build the table for a terminal of ``width`` characters."""
        columns = list(range(len(self.columns)))
        droppable = list(self.spare)
        while droppable and sum(map(self._min_width, columns)) > width:
            name = droppable.pop(0)
            columns = [column for column in columns if self.columns[column] != name]
        table = plain_table(*(self.columns[column] for column in columns))
        used = sum(self._width(column) for column in columns if not self._is_truncated(column))
        text_width = max(width - used, _MIN_TEXT_WIDTH)
        for row in self.rows:
            cells = (
                truncated(row[column], text_width) if self._is_truncated(column) else row[column]
                for column in columns
            )
            table.add_row(*(Text(cell, self.styles.get(cell, "")) for cell in cells))
        return table

    def _is_truncated(self, column: int) -> bool:
        """Return whether the texts of a column are truncated instead of wrapped."""
        return self.columns[column] == self.truncated

    def _width(self, column: int) -> int:
        """Return the width of a column, with the space before the next one."""
        return 2 + max(
            len(cell) for cell in (self.columns[column], *(row[column] for row in self.rows))
        )

    def _min_width(self, column: int) -> int:
        """Return the minimum width of a column, with its texts wrapped or truncated."""
        width = self._width(column)
        return width if self.columns[column].startswith(">") else min(width, _MIN_TEXT_WIDTH)


def truncated(text: str, length: int) -> str:
    """Truncate a text that is longer than ``length`` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def heading(text: str) -> Text:
    """Return the heading of a section of a report."""
    return Text(f"\n{text}", style="bold")


def section(title: str, table: PlainTable) -> Iterator[RenderableType]:
    """Yield a heading and a table; nothing without rows."""
    if table.rows:
        yield heading(title)
        yield table


def remarks(lines: Iterable[object]) -> Iterator[RenderableType]:
    """Yield the remarks of a report, with their heading; nothing without any."""
    texts = [Text(f"- {line}") for line in lines]
    if texts:
        yield from (heading("to mind"), *texts)


# -- rows ------------------------------------------------------------------------------------------


def summed(rows: Iterable[Row], *fields: str) -> list[Row]:
    """Merge named tuples that are equal in all other fields, and sum these fields.

    The rows are in the order of the first of each.
    """
    totals: dict[Any, Any] = {}
    zeros = dict.fromkeys(fields, 0)
    row: Any
    for row in rows:
        key = row._replace(**zeros)
        if key in totals:
            row = row._make(
                old + new if name in fields else new
                for name, old, new in zip(row._fields, totals[key], row, strict=True)
            )
        totals[key] = row
    return list(totals.values())
