"""The benchmark of sharded sessions in a short form: every contestant, on tiny models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sharded import race
from benchmarks.sharded_workloads import COMPUTE, QUICK, WORKLOADS

ROOT = Path(__file__).parents[2]


class Fake:
    """A contestant with a result of its own."""

    def __init__(self, result: float) -> None:
        self.result, self.asked = result, list[str]()

    def ask(self, what: str) -> Any:
        self.asked.append(what)
        return {"settle": None, "result": self.result, "burst": 0.5}[what]


def test_contestants_settle_and_agree_before_they_are_timed() -> None:
    crews: Any = {"a": Fake(1.0), "b": Fake(1.0 + 1e-6)}
    found = race(crews, 2)
    assert found["a"].rounds == found["b"].rounds == (0.5, 0.5)
    assert crews["a"].asked == ["settle", "result", "burst", "burst"]


def test_contestants_that_train_something_else_are_not_compared() -> None:
    crews: Any = {"a": Fake(1.0), "b": Fake(1.1)}
    with pytest.raises(RuntimeError, match=re.escape("results: {'a': 1.0, 'b': 1.1}")):
        race(crews, 2)
    assert "burst" not in crews["a"].asked


def test_every_workload_has_a_short_form() -> None:
    assert QUICK.keys() == WORKLOADS.keys()
    for workload in QUICK.values():
        model = workload.model()
        names = [name for name, _ in model.named_modules()]
        for pattern in (*workload.columns, *workload.rows):
            assert any(Path(name).match(pattern) for name in names), pattern


def run(arguments: str) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.sharded",
            "--quick",
            "--rounds",
            "1",
            *arguments.split(),
        ],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("only", "peer"),
    [
        ("data", "DDP"),
        ("fully", "FSDP2"),
        ("tensor", "DTensor"),
        ("context", "DDP, heads by hand"),
    ],
)
def test_training_against_peers(only: str, peer: str) -> None:
    output = run(f"--parts training --workers 2 --only {only}")
    assert f"2 workers, against {peer}" in output or only == "context"
    assert peer in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(300)
def test_memory_beside_peers() -> None:
    output = run("--parts memory --workers 2")
    assert "MLP 8 x 2048, 2 workers, fully sharded against data parallel, memory" in output


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(180)
def test_a_sum_passes_no_tensor_through_the_client() -> None:
    output = run("--parts sum scaling invariant --workers 2 --megabytes 1")
    assert "through the client: 0 bytes of tensors up, 4 down (the sum itself)" in output
    assert f"One step of {COMPUTE}" in output
    assert "with invariant=True and without" in output
