"""lifetime: a result is written over an operand that dies.

Bit for bit: the same kernel writes to other memory. Only pointwise ops are changed, which read each
element before they write it, and only memory of the run's own is overwritten. The run message
donates inputs (see ``graph.alias``), and the plan's schedule has the deaths of values
(``runtime.plan``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from lazygt.graph.alias import Aliases, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.graph.ops import overload
from lazygt.passes.base import placed, rebuild
from lazygt.passes.questions import ask

#: Their CPU kernel rounds complex64 otherwise if it writes over an operand.
_ROUNDED_IN_PLACE = frozenset({"aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor"})


class Lifetime:
    """Rewriting of ``b = op(a)`` to ``op_(a)`` or ``op(a, out=a)`` where ``a`` dies."""

    name = "lifetime"

    def run(self, graph: Graph) -> Graph:
        aliases = Aliases(graph)
        metas = graph.values
        rows = placed(graph)
        changed = False
        for number, row in enumerate(rows):
            aliases.visit(number, row.node, row.results)  # type: ignore[arg-type]
            target = _target(row.node, number, aliases, metas)
            written = None if target is None else _writing(row.node, target)
            if target is None or written is None:
                continue
            rows[number] = row._replace(node=written)
            aliases.share(row.results[0], target)
            changed = True
        return rebuild(graph, rows) if changed else graph


def _target(
    node: Node, number: int, aliases: Aliases, metas: Sequence[TensorMeta | None]
) -> int | None:
    """Return the operand that the node may overwrite; None if there is none."""
    if len(node.fresh) != 1 or node.writes or node.dynamic or node.body is not None:
        return None
    result = node.fresh[0]
    if (
        result is None
        or _overwriting(node.op) is None
        or result.offset
        or result.conj
        or result.neg
    ):
        return None
    if _rounds_in_place(node.op, result):
        return None
    for arg in node.args:
        if type(arg) is not Ref or metas[arg.index] != result:
            continue
        value = arg.index
        if aliases.uses[value] == number and _is_whole(value, aliases, metas):
            alone = all(
                other == value or aliases.memory[other] != aliases.memory[value]
                for other in node.refs()
            )
            if alone and aliases.dies(value):
                return value
    return None


def _rounds_in_place(op: str, result: TensorMeta) -> bool:
    """Return whether the bits depend on the memory that the result is written to."""
    return result.dtype == torch.complex64 and op in _ROUNDED_IN_PLACE


def _is_whole(value: int, aliases: Aliases, metas: Sequence[TensorMeta | None]) -> bool:
    """Return whether a value fills its memory, so that a write keeps nothing larger alive."""
    meta, home = metas[value], metas[aliases.memory[value]]
    if meta is None or home is None or meta.dtype != home.dtype:
        return False
    return ask(_fills, meta, home)


def _fills(meta: TensorMeta, home: TensorMeta) -> bool:
    """Return whether a tensor has no gaps, and as many elements as the first in its memory."""
    return meta.extent == meta.numel == home.numel


def _writing(node: Node, target: int) -> Node | None:
    """Return the node that writes its result over ``target``; None if no overload does."""
    forms = _overwriting(node.op)
    result = node.fresh[0]
    assert forms is not None
    assert result is not None
    in_place, out, keyword = forms
    if in_place and node.args[0] == Ref(target):
        return replace(node, op=in_place, fresh=(), writes=(target,), written=(result,))
    if not out:
        return None
    kwargs = (*node.kwargs, (keyword, ref(target)))
    return replace(node, op=out, kwargs=kwargs, fresh=(), writes=(target,), written=(result,))


@lru_cache(maxsize=4096)
def _overwriting(op: str) -> tuple[str, str, str] | None:
    """Return the overloads of a pointwise op that write in place and to a given tensor.

    Returns:
        (in-place overload or "", out overload or "", its keyword), or None for other ops.
    """
    f = op_facts(Node(op, ()))
    if f is None or not f.pointwise or f.random or f.outputs != ("f",) or f.aliases or f.dynamic:
        return None
    namespace, name, which = op.split(".")
    wanted = [(a.name, str(a.type)) for a in f.func._schema.arguments]
    in_place = f"{namespace}.{name}_.{which}"
    in_place = in_place if _takes(in_place, wanted) else ""
    for other in _overloads(namespace, name):
        last = overload(other)._schema.arguments[-1]
        if last.kwarg_only and last.alias_info is not None and _takes(other, wanted, last.name):
            return in_place, other, last.name
    return (in_place, "", "") if in_place else None


def _overloads(namespace: str, name: str) -> Iterable[str]:
    packet = getattr(getattr(torch.ops, namespace), name)
    return [f"{namespace}.{name}.{which}" for which in packet.overloads()]


def _takes(op: str, wanted: list[tuple[str, str]], out: str = "") -> bool:
    """Return whether an overload of this name takes these arguments (and ``out``)."""
    try:
        function = overload(op)
    except KeyError:
        return False
    have = [(a.name, str(a.type)) for a in function._schema.arguments if a.name != out]
    return have == wanted
