"""``lazygt simulate``: what a step of a script takes on a machine that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

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
from lazygt.graph.text import amount, duration
from lazygt.observe.report import shown
from lazygt.session import Session
from lazygt.simulation import DRY, Living, Prediction, predict

_ROWS = 8


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
    if as_json:
        typer.echo(json.dumps(prediction.as_json()))
        return
    for line in _sentences(prediction):
        typer.echo(line)
    console = Console()
    if not console.is_terminal:  # whole lines into a file or pipe
        console.width = 140
    console.print(_lines(prediction))
    if prediction.collectives:
        console.print(_collectives(prediction))


def _sentences(prediction: Prediction) -> list[str]:
    mesh, machine = prediction.mesh, prediction.machine
    where = f"{machine}, one rank" if mesh is None else f"{mesh} of {machine}"
    exposed = sum(row.exposed for row in prediction.collectives)
    hidden = sum(row.hidden for row in prediction.collectives)
    bound = "recording in the client" if prediction.host_bound else "the ranks"
    peak, capacity = prediction.peak_bytes, machine.memory.capacity
    fits = "" if peak <= capacity else f": more than the {amount(int(capacity), 'B')} there are"
    return [
        f"A step on {where}: {duration(prediction.step_seconds)} (estimated), bound by {bound}",
        f"  ranks {duration(prediction.computing)}, recording {duration(prediction.recording)}"
        f"{', one after the other: each step reads a value' if prediction.waits else ''}",
        f"  {amount(prediction.flops, 'flop')} on all ranks, {prediction.mfu:.1%} of their peak in "
        f"{prediction.dtype}",
        f"  peak {amount(peak, 'B')} a rank at {shown(prediction.peak_line)}{fits}",
        *([f"  collectives: {duration(exposed)} exposed, {duration(hidden)} hidden"]
          if prediction.collectives else []),
        *([] if mesh is None or prediction.collectives else [
            "  nothing is exchanged: every rank does all that the program says of its values"
        ]),
        *([] if prediction.looped else [
            "  no step is repeated: this is the last one, up to its backward pass"
        ]),
    ]  # fmt: skip


def _lines(prediction: Prediction) -> Table:
    table = Table(
        "computed at", title="the dearest lines of the busiest rank", title_justify="left"
    )
    table.add_column("time", justify="right")
    for line, seconds in prediction.by_line()[:_ROWS]:
        table.add_row(shown(line), duration(seconds))
    return table


def _collectives(prediction: Prediction) -> Table:
    table = Table("axis", "collective", "line", title="collectives", title_justify="left")
    for column in ("count", "payload", "time", "exposed"):
        table.add_column(column, justify="right")
    for row in prediction.collectives[:_ROWS]:
        table.add_row(row.axis, row.kind, shown(row.line), str(row.times),
                      amount(row.nbytes, "B"), duration(row.seconds),
                      duration(row.exposed))  # fmt: skip
    return table
