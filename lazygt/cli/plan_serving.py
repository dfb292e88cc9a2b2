"""``lazygt plan-serving``: GPUs and latencies of a service of batching stages."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lazygt.cli.script import check_output, fail
from lazygt.serving.planning import plan
from lazygt.serving.report import ServicePlan
from lazygt.serving.stages import parse_duration

_SUFFIXES = (".png", ".svg")


def plan_serving(
    context: typer.Context,
    stage: Annotated[
        list[str],
        typer.Option(
            help="a stage, in the order in which requests go through them, such as "
            "rank:batch=50,infer=80ms; others of its settings: wait=20ms (or full), gpus=60, "
            "fan=4, items=200,per_item=6us, delay=5ms"
        ),
    ],
    qps: Annotated[
        float | None, typer.Option(help="requests a second; not needed with a file of arrivals")
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="99 of 100 requests are to be done within this: ms, or with a unit"),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson, bursty:peak=3,share=0.2,burst=500ms, or a file with a time a line"
        ),
    ] = "poisson",
    balance: Annotated[
        str,
        typer.Option(help="which GPU a request goes to: random, round-robin, or shared: one queue"),
    ] = "random",
    claim: Annotated[
        list[str] | None,
        typer.Option(
            help="what you have worked out, to be judged: rank:qps=5,collection=1.7ms,latency=150ms"
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="how long requests come in a simulation")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the random numbers")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="draw latency against throughput into this .png or .svg")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in seconds")] = False,
) -> None:
    """Work out the GPUs and latencies of a service that batches requests.

    Beside the usual formulas every request is simulated, with arrivals at random, in bursts or of a
    file: mean, p50, p99, and the fewest GPUs with which the p99 is within the SLO.
    """
    if plot is not None:
        if plot.suffix not in _SUFFIXES:
            fail(context, f"{plot.name!r} must end in one of {', '.join(_SUFFIXES)}")
        check_output(context, plot)
        if find_spec("matplotlib") is None:
            fail(context, "--plot needs matplotlib, which is not installed: pip install matplotlib")
    try:
        limit = None if slo is None else parse_duration(slo, "ms")
    except ValueError as error:
        fail(context, f"--slo {slo}: {error}")
    try:
        planned = plan(
            qps, stage, limit, arrivals=arrivals, balance=balance, seconds=seconds, seed=seed,
            claims=claim or (),
        )  # fmt: skip
        if plot is not None:
            planned.plot(plot)
    except (ValueError, ImportError, OSError) as error:
        fail(context, str(error))
    _show(planned, as_json)
    if plot is not None and not as_json:
        typer.echo(f"\nlatency against throughput drawn to {plot}")


def _show(planned: ServicePlan, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(planned.as_dict(), indent=2))
    elif sys.stdout.isatty():
        Console().print(planned)
    else:
        typer.echo(planned)
