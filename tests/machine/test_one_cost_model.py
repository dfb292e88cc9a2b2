"""The figures of a machine decide, and no other: in placements, fusion, explain, and by no number
elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import lazygt
from lazygt.errors import MachineError
from lazygt.machine import default_machine
from lazygt.machine.file import text_of
from lazygt.machine.model import Machine
from lazygt.observe.doctor import costs

PACKAGE = Path(lazygt.__file__).parent
#: Of nano- and microseconds, and of ticks.
UNITS = {1e-6, 1e6, 1e9, 1e12}
#: By which equal numbers may differ.
ROUNDING = {1e-9}
#: Of scores of attention, and no cost.
SCORES = {1e8}
#: What plans are made and explained by. Workers time what they run, and go by that.
ROOMS = ("graph", "passes", "observe", "parallel", "record", "simulation")


def test_no_other_file_has_a_number_that_could_be_a_cost() -> None:
    """Seconds of an op, and what goes through in a second, are small or large floats."""
    paths = [*PACKAGE.glob("*.py"), *(p for room in ROOMS for p in (PACKAGE / room).rglob("*.py"))]
    assert len(paths) > 150
    assert [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, float)
        and node.value not in UNITS | ROUNDING | SCORES
        and node.value != 0
        and not 1e-4 < node.value < 1e5
    ] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def saved(folder: Path, machine: Machine) -> str:
    path = folder / "machine.toml"
    path.write_text(text_of(machine))
    return str(path)


def exchanged(machine: str | None) -> list[str]:
    """What a product of two matrices exchanges that are both cut by rows."""
    with lazygt.session(
        launcher="dry", mesh={"x": 4}, planning=lazygt.Planning(machine=machine)
    ) as s:
        x, w = (lazygt.distribute(torch.randn(n, 512), [Shard(0)]) for n in (64, 512))
        s.flush()
        y = x @ w
        s.flush()
        assert y.shape == (64, 512)
        assert s.last_plan is not None
        return [one.kind for one in s.last_plan.collectives]


def test_placements_follow_the_machine(folder: Path) -> None:
    """Two collectives of the small one, or a single one of the large one where each takes long."""
    small, large = ["all_to_all", "all_reduce"], ["all_gather"]
    assert exchanged(None) == exchanged("cpu-generic") == small
    assert exchanged("h100") == large
    slow = {"collectives.local[0].latency": 1.0, "collectives.sockets[0].latency": 1.0}
    assert exchanged(saved(folder, default_machine("cpu").with_values(slow))) == large


def groups(machine: str | None) -> int:
    with lazygt.session(launcher="dry", planning=lazygt.Planning(machine=machine)) as s:
        x = torch.randn(64)
        s.flush()
        y = x.neg().exp().neg()
        s.flush()
        assert y.shape == (64,)
        assert s.last_plan is not None
        return sum(node.body is not None for node in s.last_plan.graph.nodes)


def test_fusion_follows_the_machine(folder: Path) -> None:
    assert groups(None) == groups("cpu-generic") == 0
    cheap = default_machine("cpu").with_values({"host.call": 0.0})
    assert groups(saved(folder, cheap)) == 1


def test_explain_follows_the_machine() -> None:
    with lazygt.session(
        launcher="dry", mesh={"x": 4}, planning=lazygt.Planning(keep_stages=True)
    ) as s:
        x = lazygt.distribute(torch.randn(1 << 20), [Shard(0)])
        s.flush()
        x.sum().item()
        here, there = lazygt.explain(s), lazygt.explain(s, machine="h100")
    assert here.collectives[0].seconds == pytest.approx(2.5e-5 + 2 * 6e-6 + 12 / 2e9)
    assert there.collectives[0].seconds == pytest.approx(1.5e-5 + 6 / 3.6e11)


def test_a_machine_that_there_is_not_is_said_before_workers_start() -> None:
    with pytest.raises(MachineError, match="machine tpu is no machine, and no file"):
        lazygt.session(planning=lazygt.Planning(machine="tpu"))
    with lazygt.session(launcher="dry") as s, pytest.raises(MachineError):
        lazygt.explain(s, machine="tpu")


def test_why_and_doctor_name_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(folder, default_machine("cpu"))
    with lazygt.session(launcher="dry") as s:
        assert "costs" not in str(lazygt.why(s))
    with lazygt.session(launcher="dry", planning=lazygt.Planning(machine=path)) as s:
        told = f"plans are made by those of cpu-generic ({path})"
        assert told in str(lazygt.why(s))
    monkeypatch.delenv("LAZYGT_MACHINE", raising=False)
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(folder / "none"))
    assert costs().detail == "plans by the costs of cpu-generic"
    assert not costs().advice
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(folder))
    assert costs().advice == f"to plan by {path}: LAZYGT_MACHINE=calibrated"
    monkeypatch.setenv("LAZYGT_MACHINE", "calibrated")
    assert costs().detail.startswith(f"plans by the costs of cpu-generic ({path})")
    monkeypatch.setenv("LAZYGT_MACHINE", "tpu")
    assert costs().status == "fail"
