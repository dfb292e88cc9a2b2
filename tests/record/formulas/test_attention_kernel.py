"""Attention for GPUs is the kernel, with the operands, that eager torch has there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazygt
from lazygt.graph.node import Graph, Node, Ref
from lazygt.host import gpus
from lazygt.host.gpus import Gpu, HostGpu
from lazygt.record.formulas import attention_kernel

pytestmark = pytest.mark.timeout(120)

OLD, T4, A100 = Gpu((6, 1)), Gpu((7, 5)), Gpu((8, 0), 91900)
AD102, H100, B200 = Gpu((8, 9), 91900), Gpu((9, 0), 91900), Gpu((10, 0), 91900)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gpu], None]:
    """Sets the GPU of the workers; that of torch's rules for sm80 at first."""

    def of(chosen: Gpu) -> None:
        monkeypatch.setattr(attention_kernel, "workers_gpu", lambda: chosen)

    of(Gpu())
    return of


def attend(
    dtype: torch.dtype = F32,
    heads: tuple[int, int] = (4, 4),
    lengths: tuple[int, int] = (16, 16),
    sizes: tuple[int, int] = (64, 64),
    mask: tuple[int, ...] | None = None,
    additive: bool = False,
    grad: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The mean of attention, whose gradient is asked for with ``grad``."""
    (few, many), (queries, keys) = heads[::-1], lengths
    q = torch.ones(2, many, queries, sizes[0], dtype=dtype, requires_grad=grad)
    k = torch.ones(2, few, keys, sizes[0], dtype=dtype, requires_grad=grad)
    v = torch.ones(2, few, keys, sizes[1], dtype=dtype, requires_grad=grad)
    kept = None if mask is None else torch.ones(mask, dtype=dtype if additive else torch.bool)
    result = F.scaled_dot_product_attention(q, k, v, kept, **options)
    if grad:
        result.mean().backward()
    return result


def recorded(call: Callable[[], Any]) -> Graph:
    """The one plan of a dry session on GPUs."""
    with lazygt.session(launcher="dry", device="cuda") as s:
        kept = call()
        s.flush()
        [plan] = s.plans()
        del kept
    return plan.graph


def attending(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if "_scaled_dot_product_" in node.op]


def kernel(call: Callable[[], Any]) -> str:
    """The name of the kernel; of several ops: math."""
    nodes = attending(recorded(call))
    if not nodes:
        return "math"
    return nodes[0].op.removeprefix("aten._scaled_dot_product_").removesuffix("_attention.default")


CHOICES: list[tuple[str, dict[str, Any], Gpu]] = [
    ("flash", {"dtype": BF16}, A100),
    ("flash", {"dtype": F16, "is_causal": True}, A100),
    ("flash", {"dtype": BF16, "lengths": (4, 9)}, A100),
    ("efficient", {"dtype": BF16, "lengths": (4, 9), "is_causal": True}, A100),
    ("flash", {"dtype": BF16, "sizes": (20, 20)}, A100),
    ("flash", {"dtype": BF16, "sizes": (256, 256)}, A100),
    ("efficient", {"dtype": BF16, "sizes": (512, 512)}, A100),
    ("efficient", {"dtype": BF16, "sizes": (64, 32)}, A100),
    ("math", {"dtype": BF16, "sizes": (300, 300)}, A100),
    ("flash", {"dtype": BF16, "heads": (4, 2), "enable_gqa": True}, A100),
    ("efficient", {"dtype": F32, "heads": (4, 4), "enable_gqa": True}, A100),
    ("math", {"dtype": F32, "heads": (4, 2), "enable_gqa": True}, A100),
    ("flash", {"dtype": BF16, "dropout_p": 0.1}, A100),
    ("efficient", {"dtype": BF16, "mask": (16, 16)}, A100),
    ("efficient", {}, A100),
    ("efficient", {"is_causal": True, "lengths": (4, 9)}, A100),
    ("efficient", {"mask": (2, 1, 1, 16)}, A100),
    ("efficient", {"mask": (4, 16, 16)}, A100),
    ("efficient", {"dropout_p": 0.1}, A100),
    ("math", {"sizes": (6, 6)}, A100),
    ("efficient", {"sizes": (4, 4)}, A100),
    ("efficient", {"sizes": (6, 6)}, T4),
    ("math", {"dtype": F64}, A100),
    ("math", {"lengths": (0, 4)}, A100),
    ("math", {"lengths": (4, 0)}, A100),
    ("efficient", {"dtype": F16}, T4),
    ("math", {"dtype": BF16}, T4),
    ("efficient", {}, OLD),
    ("flash", {"dtype": BF16, "sizes": (256, 256), "grad": True}, AD102),
    ("flash", {"dtype": BF16, "sizes": (200, 200)}, AD102),
    ("efficient", {"dtype": BF16, "sizes": (200, 200), "grad": True}, AD102),
    ("efficient", {"dtype": BF16, "sizes": (256, 256), "grad": True, "dropout_p": 0.1}, AD102),
    ("cudnn", {"dtype": BF16}, H100),
    ("cudnn", {"dtype": F16, "is_causal": True, "lengths": (4, 9)}, B200),
    ("cudnn", {"dtype": BF16, "mask": (1, 16)}, H100),
    ("cudnn", {"dtype": BF16, "heads": (4, 2), "enable_gqa": True}, H100),
    ("cudnn", {"dtype": BF16, "lengths": (1, 16)}, H100),
    ("cudnn", {"dtype": BF16, "dropout_p": 0.125}, H100),
    ("flash", {"dtype": BF16, "dropout_p": 0.1}, H100),
    ("flash", {"dtype": BF16, "lengths": (16, 1)}, H100),
    ("flash", {"dtype": BF16, "sizes": (20, 20)}, H100),
    ("efficient", {"dtype": BF16, "mask": (4, 16, 16)}, H100),
    ("efficient", {}, H100),
    ("flash", {"dtype": BF16}, Gpu((9, 0), 91002)),
    ("flash", {"dtype": BF16}, Gpu((12, 0), 91900)),
    ("flash", {"dtype": BF16}, Gpu()),
]


@pytest.mark.parametrize(("expected", "options", "on"), CHOICES, ids=str)
def test_kernel_is_that_of_eager_torch(
    choose: Callable[[Gpu], None], expected: str, options: dict[str, Any], on: Gpu
) -> None:
    choose(on)
    assert kernel(lambda: attend(**options)) == expected


SWITCHES: list[tuple[str, list[SDPBackend], bool]] = [
    ("math", [SDPBackend.MATH], False),
    ("efficient", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], False),
    ("cudnn", [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION], False),
    ("efficient", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], True),
]


@pytest.mark.parametrize(("expected", "backends", "set_priority"), SWITCHES)
def test_chosen_kernels_are_followed(
    choose: Callable[[Gpu], None], expected: str, backends: list[SDPBackend], set_priority: bool
) -> None:
    choose(H100)
    with sdpa_kernel(backends, set_priority=set_priority):
        assert kernel(lambda: attend(BF16)) == expected
    assert kernel(lambda: attend(BF16)) == "cudnn"


def test_switch_and_determinism_are_followed(choose: Callable[[Gpu], None]) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert kernel(lambda: attend(BF16)) == "efficient"
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    choose(H100)
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel(lambda: attend(BF16)) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def test_cudnn_is_not_first_where_torch_is_told_so(
    choose: Callable[[Gpu], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(H100)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernel(lambda: attend(BF16)) == "flash"


def test_without_a_kernel_that_fits_it_is_refused() -> None:
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        recorded(attend)


def operand(graph: Graph, node: Node, position: int) -> Any:
    """The meta of an operand."""
    ref = node.args[position]
    assert isinstance(ref, Ref)
    metas = [meta for each in (*graph.inputs, *graph.nodes) for meta in _metas(each)]
    return metas[ref.index]


def _metas(each: Any) -> Iterator[Any]:
    yield from (each.results if isinstance(each, Node) else (each.meta,))


MASKS: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = [
    ((1, 128), 128, (0, 0, 0, 1)),
    ((16, 10), 10, (0, 0, 16, 1)),
    ((2, 1, 1, 24), 24, (24, 0, 0, 1)),
    ((4, 16, 10), 10, (0, 256, 16, 1)),
    ((2, 4, 16, 10), 10, (1024, 256, 16, 1)),
]


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(("shape", "keys", "strides"), MASKS)
def test_efficient_attention_has_masks_of_all_scores(
    shape: tuple[int, ...], keys: int, strides: tuple[int, ...], additive: bool
) -> None:
    graph = recorded(lambda: attend(lengths=(16, keys), mask=shape, additive=additive))
    [node] = attending(graph)
    mask = operand(graph, node, 3)
    assert (mask.shape, mask.stride) == ((2, 4, 16, keys), strides)


def test_flash_has_heads_of_a_multiple_of_eight_at_the_scale_of_the_given_ones() -> None:
    graph = recorded(lambda: attend(BF16, sizes=(20, 20), grad=True))
    forward, backward = attending(graph)
    assert [operand(graph, forward, i).shape for i in range(3)] == [(2, 4, 16, 24)] * 3
    assert dict(forward.kwargs)["scale"] == dict(backward.kwargs)["scale"] == 20**-0.5
    assert backward.op == "aten._scaled_dot_product_flash_attention_backward.default"


@pytest.mark.parametrize("on", [A100, H100])
@pytest.mark.parametrize("grad", [False, True])
def test_sums_are_kept_for_gradients_only(
    choose: Callable[[Gpu], None], on: Gpu, grad: bool
) -> None:
    choose(on)
    graph = recorded(lambda: attend(BF16, mask=(16, 16), grad=grad))
    nodes = attending(graph)
    assert len(nodes) == 1 + grad
    assert nodes[0].args[4] is grad


def test_mask_with_a_gradient() -> None:
    masks: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        q = torch.ones(2, 4, 16, 64)
        masks.append(torch.zeros(16, 10, requires_grad=True))
        k = torch.ones(2, 4, 10, 64)
        F.scaled_dot_product_attention(q, k, k, masks[0]).mean().backward()
        assert masks[0].grad is not None
        return masks[0].grad

    forward, backward = attending(recorded(call))
    assert forward.args[4] is True
    assert backward.args[10] == (False, False, False, True)


# -- numbers, with kernels of CPUs in the place of those of GPUs -------------------------------


class Kernels:
    """Fused kernels that refuse what torch's do, and compute by plain matmuls."""

    def __init__(self) -> None:
        math = torch.ops.aten._scaled_dot_product_attention_math.default

        def flash(q: Any, k: Any, v: Any, p: float, causal: bool, _: bool, *, scale: float) -> Any:
            assert all(t.shape[-1] % 8 == 0 for t in (q, k, v))
            return math(q, k, v, None, p, causal, scale=scale)

        def efficient(
            q: Any, k: Any, v: Any, mask: Any, _: bool, p: float, causal: bool, *, scale: Any
        ) -> Any:
            assert mask.shape == (*q.shape[:3], k.shape[2])
            assert not any(stride % 8 for stride in mask.stride()[:-1])
            return math(q, k, v, mask, p, causal, scale=scale)

        named = {"flash": flash, "efficient": efficient}
        for name, function in named.items():
            op = SimpleNamespace(default=function)
            setattr(self, f"_scaled_dot_product_{name}_attention", op)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_are_filled_up_give_the_same(
    monkeypatch: pytest.MonkeyPatch, causal: bool, scale: float | None
) -> None:
    monkeypatch.setattr(attention_kernel, "aten", Kernels())
    q, k, v = torch.randn(3, 2, 4, 16, 20, dtype=F64, requires_grad=True).unbind()
    call = attention_kernel.AttentionCall(q, k, v, None, 0.0, causal, scale, False)
    _same(attention_kernel._flash(call), call)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize(("shape", "keys", "strides"), MASKS)
def test_masks_of_all_scores_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    keys: int,
    strides: tuple[int, ...],
    wanted: bool,
) -> None:
    monkeypatch.setattr(attention_kernel, "aten", Kernels())
    q = torch.randn(2, 4, 16, 20, dtype=F64, requires_grad=True)
    k, v = torch.randn(2, 2, 4, keys, 20, dtype=F64, requires_grad=True).unbind()
    mask = torch.randn(shape, dtype=F64)
    mask = mask.requires_grad_() if wanted else mask > 0
    call = attention_kernel.AttentionCall(q, k, v, mask, 0.0, False, None, False)
    _same(attention_kernel._efficient(call), call)


def _same(result: torch.Tensor, call: attention_kernel.AttentionCall) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(
            *call.operands, call.mask, is_causal=call.is_causal, scale=call.scale
        )
    torch.testing.assert_close(result, expected)
    leaves = [t for t in (*call.operands, call.mask) if t is not None and t.requires_grad]
    for found, wanted in zip(
        torch.autograd.grad(result.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


# -- the workers' GPU --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ((HostGpu("H100", (9, 0)), HostGpu("A10", (8, 6))), Gpu((8, 6), 91900)),
        ((HostGpu("H100", (9, 0)),), H100),
        ((), Gpu()),
    ],
)
def test_the_least_capable_gpu_chooses(
    monkeypatch: pytest.MonkeyPatch, present: tuple[HostGpu, ...], expected: Gpu
) -> None:
    monkeypatch.setattr(gpus, "host_gpus", lambda: present)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert gpus.workers_gpu.__wrapped__() == expected
