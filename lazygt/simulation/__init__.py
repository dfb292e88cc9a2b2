"""Simulation: how long a program takes on a machine that need not be there."""

from lazygt.errors import former_names
from lazygt.observe.explain import DRY
from lazygt.simulation.discrete_event import Deadlock, RankClass, Rehearsal, Simulated, Span
from lazygt.simulation.node_costs import node_seconds
from lazygt.simulation.prediction import (
    CollectiveTime,
    LineCheck,
    Prediction,
    PredictionCheck,
    SimulatedRun,
    check,
)
from lazygt.simulation.program import LiveValue, predict, simulate

__all__ = [
    "DRY",
    "CollectiveTime",
    "Deadlock",
    "LineCheck",
    "LiveValue",
    "Prediction",
    "PredictionCheck",
    "RankClass",
    "Rehearsal",
    "Simulated",
    "SimulatedRun",
    "Span",
    "check",
    "node_seconds",
    "predict",
    "simulate",
]  # fmt: skip

__getattr__ = former_names(__name__, {"Check": "PredictionCheck", "Living": "LiveValue"})
