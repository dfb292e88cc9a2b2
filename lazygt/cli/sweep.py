"""``lazygt sweep``: a script with every combination of knobs, measured or simulated."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lazygt.cli.script import OnMachine, Script, check_output, fail, run_script
from lazygt.cli.simulate import OnGpus, OnHosts, on_gpus
from lazygt.session import Session
from lazygt.sweeps import (
    Combination,
    Ground,
    ProgramFailed,
    Row,
    Sweep,
    Window,
    combinations,
    is_knob,
    matching,
    parsed,
    rows_of,
)
from lazygt.sweeps.running import sweep_title

_SUFFIXES = (".png", ".svg")


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
    plot: Annotated[
        Path | None, typer.Option(help="draw tokens/s against memory into this .png or .svg")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:
    """Run an unchanged script with every combination of knobs, and report the best.

    Knobs follow the script: wrap=auto,block,one bucket_cap_mb=25,100 reshard=1,0
    limit_all_gathers=1,0 override arguments of its calls of lazygt.fully_shard; any other
    KNOB=A,B is passed to it as --KNOB A. The script's own arguments come after the knobs.

    Steps are measured on real workers. With --gpus or --machine nothing is computed, and a step is
    simulated.
    """
    for path in filter(None, (csv, plot)):
        check_output(context, path)
    if plot is not None:
        _check_plot(context, plot)
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
    ground = Ground(settings, simulated, capacity, Window(warmup, measured, profiled))
    rows, interrupted = _rows(script, context.args[len(knob_args) :], combos, ground)
    if rows:
        title = sweep_title(script.name, len(combos), ground)
        result = Sweep(title, rows, baseline_index if baseline_index < len(rows) else 0, target)
        _print(context, result, csv, plot, as_json)
    if interrupted:
        typer.echo(f"interrupted after {len(rows)} of {len(combos)} combinations", err=True)
    if interrupted or not any(row.done for row in rows):
        raise typer.Exit(1)


def _check_plot(context: typer.Context, plot: Path) -> None:
    if plot.suffix not in _SUFFIXES:
        fail(context, f"{plot.name!r} must end in one of {', '.join(_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        fail(context, "--plot needs matplotlib, which is not installed: pip install matplotlib")


def _print(
    context: typer.Context, result: Sweep, csv: Path | None, plot: Path | None, as_json: bool
) -> None:
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    elif sys.stdout.isatty():
        Console().print(result)
    else:
        typer.echo(str(result))
    try:
        if csv is not None:
            result.save_csv(csv)
        if plot is not None:
            result.plot(plot)
    except (OSError, ValueError) as error:
        fail(context, str(error))


# -- running ---------------------------------------------------------------------------------------


def _rows(
    script: Path, arguments: Sequence[str], combos: Sequence[Combination], ground: Ground
) -> tuple[list[Row], bool]:
    """Run all combinations; return the finished rows, and whether the user interrupted."""
    rows: list[Row] = []
    with _progress() as bar, _recorded_interrupts() as interrupts:
        task = bar.add_task("", total=len(combos) * ground.ticks, what="")
        ground = replace(ground, tick=lambda: bar.advance(task))
        run = _Running(script, arguments, interrupts, lambda text: bar.update(task, what=text))
        try:
            for row in rows_of(combos, run, ground):
                rows.append(row)
                bar.update(task, completed=len(rows) * ground.ticks)
        except KeyboardInterrupt:
            return rows, True
    return rows, False


def _progress() -> Progress:
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
        opened: Callable[[Session], object],
    ) -> None:
        self.show(str(combo))
        passed = [text for knob, value in combo.passed.items() for text in (f"--{knob}", value)]
        with tempfile.TemporaryFile("w+") as output:
            with redirect_stdout(output), redirect_stderr(output):
                ran = run_script(self.script, [*self.arguments, *passed], True, settings, opened)
            if self.interrupts:  # the script may have caught KeyboardInterrupt
                raise KeyboardInterrupt
            if ran.failed:
                raise ProgramFailed(_last_line(output))


def _last_line(output: IO[str]) -> str:
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
