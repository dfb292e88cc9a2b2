"""explain: what a script would cost, counted before anything runs."""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import lazygt
import lazygt.observe.explain as explaining
from lazygt.cli.app import app
from lazygt.graph import Graph, parse_graph
from lazygt.graph.cost import Cost, graph_costs
from lazygt.graph.liveness import peak_bytes
from lazygt.observe.report import LineCost, PlanCost, Report, short_line
from lazygt.passes.fuse import MAX_MEMBERS, Fuse, candidates
from lazygt.runtime.plan import Plan, Schedule
from lazygt.runtime.worker.inline import MAX_ZEROS
from lazygt.settings import grouped

pytestmark = pytest.mark.timeout(120)

PRICES = Fuse().prices

SCRIPT = """\
import torch

w = torch.ones(1000, 500, requires_grad=True)
for _ in range(2):
    x = torch.rand(2000, 1000)
    y = (x @ w).sigmoid() * 2 + 1
    loss = (y * y).mean()
    loss.backward()
    small = (w.detach()[:2, :2] + 1).exp()
print(loss.item(), small.tolist())
"""

#: By hand: a matrix product is 2 * 2000 * 1000 * 500 = 2 Gflop, and line 6 has one and its
#: gradient a step; line 5 draws 2,000,000 numbers a step; the result of line 6 is 4 MB.
GOLDEN = """\
0.0 [[0.0, 0.0], [0.0, 0.0]]
Nothing was computed. What the script read of computed values was 0 (or False), so a branch on them may differ from a real run.
3 runs of 3 plans, counted and not timed; a fused group counts as one launch at its first member's line.
Peak: the most bytes of a plan's own values alive at once.

lines
line         ops  launches   flops  share   read  written  share     peak  source
script.py:6   16         6  8.01 G   100%  52 MB    28 MB    62%    22 MB  y = (x @ w).sigmoid() * 2 + 1
script.py:7   12         2    10 M     0%  16 MB     8 MB    19%    22 MB  loss = (y * y).mean()
script.py:5    4         2     4 M     0%    0 B    16 MB    12%    12 MB  x = torch.rand(2000, 1000)
script.py:8    3         3   500 k     0%   4 MB     2 MB     5%    18 MB  loss.backward()
script.py:3    2         1       0     0%    0 B     2 MB     2%  2.01 MB  w = torch.ones(1000, 500, requires_grad=True)
script.py:9    8         4      16     0%   64 B     64 B     0%     4 MB  small = (w.detach()[:2, :2] + 1).exp()
total         45        18  8.02 G   100%  72 MB    56 MB   100%    22 MB

plans, one run of each
plan      runs  ops  groups  launches   flops   read  written   inputs   peak
0 DIGEST     1   19       2         7  4.01 G  34 MB    28 MB  5.06 kB  22 MB
1 DIGEST     1   22       2         9  4.01 G  38 MB    28 MB     4 MB  22 MB
2 DIGEST     1    4       0         2       8   32 B     32 B     2 MB   2 MB

fused, one run of each (estimates)
runs  ops  members                             line         bytes saved     gain
   2    5  sigmoid, mul x2, add, mean          script.py:6        24 MB  2.66 ms
   2    5  div, mul x2, add, sigmoid_backward  script.py:7        32 MB  3.55 ms

not fused
runs  ops  members   line         why
   2    1  uniform   script.py:5  random: groups draw no numbers
   2    2  add, exp  script.py:9  too small: saves 1.2 us, and a call costs 8 us
   1    1  add       script.py:8  alone: nothing follows it that could join it
"""  # noqa: E501

CHAIN = """\
graph {{
  %0: f32[{n}] = input
  %1: f32[{n}] = aten.exp.default(%0)  # a.py:1
  %2: f32[{n}] = aten.neg.default(%1)  # a.py:2
  %3: f32[{n}] = aten.sin.default(%2)  # a.py:2
  return %3
}}"""


def _run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def _explained(folder: Path, text: str) -> Any:
    path = folder / "script.py"
    path.write_text(text)
    result = _run("explain", path)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- the command ---------------------------------------------------------------------------------


