"""Plots in files, drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lazygt.host.files import open_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg")


def missing(path: Path) -> str:
    """Return the reason that no plot can be drawn into a file; empty if one can."""
    if path.suffix not in _SUFFIXES:
        return f"{path.name!r} must end in one of {', '.join(_SUFFIXES)}"
    if find_spec("matplotlib") is None:
        return "--plot needs matplotlib, which is not installed: pip install matplotlib"
    return ""


@contextmanager
def figure(path: str | os.PathLike[str], width: float, height: float) -> Iterator[Figure]:
    """Context with a new figure, which is written into a file at the end.

    Args:
        path: path of the file, a ``.png`` or ``.svg``.
        width, height: size in inches.

    Raises:
        ValueError: the suffix is another one.
        ImportError: matplotlib is not installed.
    """
    kind = Path(path).suffix
    if kind not in _SUFFIXES:
        raise ValueError(f"{Path(path).name!r} must end in one of {', '.join(_SUFFIXES)}")
    # why: matplotlib takes a second to load
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    yield drawn
    with open(open_output(path), "wb") as file:
        drawn.savefig(
            file,
            format=kind.removeprefix("."),
            metadata={"Date": None} if kind == ".svg" else None,  # the same bytes each time
        )
