"""Simulation: how long a program takes on a machine that need not be there."""

from lazygt.simulation.events import Deadlock, RankClass, Simulated, Span, simulate_plans
from lazygt.simulation.kernels import node_seconds
from lazygt.simulation.prediction import CollectiveTime, Prediction, SimulatedRun
from lazygt.simulation.program import DRY, Living, predict, simulate

__all__ = [
    "DRY", "CollectiveTime", "Deadlock", "Living", "Prediction", "RankClass", "Simulated",
    "SimulatedRun", "Span", "node_seconds", "predict", "simulate", "simulate_plans",
]  # fmt: skip
