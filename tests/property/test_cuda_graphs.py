"""Any program gives the bits of eager torch when its plans are captured and replayed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lazygt
from tests.property import positions
from tests.property.comparison import assert_same
from tests.property.programs import PROGRAMS, Step, run
from tests.runtime.executors import cuda_stand_in

pytestmark = pytest.mark.timeout(600)

#: Runs of a program: looked at, asked, captured, and replayed.
RUNS = 6


@given(PROGRAMS, st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_a_captured_program_gives_the_bits_of_eager_torch(
    program: list[Step], shortest: int, seed: int
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        cuda_stand_in.captured(),
        lazygt.session(launcher="inline", compile="off"),
    ):
        patch.setattr("lazygt.runtime.executors.segments.SHORTEST", shortest)
        for number in range(RUNS):
            torch.manual_seed(seed + number)
            lazy = run(program, "lazygt")
            torch.manual_seed(seed + number)
            assert_same(lazy, run(program, "cpu"))


@given(positions.PROGRAMS, st.integers(0, 99), st.sampled_from([1, 2, 4]))
def test_positions_that_change_give_the_bits_of_eager_torch(
    program: list[positions.Step], seed: int, shortest: int
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        cuda_stand_in.captured(),
        lazygt.session(launcher="inline", compile="off") as s,
    ):
        patch.setattr("lazygt.runtime.executors.segments.SHORTEST", shortest)
        patch.setattr(positions, "TURNS", RUNS + 2)
        lazy = positions.run("lazygt", program, seed, s.flush)
        assert repr(lazy) == repr(positions.run("cpu", program, seed, lambda: None))