def test_explain_of_a_tiny_script(here: Path) -> None:
    result = _explained(here, SCRIPT)
    assert result.exit_code == 0, result.output
    assert re.sub(r"\b[0-9a-f]{12}\b|plan {8}(?= +runs)", _short, result.stdout) == GOLDEN


def _short(found: re.Match[str]) -> str:
    return "plan  " if found[0].startswith("plan") else "DIGEST"


def test_the_plans_are_those_of_a_real_run(here: Path) -> None:
    explained = re.findall(r"^\d ([0-9a-f]{12}) ", _explained(here, SCRIPT).stdout, re.MULTILINE)
    dumped = re.findall(
        r"^plan ([0-9a-f]{12}) ", _run("dump", "--all", "--inline", "script.py").stdout, re.M
    )
    assert len(explained) == 3
    assert explained == dumped[:3]


def test_explain_computes_nothing(here: Path) -> None:
    """No op of lazygt's reaches a kernel: a product of 80 GB matrices takes no time."""
    begin = time.monotonic()
    result = _explained(
        here,
        "import torch\n"
        "a = torch.randn(141_000, 141_000)\n"
        "b = torch.softmax(a @ a, -1)\n"
        "print(b.sum().item(), (b[0, 0] > 0).item())\n",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("0.0 False\nNothing was computed.")
    assert re.search(
        r"^script.py:3 .* 5\.[0-9]+ P  +100% .* b = torch.softmax", result.stdout, re.M
    )
    assert "159 GB" in result.stdout
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("compute", [True, False])
def test_a_dry_run_calls_no_kernel(compute: bool) -> None:
    with lazygt.session(launcher="inline" if compute else "dry", compile="off") as s:
        y = (torch.ones(64, 64) @ torch.ones(64, 64)).exp()
        with torch.autograd.profiler.profile() as profile:
            s.flush()
        assert y.shape == (64, 64)
    called = {event.name for event in profile.function_events}
    kernels = {"aten::fill_", "aten::mm", "aten::exp_", "aten::exp"}
    assert bool(called & kernels) == compute
    assert ("aten::mm" in called) == compute


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("print(x.sum().item())", "0.0"),
        ("print((x > 0).any().item())", "False"),
        ("print(torch.equal(x, x + 1))", "False"),
        ("print((x + 1).tolist())", "[0.0, 0.0, 0.0]"),
        ("print(torch.tensor([1, 2], device='cpu').to('lazygt').tolist())", "[1, 2]"),
        ("x.sum().item() or print('took the branch of 0')", "took the branch of 0"),
    ],
)
def test_first_line_of_explain_for_reads_of_script(body: str, expected: str, here: Path) -> None:
    result = _explained(here, f"import torch\nx = torch.rand(3)\n{body}\ny = x + 1\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == expected


def test_random_numbers_go_on_where_they_were(here: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert _explained(here, "import torch\nprint(torch.rand(3).sum().item())\n").exit_code == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("op", ["x[x > 0]", "x.nonzero()", "torch.unique(x)"])
def test_shapes_that_depend_on_values(op: str, here: Path) -> None:
    text = f"import torch\nx = torch.rand(3)\ny = x * 2\nz = {op}\nprint('not here')\n"
    result = _explained(here, text)
    assert result.exit_code == 1
    assert "not here" not in result.stdout
    assert ", line 4, in <module>\n" in result.stderr
    assert re.search(
        r"RuntimeError: aten\.\w+\.\w+: the shape of its result depends on values, and nothing is "
        r"computed here",
        result.stderr,
    )
    assert "The script failed; this is what it recorded until then." in result.stdout
    assert re.search(r"^script.py:3 .*y = x \* 2$", result.stdout, re.M)


def test_a_fetch_of_too_many_zeros(here: Path) -> None:
    result = _explained(here, f"import torch\ntorch.rand({MAX_ZEROS}).cpu()\n")
    assert result.exit_code == 1
    assert f"fetches a tensor of {4 * MAX_ZEROS} bytes" in result.stderr


def test_a_script_with_sessions_of_its_own(here: Path) -> None:
    """Its workers are not started, whatever it asks for."""
    result = _explained(
        here,
        "import lazygt, torch\n"
        "for size in (2, 3):\n"
        "    with lazygt.session(workers=4, compile='now') as s:\n"
        "        print((torch.ones(size) + 1).tolist(), len(s.worker_pids))\n",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("[0.0, 0.0] 1\n[0.0, 0.0, 0.0] 1\n")
    assert "2 runs of 2 plans" in result.stdout
    assert re.findall(r"^(\d) [0-9a-f]{12} ", result.stdout, re.MULTILINE) == ["0", "1"]


def test_invalid_input_is_refused(here: Path) -> None:
    result = _run("explain", here / "nowhere.py")
    assert result.exit_code == 2
    assert result.stderr == f"lazygt explain: there is no file {here}/nowhere.py\n"
    result = _explained(here, "import torch\nprint('hello')\n")
    assert (result.exit_code, "recorded nothing" in result.stdout) == (0, True)
    result = _explained(here, "import torch\ntorch.rand(3) + 1\nraise KeyError('mine')\n")
    assert result.exit_code == 1
    assert result.stderr.endswith("KeyError: 'mine'\n")
    result = _explained(here, "import torch\nx = (\n")
    assert (result.exit_code, result.stdout) == (1, "")


def test_an_interrupted_script_is_explained_up_to_there(here: Path) -> None:
    text = "import torch\ny = torch.rand(3) + 1\nprint(y.sum().item())\nraise KeyboardInterrupt\n"
    result = _explained(here, text)
    assert result.exit_code == 1
    assert "interrupted" in result.stderr
    assert "torch.rand(3)" in result.stdout


# -- from Python ---------------------------------------------------------------------------------


def test_a_plan_explains_itself() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    with lazygt.session(launcher="inline") as s:
        model.to("lazygt")(torch.randn(16, 32, device="lazygt")).sum().backward()
        plan = s.plans()[-1]
        report = lazygt.explain(plan)
        whole = lazygt.explain(s)
    assert report.total == sum(graph_costs(plan.graph)[1:], graph_costs(plan.graph)[0])
    assert report.peak == peak_bytes(plan.graph, Schedule.of(plan.graph).frees)
    assert [each.name for each in report.plans] == [plan.digest.hex()[:12]]
    assert repr(report) == str(report)
    assert report.total.flops <= whole.total.flops
    page = report._repr_html_()
    assert page.startswith("<pre ")
    assert "<script" not in page
    assert f"{Path(__file__).name}:" in page


def test_reported_gains_are_those_of_fusion_pass() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 8))
    with lazygt.session(**grouped(explaining.DRY)) as s:
        model.to("lazygt")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(512, 256)).sigmoid().square().mean().backward()
            optimizer.step()
            s.flush()
        for runs in explaining.runs_of(s):
            assert runs.before is not None
            found = sorted(each.gain for each in candidates(runs.before, PRICES) if each.gain > 0)
            reported = sorted(
                each.gain for each in explaining.report_of([runs._replace(times=1)]).fused
            )
            assert reported == pytest.approx(sorted(set(found)))
        assert lazygt.explain(s).fused


