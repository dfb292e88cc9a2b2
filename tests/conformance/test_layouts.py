"""Strides and bits of results and gradients, over operands that are laid out in many ways.

Operators of torch's database run on such operands on device lazygt and on the CPU. Strides decide
which views torch allows, and the order in which kernels sum. Gradients come in row-major, so that
gradient and input differ in layout.

An ordinary run takes one sample of each third operator in one layout; the deep profile many samples
of all, in all layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import lazygt
from tests.conformance import harness
from tests.conformance.layouts import LAYOUTS, Layout, laid, strides
from tests.conformance.refusals import FORWARD
from tests.support.timeouts import DEEP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600 if DEEP else 900),
    # the samples are torch's, and so are the warnings about them
    pytest.mark.filterwarnings("ignore"),
]

#: Samples of each operator.
LIMIT = 6 if DEEP else 1
#: One of so many operators is taken.
APART = 1 if DEEP else 3

#: Operators for which torch takes another formula for tensor subclasses, or for other devices than
#: the CPU, in C++: its result is the same, and laid out otherwise.
OTHER_FORMULAS = """linalg.householder_product masked_select max.reduction_no_dim median
    min.reduction_no_dim nanmedian nn.functional.one_hot ormqr prod fft.hfft2 fft.irfft2"""


def outcome(op: OpInfo, sample: SampleInput, layout: Layout, device: str) -> list[Any]:
    """What an operator gives, and the gradients."""
    result, leaves = harness.call(op, sample, lambda value: laid(value, layout, device))
    return [result, *harness.gradients(op, sample, result, leaves)]


def differing(op: OpInfo, layouts: list[Layout]) -> Iterator[str]:
    """The samples and layouts for which lazygt's strides or bits are not torch's."""
    for number, sample in enumerate(harness.samples(op, harness.with_gradient(op), LIMIT)):
        for layout in layouts:
            try:
                expected = outcome(op, sample, layout, "cpu")
            except harness.REFUSED:
                continue  # eager torch refuses it
            try:
                found = outcome(op, sample, layout, "lazygt")
            except harness.REFUSED:
                continue  # the tables of refusals are another test's
            where = f"{harness.name_of(op)} {layout.__name__} {number}"
            if strides(found) != strides(expected):
                yield f"{where}: {strides(found)} for {strides(expected)}"
            try:
                harness.compare(op, harness.fetched(found), harness.fetched(expected))
            except AssertionError as error:
                yield f"{where}: {str(error)[:300]}"


def test_strides_and_bits_are_those_of_torchs_kernels() -> None:
    wrong: list[str] = []
    skipped = {*OTHER_FORMULAS.split(), *FORWARD}
    for number, op in enumerate(harness.operators()[::APART]):
        if harness.name_of(op) not in skipped:
            layouts = LAYOUTS if DEEP else [LAYOUTS[number % len(LAYOUTS)]]
            with lazygt.session(launcher="inline", compile="off"):
                wrong += differing(op, layouts)
    assert not wrong, "\n".join(wrong)
