"""``lazygt simulate``: what a step of a script takes on a machine that need not be there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lazygt.cli.script import (
    OnMachine,
    OnMesh,
    Script,
    check_output,
    fail,
    finish,
    on_machine,
    on_mesh,
    run,
)
from lazygt.session import Session
from lazygt.simulation import DRY, Living, Prediction, predict


def simulate(
    context: typer.Context,
    script: Script,
    mesh: OnMesh = None,
    machine: OnMachine = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write a timeline (Chrome's trace format)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the figures, for scripts")] = False,
) -> None:
    """Record an unchanged script without computing anything, and say what a step would take.

    A step is what the script repeats most. On a mesh, which needs none of its workers, ranks with
    the same plan are simulated once. All is estimated from the figures of a machine file: kernels
    by the law of their family, collectives by kind, size and ranks, overlapped as the plans have
    them.
    """
    if output is not None:
        check_output(context, output)
    settings = on_machine(context, on_mesh(context, DRY, mesh), machine)
    watched: list[tuple[Session, Living]] = []
    ran = run(
        context, script, True, settings,
        opened=lambda session: watched.append((session, Living(session))),
    )  # fmt: skip
    predictions = []
    for session, living in watched:
        try:
            predictions.append(predict(session, session.machine, living))
        except ValueError as error:
            if len(watched) == 1 and not ran.failed:
                fail(context, str(error))
    for prediction in predictions:
        _show(prediction, as_json)
    if output is not None and predictions:
        longest = max(predictions, key=lambda prediction: prediction.step_seconds)
        longest.save(output)
        typer.echo(f"timeline written to {output}; open it at https://ui.perfetto.dev")
    finish(ran)


def _show(prediction: Prediction, as_json: bool) -> None:
    """In the terminal's width and colours; everything, as plain text, into a file or pipe."""
    if as_json:
        typer.echo(json.dumps(prediction.as_json()))
    elif sys.stdout.isatty():
        Console().print(prediction)
    else:
        typer.echo(str(prediction))
