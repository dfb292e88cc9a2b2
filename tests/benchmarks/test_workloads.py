"""The contestants answer, and the tables say what was found."""

import argparse
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import contestant, workloads
from benchmarks.contestant import COMPILE, EAGER, LAZYGT, LAZYGT_COMPILED, QUICK, Contestant, Runner
from benchmarks.harness import Measured, Report

ARGUMENTS = argparse.Namespace(
    rounds=1, quick=True, pin=False, only="W3 SGD", without=[COMPILE, LAZYGT_COMPILED]
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EAGER, LAZYGT])
@pytest.mark.timeout(60)
def test_a_contestant_answers_with_numbers(kind: str) -> None:
    with Contestant(kind, "W3 Adam", ARGUMENTS) as process:
        assert process.ask("forget") > 0
        assert process.ask("make") > 0
        assert process.ask("burst 2") > 0
        assert process.ask("peak") >= 0


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_failing_contestant_is_named() -> None:
    with (
        Contestant(EAGER, "W1", ARGUMENTS) as process,
        pytest.raises(RuntimeError, match="eager on W1 ended with code 1 at 'nonsense'"),
    ):
        process.ask("nonsense")


@pytest.mark.slow
def test_every_row_names_its_workload_and_both_peers() -> None:
    report = workloads.measure(ARGUMENTS)
    assert report.columns == [
        "workload", EAGER, LAZYGT, "lazygt / eager", "lazygt / torch.compile"
    ]  # fmt: skip
    assert [row[0] for row in report.rows] == ["W3 SGD, ms", "W3 SGD, first step s"]
    for _, eager, ours, times, against_compile in report.rows:
        assert float(eager) > 0
        assert float(ours) > 0
        assert times.endswith("x")
        assert against_compile == "-"


def test_ratios_are_of_the_compiled_plans_where_there_are_some() -> None:
    found = {EAGER: Measured((4.0, 8.0)), LAZYGT: Measured((4.0, 4.0))}
    assert workloads.times(found, EAGER) == "0.75x"
    found[LAZYGT_COMPILED] = Measured((2.0, 4.0))
    assert workloads.times(found, EAGER) == "0.5x"


def test_a_peer_with_one_round_is_compared_by_medians() -> None:
    found = {COMPILE: Measured((10.0,)), LAZYGT: Measured((1.0, 2.0, 3.0))}
    assert workloads.times(found, COMPILE) == "0.2x"


def test_ratio_to_zero_is_dash() -> None:
    report = Report("x", "X", ["what", EAGER, LAZYGT, "/eager", "/compile"])
    found = {EAGER: Measured((0.0,)), LAZYGT: Measured((5.0,))}
    workloads.add(report, "row", [EAGER, LAZYGT], found)
    assert report.rows == [("row", "0", "5", "-", "-")]


def test_quick_workloads_are_the_same_ones() -> None:
    assert QUICK.keys() == contestant.WORKLOADS.keys()
    for name, quick in QUICK.items():
        assert quick.reads == contestant.WORKLOADS[name].reads


def test_results_are_read_when_the_workload_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    result = SimpleNamespace(tolist=lambda: reads.append("read"))
    for when, expected in (
        (contestant.EACH, ["read"] * 3),
        (contestant.LAST, ["read"]),
        (contestant.NEVER, ["waited"] * 3),
    ):
        reads.clear()
        runner = Runner.__new__(Runner)
        runner.workload = contestant.Workload(lambda: None, when, 3)
        runner.step = lambda: result
        monkeypatch.setattr(runner, "wait", lambda: reads.append("waited"))
        runner.burst(3)
        assert reads == expected


def test_resident_memory_is_seen_to_grow() -> None:
    runner = Runner.__new__(Runner)
    runner.session = None
    assert runner.forget() > 0
    held = mmap.mmap(-1, 32 << 20)  # its own pages: malloc may have freed ones to give
    for offset in range(0, len(held), mmap.PAGESIZE):
        held[offset] = 1
    held.close()
    assert 30 < runner.peak() < 60


def test_peaks_of_a_process_that_is_gone_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner.__new__(Runner)
    runner.session = None
    monkeypatch.setattr(Runner, "pids", [2**22 + 1])
    with pytest.raises(FileNotFoundError):
        runner.forget()
    assert not Path(f"/proc/{2**22 + 1}").exists()
