"""Messages and bytes of a training step, against a system that makes a round trip for every op.

The ancestor of lazygt sent each op to a dispatcher: one epoch of a small MLP made 36,027 round
trips (12,786 binary ops, 16,433 frees, 3,657 scalars, 2,450 unary ops, 700 fetches). Everything
here is counted, nothing timed.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch

import lazygt
from benchmarks.harness import Report, parser
from benchmarks.models import TINY_GPT, Step, gpt_step, mlp_step
from lazygt.settings import grouped

ANCESTOR_EPOCH = 36_027
ANCESTOR_STEPS = 100  # an epoch was to become "about 100 batches"

COUNTS = ("ops_recorded", "plans_built", "messages_sent", "messages_received", "bytes_sent")


def counts(stats: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(stats[name]) for name in COUNTS}


def count(
    make: Callable[[], Step], args: argparse.Namespace, *, fetch_every: int, **options: Any
) -> dict[str, float]:
    """What one steady step costs on average."""
    with lazygt.session(
        **grouped({"workers": 1, "threads": 1, "launcher": args.launcher, **options})
    ) as s:
        step = make()
        for _ in range(4):
            step().item()
        before = counts(s.stats())
        for index in range(args.steps):
            loss = step()
            if (index + 1) % fetch_every == 0:
                loss.item()
        s.synchronize()
        after = counts(s.stats())
    return {name: (after[name] - before[name]) / args.steps for name in COUNTS}


def measure(args: argparse.Namespace) -> Report:
    columns = ["step", "ops", "messages out", "messages in", "bytes out", "new plans"]
    report = Report("step_messages", "One steady training step, counted", columns)
    sgd = "MLP, SGD with momentum"
    cases: list[tuple[str, Callable[[], Step], int, dict[str, Any]]] = [
        (f"{sgd}, loss read every step", lambda: mlp_step("lazygt"), 1, {}),
        (f"{sgd}, loss read every 50 steps", lambda: mlp_step("lazygt"), 50, {}),
        (
            f"{sgd}, every 50 steps, flush_on_backward=False",
            lambda: mlp_step("lazygt"),
            50,
            {"flush_on_backward": False},
        ),
        ("MLP, Adam, every 50 steps", lambda: mlp_step("lazygt", "adam"), 50, {}),
        ("tiny GPT, AdamW, every 50 steps", lambda: gpt_step("lazygt", TINY_GPT), 50, {}),
    ]
    per_step = []
    for name, make, every, options in cases:
        found = count(make, args, fetch_every=every, **options)
        per_step.append(found["messages_sent"])
        report.add(
            name,
            f"{found['ops_recorded']:,.0f}",
            f"{found['messages_sent']:.2f}",
            f"{found['messages_received']:.2f}",
            f"{found['bytes_sent']:,.0f}",
            f"{found['plans_built']:.2f}",
        )
    epoch = per_step[0] * ANCESTOR_STEPS
    report.remarks.append(
        f"an epoch of {ANCESTOR_STEPS} such steps: {epoch:,.0f} messages sent with the loss read "
        f"every step, against the ancestor's {ANCESTOR_EPOCH:,} round trips: "
        f"{ANCESTOR_EPOCH / max(epoch, 1):,.0f} times fewer"
    )
    return report


def main() -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--launcher", choices=["process", "inline"], default="process")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
