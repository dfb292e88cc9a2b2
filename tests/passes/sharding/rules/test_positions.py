"""Strategies of ops whose position is known only when they run: right wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazygt.graph.alias import WRITE_BACK, view_step
from lazygt.graph.node import Param, map_arg
from lazygt.passes.sharding.rules.strategy import S
from tests.passes.sharding.rules.draws import Cases, Draw, check_strategies, typical
from tests.passes.sharding.rules.harness import Case

HERE = Param(0)


def base(d: Draw, more: int = 1) -> torch.Tensor:
    """A position says something only where there are several."""
    return d.of(*[d.size() + more for _ in range(3)])


def position(size: int) -> int:
    return int(torch.randint(size, ()))


def picked(d: Draw) -> Case:
    value, dim = base(d), d.dim(3)
    return Case("select.int", value, dim, HERE, params=(position(value.shape[dim]),))


def narrowed(d: Draw) -> Case:
    value, dim = base(d), d.dim(3)
    size = value.shape[dim]
    start = position(size - size // 2 + 1)
    return Case("narrow.default", value, dim, HERE, size // 2, params=(start,))


def narrowed_bools(d: Draw) -> Case:
    value = base(d) > 0
    size = value.shape[1]
    return Case("narrow.default", value, 1, HERE, size - 1, params=(position(2),))


def placed_back(d: Draw) -> Case:
    shape, dim = list(base(d).shape), d.dim(3)
    smaller = [size for at, size in enumerate(shape) if at != dim % 3]
    number = position(shape[dim])
    return Case("select_backward.default", d.of(*smaller), shape, dim, HERE, params=(number,))


def put_into(d: Draw) -> Case:
    value, dim = base(d), d.dim(3)
    number = position(value.shape[dim])
    source = d.like(value.select(dim, 0))
    return Case("select_scatter.default", value, source, dim, HERE, params=(number,))


def rolled(d: Draw) -> Case:
    return Case("roll.default", base(d), [HERE, Param(1)], [0, 2], params=(position(9), -1))


def written(*steps: Any) -> Callable[[Draw], Case]:
    """``steps``: (op, arguments) of the views of the base whose value is written."""

    def make(d: Draw) -> Case:
        whole = base(d, more=3)
        here = position(2)
        value, chain = whole, []
        for op, *args in steps:
            known = map_arg(tuple(args), lambda arg: here if type(arg) is Param else arg)
            value = getattr(torch.ops.aten, op.split(".")[0])(value, *known)
            chain.append(view_step(f"aten.{op}", 0, (None, *args), (), 0))
        return Case(WRITE_BACK, whole, d.like(value), tuple(chain), params=(here,))

    return make


CASES: Cases = {
    "select": picked, "narrow": narrowed, "narrow of bools": narrowed_bools,
    "select_backward": placed_back, "select_scatter": put_into, "roll": rolled,
    "write_back of a row": written(("select.int", 0, HERE)),
    "write_back of a column": written(("select.int", 2, HERE)),
    "write_back of a place": written(("narrow.default", 0, HERE, 1)),
    "write_back of rows": written(("narrow.default", 2, HERE, 3)),
    "write_back of rows of a part": written(
        ("slice.Tensor", 1, 1, 9), ("narrow.default", 0, HERE, 1)
    ),
    "write_back of a part of a row": written(("select.int", 0, HERE), ("slice.Tensor", 0, 1, 9)),
    "write_back of a row of a part": written(("slice.Tensor", 1, 1, 9), ("select.int", 0, HERE)),
    "write_back of a turned row": written(("select.int", 1, HERE), ("t.default",)),
    "write_back of a row of a row": written(("select.int", 0, 1), ("select.int", 0, HERE)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_strategy_is_right_wherever_it_is(name: str) -> None:
    check_strategies(CASES[name])


@pytest.mark.parametrize("name", ["select", "narrow"])
def test_sharded_positions_are_not_gathered(name: str) -> None:
    case = CASES[name](typical())
    dims = {strategy.inputs for strategy in case.strategies(2)}
    assert {(S(dim),) for dim in range(3)} <= dims
