"""``lazygt plan-serving``: GPUs and latencies of a service of batching stages."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from lazygt.cli.script import check_output, fail
from lazygt.graph.comm_volume import TransformerStep
from lazygt.observe.traffic import VolumeReport, judged, parse_volume_claim
from lazygt.serving.planning import plan
from lazygt.serving.report import ServicePlan
from lazygt.serving.stages import parse_duration

# -- ``lazygt comm``: the traffic of a training step, from a few numbers of the model --------------

#: Bytes of an element.
DTYPES = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "float64": 8, "float32": 4,
    "bfloat16": 2, "float16": 2,
}  # fmt: skip


def comm(
    context: typer.Context,
    params: Annotated[str, typer.Option(help="parameters of the whole model, such as 7e9 or 7B")],
    dtype: Annotated[
        str, typer.Option(help=f"of parameters and gradients: {', '.join(DTYPES)}")
    ],
    activations: Annotated[
        str | None, typer.Option(help="the dtype of activations; by default that of parameters")
    ] = None,
    dp: Annotated[int, typer.Option(min=1, help="data-parallel ranks")] = 1,
    zero: Annotated[
        int,
        typer.Option(
            min=0, max=3,
            help="what data-parallel ranks keep in blocks: 0 nothing, 1 and 2 optimizer and "
            "gradients, 3 weights, too (FSDP)",
        ),
    ] = 0,
    reshard: Annotated[
        bool, typer.Option(help="with --zero 3: gather weights again for the backward")
    ] = True,
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel ranks")] = 1,
    sequence_parallel: Annotated[
        bool,
        typer.Option(help="with --tp: reduce-scatter and all-gather in place of each all-reduce"),
    ] = False,
    pp: Annotated[int, typer.Option(min=1, help="pipeline stages")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="context-parallel ranks")] = 1,
    attention: Annotated[
        Literal["ring", "ulysses"],
        typer.Option(help="with --cp: pass keys on from rank to rank, or exchange heads"),
    ] = "ring",
    kv_hidden: Annotated[
        int, typer.Option(min=0, help="with --cp: what keys have of H, where heads share keys")
    ] = 0,
    ep: Annotated[int, typer.Option(min=1, help="expert-parallel ranks")] = 1,
    experts_per_token: Annotated[int, typer.Option(min=1, help="with --ep")] = 1,
    layers: Annotated[int, typer.Option(min=0, help="L")] = 0,
    hidden: Annotated[int, typer.Option(min=0, help="H")] = 0,
    batch: Annotated[
        int, typer.Option(min=0, help="B: sequences that one replica computes at once")
    ] = 0,
    sequence: Annotated[int, typer.Option(min=0, help="S: the length of one")] = 0,
    microbatches: Annotated[
        int, typer.Option(min=1, help="of B sequences each, whose gradients are added up")
    ] = 1,
    claim: Annotated[
        list[str] | None, typer.Option(help="what you have worked out, to be judged: data=56GB")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, in bytes")] = False,
) -> None:  # fmt: skip
    """Work out the traffic of a transformer's training step, by kind of parallelism.

    Payloads, and the bytes that ranks send for them in a ring. `lazygt explain` counts those of a
    script.
    """
    if zero and dp * cp == 1:
        fail(context, "--zero cuts what data-parallel ranks keep: give --dp, such as --dp 8")
    of_activations = activations or dtype
    step = TransformerStep(
        _params(context, params), _itemsize(context, "--dtype", dtype),
        _itemsize(context, "--activations", of_activations), dp, tp, pp, ep, zero, reshard,
        sequence_parallel, layers, hidden, batch, sequence, experts_per_token, microbatches, cp,
        attention, kv_hidden,
    )  # fmt: skip
    _check(context, step)
    volumes = step.volumes()
    try:
        remarks = judged(volumes, [parse_volume_claim(text) for text in claim or ()])
    except ValueError as error:
        fail(context, f"--claim: {error}")
    report = VolumeReport(step, (dtype, of_activations), volumes, remarks)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    elif sys.stdout.isatty():
        Console().print(report)
    else:
        typer.echo(report)


def _params(context: typer.Context, text: str) -> int:
    number, factor = text.strip(), 1.0
    for suffix, size in (("B", 1e9), ("M", 1e6), ("T", 1e12)):
        if number.upper().endswith(suffix):
            number, factor = number[:-1], size
    try:
        params = float(number) * factor
    except ValueError:
        params = math.nan
    if not 1 <= params < math.inf:
        fail(context, f"--params {text}: expected how many there are, such as 7e9 or 7B")
    return round(params)


def _itemsize(context: typer.Context, option: str, dtype: str) -> int:
    if dtype not in DTYPES:
        fail(context, f"{option} {dtype}: it is one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _check(context: typer.Context, step: TransformerStep) -> None:
    """End the command if nothing is exchanged, or if sizes are missing or do not fit."""
    of_layers = max(step.tensor, step.expert, step.context) > 1
    needed = {
        "--layers": of_layers and not step.layers,
        **{option: (of_layers or step.pipeline > 1) and not size
           for option, size in (("--hidden", step.hidden), ("--batch", step.batch),
                                ("--sequence", step.sequence))},
    }  # fmt: skip
    missing = [option for option, lacks in needed.items() if lacks]
    if missing:
        fail(context, f"tensor, pipeline, context and expert parallelism exchange activations: "
                      f"give {', '.join(missing)}, too")  # fmt: skip
    if max(step.data, step.tensor, step.pipeline, step.context, step.expert) == 1:
        fail(context, "one rank sends nothing: give --dp, --tp, --pp, --cp or --ep")
    if step.kv_hidden > step.hidden:
        fail(context, f"--kv-hidden {step.kv_hidden}: keys have at most H, {step.hidden}")
    if step.sequence and step.context > step.sequence:
        fail(context, f"--cp {step.context}: there are only {step.sequence} places to cut")
    if step.layers and step.pipeline > step.layers:
        fail(context, f"--pp {step.pipeline}: there are only {step.layers} layers to cut")


# -- ``lazygt plan-serving``: GPUs and latencies of a service of batching stages -------------------

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
