"""Passes: graph -> graph, pure, one small file each. Their order stands here and nowhere else."""

from lazygt.machine import Machine
from lazygt.passes.base import Pass, run_passes
from lazygt.passes.collectives.unpack import Unpack
from lazygt.passes.cse import CommonSubexpressions
from lazygt.passes.dce import DeadCode
from lazygt.passes.fold import Fold
from lazygt.passes.foreach import Foreach
from lazygt.passes.fuse import Fuse
from lazygt.passes.lifetime import Lifetime

#: What is done to a program, however many ranks run it.
BEFORE_SHARDING: tuple[Pass, ...] = (Fold(), CommonSubexpressions(), DeadCode())
#: What is done to the program of one rank, be it the only one or not.
_ON_ONE_RANK: tuple[Pass, ...] = (Foreach(), Lifetime(), Fuse())

#: All that is done to a program that one worker runs.
PIPELINE = BEFORE_SHARDING + _ON_ONE_RANK
#: What is done to each rank's program, once ``sharding`` has made one for each.
AFTER_SHARDING = (*_ON_ONE_RANK, Unpack())


def priced(passes: tuple[Pass, ...], machine: Machine) -> tuple[Pass, ...]:
    """The same passes; those that weigh costs have the machine's."""
    return tuple([Fuse(machine) if each.name == Fuse.name else each for each in passes])


__all__ = ["AFTER_SHARDING", "BEFORE_SHARDING", "PIPELINE", "Pass", "priced", "run_passes"]
