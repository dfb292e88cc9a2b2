"""Every operator of torch's database, forward and backward, on device lazygt against the CPU.

Each sample's ops are recorded and run checked, then its plan is run again, then once more as
code; they are the very ops that eager torch runs, for bits can agree by luck of size and
ops can't; and they are recorded for GPUs that this machine need not have. One walk over the
database finds all of it.

Under the deep profile all samples of each operator run, else the first.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.conformance import harness
from tests.conformance.differences import BACKWARD_DIFFERENCES, FORWARD_DIFFERENCES, LATER
from tests.conformance.harness import Findings, Tally
from tests.conformance.refusals import BACKWARD, FORWARD, UNKNOWN_BACKWARD, UNKNOWN_FORWARD
from tests.support.timeouts import DEEP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * 3600 if DEEP else 2700),
    # the samples are torch's, and so are the warnings about them
    pytest.mark.filterwarnings("ignore"),
]

LIMIT = None if DEEP else 1
#: Shares of operators whose samples all agree; they must not fall.
FLOORS = {"forward": 0.98, "backward": 0.99, "inferred forward": 0.96, "inferred backward": 0.97}


@cache
def walked(grad: bool) -> dict[str, Findings]:
    """What is found of each operator; asked once for all tests of a direction."""
    found = {}
    for op in harness.operators():
        if grad and not harness.with_gradient(op):
            continue
        try:
            findings = harness.walk(op, grad, LIMIT)
        except Exception as error:  # noqa: BLE001 - torch can't make the samples here
            none = [f"no samples: {error}"]
            findings = Findings(bits=Tally(failures=none), metas=Tally(failures=none))
        found[harness.name_of(op)] = findings
    return found


def judge(kind: str, report: dict[str, Tally], refused: dict[str, str]) -> None:
    """Print the rates; fail for what is not in the table, and for what need not be."""
    good = [name for name, tally in report.items() if not tally.failures]
    passed = sum(tally.passed for tally in report.values())
    coded = sum(tally.coded for tally in report.values())
    total = sum(tally.total for tally in report.values())
    print(
        f"\n{kind}: {len(good)} of {len(report)} operators ({len(good) / len(report):.1%}), "
        f"{passed} of {total} samples ({passed / total:.1%}), {coded} by code"
    )
    broken = {
        name: tally.failures[0]
        for name, tally in report.items()
        if tally.failures and name not in refused
    }
    assert not broken, "\n".join(f"{name}: {why}" for name, why in broken.items())
    mended = [name for name in refused if name in good and report[name].total]
    assert not (DEEP and mended), f"these work and must leave the table of refusals: {mended}"
    assert len(good) / len(report) >= FLOORS[kind]


@pytest.mark.parametrize(
    ("kind", "refused"), [("forward", FORWARD), ("backward", BACKWARD)], ids=["forward", "backward"]
)
def test_bits_of_three_runs(kind: str, refused: dict[str, str]) -> None:
    found = walked(kind == "backward")
    report = {name: findings.bits for name, findings in found.items()}
    judge(kind, report, refused)
    # the rest are data-dependent, which are checked at each run, or record nothing
    coded = sum(tally.coded for tally in report.values())
    assert coded >= 0.8 * sum(tally.passed for tally in report.values())


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("inferred forward", UNKNOWN_FORWARD), ("inferred backward", UNKNOWN_BACKWARD)],
    ids=["forward", "backward"],
)
def test_shapes_and_dtypes_for_gpus_that_are_not_there(kind: str, refused: dict[str, str]) -> None:
    found = walked("backward" in kind)
    judge(kind, {name: findings.metas for name, findings in found.items()}, refused)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_ops_are_those_of_eager_torch(grad: bool) -> None:
    refused = BACKWARD if grad else FORWARD
    known = BACKWARD_DIFFERENCES if grad else FORWARD_DIFFERENCES
    found = {
        name: findings.differences
        for name, findings in walked(grad).items()
        if findings.differences and name not in refused
    }
    later = {} if LIMIT else LATER
    new = {name: lines for name, lines in found.items() if name not in known | later}
    assert not new, "\n".join(f"{name}: {' '.join(lines)[:500]}" for name, lines in new.items())
    gone = [name for name in known if name not in found]
    assert not (DEEP and gone), f"these do not differ any more and must leave the table: {gone}"
