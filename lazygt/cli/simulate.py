"""``lazygt simulate``: time and memory of a script's step on a machine that may not exist."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from lazygt.cli.script import (
    OnMachine,
    OnMesh,
    Ran,
    Script,
    check_output,
    fail,
    finish,
    on_machine,
    on_mesh,
    run,
    run_script,
)
from lazygt.config import cache_setting
from lazygt.machine import Gpus, machine_of
from lazygt.observe.timeline import Timeline, profile
from lazygt.session import Session
from lazygt.simulation import DRY, Living, Prediction, check, predict
from lazygt.simulation.suggest import AS_IT_IS, Trial, trials, tried

# -- options of a simulated machine ----------------------------------------------------------------

OnGpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="number and kind of GPUs, such as 8xB200: sets the machine and a mesh of 8 ranks "
        "(data=8 without --mesh)",
    ),
]
OnHosts = Annotated[
    int | None,
    typer.Option("--hosts", help="number of hosts, with equally many GPUs each", min=1),
]


def on_gpus(
    context: typer.Context,
    settings: Mapping[str, Any],
    gpus: str | None,
    hosts: int | None,
    mesh: str | None,
    machine: str | None,
) -> Mapping[str, Any]:
    """Return the settings of a dry session on the requested ranks, with the machine's device.

    Ends the command if the options are invalid, or contradict each other.
    """
    if gpus is None and hosts is not None:
        fail(context, "--hosts says where GPUs are: give --gpus, too, such as --gpus 8xB200")
    if gpus is not None:
        try:
            ranks = Gpus.parse(gpus, hosts, machine)
            mesh, machine = ranks.mesh(mesh), ranks.machine
        except ValueError as error:
            fail(context, f"--gpus {gpus}: {error}")
    settings = on_machine(context, on_mesh(context, settings, mesh), machine)
    if machine is None:
        return settings
    return {**settings, "device": machine_of(machine, cache_setting()).device}


# -- ``lazygt simulate`` ---------------------------------------------------------------------------


def simulate(
    context: typer.Context,
    script: Script,
    gpus: OnGpus = None,
    hosts: OnHosts = None,
    mesh: OnMesh = None,
    machine: OnMachine = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write a timeline (Chrome's trace format)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="simulate each fused group as one kernel")
    ] = True,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="also simulate changes, and list the most useful ones")
    ] = False,
    checked: Annotated[
        bool, typer.Option("--check", help="also run the script here, not compiled, and compare")
    ] = False,
) -> None:
    """Record an unchanged script without computing anything, and predict a step.

    A step is the part that the script repeats most. A mesh needs none of its workers; ranks with
    the same plan are simulated once. All figures are estimated from a machine file: kernels by the
    cost model of their family, collectives by kind, size and ranks, overlapped as in the plans.
    """
    if output is not None:
        check_output(context, output)
    settings = on_gpus(context, DRY, gpus, hosts, mesh, machine)
    observed: list[tuple[Session, Living]] = []
    with AS_IT_IS.made() as overrides:
        ran = run(
            context, script, True, settings,
            opened=lambda session: observed.append((session, Living(session))),
        )  # fmt: skip
    by_session: list[Prediction | None] = []
    for session, living in observed:
        try:
            prediction_of_session = predict(
                session, session.machine, living, compiled=compiled and not checked
            )
            by_session.append(prediction_of_session)
        except ValueError as error:  # the session has run nothing
            by_session.append(None)
            if len(observed) == 1 and not ran.failed:
                fail(context, str(error))
    predictions = [prediction for prediction in by_session if prediction is not None]
    if suggest and predictions and not ran.failed:
        longest = max(predictions, key=lambda prediction: prediction.step_seconds)
        changes = trials(longest.mesh, overrides.calls > 0, context.args)
        rerun = partial(_predict_changed, script, context.args, settings, compiled)
        with_suggestions = replace(longest, tries=lambda: tried(changes, rerun))
        _ = (
            with_suggestions.suggestions
        )  # computes them: ``_show`` prints suggestions only if they are cached
        predictions[predictions.index(longest)] = with_suggestions
    for prediction in predictions:
        _show(prediction, as_json)
    if output is not None and predictions:
        longest = max(predictions, key=lambda prediction: prediction.step_seconds)
        longest.save(output)
        typer.echo(f"timeline written to {output}; open it at https://ui.perfetto.dev")
    if checked and predictions and not ran.failed:
        ran = _check(context, script, settings.get("mesh"), by_session)
    finish(ran)


def _predict_changed(
    script: Path,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    compiled: bool,
    trial: Trial,
) -> Prediction:
    """Predict a step of the script with a change; the script's output is discarded.

    Raises:
        ValueError: the changed script fails, or runs nothing.
    """
    changed = settings if trial.mesh is None else {**settings, "mesh": str(trial.mesh)}
    args = arguments if trial.arguments is None else trial.arguments
    observed: list[tuple[Session, Living]] = []
    with trial.made(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ran = run_script(
            script, args, True, changed,
            opened=lambda session: observed.append((session, Living(session))),
        )  # fmt: skip
    if ran.failed or not observed:
        raise ValueError(f"with {trial.what} the script fails")
    predictions = [
        predict(session, session.machine, living, compiled=compiled) for session, living in observed
    ]
    return max(predictions, key=lambda prediction: prediction.step_seconds)


def _check(
    context: typer.Context,
    script: Path,
    mesh: str | None,
    by_session: Sequence[Prediction | None],
) -> Ran:
    """Run the script for real, and print each session's prediction beside the measured step."""
    devices = {prediction.machine.device for prediction in by_session if prediction is not None}
    if "cuda" in devices and not torch.cuda.is_available():
        fail(context, "--check runs the script on this machine, which has no CUDA device")
    settings = {"compile": "off", **({} if mesh is None else {"mesh": mesh})}
    timelines: list[Timeline] = []

    def opened(session: Session) -> None:
        timelines.append(Timeline())
        profiles.enter_context(profile(session, timelines[-1]))

    with ExitStack() as profiles:
        ran = run(context, script, True, settings, opened=opened)
    for prediction, timeline in zip(by_session, timelines, strict=False):
        if prediction is None:
            continue
        try:
            comparison = check(prediction, timeline.timed)
        except ValueError as error:
            fail(context, str(error))
        typer.echo(f"\n{comparison}")
    return ran


def _show(prediction: Prediction, as_json: bool) -> None:
    """Print a prediction: formatted in a terminal, in full as plain text into a file or pipe."""
    if as_json:
        typer.echo(json.dumps(prediction.as_json()))
    elif sys.stdout.isatty():
        Console().print(prediction)
    else:
        typer.echo(str(prediction))
