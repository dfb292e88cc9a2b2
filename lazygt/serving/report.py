"""A planned service as tables: in a terminal, as plain text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.graph.text import count, duration
from lazygt.printing.plots import figure
from lazygt.printing.tables import PlainTable, Printed, heading, remarks
from lazygt.serving.mistakes import Remark
from lazygt.serving.simulation import Arrivals, ServiceRun
from lazygt.serving.stages import HIGH_LOAD, StageNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# -- results ---------------------------------------------------------------------------------------

#: Number of GPUs of each stage; 0 for a stage without.
Gpus = tuple[int, ...]
#: Loads of the points of the curve.
CURVE_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, HIGH_LOAD, 0.9, 0.95, 0.98)
#: Reasons of a choice.
FORMULAS, GIVEN = "as the formulas say", "as given"
AT_HIGH_LOAD, FOR_SLO = f"busy for {HIGH_LOAD:.0%}", "fewest for the SLO"


class ServiceChoice(NamedTuple):
    """A number of GPUs, simulated.

    Attributes:
        why: reason of the choice.
        gpus: number of GPUs of each stage; 0 for a stage without.
        load: load of the busiest stage, by the formulas.
    """

    why: str
    gpus: Gpus
    load: float
    run: ServiceRun


class Point(NamedTuple):
    """Point of the curve of latency against throughput.

    Attributes:
        load: load of the busiest stage, by the formulas.
        qps: requests a second.
        mean: mean latency by the formulas, in seconds.
    """

    load: float
    qps: float
    mean: float
    run: ServiceRun


# -- plot of latency against throughput ------------------------------------------------------------

_COLOURS = {"formula": "0.6", "mean": "tab:blue", "p50": "tab:green", "p99": "tab:red"}


def draw(axes: Axes, curve: Sequence[Point], qps: float, slo: float | None) -> None:
    """Plot latencies against throughput.

    Args:
        curve: the points, by rising load.
        qps: the requested throughput, marked by a vertical line.
        slo: limit of the p99 in seconds, marked by a horizontal line.
    """
    throughputs = [point.qps for point in curve]
    lines = {
        "formula": [point.mean for point in curve],
        **{name: [getattr(point.run.latency, name) for point in curve]
           for name in ("mean", "p50", "p99")},
    }  # fmt: skip
    for name, seconds in lines.items():
        axes.plot(throughputs, [1e3 * each for each in seconds], color=_COLOURS[name], marker=".",
                  linestyle="--" if name == "formula" else "-",
                  label="mean by the formulas" if name == "formula" else name)  # fmt: skip
    _marks(axes, curve[-1], qps, slo)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("latency (ms)")
    axes.set_ylim(bottom=0)


def _marks(axes: Axes, full: Point, qps: float, slo: float | None) -> None:
    """Mark the requested throughput, the SLO, and the load at which queues build up.

    Args:
        full: the point with the highest load.
    """
    axes.axvline(qps, color="0.3", linewidth=1, label=f"requested: {qps:,g}")
    high = full.qps * HIGH_LOAD / full.load
    axes.axvspan(
        high, full.qps / full.load, color="tab:red", alpha=0.08, label=f"load above {HIGH_LOAD:.0%}"
    )
    if slo is not None:
        axes.axhline(1e3 * slo, color="tab:orange", linewidth=1, label=f"SLO: {1e3 * slo:g} ms")


# -- tables and JSON -------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ServicePlan(Printed):
    """Plan of a service. Prints as tables.

    Attributes:
        qps: requests a second.
        slo: limit of the p99 latency in seconds; None: no limit.
        balance: load balancing; see ``serving.simulation``.
        seconds: simulated seconds.
        formulas: figures of each stage by mean-value formulas.
        choices: simulated numbers of GPUs.
        chosen: the choice of the curve.
        curve: latency against throughput.
        remarks: remarks on loads, mistakes and claims.
    """

    qps: float
    slo: float | None
    arrivals: Arrivals
    balance: str
    seed: int
    seconds: float
    formulas: tuple[StageNumbers, ...]
    choices: tuple[ServiceChoice, ...]
    chosen: ServiceChoice
    curve: tuple[Point, ...]
    remarks: tuple[Remark, ...]

    @property
    def mean(self) -> float:
        """Mean latency of a request by the formulas, in seconds: the sum over the stages."""
        return sum(stage.mean for stage in self.formulas)

    @property
    def needed(self) -> ServiceChoice | None:
        """The fewest GPUs with a p99 within the SLO; None if there are none, or no SLO."""
        return next((choice for choice in self.choices if choice.why == FOR_SLO), None)

    def plot(self, path: Path | str) -> None:
        """Draw latency against throughput into a ``.png`` or ``.svg``.

        Raises:
            ValueError: the suffix is another one, or there is no stage with GPUs.
            ImportError: matplotlib is not installed.
        """
        if not self.curve:
            raise ValueError("there is no stage with GPUs, and so no throughput to draw")
        with figure(path, 9, 5) as drawn:
            axes = drawn.add_subplot()
            draw(axes, self.curve, self.qps, self.slo)
            axes.set_title(self._title())
            drawn.legend(loc="outside right upper")

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON: seconds, requests a second, shares from 0 to 1."""
        return {
            "qps": self.qps,
            "slo": self.slo,
            "arrivals": str(self.arrivals),
            "balance": self.balance,
            "seed": self.seed,
            "simulated_seconds": self.seconds,
            "formulas": {
                "stages": [_formula_dict(each) for each in self.formulas],
                "mean": self.mean,
            },
            "choices": [
                {
                    "why": each.why,
                    "gpus": self._gpus_by_stage(each),
                    "load": each.load,
                    **_run_dict(each.run),
                }
                for each in self.choices
            ],
            "chosen": self.chosen.why,
            "needed": None if self.needed is None else self._gpus_by_stage(self.needed),
            "curve": [
                {
                    "load": each.load,
                    "qps": each.qps,
                    "formula_mean": each.mean,
                    **_run_dict(each.run),
                }
                for each in self.curve
            ],
            "remarks": [{"mistake": each.mistake, "text": each.text} for each in self.remarks],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        slo = "" if self.slo is None else f", 99 of 100 within {duration(self.slo)}"
        yield Text(f"{self.qps:,g} requests a second{slo}")
        yield heading("formulas (mean values: arrivals like a clock, full batches)")
        yield self._formulas()
        if self.choices[0].load:
            yield heading(f"simulated: {self.arrivals}, {self._balance()}, "
                          f"{duration(self.seconds)}, seed {self.seed}")  # fmt: skip
            yield self._choices()
            yield heading(f"latency against throughput, {self._title()}")
            yield self._curve()
        yield from remarks(self.remarks)

    def _title(self) -> str:
        return f"{_gpus_text(self._gpus_by_stage(self.chosen))} ({self.chosen.why})"

    def _balance(self) -> str:
        return "one queue" if self.balance == "shared" else f"a queue a GPU ({self.balance})"

    def _gpus_by_stage(self, choice: ServiceChoice) -> dict[str, int]:
        """Return the number of GPUs by stage."""
        pairs = zip(self.formulas, choice.gpus, strict=True)
        return {numbers.stage.name: gpus for numbers, gpus in pairs if gpus}

    def _formulas(self) -> PlainTable:
        """Build the table of figures by the formulas."""
        table = PlainTable("stage", ">batch", ">inference", ">QPS of a GPU", ">GPUs", ">load",
                       ">QPS at a queue", ">collection", ">mean", ">first")  # fmt: skip
        for row in self.formulas:
            stage = row.stage
            if not row.gpus:
                table.add_row(stage.name, *["-"] * 7, *[duration(stage.delay)] * 2)
                continue
            table.add_row(stage.name, str(stage.batch), duration(stage.inference),
                          f"{row.qps_of_gpu:,.4g}", str(row.gpus), f"{row.load:.0%}",
                          f"{row.arriving:,.4g}", duration(row.collection),
                          duration(row.mean), duration(row.first))  # fmt: skip
        if len(self.formulas) > 1:
            first = sum(each.first for each in self.formulas)
            gpus = str(sum(each.gpus for each in self.formulas))
            table.add_row("together", "", "", "", gpus, "", "", "", duration(self.mean),
                          duration(first))  # fmt: skip
        return table

    def _choices(self) -> PlainTable:
        """Build the table of simulated numbers of GPUs."""
        names = [each.stage.name for each in self.formulas if each.gpus]
        many = len(names) > 1
        table = PlainTable("GPUs", *([f">{name}" for name in names] if many else []), ">together",
                       ">load", ">mean", ">p50", ">p99", ">in a batch", ">SLO")  # fmt: skip
        for choice in self.choices:
            gpus = list(self._gpus_by_stage(choice).values())
            table.add_row(choice.why, *(map(str, gpus) if many else []), str(sum(gpus)),
                          f"{choice.load:.0%}", *_latencies(choice.run), _batch_sizes(choice.run),
                          self._slo_text(choice.run))  # fmt: skip
        return table

    def _curve(self) -> PlainTable:
        """Build the table of latency against throughput."""
        return PlainTable(
            ">load", ">QPS", ">formula", ">mean", ">p50", ">p99", ">in a batch", ">SLO",
            rows=(
                (f"{point.load:.0%}", f"{point.qps:,.0f}", duration(point.mean),
                 *_latencies(point.run), _batch_sizes(point.run), self._slo_text(point.run))
                for point in self.curve
            ),
        )  # fmt: skip

    def _slo_text(self, run: ServiceRun) -> str:
        """Return whether a simulation holds the SLO, as text."""
        if self.slo is None:
            return "-"
        return "holds" if run.latency.p99 <= self.slo else "missed"


def _gpus_text(by_stage: dict[str, int]) -> str:
    """Describe the GPUs of the stages."""
    if len(by_stage) == 1:
        return count(next(iter(by_stage.values())), "GPU")
    return ", ".join(f"{count(gpus, 'GPU')} for {name}" for name, gpus in by_stage.items())


def _latencies(run: ServiceRun) -> Sequence[str]:
    return [duration(seconds) for seconds in run.latency]


def _batch_sizes(run: ServiceRun) -> str:
    """Return the mean number of requests in the batches of each stage."""
    return ", ".join(f"{stage.requests:.3g}" for stage in run.stages if stage.requests)


def _formula_dict(numbers: StageNumbers) -> dict[str, Any]:
    """Return a stage's figures by the formulas, for JSON."""
    fields = numbers._asdict()
    stage = fields.pop("stage")
    wait = "full" if stage.wait == math.inf else stage.wait
    if not numbers.gpus:
        fields["qps_of_gpu"] = None
    return {"name": stage.name, "batch": stage.batch, "inference": stage.inference, "wait": wait,
            "fan": stage.fan, "items": stage.items, "delay": stage.delay, **fields}  # fmt: skip


def _run_dict(run: ServiceRun) -> dict[str, Any]:
    """Return the figures of a simulation, for JSON."""
    stages = [
        {"name": each.name, **each.latency._asdict(), "load": each.load, "batch": each.requests}
        for each in run.stages
    ]
    return {"requests": run.requests, **run.latency._asdict(), "stages": stages}
