"""Strides of kernels in the place of recorded ones, for as long as a plan runs.

The strides determine the order in which kernels sum: a restrided result gives later sums other last
bits than eager torch. A result keeps its kernel's strides if every later view of it, and of values
that share its memory, exists for those strides too and names no strides itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazygt.graph.alias import WRITE_BACK, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Ref, map_arg, params_in
from lazygt.graph.ops import OpFacts, facts, overload, undispatched
from lazygt.runtime import kernels

#: (node, returned) -> the tensors that a node returns anew.
Fresh = Callable[[Node, Any], list[Any]]


def lies_as(value: torch.Tensor, meta: TensorMeta) -> bool:
    """Return whether each element is at the offset that ``meta`` gives it, in any strides."""
    return value.numel() <= 1 or meta.lies_as(value.stride())


def may_stay(graph: Graph, number: int, slot: int, value: torch.Tensor, fresh: Fresh) -> bool:
    """Return whether a result of node ``number`` may keep its strides in the rest of the plan."""
    sharing = {slot: TensorMeta.of(value).empty("meta")}
    with undispatched(), torch.no_grad():
        try:
            return all(
                _follows(graph, node, results, sharing, fresh)
                for later, (node, results) in enumerate(graph.numbered())
                if later > number and not sharing.keys().isdisjoint(node.refs())
            )
        except Exception:  # noqa: BLE001 - torch has no such view of it
            return False


def _follows(
    graph: Graph, node: Node, results: range, sharing: dict[int, torch.Tensor], fresh: Fresh
) -> bool:
    """Return whether a node takes values with their strides; add its views of them.

    Args:
        sharing: number -> meta tensor, of the values that share the memory in question.

    Raises:
        Exception: torch's own, if a view does not exist.
    """
    if node.op == WRITE_BACK:
        base, chain = node.args[0].index, node.args[2]
        if base not in sharing:
            return True  # only its elements are copied
        sharing[results[0]] = sharing[base]
        kernels.viewed(sharing[base], chain)
        return not params_in(chain) and not any(_strided(facts(overload(s[0]))) for s in chain)
    f = op_facts(node)
    if f is None or f.foreign:
        return False  # collectives and compiled code take the recorded strides
    for target, version in zip(node.writes, results[len(node.fresh) :], strict=True):
        if target in sharing:
            sharing[version] = sharing[target]
    if f.aliases:
        views = fresh(node, _viewed(graph, node, f, sharing))
        sharing.update(zip(results, views, strict=False))
    return not (f.aliases and _strided(f))


def _strided(f: OpFacts) -> bool:
    """Return whether a view op takes strides."""
    return any(argument.name == "stride" for argument in f.func._schema.arguments)


def _viewed(graph: Graph, node: Node, f: OpFacts, sharing: dict[int, torch.Tensor]) -> Any:
    """Return a view op's results on meta tensors."""

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            meta = graph.values[arg.index]
            assert meta is not None
            return sharing.get(arg.index, meta.empty("meta"))
        return torch.device("meta") if arg is DEVICE else arg

    args = [map_arg(arg, leaf) for arg in node.args]
    return f.func(*args, **{name: map_arg(arg, leaf) for name, arg in node.kwargs})
