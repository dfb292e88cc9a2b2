"""Calls of attention in its variants, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal of other lengths": {"is_causal": True, "queries": 4},
    "one query": {"queries": 1},
    "one query, mask of keys": {"queries": 1, "mask": (1, 9)},
    "mask": {"mask": (9, 9)},
    "mask of samples": {"mask": (2, 1, 1, 9)},
    "mask of heads": {"mask": (4, 9, 9)},
    "head of 20": {"size": 20},
    "head of 512": {"size": 512},
    "grouped": {"heads": 2, "enable_gqa": True},
    "scale": {"scale": 0.3},
}


def operands(device: str, dtype: torch.dtype, case: dict[str, Any]) -> tuple[list[Any], Any]:
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(device)

    size, keys = case.get("size", 64), (2, case.get("heads", 4), 9, case.get("size", 64))
    tensors = [drawn(2, 4, case.get("queries", 9), size), drawn(*keys), drawn(*keys)]
    mask = case.get("mask")
    kept = None if mask is None else drawn(*mask) > -0.5
    return [t.requires_grad_() for t in tensors], kept


def attend(device: str, dtype: torch.dtype, case: dict[str, Any]) -> list[torch.Tensor]:
    (q, k, v), mask = operands(device, dtype, case)
    options = {name: case[name] for name in ("is_causal", "scale", "enable_gqa") if name in case}
    out = F.scaled_dot_product_attention(q, k, v, mask, **options)
    out.float().square().sum().backward()
    grads = [t.grad for t in (q, k, v) if t.grad is not None]
    return [t.detach().cpu() for t in (out, *grads)]
