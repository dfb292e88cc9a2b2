"""Metas that torch's meta kernels get wrong are those of its CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, permutations, product

import pytest
import torch
from torch import nn

import lazygt

NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.sampled(4)
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

    with lazygt.session(launcher="inline"):
        assert strides(whole.to("lazygt").permute(*dims)) == strides(whole.permute(*dims))


@pytest.mark.parametrize("dims", [(0, 3, 1, 2), (0, 2, 3, 1), (0, 1, 3, 2)], ids=str)
def test_group_norms_of_permuted_operands_have_the_kernels_strides_and_bits(
    dims: Sequence[int],
) -> None:
    whole = torch.randn(2, 4, 4, 4)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.permute(*dims).detach().requires_grad_()
        made = nn.functional.group_norm(x, 2)
        (grad,) = torch.autograd.grad(made.square().sum(), x)
        return [made, grad]

    expected = run(whole)
    with lazygt.session(launcher="inline", compile="off"):
        for mine, theirs in zip(run(whole.to("lazygt")), expected, strict=True):
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine.cpu(), theirs)


def test_channels_last_convolution_result_is_viewable_as_in_eager_torch() -> None:
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3)

    def run(image: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        made = nn.functional.conv2d(image, weight)
        return [made, torch.empty_like(made), made.permute(0, 2, 3, 1).view(2, 36, 4)]

    expected = [t.stride() for t in run(image, weight)]
    with lazygt.session(launcher="inline"):
        assert [t.stride() for t in run(image.to("lazygt"), weight.to("lazygt"))] == expected


def test_half_precision_products_with_expanded_operands_are_not_row_major() -> None:
    with lazygt.session(launcher="inline"):
        one, x = torch.ones((), dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16).t()
        made = one.expand(2, 3) * x
        assert made.stride() == (1, 2)
        assert made.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("op", ["mul", "floor_divide", "maximum", "copysign", "logaddexp"])
def test_half_precision_results_of_expanded_operands_have_the_kernels_strides(op: str) -> None:
    whole = torch.ones(2, 3, 4, dtype=torch.bfloat16)

    def strides(device: str) -> tuple[int, ...]:
        x = whole.to(device)
        one, other = x[:1].expand(2, 3, 4), x.reshape(4, 3, 2).permute(2, 1, 0)
        made: torch.Tensor = getattr(torch, op)(one, other)
        return made.stride()

    with lazygt.session(launcher="dry"):
        assert strides("lazygt") == strides("cpu")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_norms_and_convolutions_train_for_gpus_from_a_client_without_one(
    layout: torch.memory_format,
) -> None:
    with lazygt.session(launcher="dry", device="cuda") as s:
        x = torch.randn(4, 8, 6, 6).to(memory_format=layout).requires_grad_()
        made = nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))(x)
        assert made.is_contiguous(memory_format=layout)
        made.sum().backward()
        assert x.grad is not None
        assert x.grad.is_contiguous(memory_format=layout)
        assert s.stats()["flushes"] == {"backward": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_on_gpus_needs_no_sync_point(dtype: torch.dtype) -> None:
    with lazygt.session(launcher="dry", device="cuda") as s:
        q, k, v = (torch.randn(2, 4, 16, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        x = q
        for _ in range(3):
            x = nn.functional.scaled_dot_product_attention(x, k, v, is_causal=True)
        x.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
        assert s.stats()["flushes"] == {"backward": 1}


def test_copies_of_expanded_values_are_expanded() -> None:
    """An output that shares memory with what outlives the run is copied out."""
    with lazygt.session(launcher="inline"):
        x = torch.arange(3.0).expand(4, 3)
        chunks = torch.unsafe_chunk(x, 2)
        assert [c.tolist() for c in chunks] == [[[0.0, 1.0, 2.0]] * 2] * 2


#: Pointwise ops of an operand that is channels-last but for a stride that finds no element. torch
#: keeps or mends that stride op by op, and later kernels choose their formula by it.
POINTWISE_OF_ONE_SAMPLE = {
    "add": lambda x, y: x + 1,
    "sub": lambda x, y: 1 - x,
    "mul": lambda x, y: x * 2,
    "div": lambda x, y: x / 2,
    "gt": lambda x, y: x > 0,
    "pow": lambda x, y: x**2,
    "relu": lambda x, y: x.relu(),
    "clamp": lambda x, y: x.clamp(0),
    "clamp to a tensor": lambda x, y: x.clamp(min=y),
    "both": lambda x, y: x + y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where a number": lambda x, y: torch.where(y > 0, x, 0.0),
    "hardtanh": lambda x, y: torch.nn.functional.hardtanh(x),
    "nan_to_num": lambda x, y: x.nan_to_num(),
    "remainder": lambda x, y: x % 2,
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "copysign": lambda x, y: torch.copysign(x, 1.0),
    "lerp": lambda x, y: x.lerp(y, 0.5),
}


@pytest.mark.parametrize("name", POINTWISE_OF_ONE_SAMPLE)
@pytest.mark.parametrize("first", [8, 128])
def test_strides_that_find_no_element_are_those_of_the_kernel(name: str, first: int) -> None:
    function = POINTWISE_OF_ONE_SAMPLE[name]

    def strides(device: str) -> tuple[int, ...]:
        x = torch.ones(128, device=device).as_strided((1, 8, 4, 4), (first, 1, 32, 8))
        return function(x, torch.ones(1, 8, 4, 4, device=device)).stride()

    with lazygt.session(launcher="dry"):
        assert strides("lazygt") == strides("cpu")


#: Backwards that torch's loop over elements computes: call, operands.
ITERATED_BACKWARDS = {
    "elu": (lambda f, g, x: f(g, 1.0, 1.0, 1.0, False, x), 2),
    "hardsigmoid": (lambda f, *t: f(*t), 2),
    "hardswish": (lambda f, *t: f(*t), 2),
    "hardtanh": (lambda f, *t: f(*t, -1.0, 1.0), 2),
    "leaky_relu": (lambda f, *t: f(*t, 0.1, False), 2),
    "log_sigmoid": (lambda f, *t: f(*t), 3),
    "logit": (lambda f, *t: f(*t), 2),
    "rrelu_with_noise": (lambda f, *t: f(*t, 0.1, 0.3, True, False), 3),
    "soft_margin_loss": (lambda f, *t: f(*t, 0), 3),
    "softplus": (lambda f, *t: f(*t, 1.0, 20.0), 2),
    "threshold": (lambda f, *t: f(*t, 0.0), 2),
}


def _laid_out(whole: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of shape (2, 3, 4, 5), each with other strides."""
    return [
        whole.reshape(2, 3, 4, 5),
        whole.reshape(2, 4, 5, 3).permute(0, 3, 1, 2),
        whole.reshape(5, 4, 3, 2).permute(3, 2, 1, 0),
        whole.repeat(2).reshape(2, 3, 4, 10)[..., 1::2],
        whole[:12].reshape(1, 3, 4, 1).expand(2, 3, 4, 5),
    ]


