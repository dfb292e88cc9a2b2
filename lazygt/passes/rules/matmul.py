"""Contractions: what an einsum says of the dims. A contracted dim leaves partial sums."""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.label import Label
from lazygt.graph.node import Node
from lazygt.passes.rules.base import Call, Metas, P, R, Row, Rule, S, splittable
from lazygt.passes.rules.lower import zeros_when_empty

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


RULES: dict[str, Rule] = {
    f"aten.{name.replace('.', ending)}": _rule(*einsum)
    for name, einsum in _EINSUMS.items()
    for ending in (".", "_.")
    if ending == "." or name.startswith(("add", "badd"))
} | {"aten._cdist_forward.default": _distances}
