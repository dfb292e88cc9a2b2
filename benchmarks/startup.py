"""Time to import, to open a session, to the first result, and to close; each in a new process."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable

from benchmarks.harness import ROOT, Measured, Report, interleave, parser

TORCH = """
import json, time
start = time.perf_counter()
import torch
print(json.dumps({"import torch": time.perf_counter() - start}))
"""

EAGER = """
import json, time
start = time.perf_counter()
import torch
(torch.ones(2) + 1).tolist()
print(json.dumps({"eager: from nothing to the first result": time.perf_counter() - start}))
"""

LAZY = """
import json, time
start = time.perf_counter()
import torch
after_torch = time.perf_counter()
import lazygt
after_import = time.perf_counter()
with lazygt.session(workers=1, launcher=LAUNCHER) as s:
    after_open = time.perf_counter()
    x = torch.ones(2, device="lazygt") + 1
    after_record = time.perf_counter()
    x.tolist()
    after_result = time.perf_counter()
    (x + 1).tolist()
    after_second = time.perf_counter()
after_close = time.perf_counter()
print(json.dumps({
    "import lazygt, torch being there": after_import - after_torch,
    "open a session": after_open - after_import,
    "record the first op": after_record - after_open,
    "first result (waits until the worker is up)": after_result - after_record,
    "second result": after_second - after_result,
    "close the session": after_close - after_second,
    "lazygt: from nothing to the first result": after_result - start,
}))
"""


def run(program: str) -> dict[str, float]:
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def measure(args: argparse.Namespace) -> Report:
    report = Report("startup", "Starting up", ["what", "median s", "lowest", "highest"])
    lazy = LAZY.replace("LAUNCHER", repr(args.launcher))
    seen: dict[str, list[float]] = {}

    def collect(program: str) -> Callable[[], float]:
        def once() -> float:
            for name, took in run(program).items():
                seen.setdefault(name, []).append(took)
            return 0.0

        return once

    interleave(
        {"torch": collect(TORCH), "eager": collect(EAGER), "lazy": collect(lazy)}, args.rounds
    )
    for name, values in seen.items():
        found = Measured(tuple(values))
        report.add(name, f"{found.median:.3f}", f"{found.low:.3f}", f"{found.high:.3f}")
    report.remarks.append("aim: importing lazygt adds at most 0.150 s to importing torch")
    return report


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--launcher", choices=["process", "inline"], default="process")
    args = options.parse_args()
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
