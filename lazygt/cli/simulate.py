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

# -- ``--gpus 8xB200``, ``--hosts``, ``--mesh``, ``--machine``: ranks that may not exist -----------

OnGpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="so many of a kind, such as 8xB200: that machine, and a mesh of 8 ranks (without "
        "--mesh data=8)",
    ),
]
OnHosts = Annotated[
    int | None,
    typer.Option("--hosts", help="on which the GPUs are, as many on each", min=1),
]


def on_gpus(
    context: typer.Context,
    settings: Mapping[str, Any],
    gpus: str | None,
    hosts: int | None,
    mesh: str | None,
    machine: str | None,
) -> Mapping[str, Any]:
    """Return the settings of a dry session on the given ranks, with the machine's device.

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


# -- ``lazygt simulate``: time and memory of a script's step on a machine that may not exist -------


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
    as_json: Annotated[bool, typer.Option("--json", help="the figures, for scripts")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="fused groups as one kernel each")
    ] = True,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="then simulate changes, and say which help most")
    ] = False,
    checked: Annotated[
        bool, typer.Option("--check", help="then run it here, not compiled, and compare")
    ] = False,
) -> None:
    """Record an unchanged script without computing anything, and predict a step.

    A step is the part that the script repeats most. On a mesh, which needs none of its workers,
    ranks with the same plan are simulated once. All is estimated from the figures of a machine
    file: kernels by the law of their family, collectives by kind, size and ranks, overlapped as the
    plans have them.
    """
    if output is not None:
        check_output(context, output)
    settings = on_gpus(context, DRY, gpus, hosts, mesh, machine)
    watched: list[tuple[Session, Living]] = []
    with AS_IT_IS.made() as forced:
        ran = run(
            context, script, True, settings,
            opened=lambda session: watched.append((session, Living(session))),
        )  # fmt: skip
    by_session: list[Prediction | None] = []
    for session, living in watched:
        try:
            told = predict(session, session.machine, living, compiled=compiled and not checked)
            by_session.append(told)
        except ValueError as error:  # it has run nothing
            by_session.append(None)
            if len(watched) == 1 and not ran.failed:
                fail(context, str(error))
    predictions = [prediction for prediction in by_session if prediction is not None]
    if suggest and predictions and not ran.failed:
        longest = max(predictions, key=lambda prediction: prediction.step_seconds)
        others = trials(longest.mesh, forced.calls > 0, context.args)
        again = partial(_again, script, context.args, settings, compiled)
        whole = replace(longest, tries=lambda: tried(others, again))
        _ = whole.suggestions  # they print once they are there
        predictions[predictions.index(longest)] = whole
    for prediction in predictions:
        _show(prediction, as_json)
    if output is not None and predictions:
        longest = max(predictions, key=lambda prediction: prediction.step_seconds)
        longest.save(output)
        typer.echo(f"timeline written to {output}; open it at https://ui.perfetto.dev")
    if checked and predictions and not ran.failed:
        ran = _check(context, script, settings.get("mesh"), by_session)
    finish(ran)


def _again(
    script: Path,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    compiled: bool,
    trial: Trial,
) -> Prediction:
    """Return the prediction of a changed script; its output is dropped.

    Raises:
        ValueError: it fails then, or runs nothing.
    """
    changed = settings if trial.mesh is None else {**settings, "mesh": str(trial.mesh)}
    args = arguments if trial.arguments is None else trial.arguments
    watched: list[tuple[Session, Living]] = []
    with trial.made(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ran = run_script(
            script, args, True, changed,
            opened=lambda session: watched.append((session, Living(session))),
        )  # fmt: skip
    if ran.failed or not watched:
        raise ValueError(f"with {trial.what} the script fails")
    told = [predict(session, session.machine, seen, compiled=compiled) for session, seen in watched]
    return max(told, key=lambda prediction: prediction.step_seconds)


def _check(
    context: typer.Context,
    script: Path,
    mesh: str | None,
    by_session: Sequence[Prediction | None],
) -> Ran:
    """Run the script for real, and show each session's prediction beside the measured step."""
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
            told = check(prediction, timeline.timed)
        except ValueError as error:
            fail(context, str(error))
        typer.echo(f"\n{told}")
    return ran


def _show(prediction: Prediction, as_json: bool) -> None:
    """Print in the terminal's width and colours; all, as plain text, into a file or pipe."""
    if as_json:
        typer.echo(json.dumps(prediction.as_json()))
    elif sys.stdout.isatty():
        Console().print(prediction)
    else:
        typer.echo(str(prediction))
