"""The smallest calibration: what it writes is a whole machine file, and a session takes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lazygt
from lazygt import calibrate
from lazygt.calibrate import KINDS, device_benchmarks
from lazygt.calibrate.device_benchmarks import HostClock
from lazygt.cli.app import app
from lazygt.graph.collectives import goes_by_sockets
from lazygt.machine import CALIBRATED, default_machine, machine_of
from lazygt.machine.file import parse, text_of

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_smallest_calibration_writes_usable_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules["lazygt.cli.setup"], "QUICK", calibrate.SMALLEST)
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["calibrate", "--quick", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads
    path = tmp_path / "cache" / "machine.toml"
    assert f"written to {path}" in result.output.replace("\n", "")
    assert [each.name for each in path.parent.glob("*machine*")] == ["machine.toml"]

    machine = machine_of(CALIBRATED, str(path.parent))
    assert text_of(machine) == path.read_text()
    measured = {key for key, each in machine.figures.items() if each.source == CALIBRATED}
    usual = default_machine("cpu")
    assert usual.figures.keys() <= machine.figures.keys()
    network = {key for key in usual.figures if key.startswith("collectives.network")}
    assert usual.figures.keys() - measured == {"host.call", "collectives.packed", *network}
    assert {each.basis for each in machine.figures.values()} == {"measured"}
    ranges = {what: tuple(sizes) for what, sizes in machine.ranges.items()}
    assert ranges.pop("ranks")[0] == 2
    assert ranges == {
        "products": (8, 32), "bytes": (3 * 4096, 3 * 262144), "payloads": (4096, 262144),
    }  # fmt: skip
    with lazygt.session(launcher="dry", planning=lazygt.Planning(machine=CALIBRATED)) as s:
        assert s.machine.name == CALIBRATED


def test_every_collective_of_real_workers_is_timed_once_a_size() -> None:
    told: list[None] = []
    sizes = (4 << 10, 4 << 20)
    found = calibrate.fit_carriers(
        "cpu", [2], sizes, 1, {"local": 0.25, "sockets": 0.5}, 1, lambda: told.append(None)
    )
    small = sum(goes_by_sockets(kind, size, 2) for kind in KINDS for size in sizes)
    assert (
        len(told) == calibrate.progress_count("cpu", [2], sizes) == len(KINDS) * len(sizes) + small
    )
    assert {name: carrier[0].each for name, carrier in found.items()} == {
        "local": 0.25,
        "sockets": 0.5,
    }


def test_kernels_of_every_dtype_and_family() -> None:
    told: list[None] = []
    device = device_benchmarks.Device(
        "cpu", HostClock(), calibrate.SMALLEST, lambda: told.append(None)
    )
    assert device_benchmarks.launch(device) > 0
    assert set(device_benchmarks.pointwise(device, 0.0)) == set(default_machine("cpu").pointwise)
    assert set(device_benchmarks.matmuls(device, 0.0, 1).rate) == {"f32", "f64", "bf16"}
    found = device_benchmarks.memory(device, 0.0)
    assert found.bandwidth <= found.cache_bandwidth
    assert found.fresh_bandwidth is not None
    grid = calibrate.SMALLEST
    assert len(told) == 1 + 6 + 3 * len(grid.products) + (4 + 1)


def test_cache_size_is_largest_fast_working_set() -> None:
    """Also where what is small is slow to begin, as on a GPU."""
    rates = {10: 3.0, 40: 90.0, 160: 100.0, 640: 80.0, 2560: 30.0, 10240: 25.0}
    assert device_benchmarks.split_at_cache(rates) == (25.0, 640, 100.0)
    assert device_benchmarks.split_at_cache({10: 7.0, 40: 7.0}) == (7.0, 40, 7.0)


def test_gpus_are_measured_with_more() -> None:
    cpu, gpu = (
        device_benchmarks.Device(kind, HostClock(), calibrate.FULL) for kind in ("cpu", "cuda")
    )
    assert (cpu.cached, gpu.cached) == (64 << 10, 4 << 20)
    assert (cpu.large, gpu.large) == (64 << 20, 512 << 20)


def test_a_figure_that_is_not_measured_keeps_its_source() -> None:
    text = text_of(default_machine("cpu"))
    assert parse(text, "x").figures["host.call"].source == "epyc"


def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert "is a folder" in result.output
