"""The harness keeps its promises, and every benchmark still runs in a short form."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import aims, harness
from tests.runtime.executors.compared import needs_native
from tests.support.timeouts import DEEP

ROOT = Path(__file__).parents[2]


def test_cases_take_turns() -> None:
    order: list[str] = []

    def case(name: str, figure: float) -> float:
        order.append(name)
        return figure

    found = harness.interleave({"a": lambda: case("a", 3.0), "b": lambda: case("b", 1.5)}, 2)
    assert order == ["a", "b", "a", "b"]
    assert found["a"].rounds == (3.0, 3.0)
    assert harness.ratio(found["a"], found["b"]) == 2.0


def test_ratio_compares_neighbours() -> None:
    # The machine was ten times slower in the second round; the ratio does not notice.
    ours, peer = harness.Measured((2.0, 20.0, 2.0)), harness.Measured((1.0, 10.0, 1.0))
    assert harness.ratio(ours, peer) == 2.0


def test_a_row_must_fill_the_columns() -> None:
    report = harness.Report("x", "X", ["one", "two"])
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        report.add("1")


def test_results_replace_their_own_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    path = tmp_path / "RESULTS.md"
    harness.keep("b", "## b\n\nfirst\n", path)
    harness.keep("a", "## a\n\nother\n", path)
    harness.keep("b", "## b\n\nsecond\n", path)
    assert path.read_text() == "# Results\n\n## a\n\nother\n\n## b\n\nsecond\n"


def test_markdown_names_commit_and_machine() -> None:
    report = harness.Report("x", "Title", ["one", "two"])
    report.add("1", "2")
    text = report.markdown()
    assert text.startswith("## x\n\nTitle\n\n")
    assert "torch" in text
    assert "cores" in text
    assert "| one | two |\n|---|---|\n| 1 | 2 |\n" in text


def test_aim_is_compared_with_saved_result(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\n## pace\n\n| op | x |\n|---|---|\n| add | 0.9x |\n")
    tables = aims.saved(path)
    assert aims.shown(aims.Cell("pace", "add", 1, 1.0), tables) == ("0.9", "<= 1", "yes")
    assert aims.shown(aims.Cell("pace", "add", 1, 1.0, True), tables) == ("0.9", ">= 1", "no")
    assert aims.shown(aims.Cell("pace", "mul", 1, 1.0), tables) == ("-", "<= 1", "not measured")


def test_every_aim_names_a_table_that_is_saved() -> None:
    tables = aims.saved()
    cells = [cell for _, *both in aims.ROWS for cell in both if cell is not None]
    lost = {cell for cell in cells if aims.shown(cell, tables)[0] == "-"}
    assert not lost


def test_a_second_session_is_pinned_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[tuple[int, int]] = []
    monkeypatch.setattr(harness, "CORES", (3, 5))
    monkeypatch.setattr(harness, "pin_process", lambda pid, core: placed.append((pid, core)))
    # What a pinned process sees: without care its worker would land on the client's core.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    harness.pin([77])
    assert placed == [(os.getpid(), 3), (77, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("record_cost", "--rounds 1 --ops 20", "a + b with grad"),
        ("client_step", "--rounds 1 --quick --only SGD", "zero_grad counts to backward"),
        ("step_messages", "--steps 5 --launcher inline", "times fewer"),
        ("training_steps", "--rounds 1 --only MLP", "MLP 784-512-512-10, Adam"),
        pytest.param("data_movement", "--rounds 1 --largest 1", "1 MiB", marks=pytest.mark.deep),
        ("flush_cost", "--rounds 3", "client / eager"),
        ("small_syncs", "--rounds 1", "inline"),
        ("line_search", "--rounds 1 --steps 1", "inline"),
        pytest.param(
            "recovery",
            "--rounds 1 --steps 2 --idle 0 --memory-steps 20",
            "killed, until the next answer",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "pool",
            "--clients 3 --seconds 2 --warm 1 --rounds 1",
            "their Jain index",
            marks=pytest.mark.deep,
        ),
        ("aims", "", "record a view, x eager"),
        ("startup", "--rounds 1", "close the session"),
        ("long_run", "--steps 100 --allowed 1000", "growth over the last four fifths"),
        pytest.param(
            "soak",
            "--sessions 2 --processes 2 --threads 2 --rounds 1 --fill 9 --shapes 9 --allowed 999",
            "threads: 1, then 5",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "workloads",
            "--rounds 1 --quick --only W2",
            "W2, peak MB beyond its input",
            marks=pytest.mark.deep,
        ),
        ("workloads", "--rounds 1 --quick --only W5 --without torch.compile", "W5, 60 steps s"),
        pytest.param(
            "peak_memory",
            "--quick --only SGD",
            "living bytes at most 1.05x eager's",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "compile_cost", "--rounds 1 --sizes 40 80", "all passes", marks=pytest.mark.deep
        ),
        ("placement", f"--rounds 1 --layers {'1 2' if DEEP else '1'}", "fully sharded"),
        pytest.param("worker_step", "--rounds 1 --quick", "native us a node", marks=needs_native),
        ("generation", "--rounds 1 --tokens 6 --dim 32", "of fixed size"),
    ],
)
def test_benchmark_runs(name: str, arguments: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments.split()],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout
