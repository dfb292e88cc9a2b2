"""A sweep as a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lazygt.files import open_output
from lazygt.sweeps.row import Row

SUFFIXES = (".png", ".svg")
_BASELINE, _OTHERS, _HIDDEN = "tab:red", "tab:blue", "0.8"


def draw(rows: Sequence[Row], baseline: int, title: str, path: Path) -> None:
    """Draw tokens a second against peak memory, and the steps' shares in collectives.

    A share's exposed part is a bar.

    Raises:
        ValueError: neither a ``.png`` nor a ``.svg``.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name!r} must end in one of {', '.join(SUFFIXES)}")
    done = [row for row in rows if row.done]
    figure = Figure(figsize=(12, max(4.0, 0.3 * len(done) + 2)), layout="constrained")
    points, bars = figure.subplots(1, 2)
    _points(points, done, [_BASELINE if row is rows[baseline] else _OTHERS for row in done])
    _bars(bars, done)
    figure.suptitle(title)
    kind = path.suffix.removeprefix(".")
    with open(open_output(path), "wb") as file:
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _points(axes: Axes, rows: Sequence[Row], colours: Sequence[str]) -> None:
    for number, (row, colour) in enumerate(zip(rows, colours, strict=True), 1):
        place = ((row.peak_bytes or 0) / 1e9, row.rate)
        axes.plot(*place, "o", color=colour)
        axes.annotate(str(number), place, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel("peak memory of a rank (GB)")
    axes.set_ylabel("tokens a second" if rows[0].tokens else "steps a second")
    axes.set_title("the baseline is red")


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    shown = [(n, row.shares) for n, row in enumerate(rows) if row.shares is not None]
    places = [number for number, _ in shown]
    axes.barh(places, [100 * shares.in_collectives for _, shares in shown], color=_HIDDEN,
              label="in collectives")  # fmt: skip
    axes.barh(places, [100 * shares.exposed for _, shares in shown], color=_OTHERS,
              label="exposed")  # fmt: skip
    names = [f"{row.combination}  {number}" for number, row in enumerate(rows, 1)]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of a step (%)")
    axes.legend(loc="lower right")
