"""Report of a pool as plain values, as ``lazygt pool status`` prints it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lazygt.pool.hosted import Hosted
from lazygt.pool.policy import Lease, Policy
from lazygt.pool.published import PublishedValues


def report(
    policy: Policy,
    hosted: Mapping[str, Hosted],
    published: PublishedValues,
    whose: str | None = None,
) -> dict[str, Any]:
    """Build the report of a pool, with sessions in the order of their requests.

    Args:
        whose: the asking client: the report has only numbers of other clients. None: all clients
            are reported.
    """
    now = time.monotonic()
    leases = policy.leases.items()
    seen = {n: lease for n, lease in leases if whose in (None, lease.asked.client)}
    others = [lease for name, lease in leases if name not in seen]
    values = published.all() if whose is None else published.seen_by(whose)
    return {
        "workers": policy.rules.workers,
        "free": policy.free,
        "at_once": policy.rules.at_once,
        "queue_limit": policy.rules.queue,
        "draining": policy.draining,
        "sessions": [
            _session(policy, name, lease, hosted.get(name), now) for name, lease in seen.items()
        ],
        "others": {
            "sessions": sum(bool(lease.places) for lease in others),
            "workers": sum(len(lease.places) for lease in others),
            "waiting": sum(not lease.places for lease in others),
        },
        "published": [
            {"name": v.name, "client": v.client, "bytes": v.nbytes, "shared": v.shared}
            for v in values
        ],
    }


def _session(
    policy: Policy, name: str, lease: Lease, hosted: Hosted | None, now: float
) -> dict[str, Any]:
    return {
        "session": name,
        "client": lease.asked.client,
        "state": _state(policy, name, lease),
        "workers": lease.asked.workers,
        "cores": lease.asked.cores,
        "places": list(lease.places),
        "pids": [] if hosted is None else list(hosted.pids),
        "run_seconds": round(lease.run_seconds, 3),
        "memory": lease.memory,
        "seconds": round(now - lease.granted, 1) if lease.places else 0.0,
        "expires_in": None if lease.expires is None else round(max(lease.expires - now, 0.0), 1),
        "quota": asdict(policy.rules.of(lease.asked.client)),
        "before": policy.queue.index(name) if not lease.places else None,
    }


def _state(policy: Policy, name: str, lease: Lease) -> str:
    """Return the state of a session.

    It ``waits`` for workers, ``runs``, ``is held`` back for others, is ``alone`` (its client has
    gone), or is ``ending``.
    """
    if lease.ending:
        return "ending"
    if not lease.places:
        return "waits"
    if lease.expires is not None:
        return "alone"
    return "runs" if policy.turns.passes(name) else "is held"
