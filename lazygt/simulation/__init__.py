"""Simulation: how long a program takes on a machine that need not be there."""

from lazygt.simulation.check import Check, LineCheck, check
from lazygt.simulation.discrete_event import Deadlock, RankClass, Rehearsal, Simulated, Span
from lazygt.simulation.node_times import node_seconds
from lazygt.simulation.prediction import CollectiveTime, Prediction, SimulatedRun
from lazygt.simulation.program import DRY, Living, predict, simulate

__all__ = [
    "DRY", "Check", "CollectiveTime", "Deadlock", "LineCheck", "Living", "Prediction",
    "RankClass", "Rehearsal", "Simulated", "SimulatedRun", "Span", "check", "node_seconds",
    "predict", "simulate",
]  # fmt: skip
