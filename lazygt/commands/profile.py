"""``lazygt profile``: a timeline of a script."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from lazygt.commands.base import Inline, Script, check_output, fail, finish, run
from lazygt.timeline import Timeline

_SLOWEST = 5


def profile(
    context: typer.Context,
    script: Script,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the file to write")
    ] = Path("trace.json"),
    inline: Inline = False,
) -> None:  # fmt: skip
    """Run an unchanged script and write a timeline in Chrome's trace format.

    Workers run plans node by node for it, so it shows where time goes, not how fast it is.
    """
    check_output(context, output)
    timeline = Timeline()
    with ExitStack() as profiles:
        ran = run(
            context,
            script,
            inline,
            opened=lambda session: profiles.enter_context(session.profile(timeline)),
        )
    try:
        timeline.save(output)
    except OSError as error:
        fail(context, str(error))
    typer.echo(f"{timeline.runs} runs written to {output}; open it at https://ui.perfetto.dev")
    for line, steps, seconds in timeline.by_line()[:_SLOWEST]:
        typer.echo(f"  {seconds * 1e3:10.3f} ms  {steps:6} steps  {line}")
    finish(ran)
