"""lifetime: buffer reuse. A pointwise op writes its result over an operand that dies.

Results do not change by a bit: the same kernel writes to other memory. Only pointwise ops are
changed, which read each element before they write it, and only memory that belongs to the run is
overwritten. The run message donates inputs (see ``graph.alias``); the plan's schedule lists the
deaths of values (``runtime.plan``).
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

#: Ops with CPU kernels that round complex64 differently when they write over an operand.
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
            in_place = None if target is None else _in_place_node(row.node, target)
            if target is None or in_place is None:
                continue
            rows[number] = row._replace(node=in_place)
            aliases.share(row.results[0], target)
            changed = True
        return rebuild(graph, rows) if changed else graph


def _target(
    node: Node, number: int, aliases: Aliases, metas: Sequence[TensorMeta | None]
) -> int | None:
    """Return a dying operand with the result's meta that the node may overwrite; else None."""
    if len(node.fresh) != 1 or node.writes or node.dynamic or node.body is not None:
        return None
    result = node.fresh[0]
    if (
        result is None
        or _in_place_overloads(node.op) is None
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
        if aliases.uses[value] == number and _fills_its_memory(value, aliases, metas):
            is_only_alias = all(
                other == value or aliases.memory[other] != aliases.memory[value]
                for other in node.refs()
            )
            if is_only_alias and aliases.dies(value):
                return value
    return None


def _rounds_in_place(op: str, result: TensorMeta) -> bool:
    """Return whether the result's bits depend on being written over an operand."""
    return result.dtype == torch.complex64 and op in _ROUNDED_IN_PLACE


def _fills_its_memory(value: int, aliases: Aliases, metas: Sequence[TensorMeta | None]) -> bool:
    """Return whether a value fills its memory, so that reuse keeps no larger memory alive."""
    meta, base = metas[value], metas[aliases.memory[value]]
    if meta is None or base is None or meta.dtype != base.dtype:
        return False
    return ask(_fills, meta, base)


def _fills(meta: TensorMeta, base: TensorMeta) -> bool:
    """Return whether a tensor is dense, with as many elements as the base of its memory."""
    return meta.extent == meta.numel == base.numel


def _in_place_node(node: Node, target: int) -> Node | None:
    """Return the node that writes its result over ``target``; None if there is no such overload."""
    forms = _in_place_overloads(node.op)
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
def _in_place_overloads(op: str) -> tuple[str, str, str] | None:
    """Return the in-place and out overloads of a pointwise op.

    Returns:
        (in-place overload or "", out overload or "", its keyword); None: there is neither.
    """
    f = op_facts(Node(op, ()))
    if f is None or not f.pointwise or f.random or f.outputs != ("f",) or f.aliases or f.dynamic:
        return None
    namespace, name, overload_name = op.split(".")
    arguments = [(a.name, str(a.type)) for a in f.func._schema.arguments]
    in_place = f"{namespace}.{name}_.{overload_name}"
    in_place = in_place if _has_arguments(in_place, arguments) else ""
    for out_overload in _overloads(namespace, name):
        last = overload(out_overload)._schema.arguments[-1]
        if (
            last.kwarg_only
            and last.alias_info is not None
            and _has_arguments(out_overload, arguments, last.name)
        ):
            return in_place, out_overload, last.name
    return (in_place, "", "") if in_place else None


def _overloads(namespace: str, name: str) -> Iterable[str]:
    packet = getattr(getattr(torch.ops, namespace), name)
    return [f"{namespace}.{name}.{which}" for which in packet.overloads()]


def _has_arguments(op: str, arguments: list[tuple[str, str]], out: str = "") -> bool:
    """Return whether there is an overload of this name with these arguments (and ``out``)."""
    try:
        function = overload(op)
    except KeyError:
        return False
    actual = [(a.name, str(a.type)) for a in function._schema.arguments if a.name != out]
    return actual == arguments
