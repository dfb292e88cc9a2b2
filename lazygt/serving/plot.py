"""Latency against throughput as a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lazygt.files import open_output
from lazygt.serving.choices import Point
from lazygt.serving.formulas import HIGH_LOAD

_COLOURS = {"formula": "0.6", "mean": "tab:blue", "p50": "tab:green", "p99": "tab:red"}


def draw(curve: Sequence[Point], qps: float, slo: float | None, title: str, path: Path) -> None:
    """Draw a curve.

    Args:
        qps: the wanted throughput.
        slo: seconds.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    come = [point.qps for point in curve]
    lines = {
        "formula": [point.mean for point in curve],
        **{name: [getattr(point.run.latency, name) for point in curve]
           for name in ("mean", "p50", "p99")},
    }  # fmt: skip
    for name, seconds in lines.items():
        axes.plot(come, [1e3 * each for each in seconds], color=_COLOURS[name], marker=".",
                  linestyle="--" if name == "formula" else "-",
                  label="mean by the formulas" if name == "formula" else name)  # fmt: skip
    _marks(axes, curve[-1], qps, slo)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("latency (ms)")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    figure.legend(loc="outside right upper")
    kind = path.suffix.removeprefix(".")
    with open(open_output(path), "wb") as file:
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _marks(axes: Axes, full: Point, qps: float, slo: float | None) -> None:
    """Mark the wanted throughput, the SLO, and the load at which queues build up."""
    axes.axvline(qps, color="0.3", linewidth=1, label=f"asked: {qps:,g}")
    high = full.qps * HIGH_LOAD / full.load
    axes.axvspan(
        high, full.qps / full.load, color="tab:red", alpha=0.08, label=f"load above {HIGH_LOAD:.0%}"
    )
    if slo is not None:
        axes.axhline(1e3 * slo, color="tab:orange", linewidth=1, label=f"SLO: {1e3 * slo:g} ms")
