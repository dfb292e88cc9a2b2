"""Batches of matrices: each rank has its own of them, whole. A matrix is never split.

Their dims before the last two (of vectors: the last) pass through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lazygt.graph.label import Label
from lazygt.graph.node import Node
from lazygt.passes.rules.base import (
    Call,
    Metas,
    P,
    R,
    Row,
    Rule,
    S,
    splittable,
    table,
    zeros_when_empty,
)
from lazygt.passes.rules.pointwise import aligned

Shape = tuple[int, ...]

#: op -> the rank of an item of each operand, and of each result
_ITEMS: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "_linalg_det.default": ({"A": 2}, (0, 2, 1)),
    "_linalg_slogdet.default": ({"A": 2}, (0, 0, 2, 1)),
    "linalg_inv_ex.default": ({"A": 2}, (2, 0)),
    "linalg_cholesky_ex.default": ({"self": 2}, (2, 0)),
    "cholesky_solve.default": ({"self": 2, "input2": 2}, (2,)),
    "cholesky_inverse.default": ({"self": 2}, (2,)),
    "_linalg_svd.default": ({"A": 2}, (2, 1, 2)),
    "_linalg_eigh.default": ({"A": 2}, (1, 2)),
    "linalg_eig.default": ({"self": 2}, (1, 2)),
    "linalg_eigvals.default": ({"self": 2}, (1,)),
    "linalg_lu.default": ({"A": 2}, (2, 2, 2)),
    "linalg_lu_factor_ex.default": ({"A": 2}, (2, 1, 0)),
    "linalg_lu_solve.default": ({"LU": 2, "pivots": 1, "B": 2}, (2,)),
    "linalg_solve_triangular.default": ({"self": 2, "B": 2}, (2,)),
    "linalg_ldl_factor_ex.default": ({"self": 2}, (2, 1, 0)),
    "linalg_matrix_exp.default": ({"self": 2}, (2,)),
    "linalg_householder_product.default": ({"input": 2, "tau": 1}, (2,)),
    "linalg_pinv.atol_rtol_tensor": ({"self": 2, "atol": 0, "rtol": 0}, (2,)),
    "lu_unpack.default": ({"LU_data": 2, "LU_pivots": 1}, (2, 2, 2)),
    "triangular_solve.default": ({"self": 2, "A": 2}, (2, 2)),
    "ormqr.default": ({"self": 2, "input2": 1, "input3": 2}, (2,)),
}


def _batched(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    operands, results = _ITEMS[node.op.removeprefix("aten.")]
    return _rows(Call(node, metas, parts), operands, results)


def _solve(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """With vectors on the right where they have the shape of the matrices' rows."""
    call = Call(node, metas, parts)
    matrices, right = call.shape("A"), call.shape("B")
    item = 1 if len(right) == 1 or right == matrices[:-1] else 2
    return _rows(call, {"A": 2, "B": item}, (item, 2, 1, 0))


def _rows(call: Call, operands: Mapping[str, int], results: Sequence[int]) -> list[Row]:
    given = {name: rank for name, rank in operands.items() if call.has(name)}
    batches = [_batch(call.shape(name), rank) for name, rank in given.items()]
    batch = tuple(torch.broadcast_shapes(*batches))
    found = []
    for dim in splittable(batch):
        labels = {name: _label(own, batch, dim) for name, own in zip(given, batches, strict=True)}
        made = [
            _label(_batch(meta.shape, rank), batch, dim) if meta is not None else R
            for meta, rank in zip(call.node.results, results, strict=True)
        ]
        found.append(zeros_when_empty(call, call.row(made, **labels)))
    return found


def _batch(shape: Shape, rank: int) -> Shape:
    return shape[: max(len(shape) - rank, 0)]


def _label(own: Shape, batch: Shape, dim: int) -> Label:
    """Of a batch that is broadcast; what is not asked for (vectors of an svd) has none."""
    at = dim - (len(batch) - len(own))
    return S(at) if at >= 0 and own[at] == batch[dim] else R


def _cross(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    shape = call.result().shape
    dim = call.dim("dim", len(shape))
    names = ("self", "other")
    found = [
        call.row(S(d), **{name: aligned(call.meta(name), shape, d) for name in names})
        for d in splittable(shape)
        if d != dim
    ]
    return [*found, *(call.row(P, **{name: P}) for name in names)]


RULES: dict[str, Rule] = {
    **table(" ".join(_ITEMS), _batched),
    **table("_linalg_solve_ex.default", _solve),
    **table("linalg_cross.default", _cross),
}
