"""The command line.

A new command is a function in a file here, and a name in this one: in ``PLAIN``, or in
``WITH_SCRIPT`` where it runs a script (see ``script.run``). Several that belong together are a
``typer.Typer`` of their own.
"""

from __future__ import annotations

import typer

from lazygt.cli.dump import diff, dump, viz
from lazygt.cli.plan_serving import comm, plan_serving
from lazygt.cli.pool import app as pool
from lazygt.cli.pool import keys, serve, worker
from lazygt.cli.script import SETTINGS, ScriptCommand
from lazygt.cli.setup import build_native, calibrate, doctor
from lazygt.cli.show import explain, log, profile, why
from lazygt.cli.simulate import simulate, sweep
from lazygt.observe.top.command import top
from lazygt.record.context import current_session

PLAIN = (
    build_native, calibrate, comm, diff, doctor, log, plan_serving, serve, top, worker,
)  # fmt: skip
WITH_SCRIPT = (dump, explain, profile, simulate, sweep, viz, why)

app = typer.Typer(add_completion=False, no_args_is_help=True)
for _plain in PLAIN:
    app.command()(_plain)
for _with_script in WITH_SCRIPT:
    app.command(cls=ScriptCommand, context_settings=SETTINGS)(_with_script)
app.add_typer(keys, name="keys")
app.add_typer(pool, name="pool")


@app.callback()
def _about() -> None:
    """Inspect lazygt, and the record of a script."""


def main() -> None:
    """Run the console script."""
    if current_session() is not None:
        raise RuntimeError("the lazygt command opens sessions of its own")
    app()