@pytest.mark.parametrize("n", [4, 1 << 20])
def test_the_pass_and_the_report_agree(n: int) -> None:
    """A small chain is not worth a call; a large one is."""
    graph: Graph = parse_graph(CHAIN.format(n=n))
    (found,) = candidates(graph, PRICES)
    assert found.members == [0, 1, 2]
    fused = Fuse().run(graph)
    assert (fused.nodes[0].body is not None) == (found.gain > 0) == (n > 4)
    before, after = lazygt.explain(graph), lazygt.explain(fused)
    assert not before.fused
    assert len(before.unfused) == 1
    if n > 4:
        assert "the fuse pass has not run" in before.unfused[0].why
        assert not after.unfused
        assert after.fused[0].gain == pytest.approx(found.gain)
        # two results that never reach memory, each written once and read once
        assert after.fused[0].saved == 2 * 2 * 4 * n
        assert before.total.bytes - after.total.bytes == after.fused[0].saved
    else:
        assert before.unfused[0].why == (
            f"too small: saves 2.41 us, and a call costs {PRICES.call * 1e6:.0f} us"
        )


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (("aten.exp.default(%0)", "aten.view.default(%1, [2, 2])"), "aten.view.default needs it"),
        (("aten.cumsum.default(%0, 0)",), "groups don't take this reduction"),
        (("aten.bernoulli.default(%0)",), "random: groups draw no numbers"),
    ],
)
def test_why_not_fused(rows: tuple[str, ...], why: str) -> None:
    shapes = ("f32[4]", "f32[2, 2]")
    lines = [f"%{n + 1}: {shapes[n]} = {row}  # a.py:{n}" for n, row in enumerate(rows)]
    text = ["graph {", "%0: f32[4] = input", *lines, f"return %{len(rows)}", "}"]
    (found, *_) = lazygt.explain(parse_graph("\n".join(text))).unfused
    assert why in found.why


