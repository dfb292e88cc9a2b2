"""Sweeps: a program with several settings of FSDP, measured or simulated, and the best."""

from lazygt.sweeps.knobs import FORCED, Combination, combinations, is_knob, matching, parsed
from lazygt.sweeps.program import sweep
from lazygt.sweeps.report import Sweep
from lazygt.sweeps.row import Row
from lazygt.sweeps.running import Ground, ProgramFailed, Run, rows_of
from lazygt.sweeps.shares import Shares
from lazygt.sweeps.steps import Steps, StepsDone, Stopwatch, Window
from lazygt.sweeps.verdict import verdict

__all__ = [
    "FORCED", "Combination", "Ground", "ProgramFailed", "Row", "Run", "Shares", "Steps",
    "StepsDone", "Stopwatch", "Sweep", "Window", "combinations", "is_knob", "matching", "parsed",
    "rows_of", "sweep", "verdict",
]  # fmt: skip
