"""``lazygt comm``: traffic of a training step; ``lazygt plan-serving``: GPUs of a service."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import typer

from lazygt.cli.script import AsJson, Claims, Plot, check_output, fail, show, show_json
from lazygt.graph.comm_volume import TransformerStep
from lazygt.observe.traffic import VolumeReport, check_claims, parse_volume_claim
from lazygt.serving.planning import plan
from lazygt.serving.stages import parse_duration

# -- ``lazygt comm``: traffic of a training step ---------------------------------------------------

#: Bytes of an element.
DTYPES = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "float64": 8, "float32": 4,
    "bfloat16": 2, "float16": 2,
}  # fmt: skip


def comm(
    context: typer.Context,
    params: Annotated[str, typer.Option(help="parameters of the model, such as 7e9 or 7B")],
    dtype: Annotated[
        str, typer.Option(help=f"dtype of parameters and gradients: {', '.join(DTYPES)}")
    ],
    activations: Annotated[
        str | None, typer.Option(help="dtype of activations; by default that of parameters")
    ] = None,
    dp: Annotated[int, typer.Option(min=1, help="data-parallel ranks")] = 1,
    zero: Annotated[
        int,
        typer.Option(
            min=0, max=3,
            help="ZeRO stage, the values sharded over data-parallel ranks: 0 none, 1 and 2 "
            "optimizer state and gradients, 3 weights, too (FSDP)",
        ),
    ] = 0,
    reshard: Annotated[
        bool, typer.Option(help="gather weights again for the backward, with --zero 3")
    ] = True,
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel ranks")] = 1,
    sequence_parallel: Annotated[
        bool,
        typer.Option(help="reduce-scatter and all-gather in place of each all-reduce, with --tp"),
    ] = False,
    pp: Annotated[int, typer.Option(min=1, help="pipeline stages")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="context-parallel ranks")] = 1,
    attention: Annotated[
        Literal["ring", "ulysses"],
        typer.Option(help="ring attention (keys go around) or all-to-all of heads, with --cp"),
    ] = "ring",
    kv_hidden: Annotated[
        int, typer.Option(min=0, help="size of the key projection, if not H, with --cp")
    ] = 0,
    ep: Annotated[int, typer.Option(min=1, help="expert-parallel ranks")] = 1,
    experts_per_token: Annotated[int, typer.Option(min=1, help="top-k, with --ep")] = 1,
    layers: Annotated[int, typer.Option(min=0, help="number of layers, L")] = 0,
    hidden: Annotated[int, typer.Option(min=0, help="hidden size, H")] = 0,
    batch: Annotated[
        int, typer.Option(min=0, help="batch size of a replica, B, in sequences")
    ] = 0,
    sequence: Annotated[int, typer.Option(min=0, help="sequence length, S")] = 0,
    microbatches: Annotated[
        int, typer.Option(min=1, help="microbatches of B sequences, with accumulated gradients")
    ] = 1,
    claim: Claims = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compute the traffic of a transformer's training step, by kind of parallelism.

    Reports payloads, and the bytes that ranks send for them in a ring. `lazygt explain` reports
    those of a script.
    """
    if zero and dp * cp == 1:
        fail(context, "--zero cuts what data-parallel ranks keep: give --dp, such as --dp 8")
    activation_dtype = activations or dtype
    step = TransformerStep(
        _params(context, params), _itemsize(context, "--dtype", dtype),
        _itemsize(context, "--activations", activation_dtype), dp, tp, pp, ep, zero, reshard,
        sequence_parallel, layers, hidden, batch, sequence, experts_per_token, microbatches, cp,
        attention, kv_hidden,
    )  # fmt: skip
    _check(context, step)
    volumes = step.volumes()
    try:
        remarks = check_claims(volumes, [parse_volume_claim(text) for text in claim or ()])
    except ValueError as error:
        fail(context, f"--claim: {error}")
    report = VolumeReport(step, (dtype, activation_dtype), volumes, remarks)
    if as_json:
        show_json(report.as_dict(), indent=2)
    else:
        show(report)


def _params(context: typer.Context, text: str) -> int:
    """Parse a number of parameters such as 7e9 or 7B; ends the command if it is invalid."""
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
    """Return the bytes of an element; ends the command for an unknown dtype."""
    if dtype not in DTYPES:
        fail(context, f"{option} {dtype}: it is one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _check(context: typer.Context, step: TransformerStep) -> None:
    """End the command if nothing is exchanged, or if sizes are missing or do not fit."""
    splits_layers = max(step.tensor, step.expert, step.context) > 1
    needed = {
        "--layers": splits_layers and not step.layers,
        **{option: (splits_layers or step.pipeline > 1) and not size
           for option, size in (("--hidden", step.hidden), ("--batch", step.batch),
                                ("--sequence", step.sequence))},
    }  # fmt: skip
    missing = [option for option, is_missing in needed.items() if is_missing]
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


# -- ``lazygt plan-serving``: GPUs and latencies of a service --------------------------------------


def plan_serving(
    context: typer.Context,
    stage: Annotated[
        list[str],
        typer.Option(
            help="stage of the service, in the order of processing, such as "
            "rank:batch=50,infer=80ms; other settings: wait=20ms (or full), gpus=60, "
            "fan=4, items=200,per_item=6us, delay=5ms"
        ),
    ],
    qps: Annotated[
        float | None, typer.Option(help="requests a second; not needed with a file of arrivals")
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="limit of the p99 latency: ms, or with a unit"),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="arrival process: poisson, bursty:peak=3,share=0.2,burst=500ms, or a file with a "
            "time a line"
        ),
    ] = "poisson",
    balance: Annotated[
        str,
        typer.Option(help="load balancing over GPUs: random, round-robin, or shared: one queue"),
    ] = "random",
    claim: Claims = None,
    seconds: Annotated[
        float | None, typer.Option(help="duration of arrivals in a simulation")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the random numbers")] = 0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compute the GPUs and latencies of a service that batches requests.

    Besides the usual formulas every request is simulated, with arrivals at random, in bursts or
    from a file: mean, p50, p99, and the fewest GPUs with which the p99 is within the SLO.
    """
    check_output(context, plot, plot=True)
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
    if as_json:
        show_json(planned.as_dict(), indent=2)
        return
    show(planned)
    if plot is not None:
        typer.echo(f"\nlatency against throughput drawn to {plot}")