def test_a_group_that_grew_too_large_says_so() -> None:
    rows = [f"%{n + 1}: f32[4] = aten.exp.default(%{n})" for n in range(MAX_MEMBERS + 6)]
    text = ["graph {", "%0: f32[4] = input", *rows, f"return %{len(rows)}", "}"]
    graph = parse_graph("\n".join(text))
    first, second = candidates(graph, PRICES)
    assert len(first.members) == MAX_MEMBERS
    assert first.closed == f"it would have more than {MAX_MEMBERS} members"
    assert (len(second.members), second.closed) == (6, "")


def test_an_empty_graph_has_a_report() -> None:
    report = lazygt.explain(parse_graph("graph {\n%0: f32[4] = input\nreturn %0\n}"))
    assert report.total.launches == 0
    assert report.peak == 16
    assert str(report).endswith("not fused\nnone")


def test_a_plan_counts_no_more_than_its_graph() -> None:
    plan = Plan.build(parse_graph(CHAIN.format(n=8)))
    assert lazygt.explain(plan).lines == lazygt.explain(plan.graph).lines


# -- in a terminal -------------------------------------------------------------------------------


def printed(report: Report, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(report)
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_report_is_as_wide_as_the_terminal(width: int) -> None:
    """Numbers stay whole: columns are left out instead, and what the user wrote is cut short."""
    line = f"{__file__}:1"
    costs = [LineCost(line, 1234, Cost(123_456_789, 1 << 30, 1 << 20, 1000), 1 << 31)] * 2
    plan = PlanCost("0 0123456789ab", 1, 123, 4, Cost(5, 6, 7, 8), 9, 10)
    rows = printed(Report(("head",), costs, [plan], [], []), width)
    assert max(map(len, rows)) <= width
    text = "\n".join(rows).partition("plans, one run of each")[0]
    assert text.count("123 M") == 2
    assert text.count("2.15 GB") >= 2
    assert ("launches" in text) == ("written" in text) == (width >= 100)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py:5",
         "torch/nn/modules/linear.py:5"),
        ("/usr/lib/python3/dist-packages/numpy/core.py:7", "numpy/core.py:7"),
        ("/elsewhere/net.py:3", "/elsewhere/net.py:3"),
        (f"{os.getcwd()}/net.py:3", "net.py:3"),
        (f"{os.getcwd()}/.venv/lib/site-packages/einops/x.py:3", "einops/x.py:3"),
        ("?", "?"),
    ],
)  # fmt: skip
def test_a_line_is_told_as_short_as_it_can_be(line: str, expected: str) -> None:
    assert short_line(line) == expected


def test_only_graphs_plans_and_sessions_are_explained() -> None:
    with pytest.raises(TypeError, match="expected a graph, a plan or a session, not int"):
        lazygt.explain(3)  # type: ignore[arg-type]
