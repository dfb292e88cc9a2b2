"""The harness finds wrong rows: labels exchanged, collectives left out, ranks that disagree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lazygt.graph.label import ALL_GATHER, Partial, Sharded
from lazygt.passes.build import Builder
from lazygt.passes.rules import Row
from lazygt.passes.rules.base import PMAX, P, R, S
from tests.passes.rules import (
    test_batches,
    test_elementwise,
    test_layers,
    test_losses,
    test_making,
    test_moving,
)
from tests.passes.rules.draws import Cases, typical
from tests.passes.rules.harness import Case
from tests.passes.rules.lockstep import AXIS, exchange, lockstep

CALLS: Cases = {
    **test_elementwise.ALL, **test_layers.LAYERS, **test_moving.ALL, **test_making.ALL,
    **test_losses.ALL, **test_batches.ALL,
}  # fmt: skip
#: Their numbers mean nothing, or are all 0, so that partial sums of them look whole.
BLIND = {"zero_", "native_dropout", "empty", "empty_like", "empty_strided", "rand_like",
         "new_empty_strided"}  # fmt: skip


def is_right(case: Case, row: Row, parts: int = 3) -> bool:
    try:
        case.check(parts, row)
    except (AssertionError, RuntimeError, IndexError):
        return False
    return True


@pytest.mark.timeout(120)
def test_partial_results_taken_for_whole_ones_are_found() -> None:
    found = 0
    for name in sorted(CALLS.keys() - BLIND):
        case = CALLS[name](typical())
        for row in case.rows(3):
            for place in _partial_results(case, row):
                outputs = (*row.outputs[:place], R, *row.outputs[place + 1 :])
                assert not is_right(case, replace(row, outputs=outputs)), f"{name}: {row}"
                found += 1
    assert found > 300


def _partial_results(case: Case, row: Row) -> list[int]:
    """The partial results that are not, by chance, the same on all ranks, as a maximum may be."""
    made = [place for place, meta in enumerate(case.node.results) if meta is not None]
    ranks = lockstep(*case.local(3, row), case.params)
    return [
        place
        for number, place in enumerate(made)
        if isinstance(row.outputs[place], Partial)
        and any(not torch.equal(values[number], ranks[0][number]) for values in ranks)
    ]


@pytest.mark.timeout(120)
def test_collectives_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "all_reduce", lambda build, value, op="sum": value)
    found = 0
    for name in sorted(CALLS):
        case = CALLS[name](typical())
        for row in case.rows(3):
            if "all_reduce" in {one.kind for one in row.comm}:
                assert not is_right(case, replace(row, comm=())), f"{name}: {row}"
                found += 1
    assert found >= 40


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("mm", Row((S(1), S(0)), (S(0),))),
        ("mm", Row((P, P), (P,))),
        ("exp", Row((P,), (P,))),
        ("sqrt", Row((PMAX,), (PMAX,))),
        ("mul.Tensor", Row((P, P), (P,))),
        ("add.Tensor", Row((P, R), (P,))),
        ("mean.dim", Row((S(0),), (Partial("sum"),))),
        ("amax.default", Row((S(0),), (P,))),
        ("transpose", Row((S(0),), (S(0),))),
        ("cumsum", Row((S(1),), (S(1),))),
        ("tril", Row((S(1),), (S(1),))),
        ("sort", Row((S(1),), (S(1), S(1)))),
        ("copy_.default", Row((R, S(0)), (S(0),))),
        ("softmax", Row((S(0),), (S(1),))),
    ],
)
def test_wrong_rows_are_found(name: str, row: Row) -> None:
    assert not is_right(CALLS[name](typical()), row)


def test_ranks_that_meet_differently_are_found() -> None:
    case = CALLS["relu"](typical())

    def only_the_first(build: Builder, node: Any, operands: Any) -> Any:
        (made,) = build.rerun(node, operands)
        assert made is not None
        return (build.all_reduce(made) if build.index == 0 else made,)

    with pytest.raises(AssertionError, match="ranks ended"):
        lockstep(*case.local(3, Row((S(0),), (P,), only_the_first)), ())


def test_every_row_is_split_or_partial() -> None:
    for name, make in CALLS.items():
        for row in make(typical()).rows(3)[1:]:
            labels = row.inputs + row.outputs
            assert any(isinstance(label, (Sharded, Partial)) for label in labels), name


def test_what_is_gathered_is_row_major_however_the_blocks_lie() -> None:
    block = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for made in exchange(ALL_GATHER, (0, 4, AXIS), [block, block]):
        assert made.is_contiguous()
