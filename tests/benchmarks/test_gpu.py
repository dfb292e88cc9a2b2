"""Checks of a GPU: the runner with checks that end well, raise and hang, and its comparisons."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import harness
from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import speed
from benchmarks.gpu.checks import PARTS, Check
from benchmarks.gpu.rows import BITS, BOTH_RAISE, Goal, Row, agreement, difference, differences
from benchmarks.models import Step, Wrap

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
CHECKS = [check for part in PARTS.values() for check in part]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_DEVICE", "cpu")


# -- the runner ----------------------------------------------------------------------------


def process(code: str, seconds: float = 30.0) -> runner.CheckProcess:
    return runner.CheckProcess([sys.executable, "-c", code], "cpu", seconds)


def writes(row: Row) -> str:
    return f"print({json.dumps(asdict(row))!r}, flush=True)\n"


@pytest.mark.slow
@pytest.mark.anew
def test_failing_check_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    start = PARTS[1][0]
    unknown, elsewhere = Check("unknown", "correctness", 30), Check("waiting", "failures", 1, False)
    monkeypatch.setitem(PARTS, 1, (unknown, elsewhere, start))
    report, failed = runner.run_part(1, runner.arguments(["--part", "1", "--device", "cpu"]))
    assert failed == ["unknown"]
    assert [row[:2] for row in report.rows] == [
        ("unknown", "failed"), ("waiting", "all"), ("start", "first number"),
        ("start", "first product"),
    ]  # fmt: skip
    assert [row[-1] for row in report.rows] == ["no", "", "", "yes"]
    assert report.rows[1][2] == "needs a GPU"
    device = harness.cpu_model()
    assert report.markdown().startswith(f"## gpu part 1, {device}\n\nCorrectness on {device}\n\n")


@pytest.mark.anew
def test_rows_come_before_a_failure() -> None:
    row = Row("first", "1 ms")
    check = process(writes(row) + "import sys; sys.exit('no memory')")
    assert list(check.rows()) == [row]
    assert check.failure == "status 1: no memory"


@pytest.mark.anew
def test_check_that_kills_itself_is_named_by_its_signal() -> None:
    check = process("import os; os.kill(os.getpid(), 9)")
    assert list(check.rows()) == []
    assert check.failure == "ended by SIGKILL: no output"


PARENT = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                         start_new_session={apart})
print(json.dumps({{"case": str(child.pid), "figure": ""}}), flush=True)
if not {apart}:
    child.wait()
"""


@pytest.mark.anew
def test_check_over_its_limit_ends_with_its_children() -> None:
    check = process(PARENT.format(apart=False), 2.0)
    (child,) = [psutil.Process(int(row.case)) for row in check.rows()]
    assert check.failure == "over its limit of 2 s"
    child.wait(10)


@pytest.mark.anew
def test_check_has_ended_though_a_child_keeps_its_output() -> None:
    check = process(PARENT.format(apart=True))
    (child,) = [psutil.Process(int(row.case)) for row in check.rows()]
    child.kill()
    assert check.failure == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "4"], "invalid choice: 4"),
        ([], "the following arguments are required: --part"),
        (["--part", "1", "--only", "mlp"], "part 1 has no check 'mlp'; it has: start, models, "),
        (["--part", "1", "--limit", "0"], "--limit 0: expected seconds above 0"),
        (["--part", "1", "--only", "start", "--save"], "keeps the table of a part"),
        (["--part", "1", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["--part", "1"], "torch sees no GPU: "),
    ],
)
def test_invalid_arguments_are_refused(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        runner.arguments(words)
    assert message in capsys.readouterr().err


def test_saved_command_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "__main__.py"), "--part", "1"])
    assert harness.stamp()[0].startswith("`python -m benchmarks.gpu --part 1` at commit ")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check_is_a_function_of_its_module(check: Check) -> None:
    tree = ast.parse((FOLDER / f"{check.module}.py").read_text())
    assert check.name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [each.name for each in CHECKS].count(check.name) == 1


