"""Objects that print as tables: by rich in a terminal, elsewhere as plain text."""

from __future__ import annotations

import io

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_MAX_WIDTH = 1_000
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
        table.add_column(name.removeprefix(">"), justify="right" if right else "left")
    return table
