"""What is priced beyond what a machine was calibrated for: which op, of which size, how often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard
from typer.testing import CliRunner

import lazygt
from lazygt.cli.app import app
from lazygt.machine import default_machine, shipped
from lazygt.machine.file import parse, text_of
from lazygt.machine.model import Figure, Machine, Range

RANGES = {"products": (8, 512), "bytes": (1 << 10, 1 << 21), "payloads": (1 << 12, 1 << 18),
          "ranks": (2, 2)}  # fmt: skip


def calibrated(**other: tuple[int, int]) -> Machine:
    """``cpu-generic``, as if its figures had been measured at these sizes."""
    machine = default_machine("cpu")
    ranges = {
        f"range.{what}.{end}": Figure(float(size), "measured", "server")
        for what, sizes in {**RANGES, **other}.items()
        for end, size in zip(Range._fields, sizes, strict=True)
    }
    return parse(text_of(Machine("own", "cpu", "tests", {**machine.figures, **ranges},
                                 machine.sources)), "own.toml")  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "own.toml"
    file.write_text(text_of(calibrated()))
    return str(file)


def test_ranges_are_written_and_read_again() -> None:
    machine = calibrated()
    assert {what: tuple(sizes) for what, sizes in machine.ranges.items()} == RANGES
    assert parse(text_of(machine), "x").ranges == machine.ranges


@pytest.mark.parametrize("name", shipped())
def test_datasheets_have_no_ranges_and_predictions_by_them_say_nothing(name: str) -> None:
    """As files have none that were written before there were any."""
    prediction = lazygt.simulate(lambda: products(4096), machine=name)
    assert prediction.machine.ranges == {}
    assert prediction.outside == prediction.as_json()["outside"] == []
    assert "outside of what was calibrated" not in str(prediction)


def products(size: int, dtype: torch.dtype = torch.float32) -> None:
    x = torch.zeros(64, size, dtype=dtype)
    w = torch.zeros(size, 64, dtype=dtype)
    for _ in range(3):
        x = (x @ w) @ w.t()
        lazygt.current().flush()


def test_products_and_bytes(path: str) -> None:
    assert lazygt.simulate(lambda: products(512), machine=path).outside == []
    rows = {row.what: row for row in lazygt.simulate(lambda: products(8192), machine=path).outside}
    assert set(rows) == {"products", "bytes"}
    product, moved = rows["products"], rows["bytes"]
    assert (product.op, product.times, product.far) == ("mm", 2, 16.0)
    assert product.size in ("64 x 64 x 8,192", "64 x 8,192 x 64")
    assert product.measured == "8 to 512"
    assert Path(product.line.rpartition(":")[0]) == Path(__file__)
    assert moved.size == f"{(2 * 64 * 8192 + 64 * 64) * 4 / 1e6:.3g} MB"
    assert moved.measured == "1.02 kB to 2.1 MB"


def test_a_dtype_without_a_rate_of_its_own(path: str) -> None:
    (row,) = lazygt.simulate(lambda: products(256, torch.float64), machine=path).outside
    assert (row.what, row.size, row.measured, row.times) == ("dtypes", "f64", "f32", 2)


def gradients(rows: int) -> None:
    w = lazygt.data_parallel(torch.nn.Linear(256, rows, bias=False))
    opt = torch.optim.SGD(w.parameters(), lr=0.1)
    for _ in range(3):
        x = lazygt.distribute(torch.zeros(32, 256), {"data": Shard(0)})
        w(x).sum().backward()
        opt.step()
        opt.zero_grad()


def test_payloads_and_ranks(path: str) -> None:
    """256 x 256 numbers are as large as was measured, and twice as many are not; one number takes
    a latency."""
    assert lazygt.simulate(lambda: gradients(256), mesh="data=2", machine=path).outside == []
    larger = lazygt.simulate(lambda: gradients(512), mesh="data=2", machine=path).outside
    assert [(row.what, row.op, row.size, row.measured) for row in larger] == [
        ("payloads", "all_reduce", "524 kB", "4.1 kB to 262 kB")
    ]
    more = lazygt.simulate(lambda: gradients(256), mesh="data=4", machine=path)
    assert [(row.what, row.size, row.measured, row.times) for row in more.outside] == [
        ("ranks", "4", "2 to 2", 1)
    ]
    assert "outside of what was calibrated, the farthest of each kind" in str(more)
    assert more.as_json()["outside"][0]["what"] == "ranks"


def test_explain_reports_shapes_outside_calibration(path: str) -> None:
    with lazygt.session(launcher="dry", planning=lazygt.Planning(machine=path)) as s:
        products(8192)
    report = lazygt.explain(s)
    assert [(row.what, row.times) for row in report.outside] == [("bytes", 6), ("products", 6)]
    assert "outside of what was calibrated" in str(report)
    assert not lazygt.explain(s, machine="cpu-generic").outside


SCRIPT = """
import torch
x = torch.zeros(64, 8192)
for _ in range(3):
    x = (x @ x.t()) @ x
    float(x.sum())
"""


def test_command_reports_shapes_outside_calibration(path: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    told = CliRunner().invoke(app, ["simulate", "--machine", path, str(script)])
    assert told.exit_code == 0, told.output
    assert "outside of what was calibrated" in told.output
    options = ["simulate", "--machine", path, "--json", str(script)]
    told = CliRunner().invoke(app, options)
    assert {row["what"] for row in json.loads(told.output)["outside"]} == {"products", "bytes"}


@pytest.mark.parametrize("command", ["simulate", "explain"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('unit = "B/s"', 'unit = "GB/s"'), "memory.bandwidth in 'GB/s': expected 'B/s'"),
        (("version = 1", "version = 3"), "version 3: expected 1, the one that this lazygt reads"),
        (("[memory]", "[memory"), "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_ends_a_command(
    path: str, tmp_path: Path, command: str, change: tuple[str, str], message: str
) -> None:
    script, file = tmp_path / "train.py", Path(path)
    script.write_text(SCRIPT)
    file.write_text(file.read_text().replace(*change, 1))
    told = CliRunner().invoke(app, [command, "--machine", path, str(script)])
    assert told.exit_code == 2
    assert message in " ".join(told.output.replace("\u2502", " ").split())
