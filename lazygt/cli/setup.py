"""``lazygt build-native``, ``calibrate`` and ``doctor``: setup of this machine, and its checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lazygt.calibrate import FULL, QUICK, measure, write
from lazygt.cli.script import check_output, show
from lazygt.config import cache_setting, wheels_setting
from lazygt.machine import CALIBRATED, Machine, calibrated_path, default_machine
from lazygt.machine.file import in_order
from lazygt.machine.model import quantity
from lazygt.native import fit
from lazygt.native.build import BuildError, build, install
from lazygt.native.build import write as write_wheel
from lazygt.observe import doctor as checks
from lazygt.printing.tables import PlainTable
from lazygt.session import Session

#: Styles of the states of checks.
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}

# -- ``lazygt build-native``: the C++ extension, from a wheel or from the sources ------------------


def build_native(
    if_possible: Annotated[
        bool, typer.Option(help="exit with 0 without one, too: the recorder in Python replaces it")
    ] = False,
    find_links: Annotated[
        Path | None, typer.Option(help="folder of wheels (LAZYGT_NATIVE_WHEELS)")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="write a wheel of the extension into this folder")
    ] = None,
) -> None:
    """Get the C++ extension: an installed one, a compatible wheel, or a build (cached)."""
    try:
        if wheel is not None:
            typer.echo(write_wheel(build(typer.echo), wheel))
        else:
            typer.echo(_get(find_links or wheels_setting()))
    except (BuildError, PermissionError) as error:
        typer.echo(f"no native extension: {error}", err=True)
        if not if_possible:
            raise typer.Exit(1) from None
        typer.echo("lazygt works without it: its recorder in Python is slower, and does the same")


def _get(wheels: Path | str | None) -> str:
    """Find, install or build the extension, and return a sentence with its path."""
    try:
        return f"the native extension is there: {fit.find().path}"
    except fit.Misfit:
        if wheels is not None and (installed := install(Path(wheels))) is not None:
            return f"installed {installed}"
        return f"the native extension is built: {build(typer.echo).path}"


# -- ``lazygt calibrate``: a machine file of this machine ------------------------------------------


def calibrate(
    context: typer.Context,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="file to write; by default the machine named calibrated"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="measure fewer sizes and rounds")] = False,
    threads: Annotated[int, typer.Option(min=1, help="threads of a worker on the CPU")] = 1,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="device to measure")] = (
        "auto"
    ),
) -> None:
    """Measure the cost of work here, in less than a minute, and write a machine file.

    Measured are matmuls, pointwise ops, memory, recording, messages, and collectives between real
    workers; each figure is the minimum of several rounds. Sessions use the file with
    machine="calibrated" or LAZYGT_MACHINE=calibrated, or a file written with -o by its path.
    """
    check_output(context, output)
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True
    ) as progress:
        task = progress.add_task("starting", total=None)

        def show_progress(measurement: str, done: int, of: int) -> None:
            progress.update(task, description=f"{measurement} {done}/{of}" if of else measurement)

        machine = measure(kind, QUICK if quick else FULL, threads, show_progress)
    path = write(machine, output or calibrated_path(cache_setting()))
    typer.echo(machine.about)
    show(_table(machine, default_machine(kind)))
    typer.echo(f"written to {path}")
    if output is None:
        typer.echo(f"sessions take it with LAZYGT_MACHINE={CALIBRATED}")


def _table(machine: Machine, usual: Machine) -> PlainTable:
    """Return the measured figures, beside those of the default machine."""
    table = PlainTable("figure", ">here", f">{usual.name}", "unit")
    for key, figure in in_order(machine.figures):
        if figure.source == CALIBRATED:
            other = usual.figures.get(key)
            default = "" if other is None else f"{other.value:.3g}"
            table.add_row(key, f"{figure.value:.3g}", default, quantity(key).unit)
    return table


# -- ``lazygt doctor``: checks of this machine -----------------------------------------------------


def doctor() -> None:
    """Check this machine, and whether a session works on it."""
    findings = checks.report(lambda: Session(workers=1))
    rows = ((check.name, check.status, check.detail, check.advice) for check in findings)
    show(PlainTable("part", "", "finding", "advice", rows=rows, styles=_COLOURS))
    failed = [check.name for check in findings if check.status == "fail"]
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)
