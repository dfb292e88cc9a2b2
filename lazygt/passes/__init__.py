"""Passes: graph -> graph, pure, one small file each. Their order stands here and nowhere else."""

from lazygt.passes.base import Pass, run_passes
from lazygt.passes.cse import CommonSubexpressions
from lazygt.passes.dce import DeadCode
from lazygt.passes.fold import Fold
from lazygt.passes.foreach import Foreach
from lazygt.passes.fuse import Fuse
from lazygt.passes.lifetime import Lifetime

PIPELINE: tuple[Pass, ...] = (
    Fold(),
    CommonSubexpressions(),
    DeadCode(),
    Foreach(),
    Lifetime(),
    Fuse(),
)

__all__ = ["PIPELINE", "Pass", "run_passes"]
