"""Checks of a GPU, each in a process of its own with a time limit; one that fails stops no other.

A row is printed as soon as it is known, and all of them as a table at the end. Ends with status 1
if a check raised, died or was over its limit; a goal that is missed is a row like any other.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

import torch

from benchmarks.gpu.checks import PARTS, Check
from benchmarks.gpu.rows import Row
from benchmarks.harness import RESULTS, ROOT, Report, cpu_model
from lazygt.host.gpus import host_gpus, why_none

COLUMNS = ("check", "case", "figure", "beside", "goal", "met")
TITLES = {1: "Correctness", 2: "CUDA graphs and failures", 3: "Speed"}
#: Lines of a failed check's output that are shown.
TAIL = 15
MET = {None: "", True: "yes", False: "no"}


class CheckProcess:
    """A process that runs a check.

    Attributes:
        failure: the reason for which it gave no more rows; empty: it has ended well.
    """

    def __init__(self, command: Sequence[str], device: str, seconds: float) -> None:
        self._command, self._seconds, self.failure = command, seconds, ""
        # sums have eager's order on CPUs with one thread alone
        self._environment = {**os.environ, "LAZYGT_DEVICE": device, "LAZYGT_THREADS": "1"}

    def rows(self) -> Iterator[Row]:
        """The rows as the process writes them, until its end or that of its time."""
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            ) as process,
        ):  # fmt: skip
            over = False
            try:
                for line in lines(process, self._seconds):
                    yield Row(**json.loads(line))
            except TimeoutError:
                over = True
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # nobody has waited for it: it is its pid
                process.wait()
            self.failure = self._failure(process.returncode, over, log)

    def _failure(self, code: int, over: bool, log: IO[str]) -> str:
        if code == 0 and not over:
            return ""
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
        print(*lines[-TAIL:], sep="\n", file=sys.stderr)
        if over:
            return f"over its limit of {self._seconds:g} s"
        died = f"ended by {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        return f"{died}: {lines[-1][:200] if lines else 'no output'}"


def lines(process: subprocess.Popen[bytes], seconds: float) -> Iterator[bytes]:
    """Lines of a process until it ends, even if a child of it keeps the standard output.

    Raises:
        TimeoutError: it has not ended after so many seconds.
    """
    assert process.stdout is not None
    output, ended = process.stdout.fileno(), os.pidfd_open(process.pid)
    sources, rest, end = [output, ended], b"", time.monotonic() + seconds
    try:
        while True:
            left = end - time.monotonic()
            ready, _, _ = select.select(sources, [], [], max(left, 0.0))
            if not ready or left < 0:
                raise TimeoutError
            if output not in ready:
                return
            text = os.read(output, 1 << 16)
            *complete, rest = (rest + text).split(b"\n")
            yield from complete
            if not text:
                sources.remove(output)
    finally:
        os.close(ended)


def run_check(check: Check, device: str, limit: float | None) -> Iterator[tuple[Row, bool]]:
    """Rows of a check, and whether it failed: a row of its own at the end."""
    if device == "cpu" and not check.on_cpu:
        yield Row("all", "needs a GPU"), False
        return
    command = [sys.executable, "-m", "benchmarks.gpu.checks", check.name, device]
    process = CheckProcess(command, device, limit or check.seconds)
    for row in process.rows():
        yield row, False
    if process.failure:
        yield Row("failed", process.failure, met=False), True


def run_part(part: int, args: argparse.Namespace) -> tuple[Report, list[str]]:
    """The table of a part, and the names of the checks that failed."""
    device = device_name(args.device)
    title = f"{TITLES[part]} on {device}".replace("|", "/")
    report, failed = Report(f"gpu part {part}, {device}", title, COLUMNS), []
    for check in PARTS[part]:
        if args.only and check.name not in args.only:
            continue
        for row, failure in run_check(check, args.device, args.limit):
            texts = (check.name, row.case, row.figure, row.beside, row.goal, MET[row.met])
            cells = [" ".join(text.replace("|", "/").split()) for text in texts]
            report.add(*cells)
            print(*filter(None, cells), sep="  ", flush=True)
            if failure:
                failed.append(check.name)
    report.remarks.append(f"torch for CUDA {torch.version.cuda}; goals are those of a GPU")
    return report, failed


def device_name(device: str) -> str:
    """Product name of the first GPU, or the model of the processor."""
    return host_gpus()[0].name if device == "cuda" else cpu_model()


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    about = "; ".join(f"{part}: {title}" for part, title in TITLES.items())
    parser.add_argument("--part", type=int, choices=sorted(PARTS), required=True, help=about)
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this check; may be repeated"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(cuda)")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="most that a check may take; its own bound"
    )
    parser.add_argument("--save", action="store_true", help=f"keep the table in {RESULTS.name}")
    args = parser.parse_args(words)
    names = [check.name for check in PARTS[args.part]]
    unknown = [name for name in args.only if name not in names]
    if unknown:
        parser.error(f"part {args.part} has no check {unknown[0]!r}; it has: {', '.join(names)}")
    if args.limit is not None and args.limit <= 0:
        parser.error(f"--limit {args.limit:g}: expected seconds above 0")
    if args.save and args.only:
        parser.error("--save keeps the table of a part: leave --only out")
    if args.device == "cuda" and not torch.cuda.device_count():
        parser.error(f"torch sees no GPU: {why_none()}")
    return args


def main() -> int:
    args = arguments()
    report, failed = run_part(args.part, args)
    report.finish(save=args.save)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
