"""What every benchmark shares: interleaved rounds, medians, a table, and where results are kept."""

import argparse
import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
#: The cores at the start: after `pin` this process would see its own one only.
CORES = tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Measured:
    """The rounds of one case, in the case's own unit."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def low(self) -> float:
        return min(self.rounds)

    @property
    def high(self) -> float:
        return max(self.rounds)


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Measured]:
    """Run every case once a round, in turn, so that a busy moment of the machine hits all alike."""
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            figures[name].append(case())
    return {name: Measured(tuple(values)) for name, values in figures.items()}


def ratio(ours: Measured, peer: Measured) -> float:
    """The median of the ratios of neighbouring rounds: steadier than a ratio of medians."""
    return statistics.median(a / b for a, b in zip(ours.rounds, peer.rounds, strict=True))


@dataclass
class Report:
    """One table of results with the remarks that belong to it."""

    name: str
    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.name}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def show(self) -> None:
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        console = Console() if sys.stdout.isatty() else Console(width=140)
        console.print(table)
        for remark in self.remarks:
            console.print(remark, highlight=False)

    def markdown(self) -> str:
        lines = [f"## {self.name}", "", self.title, "", *stamp(), ""]
        lines += ["| " + " | ".join(self.columns) + " |", "|---" * len(self.columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        if self.remarks:
            lines += ["", *(f"- {remark}" for remark in self.remarks)]
        return "\n".join(lines) + "\n"

    def finish(self, *, save: bool) -> None:
        self.show()
        if save:
            keep(self.name, self.markdown())


def keep(name: str, section: str, path: Path = RESULTS) -> None:
    """Put `section` in the place of the section of the same name, or at the end."""
    text = path.read_text() if path.exists() else "# Results\n"
    head, *sections = re.split(r"(?m)^(?=## )", text)
    kept = {part.splitlines()[0].removeprefix("## "): part.strip() for part in sections}
    kept[name] = section.strip()
    path.write_text("\n\n".join([head.strip(), *(kept[key] for key in sorted(kept))]) + "\n")
    print(f"saved in {path.relative_to(ROOT)}")


def stamp() -> list[str]:
    """Commit, date, machine and command of this run."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    command = f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}"
    return [
        f"`{command.strip()}` at commit {commit()}, {datetime.date.today().isoformat()}, "
        f"{cpu_model()}, {len(CORES)} of {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"Python {platform.python_version()}."
    ]


def commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "lazygt", "benchmarks/*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def cpu_model() -> str:
    match = re.search(r"(?m)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text())
    return match[1] if match else platform.machine()


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--rounds", type=int, default=rounds, help=f"rounds a case ({rounds})")
    made.add_argument("--pin", action="store_true", help="client and workers on a core each")
    made.add_argument("--save", action="store_true", help="keep the table in RESULTS.md")
    return made


def pin(worker_pids: Iterable[int]) -> None:
    """This process on the first core, worker k on the next ones."""
    pin_process(os.getpid(), CORES[0])
    for index, pid in enumerate(worker_pids):
        pin_process(pid, CORES[(index + 1) % len(CORES)])


def pin_process(pid: int, core: int) -> None:
    """Every thread of a process on one core (a new thread inherits it from its parent)."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MB (1e6 bytes)."""
    match = re.search(r"(?m)^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 / 1e6 if match else float("nan")
