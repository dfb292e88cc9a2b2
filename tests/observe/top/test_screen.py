"""The terminal's screen: any number of ranks in 80 columns and 24 rows."""

import io
import re

import pytest
from rich.console import Console

from lazygt.observe.top.screen import LETTERS, Screen, ranks_text
from lazygt.observe.top.status import STATES, SessionStatus, blocks
from tests.observe.top.statuses import status


def shown(of: SessionStatus, width: int = 80, height: int = 24) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    with console.capture() as captured:
        console.print(Screen(of), height=height)
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).rstrip("\n").split("\n")


@pytest.mark.parametrize("count", [1, 2, 12, 13, 64, 256])
def test_any_number_of_ranks_fits(count: int) -> None:
    lines = shown(status(count))
    assert len(lines) <= 24, "\n".join(lines)
    assert max(map(len, lines)) <= 80, "\n".join(lines)


def test_all_ranks_are_in_the_grid() -> None:
    """The slowest ones have a row each, the one that others wait for first."""
    waiting = tuple(rank for rank in range(64) if rank not in (5, 8, 9))
    lines = shown(status(64, frozen=(5,), waiting=waiting, idle=(8,)))
    assert len(lines) <= 24
    grid = [line for line in lines if re.match(r" +\d+ [BWFi]", line)]
    assert [line.split(maxsplit=1)[0] for line in grid] == ["0", "32"]
    letters = "".join("".join(line.split()[1:]) for line in grid)
    assert letters == "WWWWWFWWiB" + "W" * 54
    text = "\n".join(lines)
    assert "rank 5 (process 1005) is frozen; it blocks ranks 0-4, 6-7, 10-63 and keeps" in text
    assert "W waiting 61" in text
    rows = [line.split() for line in lines[lines.index(grid[1]) + 4 :]]
    assert rows[0][:2] == ["5", "frozen"]
    assert rows[1][:2] == ["9", "busy"]


def test_few_ranks_have_a_row_each() -> None:
    lines = shown(status(4, frozen=(1,), idle=(2,)))
    rows = [line.split()[:2] for line in lines[-4:]]
    assert rows == [["0", "busy"], ["1", "frozen"], ["2", "idle"], ["3", "busy"]]
    assert "0:01:40" in lines[0]
    text = "\n".join(lines)
    for part in (
        "model.py:77",
        "train.py:1234",
        "queue 12",
        "120,300 hits",
        "45 misses",
        "3 compiling",
        "1 failed",
        "9 snapshots",
        "2 recoveries",
        "optimizer 2.0 GB",
    ):
        assert part in text, part  # fmt: skip


def test_narrow_and_low_terminals_are_not_overrun() -> None:
    lines = shown(status(64, frozen=(5,)), width=40, height=16)
    assert max(map(len, lines)) <= 40
    assert len(lines) <= 16


def test_every_state_has_a_letter() -> None:
    assert set(LETTERS) == set(STATES)
    assert len({letter for letter, _ in LETTERS.values()}) == len(LETTERS)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "rank 3"), ((0, 1, 2, 5), "ranks 0-2, 5"), ((1, 0), "ranks 0-1"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10 and 14 more"),
    ],
)  # fmt: skip
def test_ranks_are_named_briefly(ranks, text) -> None:
    assert ranks_text(ranks) == text


def test_blocking_ranks_are_found_transitively() -> None:
    assert blocks({0: (1,), 1: (3,), 2: (), 3: ()}) == {3: (0, 1)}
    assert blocks({0: (1,), 1: (0,)}) == {}
    assert blocks({}) == {}
