"""Training and reductions on 2 and 4 CPU workers, against DDP, FSDP2 and DTensor in the same run.

Every contestant has the same model, batch and number of workers, one thread a worker, and Gloo.
They take turns, a burst of steps each; the loss is read at a burst's end. Before they are timed
they train some steps, and all must come to the same loss. ``--parts memory`` says what the steps
add to a rank's resident memory, beside the same peers.
"""

import argparse
import math
from contextlib import ExitStack

from benchmarks.harness import Measured, Report, interleave, parser, ratio
from benchmarks.sharded_processes import (
    CONTEXT,
    DATA,
    FULL,
    INVARIANT,
    LAZYGT,
    PEERS,
    TENSOR,
    UNCOMPILED,
    Crew,
    crew,
)
from benchmarks.sharded_workloads import (
    COMPUTE,
    DEEP_MICROBATCHES,
    DEEP_MLP,
    GPT_EXAMPLE,
    GPT_MICROBATCHES,
    LONG,
    MIDDLE_MLP,
    SMALL_GPT,
    SMALL_MLP,
    WIDE_MLP,
)
from benchmarks.transfer import verdict

#: What is trained in which way, and how many times as fast as the peer it has to be.
RACES: dict[tuple[str, str], float | None] = {
    (GPT_EXAMPLE, DATA): 1.0,
    (WIDE_MLP, DATA): 1.0,
    (GPT_EXAMPLE, FULL): 1.0,
    (WIDE_MLP, FULL): 1.0,
    (GPT_EXAMPLE, TENSOR): None,
    (WIDE_MLP, TENSOR): None,
    (SMALL_GPT, TENSOR): 3.0,
    (LONG, CONTEXT): None,
}
SUM_AIM = 1.3
PARTS = ("training", "memory", "sum", "scaling", "invariant")


def ms(found: Measured) -> str:
    return f"{found.median * 1e3:.2f}"


def race(crews: dict[str, Crew], rounds: int) -> dict[str, Measured]:
    """Seconds a step of each, in turns.

    Raises:
        RuntimeError: they do not compute the same.
    """
    for each in crews.values():
        each.ask("settle")
    results = {name: each.ask("result") for name, each in crews.items()}
    first = next(iter(results.values()))
    if not all(math.isclose(one, first, rel_tol=1e-3, abs_tol=1e-3) for one in results.values()):
        raise RuntimeError(f"contestants come to different results: {results}")
    return interleave({name: lambda c=c: c.ask("burst") for name, c in crews.items()}, rounds)


def training(args: argparse.Namespace) -> Report:
    report = Report(
        # what is no whole table has a section of its own
        "sharded training" if args.only is None else f"sharded training: {args.only}",
        "One step of training, one thread a worker",
        ["model", "way", "workers", "lazygt ms", "peer", "peer ms", "as fast", "lazygt sends"],
    )
    for workers in args.workers:
        for (model, way), aim in RACES.items():
            if args.only is None or args.only in f"{model}, {way}":
                duel(report, args, (model, way), aim, workers)
    return report


def duel(
    report: Report,
    args: argparse.Namespace,
    race_of: tuple[str, str],
    aim: float | None,
    workers: int,
) -> None:
    """lazygt and its peer on one model."""
    model, way = race_of
    peer = PEERS[way]
    with ExitStack() as stack:
        crews = {
            name: stack.enter_context(crew(name, "train", workers, way, model, args.quick))
            for name in (LAZYGT, peer)
        }
        found = race(crews, args.rounds)
        sends = crews[LAZYGT].ask("counts")
    times = ratio(found[peer], found[LAZYGT])
    report.add(
        model, way, str(workers), ms(found[LAZYGT]), peer, ms(found[peer]), f"{times:.2f}x", sends
    )
    if aim is not None:
        name = f"{model}, {way}, {workers} workers, against {peer}"
        report.remarks.append(verdict(name, times, aim, least=True))


def memory(args: argparse.Namespace) -> Report:
    """What steps add to the resident memory of a rank that has the model."""
    report = Report(
        "sharded memory",
        "Peak resident memory of a rank, in steps, over what it had before the first one",
        ["model", "workers", *(f"{name} MB" for way in (DATA, FULL) for name in ways(way))],
    )
    for model in (DEEP_MLP, DEEP_MICROBATCHES, GPT_EXAMPLE, GPT_MICROBATCHES):
        for workers in args.workers:
            peaks = {}
            for way in (DATA, FULL):
                for kind, name in zip((UNCOMPILED, PEERS[way]), ways(way), strict=True):
                    with crew(kind, "train", workers, way, model, args.quick) as each:
                        each.ask("forget")
                        each.ask("settle")
                        peaks[name] = each.ask("peak")
            report.add(model, str(workers), *(f"{peak:.0f}" for peak in peaks.values()))
            whole, sharded = (peaks[ways(way)[0]] for way in (DATA, FULL))
            for other, peak in (("data parallel", whole), (PEERS[FULL], peaks[PEERS[FULL]])):
                name = f"{model}, {workers} workers, fully sharded against {other}, memory"
                report.remarks.append(verdict(name, sharded / peak, 1.0, least=False))
    report.remarks.append(
        "what a process keeps free beforehand counts as had: growth into it is not seen"
    )
    return report


