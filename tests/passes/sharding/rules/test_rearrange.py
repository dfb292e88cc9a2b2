"""Strategies of views, cutting and joining, indexing and sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazygt.graph.alias import WRITE_BACK, view_step
from tests.passes.sharding.rules.cases import Make, on
from tests.passes.sharding.rules.draws import Cases, Draw, check_strategies
from tests.passes.sharding.rules.harness import Case


def view(op: str, change: Callable[[tuple[int, ...]], list[int]], rank: int = 3) -> Make:
    """``change``: the new sizes, from the old."""

    def make(d: Draw) -> Case:
        value = d.tensor(rank)
        return Case(op, value, change(tuple(value.shape)))

    return make


def split_dim(d: Draw) -> Case:
    a, b, c = d.shape(3)
    return Case("view.default", d.of(a * b, c), [a, b, c])


def view_of_transposed(d: Draw) -> Case:
    a, b, c = d.shape(3)
    return Case("view.default", d.of(a, b * c).t(), [b, c, a])


def expand(d: Draw) -> Case:
    a, b = d.shape(2)
    return Case("expand.default", d.of(a, 1, b), [4, -1, 5, b])


VIEWS: Cases = {
    "t": on("t.default", 2), "detach": on("detach.default", 2),
    "transpose": on("transpose.int", 3, 0, -1), "permute": on("permute.default", 3, [2, 0, 1]),
    "unsqueeze": on("unsqueeze.default", 2, 1), "unsqueeze last": on("unsqueeze.default", 2, -1),
    "squeeze": lambda d: Case("squeeze.default", d.of(1, d.size(), 1, d.size())),
    "squeeze.dim": lambda d: Case("squeeze.dim", d.of(1, d.size(), 1, d.size()), 2),
    "squeeze.dims": lambda d: Case("squeeze.dims", d.of(1, d.size(), 1, d.size()), [0, 1]),
    "expand": expand, "split a dim": split_dim, "view of a transposed": view_of_transposed,
    "flatten": view("view.default", lambda s: [s[0] * s[1], s[2]]),
    "_unsafe_view": view("_unsafe_view.default", lambda s: [s[0], s[1] * s[2]]),
    "flatten all": view("view.default", lambda s: [-1]),
}  # fmt: skip


def joined(op: str, dim: int, other: int = 0) -> Make:
    """``other``: what the second tensor has more along ``dim``."""

    def make(d: Draw) -> Case:
        a = d.tensor(2)
        shape = list(a.shape)
        shape[dim] += other
        return Case(op, [a, d.of(*shape)], dim)

    return make


def cut(op: str, *rest: Callable[[int], Any], dim: int | None = None) -> Make:
    """With arguments that depend on the size of the dim that is cut."""

    def make(d: Draw) -> Case:
        value = d.tensor(3)
        at = d.dim(3) if dim is None else dim
        return Case(op, value, at, *(argument(value.shape[at]) for argument in rest))

    return make


def bools(op: str, *args: Any) -> Make:
    return lambda d: Case(op, d.tensor(2) > 0, *args)


def split_sizes(d: Draw) -> Case:
    value = d.tensor(2)
    return Case("split_with_sizes.default", value, [1, value.shape[1] - 1], 1)


def placed_back(op: str) -> Make:
    def make(d: Draw) -> Case:
        shape = d.shape(3)
        dim = d.dim(3)
        size = shape[dim]
        smaller = list(shape)
        if op == "select_backward.default":
            del smaller[dim]
            return Case(op, d.of(*smaller), shape, dim, size // 2)
        smaller[dim] = size - size // 2
        return Case(op, d.of(*smaller), shape, dim, size // 2, size, 1)

    return make


def most_placed_back(start: int) -> Make:
    """All rows but two."""

    def make(d: Draw) -> Case:
        rows = d.size() + 9
        return Case("slice_backward.default", d.of(rows, 2), [rows + 2, 2], 0, start,
                    start + rows, 1)  # fmt: skip

    return make


def put_into(op: str) -> Make:
    def make(d: Draw) -> Case:
        value, dim = d.tensor(3), d.dim(3)
        size, shape = value.shape[dim], list(value.shape)
        if op == "select_scatter.default":
            del shape[dim]
            return Case(op, value, d.of(*shape), dim, size // 2)
        shape[dim] = size - size // 2
        return Case(op, value, d.of(*shape), dim, size // 2, size)

    return make


def write_back(*steps: Any) -> Make:
    """``steps``: (op, arguments) of the views of the base whose value is written."""

    def make(d: Draw) -> Case:
        base = d.of(d.size() + 2, d.size(), d.size())
        value, chain = base, []
        for op, *args in steps:
            value = getattr(torch.ops.aten, op.split(".")[0])(value, *args)
            chain.append(view_step(f"aten.{op}", 0, (None, *args), (), 0))
        return Case(WRITE_BACK, base, d.like(value), tuple(chain))

    return make


MOVING: Cases = {
    "cat": joined("cat.default", 0, 2), "cat of last": joined("cat.default", -1, 1),
    "cat of one row more": lambda d: Case("cat.default", [d.of(d.size() + 9, 3), d.of(1, 3)]),
    "cat of rows around": lambda d: Case(
        "cat.default", [d.of(1, 3), d.of(16, 3), d.of(2, 3)], 0),
    "stack": joined("stack.default", 1), "stack last": joined("stack.default", -1),
    "split": on("split.Tensor", 3, 2, 1), "unsafe_split": on("unsafe_split.Tensor", 3, 2, 0),
    "split_with_sizes": split_sizes, "unbind": on("unbind.int", 3),
    "unbind of 1": on("unbind.int", 3, 1),
    "slice": cut("slice.Tensor", lambda n: n // 3, lambda n: n - n // 3),
    "slice from the end": cut("slice.Tensor", lambda n: -2, lambda n: 9),
    "slice all": cut("slice.Tensor", lambda n: 0, lambda n: n),
    "slice by steps": cut("slice.Tensor", lambda n: 0, lambda n: n, lambda n: 2),
    "select": cut("select.int", lambda n: n // 2), "select last": cut("select.int", lambda n: -1),
    "select_backward": placed_back("select_backward.default"),
    "slice_backward": placed_back("slice_backward.default"),
    **{f"slice_backward of most from {start}": most_placed_back(start) for start in (0, 1, 2)},
    "flip": on("flip.default", 3, [0, -1]), "roll": on("roll.default", 3, [1], [1]),
    "roll back": on("roll.default", 3, [-1], [-1]),
    "pad": on("constant_pad_nd.default", 3, [1, 0, 0, 0, 2, 1], 0.0),
    "pad with 1": on("constant_pad_nd.default", 3, [1, 0], 1.0),
    "narrow": cut("narrow.default", lambda n: n // 3, lambda n: n - n // 2),
    "roll all": on("roll.default", 2, [3]), "roll twice": on("roll.default", 3, [1, -2], [0, 2]),
    "pad and cut": on("constant_pad_nd.default", 3, [-1, 2, 0, 0], 0.0),
    **{f"{op} of bools": bools(op, *args) for op, *args in (
        ("flip.default", [0]), ("select.int", 0, -1), ("slice.Tensor", 1, 1, 4),
        ("split.Tensor", 2, 0), ("unbind.int", 1), ("constant_pad_nd.default", [1, 1], 0))},
    "cat of bools": lambda d: Case("cat.default", [d.of(d.size(), 3) > 0, d.of(4, 3) > 0]),
    "select_scatter": put_into("select_scatter.default"),
    "slice_scatter": put_into("slice_scatter.default"),
    "repeat": on("repeat.default", 2, [3, 1, 2]), "diagonal": on("diagonal.default", 3, 0, 1, 2),
    "fft": on("_fft_r2c.default", 3, [1], 0, True),
    "tril": on("tril.default", 3, 1), "triu": on("triu.default", 3, -1),
    "triu_": on("triu_.default", 2),
    "write_back of a slice": write_back(("slice.Tensor", 0, 1, 2)),
    "write_back of a select of a transposed": write_back(
        ("transpose.int", 0, 2), ("select.int", 1, 0)),
    "write_back of a transposed select": write_back(("select.int", 0, 1), ("t.default",)),
    "write_back of a slice of a select": write_back(
        ("select.int", 1, 0), ("slice.Tensor", 0, 1, 3)),
    "write_back of the last": write_back(("slice.Tensor", 0, -1, 9)),
}  # fmt: skip


def indexed(op: str) -> Make:
    def make(d: Draw) -> Case:
        value = d.tensor(3)
        dim = d.dim(3)
        return Case(op, value, dim, d.indices(value.shape[dim], d.size()))

    return make


def gather(d: Draw) -> Case:
    value, dim = d.tensor(3), d.dim(3)
    shape = list(value.shape)
    shape[dim] = d.size()
    return Case("gather.default", value, dim, d.indices(value.shape[dim], *shape))


def of_rows(op: str) -> Make:
    """With an index of rows, the same for each element of one."""

    def make(d: Draw) -> Case:
        value, count = d.tensor(2), d.size()
        places = d.indices(value.shape[0], count)
        if op == "scatter.src":
            places = torch.randperm(value.shape[0])[:count]  # no place twice
        index = places.unsqueeze(1).expand(-1, value.shape[1])
        given = [] if op == "gather.default" else [d.of(*index.shape)]
        return Case(op, value, 0, index, *given)

    return make


def scatter(op: str) -> Make:
    def make(d: Draw) -> Case:
        value, dim = d.tensor(2), d.dim(2)
        size = value.shape[dim]
        order = torch.rand(value.shape).argsort(dim)  # no place twice, so the result is certain
        index = order.narrow(dim, 0, max(size // 2, 1)).contiguous()
        return Case(op, value, dim, index, 2.0 if "value" in op else d.like(index))

    return make


def index_add(op: str) -> Make:
    def make(d: Draw) -> Case:
        value, dim, count = d.tensor(2), d.dim(2), d.size()
        shape = list(value.shape)
        shape[dim] = count
        return Case(op, value, dim, d.indices(value.shape[dim], count), d.of(*shape), alpha=2.0)

    return make


def index(places: str) -> Make:
    """``places``: one letter a dim, ``i`` for an index and ``.`` for none."""

    def make(d: Draw) -> Case:
        value = d.tensor(3)
        shape = d.shape(2)
        indices = [d.indices(value.shape[n], *shape) - value.shape[n] // 2 if place == "i" else None
                   for n, place in enumerate(places)]  # fmt: skip
        return Case("index.Tensor", value, indices)

    return make


def index_put(places: str, added: bool) -> Make:
    def make(d: Draw) -> Case:
        value, count = d.tensor(3), d.size()
        taken = [size for size, place in zip(value.shape, places, strict=False) if place == "i"]
        count = count if added else min(count, *taken)  # no place twice: the last would win
        drawn = [None if place == "." else d.indices(size, count) if added
                 else torch.randperm(size)[:count]
                 for size, place in zip(value.shape, places, strict=False)]  # fmt: skip
        before, free = places.index("i"), list(value.shape[len(places) :])
        full = [*value.shape[:before], count, *free]
        values = d.of(*full) if d.flag() else d.of(*full[-1:])
        return Case("index_put.default", value, drawn, values, added)

    return make


INDEXING: Cases = {
    "index_select": indexed("index_select.default"), "gather": gather,
    **{op: scatter(op) for op in (
        "scatter_add.default", "scatter_add_.default", "scatter.src", "scatter_.value")},
    "index_add": index_add("index_add.default"), "index_add_": index_add("index_add_.default"),
    **{f"{op} of rows": of_rows(op)
       for op in ("gather.default", "scatter_add.default", "scatter.src")},
    **{f"index {places}": index(places) for places in ("i", ".i", "ii", ".ii")},
    **{f"index_put {places} {added}": index_put(places, added)
       for places in ("i", "ii", ".i", ".ii", "..i") for added in (False, True)},
    "sort": on("sort.default", 2), "sort stable": on("sort.stable", 2, stable=True, dim=0),
    "topk": on("topk.default", 2, 1, 0), "smallest": on("topk.default", 2, 1, 1, False),
    "cumsum": on("cumsum.default", 3, 1), "cummax": on("cummax.default", 2, 0),
    "cumprod": on("cumprod.default", 2, 1), "logcumsumexp": on("logcumsumexp.default", 2, 0),
    "cumprod of whole numbers": lambda d: Case("cumprod.default", d.indices(9, *d.shape(2)), 1),
    "cumsum of whole numbers": lambda d: Case("cumsum.default", d.indices(9, *d.shape(2)), 0),
    "kthvalue": on("kthvalue.default", 2, 1, 0),
    "second smallest": lambda d: Case("kthvalue.default", d.of(d.size() + 6, d.size()), 2, 0, True),
    "median": on("median.dim", 2, 0),
}  # fmt: skip

ALL = VIEWS | MOVING | INDEXING


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ALL)
def test_rows(name: str) -> None:
    check_strategies(ALL[name], examples=12)


#: What is moved along a split dim, and not gathered: placement of the results.
ALONG: dict[str, tuple[Make, str]] = {
    "cat": (joined("cat.default", 0), "(S(0), S(0)) -> (S(0)) +send_recv"),
    "slice": (cut("slice.Tensor", lambda n: 1, lambda n: 3, dim=0), "(S(0)) -> (P(sum))"),
    "slice_backward": (most_placed_back(0), "(S(0)) -> (S(0)) +send_recv"),
    "select": (cut("select.int", lambda n: 1, dim=0), "(S(0)) -> (P(sum))"),
    "flip": (on("flip.default", 3, [0]), "(S(0)) -> (S(0)) +send_recv"),
    "roll": (on("roll.default", 3, [1], [0]), "(S(0)) -> (S(0)) +send_recv"),
    "select_scatter": (
        lambda d: Case("select_scatter.default", d.of(6, 3), d.of(3), 0, 2),
        "(S(0), R) -> (S(0))",
    ),
    "write_back": (write_back(("slice.Tensor", 0, 1, 3)), "(S(0), R) -> (S(0))"),
}


@pytest.mark.parametrize("name", ALONG)
def test_op_along_split_dim_keeps_sharding(name: str) -> None:
    make, wanted = ALONG[name]
    sixes = Draw(lambda: 6, lambda: False)
    assert wanted in [str(strategy) for strategy in make(sixes).strategies(2)]
