"""The command line; its commands are in ``lazygt.commands``."""

from __future__ import annotations

import typer

from lazygt.commands import PLAIN, WITH_SCRIPT
from lazygt.commands.base import SETTINGS, ScriptCommand
from lazygt.context import current_session

app = typer.Typer(add_completion=False, no_args_is_help=True)
for _plain in PLAIN:
    app.command()(_plain)
for _with_script in WITH_SCRIPT:
    app.command(cls=ScriptCommand, context_settings=SETTINGS)(_with_script)


@app.callback()
def _about() -> None:
    """Look into lazygt, and into what a script records."""


def main() -> None:
    """The console script."""
    if current_session() is not None:
        raise RuntimeError("the lazygt command opens sessions of its own")
    app()


if __name__ == "__main__":
    main()
