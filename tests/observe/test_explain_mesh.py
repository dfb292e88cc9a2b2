"""explain, dump and viz of a script on a mesh whose workers are not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from typer.testing import CliRunner

import lazygt
import lazygt.observe.explain as explaining
from lazygt.cli.app import app
from lazygt.cli.script import forced_settings
from lazygt.graph.mesh import Mesh, VirtualMesh
from lazygt.graph.text import parse_graph
from lazygt.machine import collective_seconds, default_machine, on_hosts
from lazygt.observe.report import AlternativeRow, Report
from lazygt.settings import grouped

pytestmark = pytest.mark.timeout(120)

#: A Megatron pair of layers: by hand, on 8 x 4 ranks the sum over "model" is of 256 / 8 rows of
#: 256 numbers of 4 bytes; a ring of 4 sends twice 3 / 4 of that.
SCRIPT = """\
import torch
import lazygt
from torch.distributed.tensor import Shard

with lazygt.session({settings}) as s:
    x = lazygt.distribute(torch.randn(256, 128), {{"data": Shard(0)}})
    w = lazygt.distribute(torch.randn(128, 512), {{"model": Shard(1)}})
    v = lazygt.distribute(torch.randn(512, 256), {{"model": Shard(0)}})
    s.flush()
    y = ((x @ w).relu() @ v).relu()
    s.flush()
    print(tuple(y.shape), y.sum().item())
"""

GOLDEN = """\
collectives, one run of each (times are estimates)
runs  count  collective      payload  ring a rank  axis   ranks     time  line          why
   1      1  all_reduce sum  32.8 kB      49.2 kB  model      4  86.2 us  script.py:10  adds up what each rank made with aten.mm.default, for aten.relu_.default
   1      1  all_reduce sum      4 B          7 B  data       8    61 us  script.py:12  adds up what each rank made with aten.sum.default, for the result
