"""Threads record into one session at once, and each gets eager torch's bits."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.native.threads import at_once, work

pytestmark = pytest.mark.timeout(300)
ROUNDS = 40


@pytest.mark.parametrize("threads", [2, 4])
def test_each_thread_gets_its_own_values(threads: int) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = at_once(threads, ROUNDS)
    finally:
        sys.setswitchinterval(before)
    for seed, mine in enumerate(found):
        theirs = work(seed, ROUNDS, "cpu")
        assert [*map(torch.equal, mine, theirs)] == [True] * len(theirs), seed
