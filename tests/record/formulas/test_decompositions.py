"""Composite ops choose on lazygt what eager torch chooses on the workers' device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lazygt
from lazygt.record.formulas.decompositions import CPU_KERNELS
from tests.conformance import streams
from tests.support.bits import drawn, same

pytestmark = pytest.mark.timeout(120)


def test_every_composite_with_a_kernel_on_cpus_is_recorded_as_it_is() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has(name, "CPU") and has(name, "CompositeImplicitAutograd")
    }
    assert found == set(CPU_KERNELS)


@pytest.mark.parametrize("f", [F.silu, F.mish])
def test_gradients_of_activations_are_one_op(f: Callable[..., Any]) -> None:
    stats = same(f, drawn(33, 47, grad=True))
    assert stats["ops_recorded"] == 3 * 2


def test_second_gradients_of_silu() -> None:
    def second(x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(F.silu(x).sum(), x, create_graph=True)
        return g.square()

    same(second, drawn(33, 47, grad=True))


@pytest.mark.parametrize("grad", [False, True])
def test_channel_shuffle_is_one_op(grad: bool) -> None:
    stats = same(lambda x: F.channel_shuffle(x, 3), drawn(2, 6, 4, 4, grad=grad))
    assert stats["ops_recorded"] == 3 * (1 + grad)


SPECTRA: dict[str, Callable[..., Any]] = {
    "eigvalsh": torch.linalg.eigvalsh,
    "eigvalsh upper": lambda a: torch.linalg.eigvalsh(a, UPLO="U"),
    "svdvals": torch.linalg.svdvals,
    "cond": torch.linalg.cond,
    "spectral norm": lambda a: torch.linalg.matrix_norm(a, 2),
    "nuclear norm": lambda a: torch.linalg.norm(a, "nuc"),
    "rank": torch.linalg.matrix_rank,
    "pinv": lambda a: torch.linalg.pinv(a, hermitian=True),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", SPECTRA)
def test_spectra(name: str, grad: bool) -> None:
    a = drawn(40, 40)
    same(SPECTRA[name], (a @ a.T).requires_grad_(grad and name != "rank"))


def test_eigenvalues() -> None:
    same(torch.linalg.eigvals, drawn(40, 40))
    same(lambda a: torch.linalg.eigvals(a).abs(), drawn(6, 6, grad=True))


@pytest.mark.parametrize("sections", [torch.tensor([3, 7]), torch.tensor(4)])
def test_sections_may_be_a_tensor(sections: torch.Tensor) -> None:
    """torch takes them on a CPU only."""
    same(lambda x: torch.tensor_split(x, sections.to(x.device)), drawn(10, 3, grad=True))
    with (
        lazygt.session(launcher="inline"),
        pytest.raises(RuntimeError, match=r"one-dimensional tensor of torch.int64, but got 1 dim"),
    ):
        torch.tensor_split(torch.ones(4), torch.tensor([1.0]))


# -- attention ---------------------------------------------------------------------------------

SHAPES = {
    "plain": ((2, 4, 5, 8),) * 3,
    "grouped": ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
    "one head": ((2, 4, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8)),
    "groups of two sizes": ((2, 4, 5, 8), (2, 2, 5, 8), (2, 4, 5, 8)),
    "keys": ((2, 4, 1, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "values": ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 6)),
    "batch of 1": ((2, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8)),
    "3 dims": ((4, 5, 8),) * 3,
    "no query": ((2, 4, 0, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
}
MASKS = ("none", "causal", "bool", "additive", "a batch", "padding", "with gradient")


def attention(
    shapes: Any, mask: str, gqa: bool, dropout: float, layout: str, dtype: torch.dtype, device: str
) -> Callable[[], Any]:
    """A program: attention and its gradients."""
    torch.manual_seed(0)
    operands = []
    for shape in shapes:
        t = torch.randn(shape).to(dtype)
        if layout != "rows":
            a, b = (-3, -2) if layout == "heads inside" else (-2, -1)
            t = t.transpose(a, b).contiguous().transpose(a, b)
        operands.append(t.to(device).requires_grad_())
    query, keys = shapes[0][-2], shapes[1][-2]
    made = {
        "bool": torch.rand(query, keys) > 0.3,
        "additive": torch.randn(query, keys).to(dtype),
        "a batch": torch.randn(*shapes[0][:-1], keys).to(dtype),
        "padding": torch.rand((*shapes[0][:-3], 1, 1, keys)) > 0.3,
        "with gradient": torch.randn(query, keys).to(dtype).requires_grad_(),
    }.get(mask)
    if made is not None:
        made = made.detach().to(device).requires_grad_(made.requires_grad)

    def program() -> Any:
        out = F.scaled_dot_product_attention(
            *operands, attn_mask=made, dropout_p=dropout, is_causal=mask == "causal",
            enable_gqa=gqa,
        )  # fmt: skip
        return torch.autograd.grad(out.square().sum(), operands)

    return program


Run = Callable[[Callable[[], Any]], tuple[Any, streams.Stream]]


def stream_of(run: Run, program: Any) -> streams.Stream:
    try:
        _, stream = run(program)
        return stream
    except (RuntimeError, IndexError) as error:
        return [f"{type(error).__name__}: {error}"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_attention_takes_the_kernel_that_cpus_take(shapes: str, mask: str) -> None:
    """The very ops of eager torch, in order, with their arguments."""
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(default_device=False)
    ):
        floats = (torch.float32,)
        choices = itertools.chain(
            itertools.product((False, True), (0.0, 0.5), ("rows", "heads inside"), floats),
            [(True, 0.0, "columns", torch.float32), (True, 0.0, "rows", torch.bfloat16)],
        )
        for gqa, dropout, layout, dtype in choices:
            case = (SHAPES[shapes], mask, gqa, dropout, layout, dtype)
            theirs = stream_of(streams.eager, attention(*case, "cpu"))
            ours = stream_of(streams.recorded, attention(*case, "lazygt"))
            assert not streams.differences(ours, theirs), case


def test_attention_obeys_the_switches_of_kernels() -> None:
    case = (SHAPES["plain"], "none", False, 0.0, "rows", torch.float32)
    backends = torch.nn.attention.SDPBackend
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(default_device=False)
    ):
        with torch.nn.attention.sdpa_kernel(backends.MATH):
            _, theirs = streams.eager(attention(*case, "cpu"))
            _, ours = streams.recorded(attention(*case, "lazygt"))
            assert not streams.differences(ours, theirs)
            assert any("_safe_softmax" in line for line in theirs)
        with (
            torch.nn.attention.sdpa_kernel(backends.EFFICIENT_ATTENTION),
            pytest.raises(RuntimeError, match="No available kernel"),
        ):
            attention(*case, "lazygt")()


def test_grouped_attention_has_eager_bits() -> None:
    def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    keys = [drawn(2, 2, 19, 16, grad=True) for _ in range(2)]
    stats = same(grouped, drawn(2, 8, 19, 16, grad=True), *keys)
    assert stats["ops_recorded"] < 3 * 6


def on_gpus(call: Callable[[], torch.Tensor], word: str) -> list[str]:
    """The ops of a call and its backward on GPUs with a word in their names."""
    with lazygt.session(launcher="dry", device="cuda") as s:
        call().sum().backward()
        s.flush()
        names = [node.op for plan in s.plans() for node in plan.graph.nodes]
        return [
            name.removeprefix("aten.").removesuffix(".default") for name in names if word in name
        ]


def rms_norm(dtype: torch.dtype, weight: torch.dtype, *shape: int) -> list[str]:
    def call() -> torch.Tensor:
        x = torch.ones(shape, dtype=dtype)
        if len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        w = torch.ones(shape[-1:], dtype=weight, requires_grad=True)
        return F.rms_norm(x.requires_grad_(), shape[-1:], w)

    return on_gpus(call, "rms")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_is_one_op_on_gpus_where_torch_has_a_kernel() -> None:
    fused = ["_fused_rms_norm", "_fused_rms_norm_backward"]
    assert rms_norm(torch.float32, torch.float32, 4, 6) == fused
    assert rms_norm(torch.bfloat16, torch.bfloat16, 4, 6) == fused
    assert rms_norm(torch.bfloat16, torch.float32, 4, 6) == []
    assert rms_norm(torch.float32, torch.float32, 2, 3, 4, 5) == []


def test_rms_norm_on_cpus_is_the_same_beside_sessions_on_gpus() -> None:
    rms_norm(torch.float32, torch.float32, 4, 6)
    same(lambda x, w: F.rms_norm(x, (47,), w), drawn(33, 47, grad=True), drawn(47, grad=True))
    with (
        lazygt.session(launcher="inline"),
        pytest.raises(RuntimeError, match=r"Given normalized_shape=\[4\], expected input"),
    ):
        F.rms_norm(torch.ones(3, 5), (4,))


def grid_sample(dtype: torch.dtype, channels: int, **options: Any) -> list[str]:
    def call() -> torch.Tensor:
        x = torch.ones(2, channels, 5, 5, dtype=dtype, requires_grad=True)
        return F.grid_sample(x, torch.ones(2, 3, 4, 2, dtype=dtype), **options)

    return on_gpus(call, "grid")


def test_grid_sampler_is_cudnns_on_gpus_where_torch_takes_it() -> None:
    cudnn = ["cudnn_grid_sampler", "cudnn_grid_sampler_backward"]
    own = ["grid_sampler_2d", "grid_sampler_2d_backward"]
    assert grid_sample(torch.float32, 4, align_corners=True) == cudnn
    assert grid_sample(torch.float32, 4, align_corners=False) == own
    assert grid_sample(torch.float32, 4, align_corners=True, mode="nearest") == own
    assert grid_sample(torch.float32, 4, align_corners=True, padding_mode="border") == own
    assert grid_sample(torch.bfloat16, 4, align_corners=True) == own
    assert grid_sample(torch.float32, 1025, align_corners=True) == own
    with torch.backends.cudnn.flags(enabled=False):
        assert grid_sample(torch.float32, 4, align_corners=True) == own


def test_grid_sampler_on_cpus_is_the_same_beside_sessions_on_gpus() -> None:
    grid_sample(torch.float32, 4, align_corners=True)
    x, grid = drawn(2, 3, 5, 5, grad=True), drawn(2, 3, 4, 2, grad=True)
    same(lambda x, grid: F.grid_sample(x, grid, align_corners=True), x, grid)
