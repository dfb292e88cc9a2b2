"""An argument that changes is never replayed stale: torch's operator database, leaf by leaf.

Of each operator a sample runs twice, so that its steps and plan are known. Then every number and
flag among its arguments is changed, one at a time, and the result has to be eager torch's for the
changed sample; or its error. Between them the sample itself comes again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_unflatten

import lazygt
from tests.conformance import harness
from tests.conformance.refusals import FORWARD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),
]
#: Changed samples of an operator, at most.
MOST = 8
SHARES = 4
#: Memory that nobody wrote, draws that depend on the kernel, modes that torch does not check, and a
#: check of values that torch leaves out on devices other than the CPU.
SKIPPED = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "grid_sampler_2d", "grid_sampler_3d",
    "new_empty", "new_empty_strided", "nn.functional.one_hot", "nn.functional.rrelu",
})  # fmt: skip


def flipped(value: Any) -> list[Any]:
    """Other values of a leaf."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [value * 1.5 + 0.25, -value]
    return []


def variants(sample: SampleInput) -> Iterator[SampleInput]:
    """The sample with one number or flag changed."""
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    for at, leaf in enumerate(leaves):
        for other in flipped(leaf):
            args, kwargs = tree_unflatten([*leaves[:at], other, *leaves[at + 1 :]], spec)
            yield SampleInput(sample.input, args=args, kwargs=kwargs)


def result(op: OpInfo, sample: SampleInput, on: Callable[[Any], Any]) -> list[Any] | None:
    """What an operator gives, or None if it refuses the sample."""
    try:
        return harness.fetched(harness.outcome(op, sample, False, on))
    except Exception:  # noqa: BLE001 - whatever it says to a changed sample
        return None


def check(op: OpInfo, sample: SampleInput, expected: list[Any] | None, what: str) -> str | None:
    """What is wrong with a sample's result in the open session."""
    ours = result(op, sample, harness.moved)
    if (ours is None) != (expected is None):
        return f"{what}: {'refused' if ours is None else 'eager torch refuses it'}"
    if ours is None or expected is None:
        return None
    try:
        harness.compare(op, ours, expected)
    except AssertionError as error:
        return f"{what}: {str(error)[:200]}"
    return None


def walk(op: OpInfo) -> list[str]:
    """What is wrong with an operator's changed samples."""
    sample = next(iter(harness.samples(op, False, 1)), None)
    expected = None if sample is None else result(op, sample, harness.copied)
    if sample is None or expected is None:
        return []
    found = []
    with lazygt.session(launcher="inline", compile="off"):
        found += [check(op, sample, expected, "known") for _ in range(2)]
        for number, variant in enumerate(variants(sample)):
            if number == MOST:
                break
            shown, theirs = f"{variant.args} {variant.kwargs}", result(op, variant, harness.copied)
            found.append(check(op, variant, theirs, f"changed to {shown}"))
            found.append(check(op, sample, expected, f"after {shown}"))
    return [f"{harness.name_of(op)}: {why}" for why in found if why is not None]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("share", range(SHARES))
def test_changed_arguments_match_eager_torch(share: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        wrong = [
            line
            for op in harness.operators()[share::SHARES]
            if harness.name_of(op) not in FORWARD and op.name not in SKIPPED
            for line in walk(op)
        ]
    assert not wrong, "\n".join(wrong)
