"""Every operator of torch's database records the very ops that eager torch runs on a CPU.

Bits can agree by luck of size; ops can't. What differs stands in a table here, with the reason why
no number differs, or why one may.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import Any

import pytest

import lazygt
from tests.conformance import harness, streams
from tests.conformance.refusals import BACKWARD, FORWARD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600 if os.environ.get("LAZYGT_ALL_SAMPLES") == "1" else 900),
    # the samples are torch's, and so are the warnings about them
    pytest.mark.filterwarnings("ignore"),
]

LIMIT = None if os.environ.get("LAZYGT_ALL_SAMPLES") == "1" else 3

CHECKED = "eager torch checks values on a CPU only, which would be a sync point"
CHOSEN = "the workers choose the formula by values that eager torch asks for; the numbers are equal"
CAT = "parts are put together by a concatenation instead of copies into zeros: the same numbers"
INDICES = "a kernel for CPUs alone, without indices: the same elements"
LENGTHS = "the lengths stay a tensor; on a CPU eager torch makes a list of them"
VIEWS = "a write through a view is recorded by the views, not by strides: the same elements"
ORDER = "the same ops, some in another order that no number depends on"
SUMMED = "a sum into a tensor of its own dtype, or one that makes it"
FOLDED = (
    "torch folds a batch of 1 for any tensor that is not plain: its rounding is that of one matrix "
    "product. A choice in Python would make every matmul slower to record"
)

#: What the first samples show, and what only further ones do.
FORWARD_DIFFERENCES = {
    "quantile": CHECKED,
    "nanquantile": CHECKED,
    "nn.functional.one_hot": CHECKED,
    "nn.functional.max_pool1d": INDICES,
    "nn.functional.ctc_loss": LENGTHS,
    "tensor_split": "the sections are fetched",
    "empty_permuted": VIEWS,
    "linalg.matrix_rank": SUMMED,
    "linalg.matrix_rank.hermitian": SUMMED,
}
BACKWARD_DIFFERENCES = {
    "quantile": CHECKED,
    "nanquantile": CHECKED,
    "linalg.eig": CHECKED,
    "cumprod": CHOSEN,
    "masked.cumprod": CHOSEN,
    "max.reduction_no_dim": CHOSEN,
    "min.reduction_no_dim": CHOSEN,
    "median": CHOSEN,
    "nanmedian": CHOSEN,
    "prod": CHOSEN,
    "linalg.vander": CHOSEN,
    "linalg.eigh": CAT,
    "linalg.householder_product": CAT,
    "matrix_exp": CAT,
    "ormqr": CAT,
    "nn.functional.pad.circular": VIEWS,
    "nn.functional.ctc_loss": LENGTHS,
    "nn.functional.embedding_bag": "the places of the largest, which its mode does not use",
    "tensor_split": "the sections are fetched",
    "to": "its device= names a CPU",
    "__getitem__": "the same kernel under its public name",
}
LATER = {
    "matmul": FOLDED,
    "__rmatmul__": FOLDED,
    "masked.prod": CHOSEN,
    "gradient": ORDER,
    "svd_lowrank": ORDER,
    "pca_lowrank": ORDER,
}


REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError)


def differing(op: harness.OpInfo, grad: bool) -> list[str]:
    """What the streams of an op's samples do not share; the first sample's that differs."""
    theirs: list[tuple[Any, streams.Stream]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(*REFUSED):  # torch can't make the samples here
            for sample in harness.samples(op, grad, LIMIT):
                with suppress(*REFUSED):  # torch refuses the sample
                    theirs.append((sample, stream(streams.eager, op, sample, grad, harness.copied)))
        with lazygt.session(launcher="inline", compile="off"):
            for sample, expected in theirs:
                ours = stream(streams.recorded, op, sample, grad, harness.moved)
                if found := streams.differences(ours, expected):
                    return found
    return []


def stream(run: Any, op: harness.OpInfo, sample: Any, grad: bool, on: Any) -> streams.Stream:
    """The ops of one sample, without those that bring its arguments."""
    arguments = on((sample.input, sample.args, sample.kwargs))
    found: streams.Stream = run(lambda: harness.outcome(op, sample, grad, lambda _: arguments))
    return found


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_ops_are_those_of_eager_torch(grad: bool) -> None:
    refused = BACKWARD if grad else FORWARD
    known = BACKWARD_DIFFERENCES if grad else FORWARD_DIFFERENCES
    found = {}
    for op in harness.operators():
        name = harness.name_of(op)
        if name in refused or (grad and not harness.with_gradient(op)):
            continue
        if different := differing(op, grad):
            found[name] = different
    later = {} if LIMIT else LATER
    new = {name: lines for name, lines in found.items() if name not in known | later}
    assert not new, "\n".join(f"{name}: {' '.join(lines)[:500]}" for name, lines in new.items())
    gone = [name for name in known if name not in found]
    assert not gone, f"these do not differ any more and must leave the table: {gone}"
