"""``lazygt simulate``: time and memory of a script's step on a machine that may not exist."""

from __future__ import annotations

import io
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lazygt.cli.script import (
    AsJson,
    OnMachine,
    OnMesh,
    Plot,
    Script,
    ScriptRun,
    check_output,
    fail,
    finish,
    planned_on,
    run,
    run_script,
    show,
    show_json,
)
from lazygt.config import cache_setting
from lazygt.machine import machine_of
from lazygt.machine.find import requested
from lazygt.observe.timeline import Timeline, profile
from lazygt.session import Session
from lazygt.simulation import DRY, Prediction, check, predict
from lazygt.simulation.program import DryRun
from lazygt.simulation.suggest import UNCHANGED, Trial, run_trials, trials
from lazygt.sweeps import (
    Combination,
    ProgramFailed,
    Row,
    Sweep,
    SweepSetup,
    Window,
    combinations,
    is_knob,
    matching,
    parsed,
    run_combinations,
)
from lazygt.sweeps.running import sweep_title

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

    Args:
        settings: further settings.
        gpus, hosts, mesh, machine: the command's options.
    """
    if gpus is None and hosts is not None:
        fail(context, "--hosts says where GPUs are: give --gpus, too, such as --gpus 8xB200")
    try:
        mesh, machine = requested(gpus, hosts, mesh, machine)
    except ValueError as error:
        fail(context, f"--gpus {gpus}: {error}")
    settings = planned_on(context, settings, mesh, machine)
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
    as_json: AsJson = False,
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
    check_output(context, output)
    settings = on_gpus(context, DRY, gpus, hosts, mesh, machine)
    recording = DryRun()
    with UNCHANGED.applied() as overrides:
        script_run = run(context, script, True, settings, recording.on_session_opened)
    by_session: list[Prediction | None] = []
    for session, living in recording.observed:
        try:
            step = predict(session, session.machine, living, compiled=compiled and not checked)
            by_session.append(step)
        except ValueError as error:  # the session has run nothing
            by_session.append(None)
            if len(recording.observed) == 1 and not script_run.failed:
                fail(context, str(error))
    predictions = [prediction for prediction in by_session if prediction is not None]
    if suggest and predictions and not script_run.failed:
        longest = max(predictions, key=lambda prediction: prediction.step_seconds)
        changes = trials(longest.mesh, overrides.calls > 0, context.args)
        rerun = partial(_predict_changed, script, context.args, settings, compiled)
        with_suggestions = replace(longest, tries=lambda: run_trials(changes, rerun))
        _ = with_suggestions.suggestions  # computes them: they are printed only if they are cached
        predictions[predictions.index(longest)] = with_suggestions
    for prediction in predictions:
        if as_json:
            show_json(prediction.as_json())
        else:
            show(prediction)
    if output is not None and predictions:
        longest = max(predictions, key=lambda prediction: prediction.step_seconds)
        longest.save(output)
        typer.echo(f"timeline written to {output}; open it at https://ui.perfetto.dev")
    if checked and predictions and not script_run.failed:
        script_run = _check(context, script, settings.get("mesh"), by_session)
    finish(script_run)


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
    recording = DryRun()
    with trial.applied(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        script_run = run_script(script, args, True, changed, recording.on_session_opened)
    if script_run.failed or not recording.observed:
        raise ValueError(f"with {trial.what} the script fails")
    return recording.longest(compiled)


def _check(
    context: typer.Context,
    script: Path,
    mesh: str | None,
    by_session: Sequence[Prediction | None],
) -> ScriptRun:
    """Run the script for real, and print each session's prediction beside the measured step."""
    devices = {prediction.machine.device for prediction in by_session if prediction is not None}
    if "cuda" in devices and not torch.cuda.is_available():
        fail(context, "--check runs the script on this machine, which has no CUDA device")
    settings = {"compile": "off", **({} if mesh is None else {"mesh": mesh})}
    timelines: list[Timeline] = []

    def on_session_opened(session: Session) -> None:
        timelines.append(Timeline())
        profiles.enter_context(profile(session, timelines[-1]))

    with ExitStack() as profiles:
        script_run = run(context, script, True, settings, on_session_opened=on_session_opened)
    for prediction, timeline in zip(by_session, timelines, strict=False):
        if prediction is None:
            continue
        try:
            comparison = check(prediction, timeline.timed)
        except ValueError as error:
            fail(context, str(error))
        typer.echo(f"\n{comparison}")
    return script_run


# -- ``lazygt sweep``: a script with every combination of knobs, measured or simulated -------------


