"""Capacity of a service of batching stages, and latency of its requests: docs/serving.md.

plan = lazygt.serving.plan(30_000, ["rank:batch=50,infer=80ms"], slo=0.2)
print(plan)                 tables
plan.needed                 the fewest GPUs with which the p99 holds
"""

from __future__ import annotations

from lazygt.errors import former_names
from lazygt.serving.planning import plan
from lazygt.serving.report import ServicePlan
from lazygt.serving.simulation import Bursty, Poisson, RecordedArrivals, read_arrivals
from lazygt.serving.stages import Stage, parse_stage

__all__ = [
    "Bursty",
    "Poisson",
    "RecordedArrivals",
    "ServicePlan",
    "Stage",
    "parse_stage",
    "plan",
    "read_arrivals",
]

__getattr__ = former_names(__name__, {"Recorded": "RecordedArrivals"})
