"""Programs whose positions change from turn to turn give the bits of eager torch.

A program is a list of steps, done turn after turn with other positions; what earlier turns have
made stays, and is looked at and written through later.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazygt
from tests.property.positions import PROGRAMS, Step, run

pytestmark = pytest.mark.timeout(600)


@given(PROGRAMS, st.integers(0, 99), st.booleans())
def test_positions_that_change_give_the_bits_of_eager_torch(
    program: list[Step], seed: int, shipped: bool
) -> None:
    eager = run("cpu", program, seed, lambda: None)
    with lazygt.session(launcher="inline") as s:
        lazy = run("lazygt", program, seed, s.flush if shipped else lambda: None)
    assert repr(lazy) == repr(eager)
