"""Programs whose graphs differ only in sizes."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

import lazygt
from lazygt.graph import Graph
from tests.passes.steps import NAMES, OPERANDS, OWN, PassStep
from tests.passes.tools import graph_of
from tests.property.programs import State, Step


def layer(batch: int, picked: int = 3) -> Graph:
    """Views, a chain that is fused, and slices, whose numbers are sizes."""
    #           %0 [batch, 512] ──add──relu──┬──t──t──mul──> %6 ──slice──slice──> %8
    #                                        └──────────┘
    return graph_of(f"""
        graph {{
          %0: f32[{batch}, 512] = input
          %1: f32[512] = input
          %2: f32[{batch}, 512] = aten.add.Tensor(%0, %1)  # a.py:1
          %3: f32[{batch}, 512] = aten.relu.default(%2)  # a.py:2
          %4: f32[512, {batch}]@(1, 512) = aten.t.default(%3)  # a.py:3
          %5: f32[{batch}, 512] = aten.t.default(%4)  # a.py:3
          %6: f32[{batch}, 512] = aten.mul.Tensor(%5, %3)  # a.py:4
          %7: f32[{batch}, 256]@(512, 1)+256 = aten.slice.Tensor(%6, 1, 256, 512)  # a.py:5
          %8: f32[{picked}, 256]@(512, 1)+256 = aten.slice.Tensor(%7, 0, 0, {picked})  # a.py:6
          return %6, %8
        }}""")


#: Steps that make no tensor of a size of their own.
SIZED = st.one_of(
    st.builds(PassStep, st.sampled_from(sorted(set(OWN) - {"dead_draw"})), *OPERANDS),
    st.builds(Step, st.sampled_from(sorted(set(NAMES) - {"full", "ramp", "leaf", "random"})),
              *OPERANDS),
)  # fmt: skip

SIZES = st.sampled_from([2, 3, 5, 8, 24, 32, 33, 64, 1024, 1025, 4096, 4097])


def start(device: str, rows: int, columns: int) -> State:
    ramp = torch.arange(float(rows * columns), device=device).view(rows, columns)
    row = torch.full((columns,), 0.5, device=device)
    return State(device, [ramp, ramp * 0.5, row, ramp.long(), ramp.half(), row.exp(), ramp.t() * 2])


def accepted(program: list[Step], state: State) -> list[Step]:
    """The steps that eager torch takes: shapes fit, and there is a kernel."""
    taken = []
    for step in program:
        before = list(state.tensors)
        try:
            step.run(state)
        except (RuntimeError, IndexError, ValueError, TypeError):
            state.tensors = before
            continue
        taken.append(step)
    return taken


def recorded(program: list[Step], rows: int, columns: int) -> list[Graph]:
    """The graphs that a program records after its start, before any pass."""
    taken = accepted(program, start("cpu", rows, columns))
    with lazygt.session(launcher="inline", planning=lazygt.Planning(keep_stages=True)) as s:
        state = start("lazygt", rows, columns)
        s.flush()
        for step in taken:
            step.run(state)
        s.flush()
        return [s.stages(plan)[0][1] for plan in s.plans()[1:]]
