"""Sweeps: a program with several settings of FSDP, measured or simulated, and the best."""

from lazygt.sweeps.knobs import FORCED, Combination, combinations, is_knob, matching, parsed
from lazygt.sweeps.report import Row, Sweep, verdict
from lazygt.sweeps.running import ProgramFailed, Run, SweepSetup, run_combinations, sweep
from lazygt.sweeps.steps import Shares, Steps, StepsDone, Stopwatch, Window

__all__ = [
    "FORCED",
    "Combination",
    "ProgramFailed",
    "Row",
    "Run",
    "Shares",
    "Steps",
    "StepsDone",
    "Stopwatch",
    "Sweep",
    "SweepSetup",
    "Window",
    "combinations",
    "is_knob",
    "matching",
    "parsed",
    "run_combinations",
    "sweep",
    "verdict",
]  # fmt: skip