def test_commands_of_the_page_are_understood() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    commands = re.findall(r"^python -m benchmarks\.gpu (.*?)(?: +#.*)?$", page, re.MULTILINE)
    parts = [runner.arguments([*words.split(), "--device", "cpu"]).part for words in commands]
    assert set(parts) == set(PARTS)


# -- comparisons ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ([torch.ones(2)], [torch.ones(2)], BITS),
        ([torch.tensor(float("nan"))], [torch.tensor(float("nan"))], BITS),
        ([torch.full((4,), 1.01)], [torch.ones(4)], "1.0e-02"),
        ([torch.tensor([1.0, float("nan")])], [torch.ones(2)], "inf"),
        ([torch.tensor([0, 2])], [torch.tensor([0, 4])], "5.0e-01"),
        ([torch.ones(2)], [torch.ones(2).half()], "lazygt: float32[2]; eager: float16[2]"),
        ([torch.ones(2)], [], "lazygt: float32[2]; eager: nothing"),
        ("ValueError: a", "TypeError: b", BOTH_RAISE),
        ([torch.ones(())], "TypeError: b", "lazygt: float32[]; eager: TypeError: b"),
    ],
)
def test_differences_are_described(ours: object, theirs: object, text: str) -> None:
    assert difference(ours, theirs) == text  # type: ignore[arg-type]


def test_differences_above_rounding_have_a_row() -> None:
    cases = {"a": BITS, "b": "1.0e-07", "c": "2.0e-03", "d": BOTH_RAISE, "e": "lazygt: x; eager: y"}
    rows = list(agreement(cases))
    assert [(row.case, row.figure) for row in rows] == [
        ("c", "2.0e-03"), ("e", "lazygt: x; eager: y"), ("all", "2 of 5 equal"),
    ]  # fmt: skip
    assert {row.met for row in rows} == {False}
    assert rows[-1].beside == "1 within 1e-05, 1 raise on both"
    (row,) = agreement({"a": BITS, "b": "1.0e-07"})
    assert row.met


def test_programs_run_on_both_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_LAUNCHER", "inline")
    cases: dict[str, Callable[[str], object]] = {
        "drawn": lambda device: torch.rand(5, device=device),
        "raises": lambda device: torch.ones(2, device=device) @ torch.ones(3, device=device),
        "differs": lambda device: torch.full((2,), float(device == "cpu"), device=device),
    }
    assert differences(cases, "cpu") == {"drawn": BITS, "raises": BOTH_RAISE, "differs": "1.0e+00"}


def test_goals_are_those_of_a_gpu() -> None:
    least, most = Goal("a copy", 0.9, at_least=True), Goal("eager", 0.3)
    assert least.row("x", "1 GB/s", 0.95, "cuda") == Row(
        "x", "1 GB/s", "0.95x a copy", ">= 0.9x", True
    )
    assert most.row("x", "1 ms", 0.95, "cuda") == Row("x", "1 ms", "0.95x eager", "<= 0.3x", False)
    assert most.row("x", "1 ms", 0.95, "cpu") == Row("x", "1 ms", "0.95x eager")


def test_contestant_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(function: Callable[..., object]) -> Callable[..., object]:
        raise RuntimeError("no compiler")

    def program(device: str, wrap: Wrap) -> Step:
        x, total = torch.ones(4, device=device), wrap(torch.sum)
        return lambda: total(x)

    monkeypatch.setenv("LAZYGT_LAUNCHER", "inline")
    monkeypatch.setattr(torch, "compile", no_compiler)
    goals = Goal(speed.EAGER, 1.0), Goal(speed.COMPILE, 1.0)
    eager, compiled, *ours = speed.contest(program, "cpu", 1, *goals, rounds=2)
    assert (eager.case, compiled.figure) == (speed.EAGER, "RuntimeError: no compiler")
    assert [row.case for row in ours] == ["lazygt", "lazygt"]
    assert ours[0].beside.endswith("x eager")
    assert ours[1].beside == "no figure of torch.compile"
