"""Five workloads, each side by side: eager torch, torch.compile, and lazygt with one worker.

W1 is a chain of 1,000 ops on four floats, fetched; W2 twelve pointwise ops on 8M floats; W3 the
training step of an MLP; W4 of a transformer (W4-tiny: so small that only overhead is left); W5 is
W3 with another batch size, from 8 to 64, at nearly every one of 60 steps, all stalls counted.

With `--pin` everybody computes with one thread on one and the same core, and lazygt's client has
another core; without, everybody has all cores. `taskset -c 0` before it all leaves one core for
client and worker together.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.contestant import (
    COMPILE,
    EAGER,
    LAZYGT,
    LAZYGT_COMPILED,
    QUICK,
    WORKLOADS,
    Contestant,
    can_compile,
)
from benchmarks.harness import CORES, Measured, Report, interleave, parser, ratio

Found = dict[str, Measured]

#: workload -> unit of a step's time, and how many of them are in a second
UNITS = {"W1": ("us/op (1,000 ops)", 1e6 / 1_000)}
MILLISECONDS = ("ms", 1e3)
TIMED = ("W1", "W2", "W3 SGD", "W3 Adam", "W4", "W4-tiny")
VARYING = "W5"


def contestants(without: Sequence[str]) -> list[str]:
    """Who takes part; lazygt with compiled plans only if it has them."""
    kinds = [EAGER, COMPILE, LAZYGT, *([LAZYGT_COMPILED] if can_compile() else [])]
    return [kind for kind in kinds if kind not in without]


def steady(name: str, kinds: Sequence[str], args: argparse.Namespace) -> tuple[Found, Found]:
    """Seconds of the first step, and of a steady one, by contestant."""
    steps = (QUICK if args.quick else WORKLOADS)[name].steps
    with ExitStack() as stack:
        running = {kind: stack.enter_context(Contestant(kind, name, args)) for kind in kinds}
        first = {}
        for kind, contestant in running.items():
            contestant.ask("make")
            first[kind] = Measured((contestant.ask("burst 1"),))
            contestant.ask("settle")
        bursts = {kind: _burst(contestant, steps) for kind, contestant in running.items()}
        return first, interleave(bursts, args.rounds)


def _burst(contestant: Contestant, steps: int) -> Callable[[], float]:
    return lambda: contestant.ask(f"burst {steps}")


def fresh(kinds: Sequence[str], args: argparse.Namespace) -> Found:
    """Seconds of all steps of the varying workload together, from a new process on.

    torch.compile has one round: it takes half a minute.
    """
    found: Found = {}
    if COMPILE in kinds:
        found[COMPILE] = Measured((_total(COMPILE, args),))
    rest = {kind: lambda kind=kind: _total(kind, args) for kind in kinds if kind != COMPILE}
    return found | interleave(rest, args.rounds)


def _total(kind: str, args: argparse.Namespace) -> float:
    steps = (QUICK if args.quick else WORKLOADS)[VARYING].steps
    with Contestant(kind, VARYING, args) as contestant:
        contestant.ask("make")
        return steps * contestant.ask(f"burst {steps}")


def peaks(kinds: Sequence[str], args: argparse.Namespace) -> Found:
    """MB of a pointwise step at its peak, its result included, its input not."""
    return {kind: Measured((_peak(kind, args),)) for kind in kinds}


def _peak(kind: str, args: argparse.Namespace) -> float:
    """Eager torch gives memory back at once; a worker keeps it for its next step.

    So a worker's peak counts from before its first step. The peers' counts from before one more
    step, since a compiler's own memory is not the step's.
    """
    keeps = kind in (LAZYGT, LAZYGT_COMPILED)
    with Contestant(kind, "W2", args) as contestant:
        for request in ("make", "forget", "settle") if keeps else ("make", "settle", "forget"):
            contestant.ask(request)
        contestant.ask("burst 1")
        return contestant.ask("peak")


def times(found: Found, peer: str) -> str:
    """Our best over the peer: 0.50x is half its time."""
    ours = found.get(LAZYGT_COMPILED, found.get(LAZYGT))
    theirs = found.get(peer)
    if ours is None or theirs is None or not all(theirs.rounds):
        return "-"
    if len(theirs.rounds) != len(ours.rounds):
        return f"{ours.median / theirs.median:.3g}x"
    return f"{ratio(ours, theirs):.3g}x"


def add(report: Report, name: str, kinds: Sequence[str], found: Found, scale: float = 1.0) -> None:
    """A row: the medians, and our ratio to both peers."""
    cells = [f"{found[kind].median * scale:.4g}" for kind in kinds]
    report.add(name, *cells, times(found, EAGER), times(found, COMPILE))


def place(args: argparse.Namespace) -> tuple[str, str]:
    """The report's name, and who computes where."""
    if len(CORES) == 1:
        return "workloads on one core", "on one core, lazygt's client and worker both"
    if args.pin:
        return "workloads", "on one core, lazygt's client on another"
    return "workloads on all cores", f"on {len(CORES)} cores"


def measure(args: argparse.Namespace) -> Report:
    kinds = contestants(args.without)
    name, where = place(args)
    columns = ["workload", *kinds, "lazygt / eager", "lazygt / torch.compile"]
    report = Report(
        name, f"Five workloads {where} (ratios below 1 are in lazygt's favour)", columns
    )
    for workload in (each for each in TIMED if args.only in each):
        unit, scale = UNITS.get(workload, MILLISECONDS)
        first, found = steady(workload, kinds, args)
        add(report, f"{workload}, {unit}", kinds, found, scale)
        add(report, f"{workload}, first step s", kinds, first)
        if workload == "W2":
            add(report, "W2, peak MB beyond its input", kinds, peaks(kinds, args))
    if args.only in VARYING:
        add(report, "W5, 60 steps s", kinds, fresh(kinds, args))
    report.remarks.append(
        f"a contestant is a process of its own, with nothing compiled before; medians of "
        f"{args.rounds} rounds in turn (first steps, peaks and torch.compile on W5: one)"
    )
    report.remarks.append(
        "`lazygt` compiles nothing; `lazygt, compiled` (where there is one, ratios are of it) "
        "compiles in the background, and steady steps begin when that has ended"
    )
    return report


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    options.add_argument("--only", default="", help="only the workloads whose name contains this")
    options.add_argument(
        "--without", nargs="+", default=[], metavar="CONTESTANT", help="leave these out"
    )
    args = options.parse_args()
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