@pytest.mark.parametrize("name", ITERATED_BACKWARDS)
def test_backwards_of_mixed_layouts_have_the_kernels_strides_and_bits(name: str) -> None:
    call, operands = ITERATED_BACKWARDS[name]
    function = getattr(torch.ops.aten, f"{name}_backward")
    wholes = [torch.linspace(0.1, 0.9, 120).roll(7 * n) for n in range(operands)]

    def run(device: str) -> list[torch.Tensor]:
        laid = [_laid_out(whole.to(device)) for whole in wholes]
        return [call(function, *tensors) for tensors in islice(product(*laid), 0, None, operands)]

    expected = run("cpu")
    with lazygt.session(launcher="inline", compile="off"):
        for mine, theirs in zip(run("lazygt"), expected, strict=True):
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("op", ["add_", "sub_", "mul_"])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.float32, torch.complex64], ids=str
)
def test_writes_that_lose_the_kind_of_number_are_refused_where_they_stand(
    op: str, dtype: torch.dtype
) -> None:
    others = [2, 0.5, 1j, *[torch.ones(shape, dtype=of)
                            for of in (torch.int64, torch.float64, torch.complex64)
                            for shape in ((), (3,))]]  # fmt: skip

    def refused(device: str) -> list[bool]:
        answers = []
        for other in others:
            target = torch.ones(3, dtype=dtype, device=device)
            operand = other.to(device) if isinstance(other, torch.Tensor) else other
            try:
                getattr(target, op)(operand)
            except RuntimeError:
                answers.append(True)
            else:
                answers.append(False)
        return answers

    expected = refused("cpu")
    with lazygt.session(launcher="inline"):
        assert refused("lazygt") == expected


@pytest.mark.parametrize(("device", "elements"), [("cpu", 120), ("cuda", 0)])
def test_log_sigmoid_leaves_its_backward_nothing_on_gpus(device: str, elements: int) -> None:
    with lazygt.session(launcher="dry", device=device):
        for x in _laid_out(torch.linspace(-1, 1, 120)):
            value, buffer = torch.ops.aten.log_sigmoid_forward(x)
            assert buffer.numel() == elements
            backward = torch.ops.aten.log_sigmoid_backward(x, x, buffer)
            if device == "cuda":
                assert value.stride() == backward.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_weights_are_of_single_precision_on_gpus(dtype: torch.dtype) -> None:
    with lazygt.session(launcher="dry", device="cuda"):
        v, g = torch.ones(4, 6, dtype=dtype), torch.ones(4, 1, dtype=dtype)
        w, norms = torch.ops.aten._weight_norm_interface(v, g, 0)
        assert (w.dtype, norms.dtype) == (dtype, torch.float32)
