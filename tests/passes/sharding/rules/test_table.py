"""Strategies of ops that have one line of text and no other test of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazygt.passes.sharding.rules import RULES, table
from tests.passes.sharding.rules.cases import bounds, of_matrices, positive
from tests.passes.sharding.rules.draws import Cases, Draw, check_strategies, typical
from tests.passes.sharding.rules.harness import Case

aten: Any = torch.ops.aten
Make = Callable[[Draw], Case]


def ldl_solve(d: Draw) -> Case:
    factors, pivots, _ = aten.linalg_ldl_factor_ex(positive(d))
    return Case("linalg_ldl_solve.default", factors, pivots, d.of(*factors.shape[:-1], 2))


def complex_dot(d: Draw) -> Case:
    size = d.size()
    return Case("vdot.default", *(torch.complex(d.of(size), d.of(size)) for _ in range(2)))


def int_mm(d: Draw) -> Case:
    """With more rows than there are sizes: its kernels are for 17 and more."""
    return Case("_int_mm.default", torch.randint(-9, 9, (24, 16), dtype=torch.int8),
                torch.randint(-9, 9, (16, 8), dtype=torch.int8))  # fmt: skip


def weights_of_bags(d: Draw) -> Case:
    rows, features, count = d.shape(3)
    weight, indices = d.of(rows, features), d.indices(rows, count)
    offsets = torch.tensor([0, count // 2])
    made, bags, *_ = aten._embedding_bag(weight, indices, offsets)
    return Case("_embedding_bag_per_sample_weights_backward.default", d.like(made), weight, indices,
                offsets, bags, 0)  # fmt: skip


def margin(reduction: int) -> Make:
    def make(d: Draw) -> Case:
        samples, classes = d.shape(2)
        return Case("multi_margin_loss.default", d.of(samples, classes),
                    d.indices(classes, samples), 1, 1, d.of(classes).abs(), reduction)  # fmt: skip

    return make


def several_margins(reduction: int) -> Make:
    """Of samples with several classes each, which end where there is -1."""

    def make(d: Draw) -> Case:
        samples, classes = d.shape(2)
        target = d.indices(classes, samples, classes)
        target[:, -1] = -1
        return Case("multilabel_margin_loss_forward.default", d.of(samples, classes), target,
                    reduction)  # fmt: skip

    return make


def sorted_by_places(d: Draw) -> Case:
    sequence = d.of(d.size())
    return Case("searchsorted.Tensor", sequence, d.tensor(2), sorter=sequence.argsort())


def searched_sequences(d: Draw) -> Case:
    rows = d.size()
    return Case("searchsorted.Tensor", bounds(d, rows, d.size()), d.of(rows, d.size()), right=True)


def resized(op: str, rank: int, *rest: Any) -> Make:
    return lambda d: Case(f"{op}.vec", d.of(*d.shape(2), *[4] * rank), [6] * rank, *rest)


def copies(op: str, *args: Any) -> Make:
    return lambda d: Case(op, d.tensor(3), *args)


def scattered(op: str, given: bool) -> Make:
    def make(d: Draw) -> Case:
        value = d.tensor(2)
        index = d.indices(value.shape[0], *value.shape)
        return Case(op, value, 0, index, d.like(value) if given else 2.0, reduce="multiply")

    return make


CASES: Cases = {
    "qr": lambda d: Case("linalg_qr.default", d.of(*d.shape(2), 4, 3)),
    "qr of wide matrices": lambda d: Case("linalg_qr.default", d.of(*d.shape(2), 3, 4), "complete"),
    "qr without q": lambda d: Case("linalg_qr.default", d.of(*d.shape(2), 3, 4), "r"),
    "cholesky": of_matrices("cholesky.default"), "ldl_solve": ldl_solve, "vdot": complex_dot,
    "addmv": lambda d: Case("addmv.default", d.of(5), d.of(5, 6), d.of(6)),
    "addmv of one number": lambda d: Case("addmv.default", d.of(1), d.of(5, 6), d.of(6)),
    "int mm": int_mm, "weights of bags": weights_of_bags,
    "addmm and activation": lambda d: Case(
        "_addmm_activation.default", d.of(6), d.of(d.size(), 4), d.of(4, 6), use_gelu=True),
    "multi_margin": margin(0), "multi_margin summed": margin(2), "multi_margin mean": margin(1),
    "multilabel_margin": several_margins(0), "multilabel_margin summed": several_margins(2),
    "bucketize": lambda d: Case("bucketize.Tensor", d.tensor(2), bounds(d, d.size()), right=True),
    "searchsorted by a sorter": sorted_by_places, "searchsorted sequences": searched_sequences,
    "renorm": lambda d: Case("renorm.default", d.tensor(3), 2, d.dim(3), 0.5),
    "nearest1d": resized("upsample_nearest1d", 1, None),
    "trilinear3d": resized("upsample_trilinear3d", 3, False, None),
    "bicubic2d": resized("upsample_bicubic2d", 2, False, None),
    "t_copy": lambda d: Case("t_copy.default", d.tensor(2)),
    "transpose_copy": copies("transpose_copy.int", 0, -1),
    "permute_copy": copies("permute_copy.default", [2, 0, 1]),
    "unsqueeze_copy": copies("unsqueeze_copy.default", 1),
    "expand_copy": lambda d: Case("expand_copy.default", d.of(1, 5), [6, -1]),
    "unfold_copy": lambda d: Case("unfold_copy.default", d.of(*d.shape(2), 6), 2, 3, 1),
    "scatter and multiply": scattered("scatter.reduce", given=True),
    "scatter a number and multiply": scattered("scatter.value_reduce", given=False),
    "rsub": lambda d: Case("rsub.Tensor", d.of(5, 6), d.of(6), alpha=3),
    "floor_divide": lambda d: Case("floor_divide.default", d.of(5, 6), d.of(6)),
    "isin a number": lambda d: Case("isin.Tensor_Scalar", d.indices(3, *d.shape(2)), 1),
    "cumprod_": lambda d: Case("cumprod_.default", d.tensor(2), d.dim(2)),
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_strategies(name: str) -> None:
    check_strategies(CASES[name], examples=8)


def test_a_mean_over_samples_of_several_classes_is_of_all() -> None:
    """torch's decomposition of it is wrong, and leads to no strategy."""
    assert len(several_margins(1)(typical()).strategies(2)) == 1


def test_places_in_a_sorter_are_of_the_whole_sequence() -> None:
    assert [str(s) for s in sorted_by_places(typical()).strategies(2)] == [
        "(R, R, R) -> (R)", "(R, S(0), R) -> (S(0))", "(R, S(1), R) -> (S(1))",
    ]  # fmt: skip


def test_searched_sequence_block_counts_smaller_elements() -> None:
    assert "(S(1), R) -> (P(sum))" in map(str, searched_sequences(typical()).strategies(2))


def test_every_line_of_the_table_is_a_rule() -> None:
    assert all(rule in RULES[op] for op, rule in table.RULES.items())


def test_distances_that_are_nan_add_nothing_to_a_margin_loss() -> None:
    value = torch.tensor([[0.5, 1.0, torch.nan], [1.0, 0.0, 0.5]], dtype=torch.float64)
    case = Case("multi_margin_loss.default", value, torch.tensor([0, 1]))
    assert case.expected[0].isfinite()
    for strategy in case.strategies(2):
        case.check(2, strategy)
