"""Passes: pure functions graph -> graph, one small file each; and their order."""

from lazygt.machine import Machine
from lazygt.passes.base import Pass, run_passes
from lazygt.passes.cse import CommonSubexpressions, DeadCode
from lazygt.passes.fold import Fold
from lazygt.passes.foreach import Foreach
from lazygt.passes.fuse import Fuse
from lazygt.passes.lifetime import Lifetime, Unpack

#: Passes on a program, for any number of ranks.
BEFORE_SHARDING: tuple[Pass, ...] = (Fold(), CommonSubexpressions(), DeadCode())
#: Passes on one rank's program.
_ON_ONE_RANK: tuple[Pass, ...] = (Foreach(), Lifetime(), Fuse())

#: All passes on a program that one worker runs.
PIPELINE = BEFORE_SHARDING + _ON_ONE_RANK
#: Passes on each rank's program after ``sharding``.
AFTER_SHARDING = (*_ON_ONE_RANK, Unpack())


def priced(passes: tuple[Pass, ...], machine: Machine) -> tuple[Pass, ...]:
    """Return the passes with the machine's cost model in ``Fuse``."""
    return tuple([Fuse(machine) if step.name == Fuse.name else step for step in passes])


__all__ = ["AFTER_SHARDING", "BEFORE_SHARDING", "PIPELINE", "Pass", "priced", "run_passes"]
