"""lazygt's own meta kernels say what torch's kernels do, errors included."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import lazygt
from lazygt.graph.shapes.meta_kernels import META_KERNELS
from tests.support.bits import same

OFFSETS = torch.tensor([2, 4, 8], dtype=torch.int32)
FACTORS = {
    "rows": torch.zeros(8, 8),
    "wide rows": torch.zeros(8, 16),
    "rows that are not aligned": torch.zeros(8, 5),
    "long columns": torch.zeros(16, 8),
    "columns": torch.zeros(16, 8).t(),
    "a stack": torch.zeros(3, 8, 8),
    "a stack of columns": torch.zeros(3, 16, 8).transpose(1, 2),
    "another stack": torch.zeros(2, 8, 8),
    "every second column": torch.zeros(8, 16)[:, ::2],
    "an expanded row": torch.zeros(1, 8).expand(8, 8),
    "a vector": torch.zeros(8),
}
REFUSED = {"a vector", "rows that are not aligned", "every second column", "an expanded row"}
KINDS = [torch.float32, torch.bfloat16]


def outcome(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        made = kernel(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return tuple(made.shape), made.stride(), made.dtype


def of(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same strides in another dtype."""
    whole = torch.zeros(t.untyped_storage().nbytes() // 4, dtype=dtype)
    return whole.as_strided(t.shape, t.stride())


@pytest.mark.parametrize("name", FACTORS)
def test_grouped_mm_meta_kernel_accepts_arguments_of_torchs_kernel(name: str) -> None:
    kernel = torch.ops.aten._grouped_mm.default
    own = META_KERNELS["aten._grouped_mm.default"]
    made = 0
    for b, kind, offsets, extra in product(
        FACTORS.values(),
        KINDS,
        (OFFSETS, None, OFFSETS.long(), OFFSETS[:2], OFFSETS[None]),
        ({}, {"out_dtype": torch.bfloat16}, {"bias": torch.zeros(8)}),
    ):
        args = (of(FACTORS[name], kind), of(b, kind), offsets)
        expected = outcome(kernel, *args, **extra)
        shown = tree_map(
            lambda t: (
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                if isinstance(t, torch.Tensor)
                else t
            ),
            (args, extra),
        )
        assert outcome(own, *shown[0], **shown[1]) == expected
        made += not isinstance(expected, str)
    assert bool(made) == (name not in REFUSED)


def test_factors_of_a_grouped_product_are_of_one_dtype() -> None:
    with lazygt.session(launcher="inline"):
        a, b = torch.zeros(8, 8), torch.zeros(3, 8, 8, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="to have the same dtype, but got: float != c10::BF"):
            torch.nn.functional.grouped_mm(a, b, offs=OFFSETS.to("lazygt"))


def test_a_mixture_of_experts_is_one_stretch_and_has_eager_torchs_bits() -> None:
    torch.manual_seed(0)
    weights, x, probabilities = torch.randn(4, 16, 8), torch.randn(12, 8), torch.randn(12, 4)

    def loss_and_gradient(w: torch.Tensor, x: torch.Tensor, chances: torch.Tensor) -> Any:
        w = w.detach().requires_grad_()
        chosen = chances.argmax(1)
        order = chosen.argsort(stable=True)
        asked = chosen.float() if w.device.type == "cpu" else chosen.int()
        counts = torch.histc(asked, bins=4, min=0, max=3)
        ends = counts.cumsum(0, dtype=torch.int32)
        out = torch.nn.functional.grouped_mm(x[order], w.transpose(1, 2), offs=ends)
        loss = out.square().sum()
        loss.backward()
        return loss, w.grad, counts

    expected = loss_and_gradient(weights, x, probabilities)
    with lazygt.session(launcher="inline", compile="off") as s:
        found = loss_and_gradient(*(t.to("lazygt") for t in (weights, x, probabilities)))
        assert s.stats()["flushes"] == {"backward": 1}
        assert found[2].dtype == torch.int32
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.cpu(), theirs.to(mine.dtype))


def test_a_copy_that_is_no_view_is_made() -> None:
    with lazygt.session(launcher="inline"):
        x = torch.arange(6.0).reshape(2, 3).t()
        assert torch.view_copy(x, [6]).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 5)])
def test_margin_losses_have_the_shapes_of_torchs_kernels(
    shape: tuple[int, ...], reduction: str
) -> None:
    labels = torch.arange(15)[: shape[0] if len(shape) > 1 else 1].reshape(shape[:-1]) % 5
    several = torch.tensor([3, 1, -1, 0, 0]).expand(shape)

    def losses(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.multi_margin_loss(x, labels.to(x.device), reduction=reduction),
            F.multilabel_margin_loss(x, several.to(x.device), reduction=reduction),
        ]

    same(losses, torch.randn(shape).requires_grad_())


def test_grid_sampler_of_cudnn() -> None:
    names = ["aten.cudnn_grid_sampler.default", "aten.cudnn_grid_sampler_backward.default"]
    forward, backward = map(META_KERNELS.__getitem__, names)
    x = torch.empty(2, 3, 5, 6, device="meta").to(memory_format=torch.channels_last)
    grid = torch.empty(2, 7, 4, 2, device="meta")
    sampled = forward(x, grid)
    assert sampled.shape == (2, 3, 7, 4)
    assert sampled.is_contiguous()
    assert [t.shape for t in backward(x, grid, sampled)] == [x.shape, grid.shape]


@pytest.mark.parametrize("kind", ["steps first", "samples first", "packed"])
def test_recurrent_layers_of_cudnn(kind: str) -> None:
    names = ["aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"]
    forward, backward = map(META_KERNELS.__getitem__, names)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.float16)

    shape = {"steps first": (5, 2, 3), "samples first": (2, 5, 3), "packed": (8, 3)}[kind]
    sizes = [2, 2, 2, 1, 1] if kind == "packed" else []
    x, weights = empty(*shape), [empty(12, 3), empty(12, 4), empty(12, 3), empty(12, 4)]
    settings = (3, 4, 0, 1, kind == "samples first", 0.0, True, True, sizes, None)
    hx = empty(2, 2, 4)
    out, hy, cy, reserve, packed = forward(x, weights, 2, None, hx, None, *settings)
    assert (out.shape, hy.shape, cy.shape) == ((*shape[:-1], 8), hx.shape, (0,))
    assert out.stride() == ((8, 16, 1) if kind == "samples first" else empty(*out.shape).stride())
    assert {t.dtype for t in (out, hy, cy, packed)} == {torch.float16}
    dx, dhx, dcx, grads = backward(x, weights, 2, packed, hx, None, out, out, None, None, *settings,
                                   reserve, [True, True, False, True])  # fmt: skip
    assert (dx.shape, dhx.shape, dcx) == (x.shape, hx.shape, None)
    assert dx.stride() == ((3, 6, 1) if kind == "samples first" else x.stride())
    assert [grad.shape for grad in grads] == [weight.shape for weight in weights]
