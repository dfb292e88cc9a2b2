"""Tensor parallelism of a transformer in Megatron's layout."""

from __future__ import annotations

from torch import nn

import lazygt


def megatron(model: nn.Module) -> nn.Module:
    column, row = lazygt.ColwiseParallel(), lazygt.RowwiseParallel()
    return lazygt.parallelize_module(model, None, {
        "tokens": lazygt.VocabParallel(), "head": column,
        "blocks.*.attn.qkv": column, "blocks.*.attn.out": row,
        "blocks.*.mlp.0": column, "blocks.*.mlp.2": row,
    })  # fmt: skip
