"""Constants of a machine that fit measured runs best.

Least squares of the logarithms of how far off predictions are (scipy's trust-region reflective
method), with a weak pull towards what the machine file says.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.foresight_rows import Row
from benchmarks.foresight_simulated import Programs, programs_key, step_seconds
from lazygt.machine import Machine
from lazygt.machine.model import Figure

#: By how much a constant's logarithm may leave the file's for as much as a row may be off.
_FREEDOM = 10.0
#: A constant is at most so many times as large or as small as the file says.
_FARTHEST = 4.0
_ALONE = ("matmul.depth", "memory.bandwidth", "host.launch", "host.call")
_TOGETHER = tuple([f"collectives.local[0].{what}" for what in ("latency", "each", "bandwidth")])
_BETWEEN_HOSTS = ("collectives.network[0].bandwidth", "collectives.network[0].latency")
_RATES = {"bf16": "bf16", "fp16": "bf16", "fp32": "f32"}
#: Added to ``matmul.depth``, which may be 0, before its logarithm is taken.
_STEPS = 32


def chosen_rows(rows: Sequence[Row], share: float, seed: int) -> list[Row]:
    """At random a share of each machine's rows, and one at least."""
    of_machine = defaultdict(list)
    for row in rows:
        if row.seconds:
            of_machine[row.machine].append(row)
    draw = random.Random(seed)
    return [
        row
        for group in of_machine.values()
        for row in draw.sample(group, max(round(share * len(group)), 1))
    ]


def fitted(machine: Machine, rows: Sequence[Row]) -> Machine:
    """The machine with the constants that fit rows best, of those that the rows depend on."""
    names = _constants(machine, rows)
    depth = machine.figures.get("matmul.depth") or Figure(0.0, "datasheet", "fit")
    machine = replace(machine, figures={**machine.figures, "matmul.depth": depth})
    shifts = np.array([_STEPS if name == "matmul.depth" else 0 for name in names])
    begin = np.log(np.array([machine.figures[name].value for name in names]) + shifts)
    programs = {key: Programs.of(key) for key in {programs_key(row) for row in rows}}

    def with_constants(logarithms: np.ndarray) -> Machine:
        values = dict(zip(names, np.exp(logarithms) - shifts, strict=True))
        if "matmul.rate.bf16" in values:  # products of either kind of half have one rate
            values["matmul.rate.f16"] = values["matmul.rate.bf16"]
        return machine.with_values({name: max(float(v), 0.0) for name, v in values.items()})

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        tried = with_constants(logarithms)
        times = {key: shared.times(tried) for key, shared in programs.items()}
        off = [
            math.log(step_seconds(row, times[programs_key(row)], tried) / row.seconds)
            for row in rows
        ]
        return np.array([*off, *(logarithms - begin) / _FREEDOM])

    far = math.log(_FARTHEST)
    best = least_squares(
        residuals, begin, bounds=(begin - far, begin + far), diff_step=0.01, xtol=1e-4, ftol=1e-4
    )
    return _told(with_constants(best.x), machine, len(rows))


def _constants(machine: Machine, rows: Sequence[Row]) -> list[str]:
    """Of those that could be fitted the ones that some row depends on."""
    rates = {f"matmul.rate.{_RATES[row.precision]}" for row in rows}
    names = [*sorted(rates), *_ALONE]
    if any(row.dp * row.tp * row.pp > 1 for row in rows):
        names += _TOGETHER
    if any(row.gpus > machine.collectives.ranks for row in rows):
        names += _BETWEEN_HOSTS
    return [name for name in names if name == "matmul.depth" or machine.figures[name].value > 0]


def _told(fit: Machine, machine: Machine, rows: int) -> Machine:
    """The machine as its file will have it: fitted figures say so."""
    figures = {
        key: Figure(figure.value, "measured", "fit") if figure.value != machine.figures[key].value
        else figure
        for key, figure in fit.figures.items()
    }  # fmt: skip
    sources = {**machine.sources, "fit": f"fitted to {rows} measured runs of training"}
    return replace(fit, figures=figures, sources=sources, name=f"{machine.name}-fitted")
