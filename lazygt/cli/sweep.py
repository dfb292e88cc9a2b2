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
            help="run on this mesh of workers, such as data=2, whatever the script says; with "
            "--gpus or --machine they need not be there",
        ),
    ] = None,
    machine: OnMachine = None,
    target: Annotated[
        float, typer.Option(help="per cent by which the best has to be better than the baseline")
    ] = 15.0,
    baseline: Annotated[
        str | None,
        typer.Option(help="what others are compared with, such as wrap=auto,reshard=1 (the first)"),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GB that a rank may use (90 % of those that there are)")
    ] = None,
    warmup: Annotated[int, typer.Option(min=1, help="steps before those that are measured")] = 5,
    measured: Annotated[int, typer.Option(min=1, help="steps that are measured")] = 20,
    profiled: Annotated[
        int, typer.Option(min=1, help="steps behind them that are timed op by op, for the shares")
    ] = 5,
    csv: Annotated[Path | None, typer.Option("--csv", help="write the rows into this file")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw tokens/s against memory into this .png or .svg")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the rows, for scripts")] = False,
) -> None:
    """Run an unchanged script with every combination of knobs, and say which is best.

    Knobs follow the script: wrap=auto,block,one bucket_cap_mb=25,100 reshard=1,0
    limit_all_gathers=1,0 are forced upon its calls of lazygt.fully_shard; any other KNOB=A,B is
    given to it as --KNOB A. Its own arguments come after them.

    Measured are steps on workers that are there. With --gpus or --machine nothing is computed, and
    a step is simulated.
    """
    for path in filter(None, (csv, plot)):
        check_output(context, path)
    if plot is not None:
        _check_plot(context, plot)
    if not script.is_file():
        fail(context, f"there is no file {script}")
    given = list(takewhile(is_knob, context.args))
    try:
        combos = combinations(parsed(given))
        first = 0 if baseline is None else matching(combos, baseline)
    except ValueError as error:
        fail(context, str(error))
    simulated = gpus is not None or machine is not None
    settings = on_gpus(context, {}, gpus, hosts, mesh, machine)
    if not simulated:
        settings = {key: settings[key] for key in ("mesh",) if key in settings}
    room = None if memory is None else memory * 1e9
    ground = Ground(settings, simulated, room, Window(warmup, measured, profiled))
    rows, interrupted = _rows(script, context.args[len(given) :], combos, ground)
    if rows:
        title = sweep_title(script.name, len(combos), ground)
        told = Sweep(title, rows, first if first < len(rows) else 0, target)
        _tell(context, told, csv, plot, as_json)
    if interrupted:
        typer.echo(f"interrupted after {len(rows)} of {len(combos)} combinations", err=True)
    if interrupted or not any(row.done for row in rows):
        raise typer.Exit(1)


def _check_plot(context: typer.Context, plot: Path) -> None:
    if plot.suffix not in _SUFFIXES:
        fail(context, f"{plot.name!r} must end in one of {', '.join(_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        fail(context, "--plot needs matplotlib, which is not installed: pip install matplotlib")


def _tell(
    context: typer.Context, told: Sweep, csv: Path | None, plot: Path | None, as_json: bool
) -> None:
    if as_json:
        typer.echo(json.dumps(told.as_json(), indent=2))
    elif sys.stdout.isatty():
        Console().print(told)
    else:
        typer.echo(str(told))
    try:
        if csv is not None:
            told.save_csv(csv)
        if plot is not None:
            told.plot(plot)
    except (OSError, ValueError) as error:
        fail(context, str(error))


# -- running ---------------------------------------------------------------------------------------


def _rows(
    script: Path, arguments: Sequence[str], combos: Sequence[Combination], ground: Ground
) -> tuple[list[Row], bool]:
    """Return the rows, as far as they came, and whether the user interrupted."""
    rows: list[Row] = []
    with _progress() as bar, _noting_interrupts() as interrupts:
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
    """Run of the script; of its output only the last line is shown, if it fails."""

    script: Path
    arguments: Sequence[str]
    interrupts: list[int]
    tell: Callable[[str], object]

    def __call__(
        self,
        combo: Combination,
        settings: Mapping[str, Any],
        opened: Callable[[Session], object],
    ) -> None:
        self.tell(str(combo))
        passed = [text for knob, value in combo.passed.items() for text in (f"--{knob}", value)]
        with tempfile.TemporaryFile("w+") as kept:
            with redirect_stdout(kept), redirect_stderr(kept):
                ran = run_script(self.script, [*self.arguments, *passed], True, settings, opened)
            if self.interrupts:  # the script may have gone on after it
                raise KeyboardInterrupt
            if ran.failed:
                raise ProgramFailed(_last_line(kept))


def _last_line(kept: IO[str]) -> str:
    kept.seek(0)
    lines = [line.strip() for line in kept.read().splitlines() if line.strip()]
    return lines[-1] if lines else "the script failed, and says not why"


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """The signals of Ctrl-C meanwhile, also those that a script does not pass on."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
