"""Strides of results and gradients, over operands that are transposed, channels-last or mixed.

Operators of torch's database run on such operands on device lazygt and on the CPU. Strides
decide which views torch allows, so a handle has to show those that eager torch gives.

``LAZYGT_ALL_SAMPLES=1`` takes every operator, which takes minutes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import lazygt
from tests.conformance import harness

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # the samples are torch's, and so are the warnings about them
    pytest.mark.filterwarnings("ignore"),
]

ALL = os.environ.get("LAZYGT_ALL_SAMPLES") == "1"
#: Samples of each operator.
LIMIT = 12 if ALL else 3

#: Operators whose meta kernels are known to give other strides (``lazygt.graph.shapes.layouts``).
CORRECTED = """__rpow__ bfloat16 copysign div.floor_rounding floor_divide heaviside ldexp logaddexp
    logical_and native_dropout_backward nn.functional.batch_norm
    nn.functional.binary_cross_entropy nn.functional.channel_shuffle nn.functional.conv1d
    nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose2d
    nn.functional.cross_entropy nn.functional.group_norm nn.functional.huber_loss
    nn.functional.layer_norm nn.functional.logsigmoid nn.functional.max_unpool2d
    nn.functional.mse_loss nn.functional.pad.reflect nn.functional.pad.replicate
    nn.functional.pixel_unshuffle nn.functional.smooth_l1_loss normal
    resize_as_ special.xlog1py xlogy"""

#: Operators for which torch takes another formula for tensor subclasses, or for other devices than
#: the CPU, in C++: its result is the same, and laid out otherwise.
OTHER_FORMULAS = """linalg.householder_product masked_select max.reduction_no_dim median
    min.reduction_no_dim nanmedian nn.functional.one_hot ormqr prod fft.hfft2 fft.irfft2"""

#: With one channel, row-major and channels-last are told apart by a stride that finds no element.
ONE_CHANNEL = "nn.functional.pixel_shuffle"

Tensor = torch.Tensor


def turned(t: Tensor, number: int) -> list[int]:
    """The dims in reverse."""
    return list(range(t.dim()))[::-1]


def channels_last(t: Tensor, number: int) -> list[int]:
    """The second dim laid out last."""
    return [0, *range(2, t.dim()), 1] if t.dim() > 2 else list(range(t.dim()))


def mixed(t: Tensor, number: int) -> list[int]:
    """Each operand in another order."""
    order = list(range(t.dim()))
    if number % 2 == 0:
        return order[::-1]
    return [*order[:-2], *order[:-3:-1]]


def laid(value: Any, layout: Callable[[Tensor, int], list[int]], device: str) -> Any:
    """The same arguments on a device, each tensor as a view of one in another order."""
    known: dict[int, Tensor] = {}

    def leaf(t: Any) -> Any:
        if isinstance(t, torch.device):
            return torch.device(device)
        if not isinstance(t, Tensor):
            return t
        if id(t) not in known:
            order = layout(t, len(known)) if t.layout == torch.strided else []
            back = [order.index(dim) for dim in range(len(order))]
            whole = t.detach().permute(order).contiguous().to(device) if order else t.to(device)
            view = whole.permute(back) if order else whole.clone()
            known[id(t)] = view.detach().requires_grad_(t.requires_grad)
        return known[id(t)]

    return tree_map(leaf, value)


def gradients(sample: Any, result: Any, leaves: list[Tensor]) -> list[Any]:
    """Gradients of the sum of the squares of all that the op returned."""
    parts = [
        t
        for t in tree_leaves(sample.output_process_fn_grad(result))
        if isinstance(t, Tensor) and t.requires_grad
    ]
    if not parts or not leaves:
        return []
    return list(
        torch.autograd.grad(sum((t * t).abs().sum() for t in parts), leaves, allow_unused=True)
    )


def strides(value: Any) -> list[Any]:
    """Shape of each tensor, with the strides by which its elements are found."""
    found: list[Any] = []
    for t in tree_leaves(value):
        if isinstance(t, Tensor):
            tell = t.numel() > 1
            pairs = zip(t.shape, t.stride(), strict=True)
            found.append([(n, step if tell and n > 1 else None) for n, step in pairs])
    return found


def outcome(op: Any, sample: Any, layout: Any, device: str) -> list[Any]:
    result, leaves = harness.call(op, sample, lambda value: laid(value, layout, device))
    return strides([result, gradients(sample, result, leaves)])


def differing(op: Any) -> Iterator[str]:
    """The samples and layouts for which lazygt's strides are not torch's."""
    grad = bool(op.supports_autograd) and harness.dtype_of(op).is_floating_point  # type: ignore[union-attr]
    for layout in (turned, channels_last, mixed):
        for number, sample in enumerate(itertools.islice(harness.samples(op, grad, None), LIMIT)):
            try:
                expected = outcome(op, sample, layout, "cpu")
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue  # eager torch refuses it
            try:
                found = outcome(op, sample, layout, "lazygt")
            except (RuntimeError, NotImplementedError, TypeError):
                continue  # the tables of refusals are another test's
            if found != expected:
                yield f"{harness.name_of(op)} {layout.__name__} {number}: {found} for {expected}"


def test_strides_are_those_of_torchs_kernels() -> None:
    wrong: list[str] = []
    compared = 0
    corrected, skipped = set(CORRECTED.split()), {ONE_CHANNEL, *OTHER_FORMULAS.split()}
    for op in harness.operators():
        name = harness.name_of(op)
        if name in skipped or not (ALL or name in corrected):
            continue
        with lazygt.session(launcher="dry"):
            wrong += differing(op)
            compared += 1
    assert not wrong, "\n".join(wrong)
    assert compared >= len(corrected)
