"""Verdict of a sweep: the best combination and its gain, or the bottleneck."""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.text import duration
from lazygt.sweeps.row import SKIPPED, Row
from lazygt.sweeps.shares import Shares


def verdict(rows: Sequence[Row], baseline: int, target: float) -> str:
    """Compare the best combination with the baseline; below the target, name its bound.

    Args:
        baseline: number of a row.
        target: per cent.
    """
    first, done = rows[baseline], [row for row in rows if row.done]
    if not done:
        skipped = sum(row.status == SKIPPED for row in rows)
        return f"No combination has figures: {skipped} skipped, {len(rows) - skipped} failed."
    best = max(done, key=lambda row: row.rate)
    if not first.done:
        return (
            f"Best: {best.combination} with {best.speed} ({best.how}). The baseline "
            f"{first.combination} {first.status}, so there is nothing to compare it with."
        )
    gain = 100 * (best.rate / first.rate - 1)
    against = f"{gain:+.1f}% against the baseline {first.combination} ({first.speed}), {best.how}"
    if best is first:
        against = f"the baseline itself, {best.how}"
    told = f"Best: {best.combination} with {best.speed}, {against}"
    if gain >= target:
        return f"{told}: the target of {target:+g}% is reached."
    if best.shares is None:
        return f"{told}: below the target of {target:+g}%."
    return f"{told}: below the target of {target:+g}%, bound by {_bound(best, best.shares)}."


def _bound(row: Row, shares: Shares) -> str:
    """Return the bottleneck of a step, with numbers."""
    step = row.step_seconds
    waits = f"{duration(shares.exposed * step)} of waiting for collectives"
    words = {
        "compute": f"compute ({shares.compute:.0%} of the {duration(step)} of a step; only {waits} "
        f"could still be hidden)",
        "exposed bandwidth": f"exposed bandwidth ({shares.bandwidth:.0%} of the {duration(step)} "
        f"of a step is waiting for bytes, {shares.latency:.0%} for latencies, "
        f"{shares.compute:.0%} computing)",
        "latency x count": f"latency x count ({shares.collectives} collectives a step; "
        f"{shares.latency:.0%} of the {duration(step)} of a step is waiting for their latencies, "
        f"{shares.bandwidth:.0%} for bytes, {shares.compute:.0%} computing)",
        "host": f"the host ({shares.host:.0%} of the {duration(step)} of a step the ranks wait for "
        f"what the client records and launches)",
    }
    return words[shares.bound]
