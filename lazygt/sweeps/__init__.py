"""Sweeps: a program with several settings of FSDP, measured or simulated, and the best."""

from lazygt.sweeps.knobs import FORCED, Combination, combinations, is_knob, matching, parsed
from lazygt.sweeps.report import Row, Sweep, verdict
from lazygt.sweeps.running import Ground, ProgramFailed, Run, rows_of, sweep
from lazygt.sweeps.steps import Shares, Steps, StepsDone, Stopwatch, Window

__all__ = [
    "FORCED", "Combination", "Ground", "ProgramFailed", "Row", "Run", "Shares", "Steps",
    "StepsDone", "Stopwatch", "Sweep", "Window", "combinations", "is_knob", "matching", "parsed",
    "rows_of", "sweep", "verdict",
]  # fmt: skip
