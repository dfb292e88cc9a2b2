"""docs/machines.md says of every figure what it is, and shows errors as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lazygt
from lazygt.errors import MachineError
from lazygt.machine import machine_of, shipped
from lazygt.machine.file import parse
from lazygt.machine.model import FIGURES, LINK, quantity
from lazygt.printing.tables import PlainTable

PAGE = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
GENERIC = Path(lazygt.__file__).parent / "machine" / "machines" / "cpu-generic.toml"


def test_the_table_has_every_figure_with_its_unit() -> None:
    rows = re.findall(r"^\| `([\w.]+)`(?: of a carrier)? \| (\S+) \| (.+) \|$", PAGE, re.MULTILINE)
    wanted = [(re.sub(r"(rate|peak)\.\w+", r"\1.DTYPE", k), q.unit) for k, q in FIGURES.items()]
    wanted += [(name, quantity.unit) for name, quantity in LINK.items()]
    assert [(name, unit) for name, unit, _ in rows] == list(dict.fromkeys(wanted))
    for name, _, about in rows:
        if name in FIGURES:
            assert about.startswith(FIGURES[name].about)


def test_every_machine_has_its_row() -> None:
    for name in shipped():
        assert f"`{name}`" in PAGE.partition("## Selection of a machine")[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bandwidth = { value = 9e9", "bandwidth = { value = 1e30"),
        ('bandwidth = { value = 9e9, unit = "B/s"', 'bandwidth = { value = 9, unit = "GB/s"'),
        ("cache_bandwidth =", "cash_bandwidth ="),
        ("version = 1", "version = 2"),
    ],
)
def test_errors_are_as_shown(old: str, new: str) -> None:
    text = GENERIC.read_text()
    assert old in text
    with pytest.raises(MachineError) as caught:
        parse(text.replace(old, new, 1), "own.toml")
    assert f"    {caught.value}\n" in PAGE


def test_calibrated_figures_are_as_printed() -> None:
    _, _, text = PAGE.partition("    $ lazygt calibrate\n")
    lines = [line.strip() for line in text.partition("    written to")[0].splitlines()[1:]]
    table = PlainTable("figure", ">here", ">cpu-generic", "unit")
    usual = machine_of("cpu-generic").figures
    for line in lines[1:]:
        name, here, *_ = line.split()
        default = f"{usual[name].value:.3g}" if name in usual else ""
        table.add_row(name, f"{float(here):.3g}", default, quantity(name).unit)
    assert len(lines) > 30
    assert str(table).splitlines() == lines
