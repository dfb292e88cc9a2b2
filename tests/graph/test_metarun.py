"""Metas that torch's meta kernels get wrong are those of its CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from torch import nn

import lazygt

NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "dims", [dims for rank in NORMS for dims in permutations(range(rank))], ids=str
)
def test_batch_norms_of_permuted_operands_have_the_kernels_strides(
    dims: Sequence[int], training: bool
) -> None:
    whole = torch.randn([2, 3, 4, 5, 6][: len(dims)])

    def strides(x: torch.Tensor) -> list[tuple[int, ...]]:
        norm = NORMS[len(dims)](x.shape[1], device=x.device).train(training)
        x = x.detach().requires_grad_()
        made = norm(x)
        (grad,) = torch.autograd.grad(made.square().sum(), x)
        return [made.stride(), grad.stride()]

    with lazygt.session(executor="inline"):
        assert strides(whole.to("lazygt").permute(*dims)) == strides(whole.permute(*dims))
