"""Every operator of torch's database, forward and backward, on device lazygt against the CPU.

``LAZYGT_ALL_SAMPLES=1`` runs all samples of each operator instead of the first few.
"""

from __future__ import annotations

import os

import pytest

import lazygt
from tests.conformance import harness
from tests.conformance.refusals import BACKWARD, FORWARD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # the samples are torch's, and so are the warnings about them
    pytest.mark.filterwarnings("ignore"),
]

LIMIT = None if os.environ.get("LAZYGT_ALL_SAMPLES") == "1" else 4
#: Shares of operators whose samples all agree; they must not fall.
FLOORS = {"forward": 0.97, "backward": 0.99}

Report = dict[str, harness.Tally]


def run(ops: list[harness.OpInfo], grad: bool) -> Report:
    found = {}
    for op in ops:
        with lazygt.session(executor="inline"):
            try:
                found[harness.name_of(op)] = harness.check(op, grad, LIMIT)
            except Exception as error:  # noqa: BLE001 - torch can't make the samples here
                found[harness.name_of(op)] = harness.Tally(failures=[f"no samples: {error}"])
    return found


def with_gradient(op: harness.OpInfo) -> bool:
    return bool(op.supports_autograd) and harness.dtype_of(op).is_floating_point


@pytest.fixture(scope="module")
def forward() -> Report:
    return run(harness.operators(), grad=False)


@pytest.fixture(scope="module")
def backward() -> Report:
    return run([op for op in harness.operators() if with_gradient(op)], grad=True)


def judge(kind: str, report: Report, refused: dict[str, str]) -> None:
    """Print the rates; fail for what is not in the table, and for what need not be."""
    good = [name for name, tally in report.items() if not tally.failures]
    passed = sum(tally.passed for tally in report.values())
    exact = sum(tally.exact for tally in report.values())
    total = sum(tally.total for tally in report.values())
    print(
        f"\n{kind}: {len(good)} of {len(report)} operators ({len(good) / len(report):.1%}), "
        f"{passed} of {total} samples ({passed / total:.1%}), {exact} of them bit for bit"
    )
    broken = {
        name: tally.failures[0]
        for name, tally in report.items()
        if tally.failures and name not in refused
    }
    assert not broken, "\n".join(f"{name}: {why}" for name, why in broken.items())
    mended = [name for name in refused if name in good and report[name].total]
    assert not mended, f"these work and must leave the table of refusals: {mended}"
    assert len(good) / len(report) >= FLOORS[kind]


def test_forward(forward: Report) -> None:
    judge("forward", forward, FORWARD)


def test_backward(backward: Report) -> None:
    judge("backward", backward, BACKWARD)
