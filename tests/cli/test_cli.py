"""The command line: dump, diff, why, profile, doctor."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lazygt
from lazygt.cli.app import app
from lazygt.cli.dump import STAGES, read_plans, wrapped
from lazygt.cli.script import Option, command_options_first, run_script
from lazygt.graph.text import parse_graph
from lazygt.passes import PIPELINE

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]

PLAIN = """\
import sys
import torch

w = torch.ones(3, 2, requires_grad=True)
for _ in range(3):
    w.grad = None
    loss = (torch.ones(4, 3) @ w).sum()
    loss.backward()
print(sys.argv[1:], __name__, loss.item())
"""

#: One value is computed twice and another is never looked at: the passes have work to do.
WASTEFUL = """\
import torch

x = torch.ones(3)
y = x.exp() + x.exp()
x.log()
print(y.sum().item())
"""

DUMP = """\
['--lr', '0.1'] __main__ 24.0
# plan 0: shipped 1 time(s), N bytes; run 1 time(s)
# 0 inputs, 0 bytes; 10 nodes make 136 bytes; 4 outputs, 56 bytes
recorded of plan DIGEST {
  $0: float = param
  $1: float = param
  %0: f32[3, 2] = aten.empty_strided.default([3, 2], [2, 1], dtype=torch.float32, device=device)  # plain.py:4  [24 bytes]
  %1: f32[3, 2] = aten.fill_.Scalar(%0, $0) writes %0  # plain.py:4
  %2: f32[4, 3] = aten.empty_strided.default([4, 3], [3, 1], dtype=torch.float32, device=device)  # plain.py:7  [48 bytes]
  %3: f32[4, 3] = aten.fill_.Scalar(%2, $1) writes %2  # plain.py:7
  %4: f32[4, 2] = aten.mm.default(%3, %1)  # plain.py:7  [32 bytes]
  %5: f32[] = aten.sum.default(%4)  # plain.py:7  [4 bytes]
  %6: f32[] = aten.ones_like.default(%5, pin_memory=False, memory_format=torch.preserve_format)  # plain.py:8  [4 bytes]
  %7: f32[4, 2]@(0, 0) = aten.expand.default(%6, [4, 2])  # plain.py:7
  %8: f32[3, 4]@(1, 3) = aten.t.default(%3)  # plain.py:7
  %9: f32[3, 2] = aten.mm.default(%8, %7)  # plain.py:7  [24 bytes]
  return %1, %5, %6, %9
}

# plan 1: shipped 1 time(s), N bytes; run 2 time(s)
"""  # noqa: E501

WHY = """\
[] __main__ 24.0
session 0: 26 ops recorded, 2 plans built, 1 hits
flushes (5)
  1x backward  plain.py:8  10 ops, plan DIGEST, 0 hits
  2x backward  plain.py:8  8 ops, plan DIGEST, 1 hits
  1x item  plain.py:9  0 ops, nothing to run
  1x synchronize()  ?  0 ops, nothing to run
plan misses (2)
  plan DIGEST, built in N ms, flush 'backward': a new sequence of ops
    first   aten.empty_strided.default([3, 2], [2, 1], dtype=torch.float32, device=device)  plain.py:4
  plan DIGEST, built in N ms, flush 'backward': aten.empty_strided.default with other arguments or shapes than before
    before  aten.empty_strided.default([3, 2], [2, 1], dtype=torch.float32, device=device)  plain.py:4
    now     aten.empty_strided.default([4, 3], [3, 1], dtype=torch.float32, device=device)  plain.py:7
fallbacks
  none
compiles
  none
