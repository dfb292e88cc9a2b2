"""Results and gradients on lazygt against those of eager torch on a CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lazygt

Tensors = list[torch.Tensor]


def results(f: Callable[..., Any], tensors: Tensors, device: str) -> Tensors:
    """Results and gradients; the cotangents differ in every element and in sign."""
    leaves = [t.detach().clone().to(device).requires_grad_(t.requires_grad) for t in tensors]
    returned = f(*leaves)
    made = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    wanted = [t for t in leaves if t.requires_grad]
    if wanted:
        ends = [t for t in made if t.requires_grad]
        slopes = [torch.linspace(-1, 1.3, t.numel()).reshape(t.shape).to(device) for t in ends]
        made += torch.autograd.grad(ends, wanted, slopes)
    return [t.detach().cpu() for t in made]


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """The sign of zero counts; one NaN is as good as another."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    nan = a.isnan() & b.isnan()
    equal = (a == b) & (torch.signbit(a) == torch.signbit(b))
    assert bool((equal | nan).all()), f"{a} instead of {b}"


def same(f: Callable[..., Any], *tensors: torch.Tensor) -> dict[str, Any]:
    """Compare bits over three runs, the later ones from generated code; the session's stats."""
    expected = results(f, list(tensors), "cpu")
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(default_device=False)
    ) as session:
        for _ in range(3):
            for a, b in zip(results(f, list(tensors), "lazygt"), expected, strict=True):
                assert_same_bits(a, b)
        return dict(session.stats())


def drawn(*shape: int, grad: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).requires_grad_(grad)
