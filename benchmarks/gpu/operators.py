"""Operators of torch's database on the device: results and gradients, three samples of each.

Stands apart from the other checks, for torch's database freezes flags in a process that loads it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.testing._internal.opinfo.core import OpInfo

import lazygt
from benchmarks.gpu.rows import Outcome, Row, agreement, difference, outcome
from tests.conformance import harness
from tests.conformance.refusals import BACKWARD, FORWARD, UNWRITTEN

SAMPLES = 3


def forward(device: str) -> Iterator[Row]:
    yield from _walk(device, grad=False)


def backward(device: str) -> Iterator[Row]:
    yield from _walk(device, grad=True)


def _walk(device: str, grad: bool) -> Iterator[Row]:
    """All samples by eager torch, then all of them in one session."""
    refused = (BACKWARD if grad else FORWARD).keys() | UNWRITTEN
    operators = [
        op
        for op in harness.operators()
        if harness.name_of(op) not in refused and (not grad or harness.with_gradient(op))
    ]
    theirs = dict(outcomes for op in operators for outcomes in _outcomes(op, grad, device))
    theirs = {name: result for name, result in theirs.items() if not isinstance(result, str)}
    yield Row("eager torch", f"runs {len(theirs)} samples of {len(operators)} operators")
    with lazygt.session(compile="off", tracing=lazygt.Tracing(default_device=False)):
        cases = {
            name: difference(ours, theirs[name])
            for op in operators
            for name, ours in _outcomes(op, grad, "lazygt")
            if name in theirs
        }
    yield from agreement(cases)


def _outcomes(op: OpInfo, grad: bool, device: str) -> Iterator[tuple[str, Outcome]]:
    try:
        samples = list(harness.samples(op, grad, SAMPLES))
    except Exception:  # noqa: BLE001 - torch can't make them here: there is nothing to compare
        return
    for number, sample in enumerate(samples):

        def run(device: str, sample: Any = sample) -> Any:
            moved = partial(harness.moved, device=device)
            return harness.outcome(op, sample, grad, harness.copied if device == "cpu" else moved)

        yield f"{harness.name_of(op)}, sample {number}", outcome(run, device)
