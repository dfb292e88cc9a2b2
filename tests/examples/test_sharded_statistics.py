"""Statistics over rows on several workers: numpy's numbers, the same on any number of workers, and
collectives of the size of the results."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.examples.running import ROOT, run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COLUMNS = 30
#: Bytes of the largest result, with a column of ones: the matrix and the right-hand side.
NORMAL_EQUATIONS = 8 * (COLUMNS + 1) * (COLUMNS + 2)


@cache
def parts(workers: int) -> tuple[str, str]:
    """What is printed of the data, and of the communication."""
    output = run_example("sharded_statistics.py", f"--workers {workers}")
    numbers, communication = output.split("all of it agrees with numpy\n")
    return numbers, communication


def lines(workers: int) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """For each statistic the bytes that the client got, and (kind, bytes) of each collective."""
    found = {}
    for line in parts(workers)[1].splitlines()[1:]:
        name, fetched, sent = re.split(r"\s{2,}", line, maxsplit=2)
        collectives = re.findall(r"(\w+) ([\d,]+)", sent)
        found[name] = (
            int(fetched.replace(",", "")),
            [(kind, int(nbytes.replace(",", ""))) for kind, nbytes in collectives],
        )
    return found


@pytest.mark.parametrize("workers", [2, 4])
def test_the_numbers_are_those_of_one_worker(workers: int) -> None:
    assert "most alike: mean radius, mean perimeter (0.9979)" in parts(1)[0]
    assert parts(workers)[0] == parts(1)[0]


def test_one_worker_exchanges_nothing() -> None:
    assert all(not collectives for _, collectives in lines(1).values())


@pytest.mark.parametrize("workers", [2, 4])
def test_only_the_median_moves_rows(workers: int) -> None:
    found = lines(workers)
    assert [kind for kind, _ in found.pop("median")[1]] == ["all_to_all"]
    for name, (_, collectives) in found.items():
        assert {kind for kind, _ in collectives} == {"all_reduce"}, name
        assert max(nbytes for _, nbytes in collectives) <= NORMAL_EQUATIONS, name
    assert found["mean"] == (8 * COLUMNS, [("all_reduce", 8 * COLUMNS)])


def test_document_shows_printed_output() -> None:
    document = (ROOT / "docs" / "sharding.md").read_text()
    command = "$ python examples/sharded_statistics.py --workers 4 | tail -n 10\n"
    assert f"```console\n{command}{parts(4)[1]}```" in document
