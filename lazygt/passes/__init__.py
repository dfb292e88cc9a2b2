"""Passes: graph -> graph, pure, one small file each. Their order stands here and nowhere else."""

from lazygt.passes.base import Pass, run_passes
from lazygt.passes.cse import CommonSubexpressions
from lazygt.passes.dce import DeadCode
from lazygt.passes.fold import Fold
from lazygt.passes.foreach import Foreach
from lazygt.passes.fuse import Fuse
from lazygt.passes.lifetime import Lifetime

#: What is done to a program, however many ranks run it.
BEFORE_SHARDING: tuple[Pass, ...] = (Fold(), CommonSubexpressions(), DeadCode())
#: What is done to each rank's program, once ``sharding.shard`` has made one for each.
AFTER_SHARDING: tuple[Pass, ...] = (Foreach(), Lifetime(), Fuse())

PIPELINE = BEFORE_SHARDING + AFTER_SHARDING

__all__ = ["AFTER_SHARDING", "BEFORE_SHARDING", "PIPELINE", "Pass", "run_passes"]
