"""The collectives of plans as rows of a report, and what would be dearer than they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lazygt.graph.communication import Communication
from lazygt.passes.sharding.cost import CPU, GPU, Machine, collective_seconds
from lazygt.passes.sharding.reasons import reasons
from lazygt.passes.sharding.shard import AxisStep
from lazygt.report import Dearer, Exchange


def machine_of(device_type: str) -> Machine:
    """What is assumed of a rank that computes on such a device."""
    return GPU if device_type == "cuda" else CPU


def exchanges(
    collectives: Iterable[Communication], runs: int, device_type: str = "cpu"
) -> list[Exchange]:
    """One row for all collectives that differ in nothing but their bytes."""
    machine = machine_of(device_type)
    found: dict[tuple[object, ...], Exchange] = {}
    for each in collectives:
        key = each.kind, each.reduce_op, each.mesh_dim, each.source, each.why
        took = collective_seconds(machine, each.kind, each.nbytes, each.ranks)
        old = found.get(key)
        count, nbytes, ring, before = (
            (0, 0, 0, 0.0) if old is None else (old.times, old.nbytes, old.ring, old.seconds)
        )
        found[key] = Exchange(
            runs, count + 1, each.kind, each.reduce_op, nbytes + each.nbytes,
            ring + each.ring_bytes, each.mesh_dim, each.ranks, before + took, each.source, each.why,
        )  # fmt: skip
    return list(found.values())


def dearer(decided: Sequence[AxisStep], runs: int) -> list[Dearer]:
    """For the dearest collectives the best program without them; solves placements again."""
    return [
        Dearer(
            runs, each.times, f"{each.kind} {each.reduce_op}" if each.reduce_op else each.kind,
            each.nbytes, each.axis, each.seconds, each.line, each.cause, each.instead, each.extra,
        )
        for each in reasons(decided)
    ]  # fmt: skip
