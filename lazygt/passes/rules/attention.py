"""Fused scaled dot product attention: split by samples or by heads; on CPUs also by queries.

Kernels divide by the number of blocks: a rank with none gives zeros. Only without dropout, which
is drawn for the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.label import Label, Partial, Replicated, Sharded
from lazygt.graph.node import Node
from lazygt.passes.rules.base import Call, Metas, P, R, Row, Rule, S, table, zeros_when_empty

_SAMPLE, _HEAD, _QUERY = 0, 1, 2
#: Have these dims, where an op has such an argument or result; the rest is one number or nothing.
_OPERANDS = ("query", "key", "value", "grad_out", "grad_out_", "out", "logsumexp")
_BIASES = ("attn_mask", "attn_bias")


def _dims(call: Call) -> list[int]:
    """Groups of queries that share a key stay together where each rank has as many keys."""
    query, key = call.shape("query"), call.shape("key")
    if call["dropout_p"] != 0:
        return []
    alike = query[1] == key[1] or (query[1] % key[1] == 0 and key[1] % call.parts == 0)
    return [_SAMPLE] * (query[0] > 1) + [_HEAD] * (query[1] > 1 and alike)


def _labels(call: Call, dim: int) -> dict[str, Label]:
    labels: dict[str, Label] = {name: S(dim) for name in _OPERANDS if call.has(name)}
    labels.update({name: _bias(call, name, dim) for name in _BIASES if call.has(name)})
    return labels


def _bias(call: Call, name: str, dim: int) -> Replicated | Sharded:
    """What is added to scores is broadcast to their four dims; it may be of no elements."""
    shape = call.shape(name)
    own = dim - (4 - len(shape))
    return S(own) if own >= 0 and shape[own] > 1 else R


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """The output and the sums of each query; what follows is one number or nothing."""
    call = Call(node, metas, parts)
    found = [
        call.row([S(dim), S(dim), *[R] * (len(node.results) - 2)], **_labels(call, dim))
        for dim in _dims(call)
    ]
    return [zeros_when_empty(call, row) for row in found]


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """Gradients of query, key, value, and of the bias, which sums over what it is broadcast to."""
    call = Call(node, metas, parts)
    found = []
    for dim in _dims(call):
        outputs: list[Label] = [S(dim)] * 3
        if len(node.results) > 3:
            outputs.append(_bias_gradient(call, dim))
        found.append(zeros_when_empty(call, call.row(outputs, **_labels(call, dim))))
    return found


def _bias_gradient(call: Call, dim: int) -> Sharded | Partial:
    label = _bias(call, "attn_bias", dim) if call.has("attn_bias") else R
    return label if isinstance(label, Sharded) else P


def _queries(call: Call) -> bool:
    """Whether queries can be split: a causal mask counts from the first one."""
    return call.shape("query")[_QUERY] > 1 and not call["is_causal"] and call["dropout_p"] == 0


def _cpu_forward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    found = [*_forward(node, metas, parts)]
    if _queries(call):
        labels = {"query": S(_QUERY)} | _mask_of_queries(call)
        found.append(zeros_when_empty(call, call.row(S(_QUERY), **labels)))
    return found


def _cpu_backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    found = [*_backward(node, metas, parts)]
    if _queries(call):
        split = dict.fromkeys(("grad_out", "query", "out", "logsumexp"), S(_QUERY))
        row = call.row((S(_QUERY), P, P), **split | _mask_of_queries(call))
        found.append(zeros_when_empty(call, row))
    return found


def _mask_of_queries(call: Call) -> dict[str, Label]:
    return {"attn_mask": _bias(call, "attn_mask", _QUERY)} if call.has("attn_mask") else {}


def _both(name: str) -> dict[str, Rule]:
    return {
        **table(f"_scaled_dot_product_{name}.default", _forward),
        **table(f"_scaled_dot_product_{name}_backward.default", _backward),
    }


RULES: dict[str, Rule] = {
    **_both("flash_attention"),
    **_both("efficient_attention"),
    **_both("cudnn_attention"),
    **_both("fused_attention_overrideable"),
    **table("_scaled_dot_product_flash_attention_for_cpu.default", _cpu_forward),
    **table("_scaled_dot_product_flash_attention_for_cpu_backward.default", _cpu_backward),
}