"""  # noqa: E501


def _run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def _scrubbed(text: str, folder: Path) -> str:
    """``text`` without what differs from run to run."""
    text = text.replace(f"{folder}/", "")
    text = re.sub(r"plan [0-9a-f]{12}\b", "plan DIGEST", text)
    text = re.sub(r"\d+ bytes; run", "N bytes; run", text)
    return re.sub(r"\d+\.\d ms", "N ms", text)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    return path


@pytest.fixture
def wasteful(tmp_path: Path) -> Path:
    path = tmp_path / "wasteful.py"
    path.write_text(WASTEFUL)
    return path


# -- how a command takes a script ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("a.py --plan 1 -o x", "--plan 1 -o x a.py"),
        ("a.py --lr 0.1 --plan=2 --flag", "--plan=2 --flag a.py --lr 0.1"),
        ("--flag a.py -oops --planner 3", "--flag a.py -oops --planner 3"),
        ("a.py -- --plan 1 --flag", "a.py --plan 1 --flag"),
        ("a.py -- x -- --flag", "a.py x -- --flag"),
        ("a.py --plan", "--plan a.py"),
        ("--plan 1 a.py --plan 2", "--plan 1 a.py --plan 2"),
        ("--output x a.py -o y --flag", "--output x --flag a.py -o y"),
        ("a.py --flag --flag", "--flag --flag a.py"),
    ],
)
def test_own_options_may_stand_behind_the_script(args: str, expected: str) -> None:
    output = Option("output", True)
    known = {"--plan": Option("plan", True), "-o": output, "--output": output,
             "--flag": Option("flag", False)}  # fmt: skip
    assert command_options_first(args.split(), known) == expected.split()


@pytest.mark.parametrize("command", ["dump", "why", "profile"])
def test_missing_script_is_refused(command: str, tmp_path: Path) -> None:
    result = _run(command, tmp_path / "nowhere.py")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"lazygt {command}: there is no file {tmp_path}/nowhere.py\n"


@pytest.mark.parametrize("command", ["dump", "why"])
def test_a_script_that_raises(command: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import torch\n\ndef f():\n    raise KeyError('mine')\n\nf()\n")
    out = subprocess.run(
        [sys.executable, "-m", "lazygt.cli", command, str(path), "--inline"],
        capture_output=True, text=True, cwd=ROOT, timeout=600, check=False,
    )  # fmt: skip
    assert out.returncode == 1
    assert out.stderr.startswith("Traceback (most recent call last):\n  File ")
    assert "lazygt/cli/script.py" not in out.stderr
    assert "runpy" not in out.stderr
    assert out.stderr.endswith("KeyError: 'mine'\n")


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("None", 0), ("3", 1), ("'no'", 1)])
def test_a_script_that_exits(code: str, expected: int, tmp_path: Path) -> None:
    path = tmp_path / "exits.py"
    path.write_text(f"import sys, torch\ntorch.ones(2).sum().item()\nsys.exit({code})\n")
    assert _run("why", path, "--inline").exit_code == expected


@pytest.mark.parametrize(
    ("command", "shown"),
    [("dump", "# plan 0: "), ("why", "plan misses (1)"), ("profile", "1 runs written to ")],
)
def test_an_interrupted_script_is_shown_up_to_there(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "long.py"
    path.write_text("import torch\nprint(torch.ones(2).sum().item())\nraise KeyboardInterrupt\n")
    result = _run(command, path, "--inline")
    assert result.exit_code == 1
    assert result.stderr == "interrupted; what follows is what was seen until then\n"
    assert shown in result.stdout


# -- dump ----------------------------------------------------------------------------------------


def test_dump_of_a_script_without_a_session(plain: Path) -> None:
    result = _run("dump", "--inline", "--all", "--stage=recorded", plain, "--lr", "0.1")
    assert result.exit_code == 0, result.output
    text = _scrubbed(result.stdout, plain.parent)
    assert text.startswith(DUMP), text
    assert "flushes: backward 3" in text
    assert re.search(r"# \d+ messages sent, \d+ bytes\n# \d+ messages received, \d+ bytes\n$", text)


def test_dump_of_plans_shows_lines_bytes_and_frees(plain: Path) -> None:
    text = _scrubbed(_run("dump", "--inline", "--all", plain).stdout, plain.parent)
    assert "\nplan DIGEST {\n" in text
    (mm,) = re.findall(r"^  %\d+: f32\[4, 2\] = aten.mm.*$", text.partition("# plan 1")[0], re.M)
    assert re.search(r"  # plain.py:7  \[(.*; )?32 bytes\]$", mm)
    assert re.search(r"\[in place; free %\d+\]", text)


def test_dump_of_one_plan(plain: Path) -> None:
    result = _run("dump", plain, "--plan", "1", "--inline")
    assert result.output.count("# plan ") == 1
    assert "# plan 1:" in result.output


def test_dump_prints_the_plan_that_ran_most_ops(plain: Path) -> None:
    """The first step makes the weight, too, and is no plan of the steps after it."""
    text = _run("dump", plain, "--inline").stdout
    assert text.count("shipped") == 1
    assert re.search(r"# plan 1: shipped 1 time\(s\), \d+ bytes; run 2 time\(s\)", text)
    assert text.endswith(
        "# plan 1 of 2 ran the most ops; --plan NUMBER prints another, --all prints them all\n"
    )


def test_long_lines_go_on_in_the_next(plain: Path) -> None:
    text = _run("dump", plain, "--inline").stdout
    narrow = wrapped(text, 80)
    assert max(map(len, text.splitlines())) > 80
    # a path may be longer than a line, and stays whole
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in narrow.splitlines())
    assert narrow.split() == text.split()
    assert "\n        " in narrow


@pytest.mark.parametrize("number", ["7", "-1"])
def test_dump_of_a_plan_that_is_not_there(number: str, plain: Path) -> None:
    result = _run("dump", "--inline", "--plan", number, plain)
    assert result.exit_code == 2
    assert result.stderr == f"lazygt dump: there is no plan {number}, only 0 to 1\n"


def _graph(text: str) -> Any:
    (rows,) = dict(read_plans(text.splitlines())).values()
    return parse_graph("\n".join(rows))


def test_dump_of_a_stage(wasteful: Path) -> None:
    graphs, passed = {}, [each.name for each in PIPELINE]
    for stage in STAGES:
        result = _run("dump", wasteful, "--stage", stage, "--inline")
        assert result.exit_code == 0, result.output
        if stage not in ("recorded", *passed, "plan"):  # on a mesh: see test_explain_mesh
            assert f"# it went through no stage {stage!r}\n" in result.stdout
            continue
        assert stage == "plan" or f"\n{stage} of plan " in result.stdout
        graphs[stage] = _graph(result.stdout)
    assert [node.op for node in graphs["recorded"].nodes].count("aten.exp.default") == 2
    assert any(node.op == "aten.log.default" for node in graphs["recorded"].nodes)
    assert "aten.exp.default" in str(graphs["plan"])
    assert "aten.log.default" not in str(graphs["plan"])
    assert graphs[passed[-1]] == graphs["plan"]


def test_dump_of_an_unknown_stage(plain: Path) -> None:
    result = _run("dump", plain, "--stage", "magic")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"there is no stage 'magic', only {', '.join(STAGES)}" in result.stderr
    assert STAGES[0] == "recorded"
    assert STAGES[-1] == "plan"


def test_dump_leaves_a_script_its_own_sessions(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import lazygt, torch\n"
        "for size in (2, 3):\n"
        "    with lazygt.session(launcher='inline', planning=lazygt.Planning(keep_stages=False)):\n"
        "        print((torch.ones(size) + 1).tolist())\n"
    )
    result = _run("dump", path, "--stage", "recorded", "--all")
    assert result.exit_code == 0, result.output
    assert "# plan 0: shipped 1" in result.output
    assert "# plan 1: shipped 1" in result.output
    assert result.output.count("ops recorded") == 2


def test_dump_of_a_script_that_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('hello')\n")
    result = _run("dump", "--inline", path)
    assert result.exit_code == 0
    assert "the script recorded nothing" in result.output


# -- diff ----------------------------------------------------------------------------------------


def _dumped(script: Path, text: str, output: str) -> Path:
    """A file with the dump of a script."""
    script.write_text(text)
    dump = script.parent / output
    dump.write_text(_run("dump", script, "--inline", "--all").stdout)
    return dump


def test_diff_of_the_same_plans(plain: Path) -> None:
    old = _dumped(plain, PLAIN, "old")
    new = _dumped(plain, PLAIN.replace("range(3)", "range(5)").replace("__name__", "3"), "new")
    assert old.read_text() != new.read_text()
    result = _run("diff", old, new)
    assert (result.exit_code, result.output) == (0, "")


def test_diff_shows_the_plan_that_differs(plain: Path) -> None:
    old = _dumped(plain, PLAIN, "old")
    new = _dumped(plain, PLAIN.replace(".sum()", ".mean()"), "new")
    result = _run("diff", old, new)
    rows = result.stdout.splitlines()
    assert result.exit_code == 1
    assert rows[:2] == [f"--- {old} plan 0", f"+++ {new} plan 0"]
    assert [row for row in rows if row.startswith("---")] == [
        f"--- {old} plan {n}" for n in range(2)
    ]
    assert any(row.startswith("-") and "aten.sum.default" in row for row in rows)
    assert any(row.startswith("+") and "aten.mean.default" in row for row in rows)
    assert "\x1b[" not in result.stdout


def test_diff_is_coloured_on_a_terminal(plain: Path) -> None:
    old = _dumped(plain, PLAIN, "old")
    new = _dumped(plain, PLAIN.replace(".sum()", ".mean()"), "new")
    result = CliRunner().invoke(app, ["diff", str(old), str(new)], color=True)
    assert re.search(r"^\x1b\[31m-.*aten\.sum\.default", result.stdout, re.MULTILINE)
    assert re.search(r"^\x1b\[32m\+.*aten\.mean\.default", result.stdout, re.MULTILINE)


def test_diff_may_leave_the_users_lines_out(plain: Path) -> None:
    old = _dumped(plain, PLAIN, "old")
    new = _dumped(plain, "# one line more\n" + PLAIN, "new")
    assert _run("diff", old, new).exit_code == 1
    result = _run("diff", old, new, "--no-lines")
    assert (result.exit_code, result.output) == (0, "")


def test_diff_of_a_plan_that_only_one_has(plain: Path) -> None:
    old = _dumped(plain, PLAIN, "old")
    new = _dumped(plain, PLAIN.replace("range(3)", "range(1)"), "new")
    result = _run("diff", old, new)
    assert result.exit_code == 1
    body = [row for row in result.stdout.splitlines() if row[:3] not in ("---", "+++")][1:]
    assert body
    assert all(row.startswith("-") for row in body)


def test_diff_of_non_dump_fails(plain: Path) -> None:
    missing = plain.parent / "missing"
    result = _run("diff", missing, plain)
    assert result.exit_code == 2
    assert f"lazygt diff: can't read {missing}: " in result.stderr
    result = _run("diff", plain, plain)
    assert result.exit_code == 2
    how = "write one with `lazygt dump --all SCRIPT >"
    assert f"there is no plan in {plain}; {how}" in result.stderr
    binary = plain.parent / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert f"can't read {binary}" in _run("diff", binary, plain).stderr


# -- why -----------------------------------------------------------------------------------------


def test_why(plain: Path) -> None:
    result = _run("why", plain, "--inline")
    assert result.exit_code == 0, result.output
    assert _scrubbed(result.stdout, plain.parent) == WHY


# -- profile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [["--inline"], []], ids=["inline", "process"])
def test_profile_writes_a_trace(inline: list[str], plain: Path) -> None:
    output = plain.parent / "trace.json"
    result = _run("profile", plain, "-o", output, *inline)
    assert result.exit_code == 0, result.output
    assert f"runs written to {output}; open it at" in result.stdout
    assert re.search(r"\d\.\d{3} ms +\d+ steps  \S+plain\.py:7\n", result.stdout)
    events = json.loads(output.read_text())["traceEvents"]
    steps = [event for event in events if "step" in event.get("args", {})]
    assert [event["name"] for event in steps].count("aten.mm.default") == 6
    assert {Path(event["args"]["line"]).name for event in steps} == {
        "plain.py:4", "plain.py:7", "plain.py:8",
    }  # fmt: skip


def test_profile_into_a_folder_that_is_not_there(plain: Path) -> None:
    result = _run("profile", plain, "-o", plain.parent / "no" / "trace.json")
    assert result.exit_code == 2
    assert f"there is no folder {plain.parent}/no to write trace.json into" in result.stderr


def test_a_trace_that_cannot_be_written(plain: Path) -> None:
    result = _run("profile", plain, "-o", plain.parent, "--inline")
    assert (result.exit_code, result.stdout) == (2, "")  # it is said before the script runs
    assert result.stderr == f"lazygt profile: {plain.parent} is a folder; name a file in it\n"
    result = _run("profile", plain, "-o", "/dev/full", "--inline")
    assert result.exit_code == 2
    assert "lazygt profile: [Errno 28] No space left on device" in result.stderr


# -- doctor --------------------------------------------------------------------------------------


def test_doctor_reports_and_fails_on_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _run("doctor")
    assert result.exit_code == 0, result.output
    assert "one worker started" in result.output
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    result = _run("doctor")
    assert result.exit_code == 1
    assert "failed: torch" in result.output


def test_sessions_are_told_of_while_a_script_runs_and_no_longer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import lazygt\nlazygt.session(launcher='inline').close()\n")
    ran = run_script(script, settings={"launcher": "inline", "max_ahead": 3})
    assert [s.config.max_ahead for s in ran.sessions] == [3]
    with lazygt.session(launcher="inline") as other:
        assert other.config.max_ahead == 4
    assert len(ran.sessions) == 1


def test_machine_sets_the_costs_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, lazygt\n"
        "with lazygt.session(mesh={'x': 4}):\n"
        "    lazygt.distribute(torch.randn(1 << 20), [lazygt.Shard(0)]).sum().item()\n"
    )
    for machine, took in (("cpu-generic", "37 us"), ("h100", "15 us")):
        result = _run("explain", script, "--mesh", "x=4", "--machine", machine)
        assert result.exit_code == 0, result.output
        row = next(row for row in result.stdout.splitlines() if "all_reduce sum" in row)
        assert f"  {took}  " in row


@pytest.mark.parametrize("command", ["explain", "viz", "dump"])
def test_unknown_machine_is_refused(command: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('not reached')")
    result = _run(command, script, "--machine", "tpu")
    assert result.exit_code == 2
    assert f"lazygt {command}: --machine: machine tpu is no machine, and no file" in result.output


#: How people ask for workers of a pool; nobody listens there.
IN_A_POOL = """\
import torch, lazygt

with lazygt.session(workers=lazygt.Workers(start_timeout=1.0)):
    print(torch.ones(3).sum().item())
"""


@pytest.mark.parametrize("said", ["by the script", "by variables"])
def test_program_without_computation_contacts_no_pool(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "pool=lazygt.PoolAccess('tcp://127.0.0.1:9', key='alice.key', detach=True), workers=2"
    if said == "by variables":
        asked = "workers=2"
        monkeypatch.setenv("LAZYGT_POOL", "tcp://127.0.0.1:9")
        monkeypatch.setenv("LAZYGT_KEY", "alice.key")
    script = tmp_path / "pooled.py"
    script.write_text(IN_A_POOL.format(asked=asked))
    done = _run("explain", script)
    assert done.exit_code == 0, done.output
    assert "Nothing was computed." in done.output
    assert "pooled.py:4" in done.output


def test_a_script_that_imports_lazygt_beside_others_opens_its_own_session(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    session = "with lazygt.session(launcher='inline'):\n    torch.ones(3).sum().item()\n"
    script.write_text(f"import os, torch, lazygt as lazygt\n{session}")
    assert len(run_script(script, inline=True).sessions) == 1
