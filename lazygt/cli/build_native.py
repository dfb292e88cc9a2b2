"""``lazygt build-native``: the C++ extension, from a wheel that fits or of the sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lazygt.config import wheels_setting
from lazygt.native import fit
from lazygt.native.build import BuildError, build, install, write


def build_native(
    if_possible: Annotated[
        bool, typer.Option(help="end well without one, too: the recorder in Python does")
    ] = False,
    find_links: Annotated[
        Path | None, typer.Option(help="a folder of wheels (LAZYGT_NATIVE_WHEELS)")
    ] = None,
    wheel: Annotated[Path | None, typer.Option(help="put a wheel of it into this folder")] = None,
) -> None:
    """Get the C++ extension: one that is there, a wheel that fits, or a build (cached)."""
    try:
        if wheel is not None:
            typer.echo(write(build(typer.echo), wheel))
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