"""  # noqa: E501
DEARER = re.compile(
    r"^ +1 +1  all_reduce sum  32.8 kB  model +86.2 us +\+[\d.]+ us  script.py:10  "
    r"input f32\[\S+ \S+ stored S\([01]\) +all_gather ", re.MULTILINE,
)  # fmt: skip

PLACEMENTS = """\
placements of plan DIGEST {
  %0: f32[256, 128] {data: S(0), model: R} = input
  %1: f32[128, 512] {data: R, model: S(1)} = input
  %2: f32[512, 256] {data: R, model: S(0)} = input
  %3: f32[256, 512] {data: S(0), model: S(1)} = aten.mm.default(%0, %1)  # script.py:10  [524288 bytes]
  %4: f32[256, 512] {data: S(0), model: S(1)} = aten.relu.default(%3)  # script.py:10  [524288 bytes]
  %5: f32[256, 256] {data: S(0), model: P(sum) -> R} = aten.mm.default(%4, %2)  # script.py:10  [262144 bytes]
  %6: f32[256, 256] {data: S(0), model: R} = aten.relu.default(%5)  # script.py:10  [262144 bytes]
  return %6
}
"""  # noqa: E501


def _run(*args: object) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _script(folder: Path, settings: str = "mesh='data=2,model=2'") -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(settings=settings))
    return path


def test_explain_for_a_mesh_that_is_not_there(here: Path) -> None:
    result = _run("explain", "--mesh", "data=8,model=4", _script(here))
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.startswith("(256, 256) 0.0\nNothing was computed.")
    assert "Planned for the mesh data=8,model=4: the numbers are those of rank 0 of 32." in text
    assert GOLDEN in text
    assert DEARER.search(text), text
    # by hand: 2 * 32 * 128 * 128 and 2 * 32 * 128 * 256 flops of the products a rank
    assert re.search(r"^script.py:10 +\d+ +\d+ +3\.1\d M ", text, re.MULTILINE), text


@pytest.mark.parametrize(
    ("settings", "option", "mesh"),
    [
        ("mesh='data=2,model=2'", [], "data=2,model=2"),
        ("mesh={'model': 2, 'data': 2}", ["--mesh=data=3,model=1"], "model=1,data=3"),
        ("workers=7", ["--mesh=data=2,model=3"], "data=2,model=3"),
        ("", ["--mesh", "data=1,model=2"], "data=1,model=2"),
    ],
)
def test_explained_mesh_comes_from_option_or_session(
    here: Path, settings: str, option: list[str], mesh: str
) -> None:
    result = _run("explain", *option, _script(here, settings))
    assert result.exit_code == 0, result.output
    assert f"Planned for the mesh {mesh}:" in result.stdout


def test_a_mesh_without_the_axes_that_a_script_names(here: Path) -> None:
    result = _run("explain", "--mesh", "rows=4", _script(here))
    assert result.exit_code == 1
    assert (
        "--mesh rows=4: the script's own mesh is data=2,model=2, and its placements name those "
        "axes; give sizes for data, model"
    ) in result.output
    result = _run("explain", "--mesh", "rows=4", _script(here, ""))
    assert result.exit_code == 1
    assert "the mesh rows=4 has no axis 'data'" in result.output
    result = _run("explain", "--mesh", "eight", _script(here))
    assert result.exit_code == 2
    assert "--mesh: 'eight' is not a mesh such as 'data=2,model=4'" in result.output
    result = _run("explain", "--mesh", "", _script(here))
    assert result.exit_code == 2
    assert "--mesh: '' names no axis; write for example data=8,model=4" in result.output


def test_settings_of_a_script_that_are_not_its_own_to_say() -> None:
    assert forced_settings({"workers": 3, "log": "x"}, {"launcher": "dry"}) == {
        "workers": 3, "log": "x", "launcher": "dry",
    }  # fmt: skip
    assert forced_settings({"workers": 3}, {"mesh": "a=2"}) == {"mesh": "a=2"}


def test_dump_shows_where_every_value_lies(here: Path) -> None:
    result = _run(
        "dump", "--all", "--stage", "placements", "--mesh", "data=2,model=2", _script(here)
    )
    assert result.exit_code == 0, result.output
    text = re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", result.stdout).replace(f"{here}/", "")
    assert PLACEMENTS in text
    assert "# it went through no stage 'placements'" in text  # the plan that reads the generator
    graph = parse_graph(PLACEMENTS)
    assert graph == parse_graph(re.sub(r" \{data[^}]*\}", "", PLACEMENTS))
    assert [node.op for node in graph.nodes] == ["aten.mm.default", "aten.relu.default"] * 2


@pytest.mark.parametrize("stage", ["shard", "overlap", "plan"])
def test_dump_shows_the_bytes_of_collectives(here: Path, stage: str) -> None:
    result = _run("dump", "--all", "--stage", stage, "--mesh", "data=8,model=4", _script(here))
    assert result.exit_code == 0, result.output
    (row,) = re.findall(r"^.*all_reduce sum along model.*$", result.stdout, re.MULTILINE)
    assert "all_reduce sum along model: 32768 bytes, 49152 in a ring of 4" in row
    assert "script.py:10" in row


def test_viz_marks_collectives(here: Path) -> None:
    result = _run("viz", "--mesh=data=8,model=4", "--plan", 1, "-o", "plan.dot", _script(here))
    assert result.exit_code == 0, result.output
    text = (here / "plan.dot").read_text()
    (box,) = re.findall(r"^.*all_reduce sum.*along model.*$", text, re.MULTILINE)
    assert "shape=hexagon" in box
    assert "32.8 kB along model" in box
    assert "each of 4 ranks sends 49.2 kB in a ring" in box
    (here / "plain.py").write_text("import torch\nprint(torch.ones(3).sum().item())\n")
    result = _run("viz", "--inline", "--stage=shard", "-o", "plan.dot", "plain.py")
    assert (result.exit_code, result.stderr) == (
        2, "lazygt viz: plan 0 went through no stage 'shard'\n",
    )  # fmt: skip


def test_no_process_is_started() -> None:
    before = psutil.Process().children(recursive=True)
    with lazygt.session(launcher="dry", mesh={"data": 64, "model": 8}):
        x = lazygt.distribute(torch.randn(128, 64), {"data": Shard(0), "model": Shard(1)})
        y = lazygt.redistribute(x * 2, [Replicate(), Replicate()])
        assert y.placements == (Replicate(), Replicate())
        assert torch.equal((x + 1).cpu(), torch.zeros(128, 64, device="cpu"))
        assert psutil.Process().children(recursive=True) == before


def test_plan_lists_bytes_of_its_collectives() -> None:
    with lazygt.session(launcher="dry", mesh={"data": 4}) as s:
        x = lazygt.distribute(torch.randn(64, 64), [Shard(0)])
        s.flush()
        x.sum(0).tolist()
        plan = s.last_plan
        assert plan is not None
        (one,) = plan.collectives
        (row,) = lazygt.explain(plan).collectives
        (same,) = lazygt.explain(s).collectives
    assert (one.kind, one.nbytes, one.ranks, one.ring_bytes) == ("all_reduce", 256, 4, 384)
    assert (row.kind, row.nbytes, row.ranks, row.ring) == ("all_reduce", 256, 4, 384)
    assert same == row
    assert "all_reduce sum" in lazygt.explain(plan)._repr_html_()


def test_axis_between_hosts_has_cost_of_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same collective along two axes the one between hosts takes longer, and plans know."""
    mesh = VirtualMesh.of(Mesh.parse("data=2,model=2"), None)
    machine = on_hosts(default_machine("cpu"), mesh, [2, 2])
    monkeypatch.setattr(sys.modules["lazygt.session"], "_find_machine", lambda _: machine)
    with lazygt.session(
        launcher="dry", mesh={"data": 2, "model": 2}, planning=lazygt.Planning(keep_stages=True)
    ) as s:
        for axis in (0, 1):
            x = torch.ones(1024, 64)
            placements = [Replicate(), Replicate()]
            placements[axis] = Shard(0)
            lazygt.distribute(x, placements).sum(0).tolist()
        rows = {row.axis: row for row in lazygt.explain(s).collectives}
        assert rows.keys() == {"data", "model"}
        (data, model) = (rows[axis].seconds for axis in ("data", "model"))
        assert data == collective_seconds(machine.along("data"), "all_reduce", 256, 2)
        assert model == collective_seconds(machine, "all_reduce", 256, 2)
        assert data > model
        assert "cpu-generic@2" in str(lazygt.explain(s))
        named = {row.axis: row.seconds for row in lazygt.explain(s, "h100").collectives}
        assert named["data"] > named["model"]  # the same hosts, another machine
        plan = s.last_plan
        assert plan is not None
        assert [step.axis.machine.share for step in s.decided(plan)] == [0.5, 1.0]


