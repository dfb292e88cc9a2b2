"""The harness finds wrong strategies: placements exchanged, collectives left out, ranks that
disagree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lazygt.graph.placement import ALL_GATHER, Partial, Shard
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules import Strategy
from lazygt.passes.sharding.rules.strategy import PMAX, P, R, S
from tests.passes.sharding.rules import (
    test_batches,
    test_elementwise,
    test_layers,
    test_losses,
    test_making,
    test_rearrange,
)
from tests.passes.sharding.rules.draws import Cases, typical
from tests.passes.sharding.rules.harness import Case
from tests.passes.sharding.rules.lockstep import AXIS, exchange, lockstep

CALLS: Cases = {
    **test_elementwise.ALL, **test_layers.LAYERS, **test_rearrange.ALL, **test_making.ALL,
    **test_losses.ALL, **test_batches.ALL,
}  # fmt: skip
#: Their numbers mean nothing, or are all 0, so that partial sums of them look whole.
BLIND = {"zero_", "native_dropout", "empty", "empty_like", "empty_strided", "rand_like",
         "new_empty_strided"}  # fmt: skip


def is_right(case: Case, strategy: Strategy, parts: int = 3) -> bool:
    try:
        case.check(parts, strategy)
    except (AssertionError, RuntimeError, IndexError):
        return False
    return True


@pytest.mark.timeout(120)
def test_partial_results_taken_for_whole_ones_are_found() -> None:
    found = 0
    for name in sorted(CALLS.keys() - BLIND):
        case = CALLS[name](typical())
        for strategy in case.strategies(3):
            for place in _partial_results(case, strategy):
                outputs = (*strategy.outputs[:place], R, *strategy.outputs[place + 1 :])
                assert not is_right(case, replace(strategy, outputs=outputs)), f"{name}: {strategy}"
                found += 1
    assert found > 300


def _partial_results(case: Case, strategy: Strategy) -> list[int]:
    """The partial results that are not, by chance, the same on all ranks, as a maximum may be."""
    made = [place for place, meta in enumerate(case.node.results) if meta is not None]
    ranks = lockstep(*case.local(3, strategy), case.params)
    return [
        place
        for number, place in enumerate(made)
        if isinstance(strategy.outputs[place], Partial)
        and any(not torch.equal(values[number], ranks[0][number]) for values in ranks)
    ]


@pytest.mark.timeout(120)
def test_collectives_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "all_reduce", lambda build, value, op="sum": value)
    found = 0
    for name in sorted(CALLS):
        case = CALLS[name](typical())
        for strategy in case.strategies(3):
            if "all_reduce" in {one.kind for one in strategy.comm}:
                assert not is_right(case, replace(strategy, comm=())), f"{name}: {strategy}"
                found += 1
    assert found >= 40


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("mm", Strategy((S(1), S(0)), (S(0),))),
        ("mm", Strategy((P, P), (P,))),
        ("exp", Strategy((P,), (P,))),
        ("sqrt", Strategy((PMAX,), (PMAX,))),
        ("mul.Tensor", Strategy((P, P), (P,))),
        ("add.Tensor", Strategy((P, R), (P,))),
        ("mean.dim", Strategy((S(0),), (Partial("sum"),))),
        ("amax.default", Strategy((S(0),), (P,))),
        ("transpose", Strategy((S(0),), (S(0),))),
        ("cumsum", Strategy((S(1),), (S(1),))),
        ("tril", Strategy((S(1),), (S(1),))),
        ("sort", Strategy((S(1),), (S(1), S(1)))),
        ("copy_.default", Strategy((R, S(0)), (S(0),))),
        ("softmax", Strategy((S(0),), (S(1),))),
    ],
)
def test_wrong_rows_are_found(name: str, strategy: Strategy) -> None:
    assert not is_right(CALLS[name](typical()), strategy)


def test_ranks_that_meet_differently_are_found() -> None:
    case = CALLS["relu"](typical())

    def only_the_first(build: Builder, node: Any, operands: Any) -> Any:
        (made,) = build.rerun(node, operands)
        assert made is not None
        return (build.all_reduce(made) if build.index == 0 else made,)

    with pytest.raises(AssertionError, match="ranks ended"):
        lockstep(*case.local(3, Strategy((S(0),), (P,), only_the_first)), ())


def test_every_row_is_split_or_partial() -> None:
    for name, make in CALLS.items():
        for strategy in make(typical()).strategies(3)[1:]:
            placements = strategy.inputs + strategy.outputs
            assert any(isinstance(placement, (Shard, Partial)) for placement in placements), name


def test_gathered_value_is_row_major_for_any_block_layout() -> None:
    block = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for made in exchange(ALL_GATHER, (0, 4, AXIS), [block, block]):
        assert made.is_contiguous()
