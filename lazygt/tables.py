"""Objects that print as tables: by rich in a terminal, as plain text elsewhere."""

from __future__ import annotations

import io

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_WIDEST = 1_000
_HTML = '<pre style="line-height:normal;font-family:monospace">{code}</pre>'


class Printed:
    """Has ``__rich_console__``, and prints so everywhere."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        raise NotImplementedError(f"{type(self).__name__} says not how it prints")

    def __str__(self) -> str:
        console = Console(
            file=io.StringIO(), width=_WIDEST, color_system=None, legacy_windows=False
        )
        with console.capture() as captured:
            console.print(self)
        return "\n".join(row.rstrip() for row in captured.get().rstrip().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDEST, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format=_HTML)


def plain_table(*columns: str) -> Table:
    """Build a table without lines; names that begin with ``>`` mean aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if right else "left")
    return table
