"""Why there is a collective, and what the best program without it would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.tensor import Shard

import lazygt
from lazygt.machine import collective_seconds, default_machine
from lazygt.passes.sharding import reasons as module
from lazygt.passes.sharding.axis import AxisStep
from lazygt.passes.sharding.reasons import CostReason, decisions, programs_of, reasons

pytestmark = pytest.mark.timeout(120)

CPU = default_machine("cpu")
Tensor = torch.Tensor


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(
        launcher="dry", mesh={"data": 4}, planning=lazygt.Planning(keep_stages=True)
    ) as session:
        yield session


def _decided(
    s: lazygt.Session, shapes: dict[tuple[int, int], int | None], call: Callable[..., Tensor]
) -> tuple[AxisStep, ...]:
    """How the axis was decided for an op on tensors that are stored cut along these dims."""
    given = [
        torch.randn(shape) if dim is None else lazygt.distribute(torch.randn(shape), [Shard(dim)])
        for shape, dim in shapes.items()
    ]
    s.flush()
    made = call(*given)
    s.flush()
    assert made.device.type == "lazygt"
    assert s.last_plan is not None
    return s.decided(s.last_plan)


def _one(decided: tuple[AxisStep, ...]) -> CostReason:
    (found,) = reasons(decided)
    return found


def test_instead_of_reducing_the_operands_are_gathered(s: lazygt.Session) -> None:
    """x and w are cut along the dim that the product sums over."""
    decided = _decided(s, {(512, 1024): 1, (1024, 256): 0}, lambda x, w: (x @ w).relu())
    found = _one(decided)
    assert (found.kind, found.reduce_op, found.axis, found.times) == (
        "all_reduce", "sum", "data", 1,
    )  # fmt: skip
    assert found.nbytes == 512 * 256 * 4
    assert found.seconds == collective_seconds(CPU, "all_reduce", found.nbytes, 4)
    assert found.line.startswith(__file__)
    assert found.cause in (
        "input f32[512, 1024] stored S(1)",
        "input f32[1024, 256] stored S(0)",
    )
    assert "all_gather 2.1 MB along data" in found.instead
    assert found.extra is not None
    gathered = collective_seconds(CPU, "all_gather", 512 * 1024 * 4, 4)
    assert found.extra > gathered - found.seconds  # and the product is no longer divided


def test_parts_that_are_passed_on_are_not_reduced_elsewhere_instead(s: lazygt.Session) -> None:
    """Negated parts are parts: reducing one op earlier or later is no alternative."""
    decided = _decided(s, {(64, 1024): 1, (1024, 256): 0}, lambda x, w: (-(x @ w)).relu())
    found = _one(decided)
    assert "all_reduce" not in found.instead
    assert "all_gather" in found.instead


def test_op_without_sharding_rule_has_no_alternative(s: lazygt.Session) -> None:
    with pytest.warns(lazygt.GatherWarning):
        decided = _decided(s, {(64, 32): 0}, lambda x: torch.linalg.qr(x).R)
    found = _one(decided)
    assert (found.kind, found.nbytes, found.instead, found.extra) == ("all_gather", 8192, "", None)
    assert found.cause == "input f32[64, 32] stored S(0)"


def test_a_move_is_not_done_before_or_after_a_view_instead(s: lazygt.Session) -> None:
    """Rows of x are columns of its transpose, which is wanted in rows."""
    decided = _decided(s, {(64, 32): 0}, lambda x: lazygt.distribute(x.t(), [Shard(0)]))
    found = _one(decided)
    assert (found.kind, found.nbytes, found.extra) == ("all_to_all", 64 * 32 * 4 // 4, None)


def test_an_op_that_meets_inside_may_be_run_whole(s: lazygt.Session) -> None:
    decided = _decided(s, {(4096, 64): 0}, lambda x: x.softmax(0))
    found = reasons(decided)
    assert {each.kind for each in found} == {"all_reduce"}
    assert all("all_gather" in each.instead or "all_to_all" in each.instead for each in found)


def test_only_the_dearest_are_looked_into(
    s: lazygt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        a = (x @ w).relu()
        b = (x[:8] @ w).relu()
        return a.sum() + b.sum()

    decided = _decided(s, {(512, 1024): 1, (1024, 256): 0}, call)
    every = reasons(decided)
    assert len(every) > 1
    assert [each.seconds for each in every] == sorted((e.seconds for e in every), reverse=True)
    monkeypatch.setattr(module, "MAX_REASONS", 1)
    assert reasons(decided) == every[:1]


def test_labels_of_every_value_on_every_axis() -> None:
    with lazygt.session(
        launcher="dry", mesh={"data": 2, "model": 2}, planning=lazygt.Planning(keep_stages=True)
    ) as s:
        x = lazygt.distribute(torch.randn(8, 16), {"data": Shard(0)})
        w = lazygt.distribute(torch.randn(16, 4), {"model": Shard(0)})
        s.flush()
        y = (x @ w).relu()
        s.flush()
        assert s.last_plan is not None
        (steps,) = programs_of(s.decided(s.last_plan))
        shown = [
            {axis: " ".join(map(str, labels)) for axis, labels in value.items()}
            for value in decisions(steps)
        ]
        assert y.shape == (8, 4)
    assert shown == [
        {"data": "S(0)", "model": "R S(1)"},
        {"data": "R", "model": "S(0)"},
        {"data": "S(0)", "model": "P(sum) R"},
        {"data": "S(0)", "model": "R"},
    ]
