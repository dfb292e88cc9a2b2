"""Passes: graph -> graph, pure, one small file each. Their order stands here and nowhere else."""

from lazygt.passes.base import Pass, run_passes
from lazygt.passes.cse import CommonSubexpressions
from lazygt.passes.dce import DeadCode
from lazygt.passes.fold import Fold

PIPELINE: tuple[Pass, ...] = (
    Fold(),
    CommonSubexpressions(),
    DeadCode(),
)

__all__ = ["PIPELINE", "Pass", "run_passes"]
