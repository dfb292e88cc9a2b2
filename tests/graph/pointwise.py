"""Pointwise ops, and a check of their functional forms."""

from __future__ import annotations

from lazygt.graph.fusion import is_pointwise, pure_form
from lazygt.graph.ops import overload
from tests.passes.overloads import that

POINTWISE = that(is_pointwise)


def has_a_functional_form(op: str) -> None:
    """Of every member; called by tests/passes/test_every_op.py."""
    pure, dropped = pure_form(op)
    have = overload(op)._schema.arguments
    wanted = overload(pure)._schema.arguments
    assert [str(a.type) for a in have if a.name != dropped] == [str(a.type) for a in wanted]
    if op == "aten.copy_.default":  # the only one that keeps its name: it takes over the strides
        return
    assert all(a.alias_info is None for a in wanted)
    assert pure_form(pure) == (pure, "")
    assert pure.split(".")[1] in (op.split(".")[1], op.split(".")[1].removesuffix("_"))