def sweep(
    context: typer.Context,
    script: Script,
    gpus: OnGpus = None,
    hosts: OnHosts = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help="mesh of workers, such as data=2, in place of the script's; with --gpus or "
            "--machine the workers need not exist",
        ),
    ] = None,
    machine: OnMachine = None,
    target: Annotated[
        float, typer.Option(help="required gain over the baseline, in per cent")
    ] = 15.0,
    baseline: Annotated[
        str | None,
        typer.Option(help="combination to compare with, such as wrap=auto,reshard=1 (the first)"),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GB that a rank may use (90 % of its memory)")
    ] = None,
    warmup: Annotated[int, typer.Option(min=1, help="warm-up steps, not measured")] = 5,
    measured: Annotated[int, typer.Option(min=1, help="measured steps")] = 20,
    profiled: Annotated[
        int,
        typer.Option(min=1, help="steps timed op by op after the measured ones, for the shares"),
    ] = 5,
    csv: Annotated[Path | None, typer.Option("--csv", help="write the rows into this file")] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Run an unchanged script with every combination of knobs, and report the best.

    Knobs follow the script: wrap=auto,block,one bucket_cap_mb=25,100 reshard=1,0
    limit_all_gathers=1,0 override arguments of its calls of lazygt.fully_shard; any other
    KNOB=A,B is passed to it as --KNOB A. The script's own arguments come after the knobs.

    Steps are measured on real workers. With --gpus or --machine nothing is computed, and a step is
    simulated.
    """
    check_output(context, csv)
    check_output(context, plot, plot=True)
    if not script.is_file():
        fail(context, f"there is no file {script}")
    knob_args = list(takewhile(is_knob, context.args))
    try:
        combos = combinations(parsed(knob_args))
        baseline_index = 0 if baseline is None else matching(combos, baseline)
    except ValueError as error:
        fail(context, str(error))
    simulated = gpus is not None or machine is not None
    settings = on_gpus(context, {}, gpus, hosts, mesh, machine)
    if not simulated:
        settings = {key: settings[key] for key in ("mesh",) if key in settings}
    capacity = None if memory is None else memory * 1e9
    setup = SweepSetup(settings, simulated, capacity, Window(warmup, measured, profiled))
    rows, interrupted = _rows(script, context.args[len(knob_args) :], combos, setup)
    if rows:
        title = sweep_title(script.name, len(combos), setup)
        result = Sweep(title, rows, baseline_index if baseline_index < len(rows) else 0, target)
        _print(context, result, csv, plot, as_json)
    if interrupted:
        typer.echo(f"interrupted after {len(rows)} of {len(combos)} combinations", err=True)
    if interrupted or not any(row.done for row in rows):
        raise typer.Exit(1)


def _print(
    context: typer.Context, result: Sweep, csv: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Print a sweep, and write its files; ends the command if one can't be written."""
    if as_json:
        show_json(result.as_json(), indent=2)
    else:
        show(result)
    try:
        if csv is not None:
            result.save_csv(csv)
        if plot is not None:
            result.plot(plot)
    except (OSError, ValueError) as error:
        fail(context, str(error))


# -- running ---------------------------------------------------------------------------------------


def _rows(
    script: Path, arguments: Sequence[str], combos: Sequence[Combination], setup: SweepSetup
) -> tuple[list[Row], bool]:
    """Run all combinations; return the finished rows, and whether the user interrupted."""
    rows: list[Row] = []
    with _progress() as bar, _recorded_interrupts() as interrupts:
        task = bar.add_task("", total=len(combos) * setup.ticks, what="")
        setup = replace(setup, tick=lambda: bar.advance(task))
        run = _Running(script, arguments, interrupts, lambda text: bar.update(task, what=text))
        try:
            for row in run_combinations(combos, run, setup):
                rows.append(row)
                bar.update(task, completed=len(rows) * setup.ticks)
        except KeyboardInterrupt:
            return rows, True
    return rows, False


def _progress() -> Progress:
    """Return a progress bar of steps on the terminal's error stream; none without a terminal."""
    return Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
        console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty(),
        redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip


@dataclass
class _Running:
    """Callable that runs the script for a combination; its output is discarded.

    If the script fails, the last line of its output is the error.
    """

    script: Path
    arguments: Sequence[str]
    interrupts: list[int]
    show: Callable[[str], object]

    def __call__(
        self,
        combo: Combination,
        settings: Mapping[str, Any],
        on_session_opened: Callable[[Session], object],
    ) -> None:
        self.show(str(combo))
        passed = [text for knob, value in combo.passed.items() for text in (f"--{knob}", value)]
        with tempfile.TemporaryFile("w+") as output:
            with redirect_stdout(output), redirect_stderr(output):
                script_run = run_script(
                    self.script, [*self.arguments, *passed], True, settings, on_session_opened
                )
            if self.interrupts:  # the script may have caught KeyboardInterrupt
                raise KeyboardInterrupt
            if script_run.failed:
                raise ProgramFailed(_last_line(output))


def _last_line(output: IO[str]) -> str:
    """Return the last line of a script's output, or a substitute."""
    output.seek(0)
    lines = [line.strip() for line in output.read().splitlines() if line.strip()]
    return lines[-1] if lines else "the script failed, and says not why"


@contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Context that records signals of Ctrl-C, even if the script catches KeyboardInterrupt."""
    signals: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, record)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, previous)
