"""What recording and small steps shall cost, beside what RESULTS.md says that they do: with a core
each for client and worker, and with one for both.

Measures nothing: it reads the tables that other benchmarks have saved, see `SOURCES`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import RESULTS, Report, parser

#: What has to be saved before, on a quiet machine.
SOURCES = """\
python -m benchmarks.record_cost --save
python -m benchmarks.workloads --pin --save
taskset -c 0 python -m benchmarks.workloads --pin --without torch.compile --save
python -m benchmarks.small_syncs --save
python -m benchmarks.generation --pin --save
taskset -c 0 python -m benchmarks.generation --pin --save
python -m benchmarks.line_search --save
python -m benchmarks.data_movement --pin --save
python -m benchmarks.startup --save
"""

COLUMNS = ["what", "two cores", "aim", "met", "one core", "aim", "met"]


@dataclass(frozen=True)
class Cell:
    """A figure of a saved table, and what it shall be.

    Attributes:
        section: of RESULTS.md.
        row: how its first cell begins.
        column: counted from the left.
        aim: the most it may be; the least, where ``at_least``.
    """

    section: str
    row: str
    column: int
    aim: float
    at_least: bool = False


Row = tuple[str, Cell, Cell | None]
_LAST = -2
_CORES = ("a worker on another core", "a worker on the client's core")


def _by_core(name: str, section: str, column: int, aims: tuple[float, float]) -> Row:
    two, one = (Cell(section, row, column, aim) for row, aim in zip(_CORES, aims, strict=True))
    return name, two, one


def _recorded(name: str, row: str, aim: float) -> Row:
    cell = Cell("record_cost", row, 3, aim)
    return f"record {name}, x eager", cell, cell


def _workload(row: str, two: float, one: float) -> Row:
    cells = Cell("workloads", row, _LAST, two), Cell("workloads on one core", row, _LAST, one)
    return (f"{row.split(',')[0]}, x eager", *cells)


def _generated(row: str, two: float, one: float) -> Row:
    cells = Cell("generation", row, 3, two), Cell("generation on one core", row, 3, one)
    return (f"a token, cache {row}, x eager", *cells)


ROWS: tuple[Row, ...] = (
    _recorded("a + b", "a + b |", 1.0),
    _recorded("a + number", "a + Python number", 1.0),
    _recorded("with grad", "a + b with grad", 1.0),
    _recorded("in place", "a * b, in place", 1.0),
    _recorded("a view", "view", 1.1),
    _workload("W1, us", 1.0, 1.8),
    _workload("W2, ms", 0.3, 0.3),
    _workload("W3 SGD, ms", 0.85, 1.0),
    _workload("W3 Adam, ms", 0.7, 0.85),
    _workload("W4, ms", 0.95, 1.0),
    _workload("W4-tiny, ms", 0.75, 1.1),
    _workload("W5, 60 steps", 1.1, 1.4),
    _by_core(".item() of a known plan, us", "small_syncs", 1, (30, 80)),
    (".item() inline, us", Cell("small_syncs", "inline", 1, 10), None),
    _generated("of fixed size", 1.3, 2.0),
    _generated("that grows", 1.5, 2.0),
    _by_core("LBFGS, x eager", "line_search", 3, (4, 6)),
    ("fetch of 1 MiB, share of a copy", Cell("data_movement", "1 MiB", 6, 0.4, True), None),
    ("fetch of 4 MiB, share of a copy", Cell("data_movement", "4 MiB", 6, 0.7, True), None),
    ("open a session, s", Cell("startup", "open a session", 1, 0.3), None),
    ("import beside torch, s", Cell("startup", "import lazygt", 1, 0.15), None),
)


Tables = Mapping[str, Sequence[Sequence[str]]]


def saved(path: Path = RESULTS) -> Tables:
    """The rows of every table, by the name of its section."""
    tables: dict[str, list[list[str]]] = {}
    for part in re.split(r"(?m)^## ", path.read_text())[1:]:
        lines = [line for line in part.splitlines() if line.startswith("| ")]
        tables[part.splitlines()[0]] = [
            [c.strip() for c in line.split("|")[1:-1]] for line in lines
        ]
    return tables


def shown(cell: Cell | None, tables: Tables) -> tuple[str, str, str]:
    """The figure, its aim, and whether it is met."""
    if cell is None:
        return "", "", ""
    aim = f"{'>=' if cell.at_least else '<='} {cell.aim:g}"
    rows = [row for row in tables.get(cell.section, ()) if f"{row[0]} |".startswith(cell.row)]
    figure = re.match(r"[\d.]+", rows[0][cell.column]) if rows else None
    if figure is None:
        return "-", aim, "not measured"
    value = float(figure[0])
    met = value >= cell.aim if cell.at_least else value <= cell.aim
    return f"{value:g}", aim, "yes" if met else "no"


def measure(tables: Tables) -> Report:
    report = Report("aims", "What recording and small steps cost, and shall cost", COLUMNS)
    for name, two, one in ROWS:
        report.add(name, *shown(two, tables), *shown(one, tables))
    report.remarks.append(
        "read from the tables below; one worker with one thread, in turn with eager"
    )
    return report


def main() -> None:
    args = parser(__doc__, rounds=1).parse_args()
    measure(saved()).finish(save=args.save)


if __name__ == "__main__":
    main()
