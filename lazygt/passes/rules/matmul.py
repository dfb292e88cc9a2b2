"""Contractions: what an einsum says of the dims. A contracted dim leaves partial sums."""

from __future__ import annotations

from collections.abc import Sequence

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

#: op -> operands (name: its dims), and the result's dims
_EINSUMS: dict[str, tuple[dict[str, str], str]] = {
    "mm.default": ({"self": "ik", "mat2": "kj"}, "ij"),
    "bmm.default": ({"self": "bik", "mat2": "bkj"}, "bij"),
    "mv.default": ({"self": "ik", "vec": "k"}, "i"),
    "dot.default": ({"self": "k", "tensor": "k"}, ""),
    "addmm.default": ({"mat1": "ik", "mat2": "kj"}, "ij"),
    "baddbmm.default": ({"batch1": "bik", "batch2": "bkj"}, "bij"),
    "addmv.default": ({"mat": "ik", "vec": "k"}, "i"),
    "addbmm.default": ({"batch1": "bik", "batch2": "bkj"}, "ij"),
    "addr.default": ({"vec1": "i", "vec2": "j"}, "ij"),
}


def _rule(operands: dict[str, str], result: str) -> Rule:
    letters = sorted(set("".join(operands.values())))

    def rows(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
        call = Call(node, metas, parts)
        sizes = {
            letter: size
            for name, dims in operands.items()
            for letter, size in zip(dims, call.shape(name), strict=True)
        }
        split = [letter for letter in letters if sizes[letter] > 1]
        return [_split_row(call, letter) for letter in split] + _linear_rows(call)

    def _split_row(call: Call, letter: str) -> Row:
        labels: dict[str, Label] = {
            name: S(dims.index(letter)) if letter in dims else R for name, dims in operands.items()
        }
        output = S(result.index(letter)) if letter in result else P
        return call.row(output, **_with_bias(call, labels, output))

    def _linear_rows(call: Call) -> list[Row]:
        """A partial sum times a whole one is a partial sum."""
        return [call.row(P, **_with_bias(call, {name: P}, P)) for name in operands]

    return rows


def _with_bias(call: Call, labels: dict[str, Label], output: Label) -> dict[str, Label]:
    """What is added has the label of the result; a partial sum of it counts once."""
    if "beta" not in call.args:
        return labels
    shape, bias = call.result().shape, call.shape("self")
    label = output
    if isinstance(output, S):
        own = output.dim - (len(shape) - len(bias))
        label = S(own) if own >= 0 and bias[own] == shape[output.dim] else R
    return {**labels, "self": label}


def _distances(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """Batches of pairs; rows of either side."""
    call = Call(node, metas, parts)
    shape = call.result().shape
    rank = len(shape)
    same = call.shape("x1")[:-2] == call.shape("x2")[:-2] == shape[:-2]
    found = []
    for dim in splittable(shape) if same else []:
        one = {rank - 2: {"x1": S(dim)}, rank - 1: {"x2": S(rank - 2)}}
        labels = one.get(dim, {"x1": S(dim), "x2": S(dim)})
        found.append(zeros_when_empty(call, call.row(S(dim), **labels)))
    return found


def _distances_backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """The gradient of the first side: of blocks of the second, a partial sum."""
    call = Call(node, metas, parts)
    shape = call.shape("grad")
    rank = len(shape)
    names = ("grad", "x1", "x2", "cdist")
    if any(call.shape(name)[:-2] != shape[:-2] for name in names):
        return ()
    found = [call.row(P, grad=P)]
    for dim in splittable(shape):
        labels: dict[str, Label] = {"grad": S(dim), "cdist": S(dim)}
        if dim < rank - 2:
            labels = dict.fromkeys(names, S(dim))
        else:
            labels["x1" if dim == rank - 2 else "x2"] = S(rank - 2)
        row = call.row(P if dim == rank - 1 else S(dim), **labels)
        found.append(zeros_when_empty(call, row))
    return found


def _trilinear(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """The product of three operands, each with dims of size 1 put in, summed over some dims."""
    call = Call(node, metas, parts)
    own = {f"i{which}": _dims_without(call, f"i{which}", f"expand{which}") for which in (1, 2, 3)}
    sizes = [
        max(call.shape(name)[dims[full]] for name, dims in own.items() if full in dims)
        for full in range(len(call.shape("i1")) + len(call["expand1"]))
    ]
    summed = set(call["sumdim"])
    found = [call.row(P, **{name: P}) for name in own]
    for full in splittable(tuple(sizes)):
        labels: dict[str, Label] = {
            name: S(dims[full])
            for name, dims in own.items()
            if full in dims and call.shape(name)[dims[full]] == sizes[full]
        }
        output = P if full in summed else S(full - sum(gone < full for gone in summed))
        found.append(zeros_when_empty(call, call.row(output, **labels)))
    return found


def _dims_without(call: Call, name: str, expanded: str) -> dict[int, int]:
    """The operand's dim for each dim of the product that it was not given."""
    given = set(call[expanded])
    rank = len(call.shape(name)) + len(given)
    return {full: own for own, full in enumerate(d for d in range(rank) if d not in given)}


RULES: dict[str, Rule] = {
    f"aten.{name.replace('.', ending)}": _rule(*einsum)
    for name, einsum in _EINSUMS.items()
    for ending in (".", "_.")
    if ending == "." or name.startswith(("add", "badd"))
} | {
    **table("_cdist_forward.default _euclidean_dist.default", _distances),
    **table("_cdist_backward.default", _distances_backward),
    **table("_trilinear.default", _trilinear),
}
