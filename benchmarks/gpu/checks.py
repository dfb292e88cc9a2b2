"""Table of checks, and the process that runs one of them: ``python -m benchmarks.gpu.checks NAME``.

A check is a generator of rows, a function of the device. Its process writes each row to stdout as a
line of JSON as soon as it is known; all other output goes to stderr.
"""

import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Check:
    """A function of a module of this folder.

    Attributes:
        seconds: the most that it may take.
        on_cpu: it makes sense on a CPU, too.
    """

    name: str
    module: str
    seconds: float
    on_cpu: bool = True


#: In the order of what they tell: where the first fail, the later ones need not be looked at.
PARTS: dict[int, tuple[Check, ...]] = {
    1: (
        Check("start", "correctness", 120),
        Check("models", "correctness", 180),
        Check("attention", "correctness", 180),
        Check("recurrent", "correctness", 120),
        Check("autocast", "correctness", 90),
        Check("draws", "correctness", 90),
        Check("flags", "correctness", 90),
        Check("synchronize", "correctness", 90),
        Check("forward", "operators", 540),
        Check("backward", "operators", 540),
    ),
    2: (
        Check("waiting", "failures", 150, on_cpu=False),
        Check("seeds", "failures", 90, on_cpu=False),
        Check("index", "failures", 120),
        Check("memory", "failures", 90, on_cpu=False),
        Check("killed", "failures", 180),
        Check("snapshots", "failures", 180),
        Check("suites", "failures", 600, on_cpu=False),
    ),
    3: (
        Check("mlp", "speed", 180),
        Check("gpt2", "speed", 400),
        Check("decode", "speed", 180),
        Check("generate", "speed", 240),
        Check("item", "speed", 180),
        Check("host", "copies", 120),
        Check("transfer", "copies", 120),
    ),
}


def main(name: str, device: str) -> None:
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler that prints is not taken for a row
    (check,) = (check for part in PARTS.values() for check in part if check.name == name)
    run = getattr(importlib.import_module(f"benchmarks.gpu.{check.module}"), name)
    for row in run(device):
        print(json.dumps(asdict(row)), file=rows, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
