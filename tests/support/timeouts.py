"""Bounds of time that a test measures, on a machine that has other things to do."""

from __future__ import annotations

import os


def patience(seconds: float) -> float:
    """What takes so long on a free machine, here: with so many processes to each core as now."""
    with open("/proc/loadavg") as file:
        minute, _, _, tasks, _ = file.read().split()
    running = max(float(minute), float(tasks.split("/")[0]))
    return seconds * max(1.0, running / len(os.sched_getaffinity(0)))


#: Whether the tests that take minutes run, and many more examples of the others.
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
