"""Horizontal ops and the ops on one tensor that they stand for.

``aten._foreach_mul_.ScalarList([a, b], [2, 3])`` is ``a.mul_(2)`` and ``b.mul_(3)``. On a CPU
torch runs it as just those calls, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lazygt.graph.node import Arg, Node

EACH, ALL = "each", "all"


class ForeachForm(NamedTuple):
    """Correspondence of the arguments of a horizontal op and its op on one tensor.

    Attributes:
        wide: the horizontal overload.
        single: the overload for one tensor.
        takes: for each positional argument of ``wide``: EACH, a list with one item a tensor, or
            ALL, the same for every tensor.
        keyword: the keyword of ``single`` that takes the last positional argument of ``wide``.
    """

    wide: str
    single: str
    takes: tuple[str, ...]
    keyword: str = ""

    def is_plain(self, node: Node) -> bool:
        """Return whether a node has one result a tensor, in order, and no further argument."""
        targets = tuple(arg.index for arg in node.args[0])
        count = len(targets)
        results = (
            node.writes == targets and not node.fresh if node.writes else len(node.fresh) == count
        )
        return results and len(node.args) <= len(self.takes)

    def narrow(
        self, args: tuple[Arg, ...], which: int
    ) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """Return arguments and keywords of ``single`` for one tensor, from those of ``wide``."""
        # the last one may be left out: it has a default
        arguments = tuple(
            arg[which] if kind is EACH else arg for kind, arg in zip(self.takes, args, strict=False)
        )
        if self.keyword and len(arguments) == len(self.takes):
            return arguments[:-1], ((self.keyword, arguments[-1]),)
        return arguments, ()

    def widen(
        self, calls: Sequence[tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]]
    ) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """Return the arguments and keywords of ``wide``, from the calls of ``single``."""
        rows = []
        for args, kwargs in calls:
            rows.append((*args, dict(kwargs).get(self.keyword, 1)) if self.keyword else args)
        shared = () if self.keyword else calls[0][1]
        return tuple(zip(*rows, strict=True)), shared


def _forms() -> list[ForeachForm]:
    unary, binary, ternary = (EACH,), (EACH, EACH), (EACH, EACH, EACH)
    forms = []
    for name in ("add", "sub", "mul", "div"):
        for end in ("", "_"):
            wide, single = f"aten._foreach_{name}{end}", f"aten.{name}{end}.Tensor"
            forms += [
                ForeachForm(f"{wide}.List", single, binary),
                ForeachForm(f"{wide}.ScalarList", single, binary),
                ForeachForm(f"{wide}.Scalar", single, (EACH, ALL)),
            ]
            if name != "sub":
                forms.append(ForeachForm(f"{wide}.Tensor", single, (EACH, ALL)))
    for name in ("addcmul", "addcdiv"):
        for end in ("", "_"):
            wide, single = f"aten._foreach_{name}{end}", f"aten.{name}{end}.default"
            forms += [
                ForeachForm(f"{wide}.ScalarList", single, (*ternary, EACH), keyword="value"),
                ForeachForm(f"{wide}.Scalar", single, (*ternary, ALL), keyword="value"),
            ]
    for end in ("", "_"):
        forms += [
            ForeachForm(f"aten._foreach_lerp{end}.ScalarList", f"aten.lerp{end}.Scalar", ternary),
            ForeachForm(
                f"aten._foreach_lerp{end}.Scalar", f"aten.lerp{end}.Scalar", (*binary, ALL)
            ),
            ForeachForm(f"aten._foreach_lerp{end}.List", f"aten.lerp{end}.Tensor", ternary),
            ForeachForm(
                f"aten._foreach_pow{end}.ScalarList", f"aten.pow{end}.{_POWER[end]}", binary
            ),
            ForeachForm(
                f"aten._foreach_pow{end}.Scalar", f"aten.pow{end}.{_POWER[end]}", (EACH, ALL)
            ),
        ]
        for name in _ONE_ARGUMENT:
            foreach, single = f"aten._foreach_{name}{end}.default", f"aten.{name}{end}.default"
            forms.append(ForeachForm(foreach, single, unary))
    return [
        *forms,
        ForeachForm("aten._foreach_maximum.List", "aten.maximum.default", binary),
        ForeachForm("aten._foreach_minimum.List", "aten.minimum.default", binary),
        ForeachForm("aten._foreach_zero_.default", "aten.zero_.default", unary),
        ForeachForm("aten._foreach_copy_.default", "aten.copy_.default", binary),
        ForeachForm("aten._foreach_norm.Scalar", "aten.linalg_vector_norm.default", (EACH, ALL)),
    ]


_POWER = {"": "Tensor_Scalar", "_": "Scalar"}
_ONE_ARGUMENT = ("abs", "sqrt", "neg", "exp", "log", "sign", "reciprocal", "rsqrt", "sigmoid",
                 "tanh", "round", "floor", "ceil")  # fmt: skip

#: horizontal overload -> its form
SPLIT: dict[str, ForeachForm] = {form.wide: form for form in _forms()}
#: (overload for one tensor, has a number where the horizontal one takes a list of them) -> form
MERGE: dict[tuple[str, bool], ForeachForm] = {
    (form.single, form.wide.endswith(".ScalarList")): form
    for form in SPLIT.values()
    if ALL not in form.takes
}
