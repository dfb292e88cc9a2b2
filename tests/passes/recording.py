"""Graphs that a drawn program records."""

from __future__ import annotations

import lazygt
from lazygt.graph import Graph
from tests.passes.steps import Step, start


def recorded(program: list[Step]) -> list[Graph]:
    """The graphs that a program records after its start, before any pass."""
    with lazygt.session(
        launcher="inline", planning=lazygt.Planning(keep_stages=True, check_passes=False)
    ) as s:
        state = start("lazygt")
        s.flush()
        for step in program:
            step.run(state)
        s.flush()
        return [s.stages(plan)[0][1] for plan in s.plans()[1:]]