def test_dry_session_plans_match_worker_session() -> None:
    """The dry session plans what the real one does."""
    digests = []
    for settings in (explaining.DRY, {"threads": 1}):
        with lazygt.session(**grouped({"mesh": {"data": 2}, **settings})) as s:
            x = lazygt.distribute(torch.ones(8, 4), [Shard(0)])
            s.flush()
            y = (x @ x.T).relu()
            s.flush()
            digests.append([plan.digest for plan in s.plans()])
            assert y.shape == (8, 8)
    assert digests[0] == digests[1]


def test_a_notebook_shows_the_collectives_of_the_last_plan() -> None:
    with lazygt.session(launcher="dry", mesh={"data": 4}) as s:
        assert "<caption>collectives" not in s._repr_html_()
        x = lazygt.distribute(torch.randn(64, 64), [Shard(0)])
        s.flush()
        x.sum(0).tolist()
        page = s._repr_html_()
    (row,) = re.findall(r"<tr><td.*?</tr>", page.partition("collectives</caption>")[2])
    cells = re.findall(r">([^<]*)</td>", row)
    assert cells[:5] == ["all_reduce", "sum", "256", "384", "data"]
    assert cells[5].startswith(__file__)


def test_cheaper_and_forced_alternatives_are_marked() -> None:
    row = AlternativeRow(
        2, 1, "all_reduce sum", 8, "data", 1e-4, "a.py:1", "", "all_gather 4 B", -2e-4
    )
    report = Report((), [], [], [], [], alternatives=[row, row._replace(extra=None)])
    cheaper, forced = str(report).splitlines()[-2:]
    assert re.search(r"100 us +-200 us  a.py:1 ", cheaper)
    assert re.search(r"100 us +-  a.py:1 +nothing: the annotations force it$", forced)
