"""Attention whose keys go round: right on any number of ranks, by every kernel; shared evenly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazygt.passes.sharding.rules import attention
from lazygt.passes.sharding.rules.attention_blocks import LENGTH, schedule
from lazygt.passes.sharding.rules.strategy import S, Strategy
from tests.passes.sharding.rules import standins
from tests.passes.sharding.rules.harness import Case

Tensor = torch.Tensor
aten: Any = torch.ops.aten
pytestmark = pytest.mark.timeout(120)
CPU = "_scaled_dot_product_flash_attention_for_cpu"
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"


@pytest.fixture(autouse=True)
def keys_always_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_REPLICABLE_BYTES", -1)
    monkeypatch.setattr(attention, "_may_beat_head_sharding", lambda call: True)


def case(op: str, queries: int, keys: int, causal: bool, backward: bool, shared: int = 1) -> Case:
    """``shared``: heads of queries for each of the keys'."""
    torch.manual_seed(queries)
    q, g = (torch.randn(2, 3 * shared, queries, 8) for _ in range(2))
    k, v = (torch.randn(2, 3, keys, 8) for _ in range(2))
    state = torch.zeros(())
    if op == CPU:
        if not backward:
            return Case(f"{op}.default", q, k, v, 0.0, causal)
        out, sums = getattr(aten, op)(q, k, v, 0.0, causal)
        return Case(f"{op}_backward.default", g, q, k, v, out, sums, 0.0, causal)
    if op == FLASH:
        if not backward:
            return Case(f"{op}.default", q, k, v, 0.0, causal, False)
        out, sums, *_ = standins.flash(q, k, v, 0.0, causal)
        return Case(f"{op}_backward.default", g, q, k, v, out, sums, None, None, queries, keys, 0.0,
                    causal, torch.zeros(2), state)  # fmt: skip
    if op == EFFICIENT:
        if not backward:
            return Case(f"{op}.default", q, k, v, None, True, 0.0, causal)
        out, sums, *_ = standins.efficient(q, k, v, None, True, 0.0, causal)
        return Case(f"{op}_backward.default", g, q, k, v, None, out, sums, state, state.clone(),
                    0.0, [True, True, True, False], causal)  # fmt: skip
    if not backward:
        return Case(f"{op}.default", q, k, v, None, True, 0.0, causal, False)
    out, sums, *_ = standins.cudnn(q, k, v, None, True, 0.0, causal)
    return Case(f"{op}_backward.default", g, q, k, v, out, sums, state, state.clone(), None, None,
                None, queries, keys, 0.0, causal)  # fmt: skip


def rings(made: Case, parts: int) -> list[Strategy]:
    """The strategies that cut queries and keys."""
    return [
        strategy for strategy in made.strategies(parts)
        if strategy.overlapped_turns and strategy.inputs.count(S(LENGTH)) >= 3
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(12, 12, True), (7, 7, True), (2, 2, True), (13, 6, False), (5, 17, False)],
)
def test_the_numbers_are_those_of_one_kernel(
    queries: int, keys: int, causal: bool, backward: bool, parts: int
) -> None:
    made = case(CPU, queries, keys, causal, backward, shared=2)
    ways = rings(made, parts)
    assert len(ways) == 1 + causal
    for strategy in ways:
        made.check(parts, strategy)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("op", "length"), [(FLASH, 11), (EFFICIENT, 128), (CUDNN, 11)])
def test_kernels_of_gpus_pass_keys_on(op: str, length: int, causal: bool, backward: bool) -> None:
    made = case(op, length, length, causal, backward)
    ways = rings(made, 4)
    assert len(ways) == 1 + causal
    for strategy in ways:
        made.check(4, strategy)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_a_causal_mask_is_shared_evenly(parts: int) -> None:
    length = 64 * 3 * parts
    balanced = schedule(length, length, parts, causal=True, balanced=True)
    assert balanced.share == pytest.approx(1 / parts)
    usual = schedule(length, length, parts, causal=True, balanced=False)
    assert usual.share == pytest.approx((2 * parts - 1) / parts**2)
