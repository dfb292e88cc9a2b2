"""Strategies of batches of matrices, of searches, and of ops that keep some dims as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazygt.graph.alias import WRITE_BACK, view_step
from tests.passes.sharding.rules.cases import Make, bounds, of_matrices, positive
from tests.passes.sharding.rules.draws import Cases, Draw, check_strategies, typical
from tests.passes.sharding.rules.harness import Case
from tests.support.values import Kind

aten: Any = torch.ops.aten
linalg: Any = torch.linalg


def with_right(op: str, **kwargs: Any) -> Make:
    """A right side whose first dim of the batch is broadcast, for half of them."""

    def make(d: Draw) -> Case:
        matrices = positive(d)
        first = 1 if d.flag() else matrices.shape[0]
        return Case(op, matrices, d.of(first, matrices.shape[1], 3, 2), **kwargs)

    return make


def solve_vectors(d: Draw) -> Case:
    matrices = positive(d)
    return Case("_linalg_solve_ex.default", matrices, d.of(*matrices.shape[:-1]))


def cholesky_solve(d: Draw) -> Case:
    factor = linalg.cholesky(positive(d))
    return Case("cholesky_solve.default", d.of(*factor.shape[:-1], 2), factor)


def lu_solve(d: Draw) -> Case:
    lu, pivots = linalg.lu_factor(positive(d))
    return Case("linalg_lu_solve.default", lu, pivots, d.of(*lu.shape[:-1], 2))


def lu_unpack(d: Draw) -> Case:
    return Case("lu_unpack.default", *linalg.lu_factor(positive(d)))


def householder(d: Draw) -> Case:
    batch = d.shape(1)
    return Case("linalg_householder_product.default", d.of(*batch, 3, 2), d.of(*batch, 2))


def cross(d: Draw) -> Case:
    a, b = d.shape(2)
    return Case("linalg_cross.default", d.of(a, b, 3), d.of(1 if d.flag() else a, b, 3))


LINALG: Cases = {
    **{name: of_matrices(f"{name}.default") for name in (
        "_linalg_det", "_linalg_slogdet", "linalg_inv_ex", "linalg_cholesky_ex",
        "cholesky_inverse", "linalg_lu", "linalg_lu_factor_ex", "linalg_ldl_factor_ex",
        "linalg_matrix_exp")},
    "eigenvalues": of_matrices("_linalg_eigh.default", "L", False),
    "singular values": of_matrices("_linalg_svd.default", False, False),
    "pinv": lambda d: Case("linalg_pinv.atol_rtol_tensor", positive(d)),
    "solve": with_right("_linalg_solve_ex.default"), "solve vectors": solve_vectors,
    "solve_triangular": with_right("linalg_solve_triangular.default", upper=True),
    "cholesky_solve": cholesky_solve, "lu_solve": lu_solve, "lu_unpack": lu_unpack,
    "householder_product": householder, "cross": cross,
}  # fmt: skip


def searched_rows(d: Draw) -> Case:
    rows = d.size()
    return Case("searchsorted.Tensor", bounds(d, rows, 4), d.of(rows, d.size()))


def isin(invert: bool) -> Make:
    return lambda d: Case("isin.Tensor_Tensor", d.indices(5, *d.shape(2)), d.indices(5, d.size()),
                          invert=invert)  # fmt: skip


def take(d: Draw) -> Case:
    return Case("take.default", d.of(3, 4), d.indices(12, *d.shape(2)))


SEARCHES: Cases = {
    "bucketize": lambda d: Case("bucketize.Tensor", d.tensor(2), bounds(d, 4)),
    "searchsorted": lambda d: Case("searchsorted.Tensor", bounds(d, 4), d.tensor(2)),
    "searchsorted rows": searched_rows,
    "isin": isin(invert=False), "isin inverted": isin(invert=True), "take": take,
}  # fmt: skip


def distances_backward(d: Draw) -> Case:
    b, i, j, k = d.shape(4)
    one, two = d.of(b, i, k), d.of(b, j, k)
    made = aten._cdist_forward(one, two, 2.0, None)
    return Case("_cdist_backward.default", d.like(made), one, two, 2.0, made)


def euclidean(d: Draw) -> Case:
    b, i, j, k = d.shape(4)
    return Case("_euclidean_dist.default", d.of(b, i, k), d.of(b, j, k))


def bilinear(d: Draw) -> Case:
    """As ``nn.Bilinear`` asks for it; the order of factors tells what zeros make of infinity."""
    d = d.without(Kind.INFINITE)
    n, out, a, b = d.shape(4)
    return Case("_trilinear.default", d.of(n, a), d.of(out, a, b), d.of(n, b),
                [1, 3], [0], [1, 2], [2, 3])  # fmt: skip


def norm(*rest: Any) -> Make:
    return lambda d: Case("norm.ScalarOpt_dim", d.tensor(2), *rest)


def masked_put(d: Draw) -> Case:
    value = d.tensor(3)
    return Case("index_put_.default", value, [d.of(*value.shape[:2]) > 0], d.of())


def along(op: str, *rest: Any, source: bool = False) -> Make:
    def make(d: Draw) -> Case:
        value = d.tensor(3)
        index = torch.randperm(value.shape[1])[:1]
        given = [d.of(value.shape[0], 1, value.shape[2])] if source else []
        return Case(op, value, 1, index, *given, *rest)

    return make


def unfolded(d: Draw) -> tuple[Any, ...]:
    value = d.of(*d.shape(2), 6)
    return d.like(value.unfold(2, 3, 1)), value.shape, 2, 3, 1


def frames(d: Draw) -> Case:
    """Windows that overlap, as of a short-time Fourier transform."""
    value = d.of(d.size(), 12)
    return Case("as_strided.default", value, [value.shape[0], 5, 4], [12, 2, 1])


def whole_write_back(d: Draw) -> Case:
    """Through views that show every element, so that what was there does not matter."""
    base = d.tensor(2)
    chain = (view_step("aten.t.default", 0, (None,), (), 0),
             view_step("aten.unsqueeze.default", 0, (None, 0), (), 0))  # fmt: skip
    return Case(WRITE_BACK, base, d.of(1, *base.t().shape), chain)


def reshaped_write_back(d: Draw) -> Case:
    """Of a bias' gradient, through the shape that it was summed in."""
    rows, columns = d.shape(2)
    base = d.of(1, rows, columns)
    chain = (view_step("aten.view.default", 0, (None, (rows, columns)), (), 0),
             view_step("aten.t.default", 0, (None,), (), 0))  # fmt: skip
    return Case(WRITE_BACK, base, d.of(columns, rows), chain)