def ways(way: str) -> tuple[str, str]:
    """lazygt's way and its peer, as columns name them."""
    return f"lazygt, {way}", PEERS[way]


def summing(args: argparse.Namespace) -> Report:
    """The sum of a tensor in blocks, read by the client."""
    elements = args.megabytes << 18
    report = Report(
        "sharded sum",
        f"The sum of {args.megabytes} MiB of float32 in blocks, to a Python number",
        ["workers", "lazygt ms", "local sums and one all-reduce ms", "lazygt takes"],
    )
    peer = "torch"
    for workers in args.workers:
        with ExitStack() as stack:
            crews = {
                name: stack.enter_context(crew(name, "sum", workers, DATA, elements))
                for name in (LAZYGT, peer)
            }
            found = race(crews, 3 * args.rounds)
            before = crews[LAZYGT].ask("counts")
            crews[LAZYGT].ask("burst")
            after = crews[LAZYGT].ask("counts")
        took = ratio(found[LAZYGT], found[peer])
        report.add(str(workers), ms(found[LAZYGT]), ms(found[peer]), f"{took:.2f}x")
        passed = {key: after[key] - before[key] for key in after}
        report.remarks += [
            verdict(f"{workers} workers, time against the peer's", took, SUM_AIM, least=False),
            f"{workers} workers, through the client: {passed['bytes_uploaded']} bytes of tensors "
            f"up, {passed['bytes_fetched']} down (the sum itself); "
            f"{passed['bytes_received']} bytes of messages from all workers",
        ]
    return report


def scaling(args: argparse.Namespace) -> Report:
    """How much faster more workers are than one on a step that is mostly matmuls."""
    report = Report(
        "sharded scaling",
        f"One step of {COMPUTE}, data parallel; efficiency: speedup over the workers",
        ["workers", "lazygt ms", "speedup", "efficiency", "DDP ms", "speedup", "efficiency"],
    )
    counts = sorted({1, *args.workers})
    with ExitStack() as stack:
        crews = {
            f"{kind} {workers}": stack.enter_context(
                crew(kind, "train", workers, DATA, COMPUTE, args.quick)
            )
            for workers in counts
            for kind in (LAZYGT, PEERS[DATA])
        }
        found = race(crews, args.rounds)
    for workers in counts:
        cells = [str(workers)]
        for kind in (LAZYGT, PEERS[DATA]):
            here = found[f"{kind} {workers}"]
            speedup = ratio(found[f"{kind} 1"], here)
            cells += [ms(here), f"{speedup:.2f}x", f"{speedup / workers:.0%}"]
        report.add(*cells)
    return report


def invariant(args: argparse.Namespace) -> Report:
    """What the same bits on any number of workers cost."""
    report = Report(
        "sharded invariant",
        "One step of training, data parallel, with invariant=True and without",
        ["model", "workers", "invariant ms", "plain ms", "invariant takes"],
    )
    for model in (SMALL_MLP, MIDDLE_MLP):
        for workers in sorted({1, *args.workers}):
            with ExitStack() as stack:
                crews = {
                    kind: stack.enter_context(crew(kind, "train", workers, DATA, model, args.quick))
                    for kind in (INVARIANT, LAZYGT)
                }
                found = race(crews, args.rounds)
            here, plain = found[INVARIANT], found[LAZYGT]
            report.add(model, str(workers), ms(here), ms(plain), f"{ratio(here, plain):.2f}x")
    return report


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    options.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    options.add_argument("--only", help="of training, what has this in its name")
    options.add_argument("--megabytes", type=int, default=64, help="to sum (64)")
    options.add_argument("--quick", action="store_true", help="tiny models")
    args = options.parse_args()
    if args.pin:
        options.error("--pin is for one worker; the scheduler places these")
    parts = {
        "training": training,
        "memory": memory,
        "sum": summing,
        "scaling": scaling,
        "invariant": invariant,
    }
    for part in args.parts:
        parts[part](args).finish(save=args.save)


if __name__ == "__main__":
    main()
