"""Fused scaled dot product attention: split by samples, by heads, or by queries.

Kernels divide by the number of blocks: a rank with none gives zeros."""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.label import Label
from lazygt.graph.node import Node
from lazygt.passes.rules.base import Call, Metas, P, R, Row, Rule, S, table
from lazygt.passes.rules.lower import zeros_when_empty

_SAMPLE, _HEAD, _QUERY = 0, 1, 2


def _labels(call: Call, names: str, label: Label, **others: Label) -> dict[str, Label]:
    """The same label for the arguments that are named, and the mask's, which is broadcast."""
    labels: dict[str, Label] = dict.fromkeys(names.split(), label)
    if isinstance(label, S) and call.has("attn_mask"):
        shape = call.shape("attn_mask")
        own = label.dim - (4 - len(shape))
        labels["attn_mask"] = S(own) if own >= 0 and shape[own] > 1 else R
    return {**labels, **others}


def _dims(call: Call) -> list[int]:
    """A causal mask counts from the first query. The CPU kernels refuse dropout."""
    query, key = call.shape("query"), call.shape("key")
    dims = [_SAMPLE] if query[0] > 1 else []
    dims += [_HEAD] if query[1] > 1 and query[1] == key[1] else []
    return dims + ([_QUERY] if query[2] > 1 and not call["is_causal"] else [])


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    found = []
    for dim in _dims(call):
        names = "query" if dim == _QUERY else "query key value"
        found.append(zeros_when_empty(call, call.row(S(dim), **_labels(call, names, S(dim)))))
    return found


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    found = []
    for dim in _dims(call):
        if dim == _QUERY:
            labels = _labels(call, "grad_out query out logsumexp", S(dim))
            found.append(zeros_when_empty(call, call.row((S(dim), P, P), **labels)))
        else:
            names = "grad_out query key value out logsumexp"
            found.append(zeros_when_empty(call, call.row(S(dim), **_labels(call, names, S(dim)))))
    return found


RULES: dict[str, Rule] = {
    **table("_scaled_dot_product_flash_attention_for_cpu.default", _forward),
    **table("_scaled_dot_product_flash_attention_for_cpu_backward.default", _backward),
}