REST: Cases = {
    "cdist backward": distances_backward, "euclidean": euclidean, "bilinear": bilinear,
    "norm of rows": norm(2.0, [1]), "norm of columns": norm(3.0, [0], True),
    "norm of no order": norm(None, [0]), "norm of order 0": norm(0.0, [0]),
    "aminmax": lambda d: Case("aminmax.default", d.tensor(2)),
    "aminmax of rows": lambda d: Case("aminmax.default", d.tensor(2), dim=d.dim(2)),
    "count_nonzero": lambda d: Case("count_nonzero.default", d.indices(2, *d.shape(2))),
    "count_nonzero of rows": lambda d: Case("count_nonzero.default", d.indices(2, *d.shape(2)), 0),
    "count_nonzero of two dims": lambda d: Case(
        "count_nonzero.dim_IntList", d.indices(2, *d.shape(3)), [0, 1]),
    "nansum": lambda d: Case("nansum.default", d.tensor(2).sqrt(), [0]),
    "nanmedian": lambda d: Case("nanmedian.dim", d.tensor(2), d.dim(2)),
    "masked put": masked_put, "index_fill": along("index_fill.int_Scalar", 2.0),
    "index_copy": along("index_copy.default", source=True),
    "index_reduce": along("index_reduce.default", "amax", source=True),
    "view_as_real": lambda d: Case("view_as_real.default", torch.complex(d.of(5, 6), d.of(5, 6))),
    "view_as_complex": lambda d: Case("view_as_complex.default", d.of(*d.shape(2), 2)),
    "diag_embed": lambda d: Case("diag_embed.default", d.tensor(3), 1, 0, 2),
    "unfold": lambda d: Case("unfold.default", d.of(*d.shape(2), 6), 2, 3, 1),
    "unfold by steps": lambda d: Case("unfold.default", d.of(d.size() + 9, 3), 0, 4, 2),
    "unfold backward": lambda d: Case("unfold_backward.default", *unfolded(d)),
    "conj": lambda d: Case("_conj.default", torch.complex(*[d.of(5, 6)] * 2)),
    "frames": frames,
    "write_back of all": whole_write_back, "write_back of a reshape": reshaped_write_back,
    "rot90": lambda d: Case("rot90.default", d.tensor(3), 1, [0, 2]),
    "new_empty_strided": lambda d: Case("new_empty_strided.default", d.tensor(2), [5, 6], [6, 1],
                                        shapes_only=[0]),
    "pixel_shuffle": lambda d: Case("pixel_shuffle.default", d.of(d.size(), 8, 3, 2), 2),
    "pixel_unshuffle": lambda d: Case("pixel_unshuffle.default", d.of(d.size(), 2, 4, 6), 2),
    "channel_shuffle": lambda d: Case("channel_shuffle.default", d.of(d.size(), 6, d.size(), 2), 3),
}  # fmt: skip

ALL = LINALG | SEARCHES | REST


def test_a_base_that_is_overwritten_may_be_partial() -> None:
    rows = [str(row) for row in whole_write_back(typical()).strategies(3)]
    assert "(P(sum), R) -> (R)" in rows
    assert "(P(sum), S(2)) -> (S(0))" in rows


def test_write_through_reshape_is_not_gathered() -> None:
    rows = [str(row) for row in reshaped_write_back(typical()).strategies(3)]
    assert "(S(1), S(1)) -> (S(1))" in rows
    assert "(S(2), S(0)) -> (S(2))" in rows
    assert "(P(sum), S(1)) -> (S(1))" in rows


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ALL)
def test_rows(name: str) -> None:
    check_strategies(ALL[name], examples=12)
